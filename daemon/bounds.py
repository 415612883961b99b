"""The bounds of single settings, and refusals that name the setting, what is wrong with it and what would do.

Owns nothing. Called by ``config`` while it reads and resolves settings. Imports ``tiers.budget``, ``disk``, ``errors``
and ``tier``. Sizes in bytes; everything here raises ConfigError unless it says otherwise.
"""

import os
from pathlib import Path

from terracekv.tiers.budget import Budget, show, show_up
from terracekv.tiers.errors import ConfigError, NoRoom
from terracekv.tiers.tier import PAGE

HOST_MIN = 4 * PAGE
"""A smaller arena would serve nobody, not even a test."""
SEGMENT_MIN = 2 * PAGE
UNMAPPED = 65534
"""The owner of what belongs to none of a container's users, such as a volume: who that is cannot be told."""


def check_folder(key: str, folder: Path, source: str) -> None:
    """Whether this process may make a folder and write into it. Changes nothing."""
    near = folder
    while not os.path.lexists(near) and near != near.parent:
        near = near.parent
    said = f"{key} is {folder} ({source}), and {near}"
    if not near.is_dir():
        raise ConfigError(f"{said} is no folder", f"set {key} to a folder, or to where one can be made")
    if os.statvfs(near).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{said} is on a file system mounted read-only", f"set {key} to a folder elsewhere")
    if not os.access(near, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{said} cannot be written by this user (uid {os.getuid()})", f"set {key} to a folder of its own"
        )
    if key == "daemon.runtime_dir":
        _check_owner(key, folder, source)


def _check_owner(key: str, folder: Path, source: str) -> None:
    """Whether a folder that is there already is this user's or root's: anybody may make one in ``/dev/shm``, and whose
    it is can put links in the place of the arena, and sockets of their own in the place of ours."""
    if folder.is_dir() and (owner := _owner(folder)) not in (os.getuid(), 0, UNMAPPED):
        raise ConfigError(
            f"{key} is {folder} ({source}), and belongs to another user (uid {owner})",
            f"give it to uid {os.getuid()}, or set {key} to a folder of this user's own",
        )


def _owner(folder: Path) -> int:
    return folder.stat().st_uid


def check_host(size: int | None, slab: int | None) -> None:
    """``host.size`` and ``host.slab``, None where they are auto."""
    if size == 0:
        raise ConfigError("host.size is 0, and every block passes through host", "set host.size, or leave it auto")
    if size is not None and size < HOST_MIN:
        raise ConfigError(f"host.size is {size} bytes", f"set {show(HOST_MIN)} or more, such as 8GiB, or leave it auto")
    if slab is not None and (slab == 0 or slab % PAGE):
        raise ConfigError(
            f"host.slab is {slab} bytes", f"set a positive multiple of {PAGE}, such as 64MiB, or leave it auto"
        )


def check_segment(segment: int) -> None:
    """``disk.segment``."""
    if segment < SEGMENT_MIN or segment % PAGE:
        raise ConfigError(
            f"disk.segment is {segment} bytes", f"set a multiple of {PAGE}, {SEGMENT_MIN} at the least, such as 256MiB"
        )


def check_disk(size: int, segment: int) -> None:
    """``disk.size`` as somebody chose it."""
    least = _least(segment)
    if size == 0:
        raise ConfigError("disk.size is 0 while disk.enabled is true", "set disk.enabled to false for no disk tier")
    if size < least:
        raise ConfigError(
            f"disk.size is {show(size)}, and with disk.segment {show(segment)} {show_up(least)} are the least",
            f"raise disk.size to {show_up(least)}, {_lower_segment(size)}or set disk.enabled to false",
        )


def check_disk_auto(room: Budget, size: int, floor: int, segment: int) -> None:
    """``disk.size`` as ``auto`` came to it: nobody chose it, so say of what it was made. Raises NoRoom."""
    least = _least(segment)
    if size < least:
        raise NoRoom(
            f"disk.size auto comes to {show(size)}: {room.disk.path} has {show(room.disk_free)} free, of which it "
            f"takes a quarter and leaves disk.free_floor {show(floor)}; with disk.segment {show(segment)} "
            f"{show_up(least)} are the least",
            f"free some space there, point disk.path at another disk, set disk.size (and a lower disk.free_floor), "
            f"{_lower_segment(size)}or set disk.enabled to false",
        )


def _lower_segment(size: int) -> str:
    """Advice on the largest segments that a disk tier of this size can have, if it can have any."""
    segments = (_least(PAGE) - _least(0)) // PAGE
    largest = (size - _least(0)) // segments // PAGE * PAGE
    return f"lower disk.segment to at most {show(largest)}, " if largest >= SEGMENT_MIN else ""


def _least(segment: int) -> int:
    """The rule is the disk tier's own. Imported late: the command line would load a database for the sake of a sum."""
    from terracekv.tiers.disk import least_capacity_bytes

    return least_capacity_bytes(segment)

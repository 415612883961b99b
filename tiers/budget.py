"""How much memory and disk this process may take, and the refusal when more is asked for.

Owns nothing; reads /proc, /sys and ``statvfs`` afresh at every call. Called by the daemon before it starts (its
settings are checked against the answers) and by ``doctor``, from any thread. Imports the standard library and
``errors``.

All limits are those of one daemon: engines and sessions share them, and however many there are, none is raised.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from terracekv.tiers.errors import NoRoom

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAEMON_BYTES = 100 * MIB
"""What the daemon itself may need besides its arena."""
SHM_MARGIN_BYTES = 8 * MIB
"""Left free in the shared-memory folder: the slot table and sockets live there too."""
HOST_AUTO_MIN = 128 * MIB
"""``auto`` refuses below this: such an arena helps nobody, and hides that the container has 64 MB of shared memory."""
HOST_AUTO_STEP = 2 * MIB
DISK_AUTO_MAX = 16 * GIB
UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""

_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3,
          "t": 1000**4, "tb": 1000**4, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory that may be taken now, which limit is the tightest, and all that were read."""

    available_bytes: int
    limited_by: str
    readings: dict[str, int]


@dataclass(frozen=True, slots=True)
class Space:
    """Room in the file system that holds ``path`` (or will: its nearest parent that exists)."""

    path: Path
    total_bytes: int
    free_bytes: int
    filesystem: str
    device: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a daemon with these folders may take. ``arena_bytes`` and ``disk_bytes`` are held already by files that
    an earlier life left there and this one will adopt, so they count as free; ``arena_size`` is that arena's size."""

    memory: Memory
    shm: Space
    disk: Space
    arena_size: int = 0
    arena_bytes: int = 0
    disk_bytes: int = 0

    @property
    def memory_free(self) -> int:
        return self.memory.available_bytes + self.arena_bytes

    @property
    def shm_free(self) -> int:
        return self.shm.free_bytes + self.arena_bytes

    @property
    def disk_free(self) -> int:
        return self.disk.free_bytes + self.disk_bytes


def survey(arena: Path, disk: Path, root: Path = Path("/")) -> Budget:
    """Look at the memory, at the file system of the ``arena`` file and at the one of the ``disk`` folder."""
    try:
        found = arena.stat()
        arena_size, arena_bytes = found.st_size, found.st_blocks * 512
    except OSError:
        arena_size = arena_bytes = 0
    return Budget(memory(root), space(arena.parent), space(disk), arena_size, arena_bytes, _bytes_below(disk))


def memory(root: Path = Path("/")) -> Memory:
    """The least of MemAvailable and, for this process's cgroup and each one above it, limit minus use.

    Page cache is not use: the kernel drops it on demand. Shared memory is, though the kernel books it as cache.
    Raises NoRoom when nothing at all can be read.
    """
    readings = dict(_cgroup_readings(root))
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        readings["MemAvailable"] = available * KIB
    if not readings:
        raise NoRoom("neither /proc/meminfo nor a memory cgroup can be read", "set host.size to a number of bytes")
    name, least = min(readings.items(), key=lambda reading: reading[1])
    return Memory(max(0, least), name, readings)


def space(path: Path) -> Space:
    """Free and total bytes for ``path``. Raises OSError when not even a parent can be looked at."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    stat = os.statvfs(path)
    return Space(
        path,
        stat.f_blocks * stat.f_frsize,
        stat.f_bavail * stat.f_frsize,
        filesystem_type(path),
        path.stat().st_dev,
    )


def filesystem_type(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """``tmpfs``, ``ext4``, ``overlay``, ``nfs4`` ...; ``unknown`` where the mounts cannot be read."""
    real = path.resolve()
    best, kind = -1, "unknown"
    for line in _text(mounts).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].encode().decode("unicode_escape"))
        # Of two mounts on one point the later hides the earlier.
        if (point == real or point in real.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def require(where: str, available_bytes: int, asked: Mapping[str, int], knob: str, hint: str = "") -> None:
    """Refuse, with the numbers, when all that is asked of one place together exceeds what is there.

    ``asked`` maps what wants room (a setting, mostly) to bytes; ``knob`` is the one of them to turn.
    Raises NoRoom, naming the largest value of ``knob`` that fits.
    """
    total = sum(asked.values())
    if total <= available_bytes:
        return
    largest = max(0, available_bytes - total + asked[knob])
    parts = " + ".join(f"{name} {show(size)}" for name, size in asked.items())
    advice = f"the largest {knob} that fits is {show(largest)}"
    raise NoRoom(
        f"{where} has {show(available_bytes)} left, and {show(total)} is asked: {parts}",
        f"{advice}; {hint}" if hint else advice,
    )


def host_auto(room: Budget) -> int:
    """Bytes of an arena that nobody chose a size for: a quarter of the memory, within shared memory. NoRoom if tiny."""
    of_memory, of_shm = room.memory_free // 4, room.shm_free - SHM_MARGIN_BYTES
    size = min(of_memory, of_shm) // HOST_AUTO_STEP * HOST_AUTO_STEP
    if size < HOST_AUTO_MIN:
        more = (
            "give the container more shared memory (docker run --shm-size=8g; in Kubernetes an emptyDir with "
            "medium: Memory), point daemon.runtime_dir at another tmpfs"
            if of_shm < of_memory
            else f"give the container {show(4 * HOST_AUTO_MIN)} of memory or more"
        )
        raise NoRoom(
            f"host.size auto comes to {show(max(0, size))}, less than {show(HOST_AUTO_MIN)}: {room.shm.path} has "
            f"{show(room.shm_free)} free and this process may take {show(room.memory_free)} of memory "
            f"({room.memory.limited_by}), of which auto takes a quarter",
            f"{more}, or set host.size",
        )
    return size


def disk_auto(room: Budget, floor_bytes: int) -> int:
    """Bytes of a disk tier that nobody chose a size for: a quarter of the free space, at most 16 GiB."""
    return max(0, min(DISK_AUTO_MAX, room.disk_free // 4, room.disk_free - floor_bytes))


def require_all(room: Budget, host_bytes: int, disk_bytes: int, floor_bytes: int) -> None:
    """Sum up, for memory and each file system, all that a daemon will take of it; NoRoom for what does not fit.

    ``disk_bytes`` is 0 for no disk tier; ``floor_bytes`` stay free on its file system.
    """
    host, disk = {"host.size": host_bytes}, {"disk.size": disk_bytes} if disk_bytes else {}
    in_memory = disk if room.disk.filesystem == "tmpfs" else {}
    on_shm = disk if room.disk.device == room.shm.device else {}
    require(
        f"memory (limited by {room.memory.limited_by})",
        room.memory_free + (room.disk_bytes if in_memory else 0),
        host | in_memory | {"the daemon itself": DAEMON_BYTES},
        "host.size",
    )
    require(
        f"shared memory at {room.shm.path}",
        room.shm_free + (room.disk_bytes if on_shm else 0),
        host | on_shm | {"margin": SHM_MARGIN_BYTES},
        "host.size",
        "or give more: docker run --shm-size=8g, or another daemon.runtime_dir",
    )
    if disk:
        where = f"the disk at {room.disk.path}"
        asked = disk | {"disk.free_floor": floor_bytes}
        require(where, room.disk_free, asked, "disk.size", "or choose another disk.path")


def show(size: int) -> str:
    """Bytes for people, rounded down so that what is shown also fits: ``1.5GiB``."""
    return _shown(size, 0)


def show_up(size: int) -> str:
    """Like ``show``, rounded up, so that what is shown is enough."""
    return _shown(size, 1)


def _shown(size: int, up: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            tenths = (size * 10 + up * (unit - 1)) // unit
            return f"{tenths // 10}{name}" if tenths % 10 == 0 else f"{tenths / 10:.1f}{name}"
    return f"{size}B"


def parse_size(text: str) -> int:
    """``8GiB``, ``512 MiB``, ``1.5g`` or plain bytes; GB is a power of ten, GiB of two. ValueError otherwise."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size such as 8GiB, 512MiB or 4096")
    return int(Decimal(match[1]) * unit)


def _cgroup_readings(root: Path) -> Iterator[tuple[str, int]]:
    """Room in each memory cgroup from this process's own up to the top, of version 2 and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            limit, used, cache = "memory.max", "memory.current", ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            tops = ["sys/fs/cgroup/memory"]
            limit, used, cache = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_active_file", "total_inactive_file"),
            )
        else:
            continue
        # In a container the path may name the group as the host sees it, while the mount starts at the group
        # itself: what does not exist is passed over, and the top of the mount is the group.
        parts = [part for part in Path(path).parts if part not in ("/", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                group = (root / top).joinpath(*parts[:depth])
                limit_bytes, used_bytes = _number(group / limit), _number(group / used)
                if limit_bytes is None or used_bytes is None or limit_bytes >= UNLIMITED:
                    continue
                stat = _table(group / "memory.stat")
                reclaimable = sum(stat.get(name, 0) for name in cache)
                name = f"cgroup /{'/'.join(parts[:depth])}"
                yield name, limit_bytes - max(0, used_bytes - reclaimable)


def _bytes_below(folder: Path) -> int:
    """Bytes that the files below a folder occupy; what vanishes meanwhile counts nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max`` or no such file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """``name number`` or ``name: number kB`` lines."""
    table = {}
    for line in _text(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0].rstrip(":")] = int(fields[1])
    return table

"""The doctor: looks at the machine and at a running daemon, and says what to change.

Owns nothing; leaves nothing behind but one small namespace of its own in a daemon that it tried out. Called by
``cli`` in its own process, never by the daemon. Imports ``config``, ``bucket_view``, ``http_client``, ``doctor_trial``
and ``tiers.budget``.
"""

import importlib.util
import mmap
import os
import platform
import resource
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from terracekv.daemon.cli_text import last_error
from terracekv.daemon.config import Config, describe, require_folders, resolve, summary, survey, version
from terracekv.daemon.doctor_trial import Finding, round_trips
from terracekv.daemon.http_client import PROMPT_S, Answered, Door, NotRunning, Partial, Silent
from terracekv.tiers.budget import Budget, show
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.tier import PAGE

LIBRARIES = ("aiohttp", "lmdb", "msgspec", "numpy", "prometheus-client", "uvloop", "xxhash", "zstandard")
S3_LIBRARIES = ("boto3",)
GPU_LIBRARIES = ("cupy", "pynvml")
GPU_PAGE = "see docs/gpu.md"
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "fuse.sshfs", "fuse.s3fs", "glusterfs"}
FILES_MIN = 1024
BUCKET_S = 5.0
NAMED_BY = ("revision", "dtype", "layout", "block_tokens", "shards", "tenant")
NAME_CHARS = 16


def examine(config: Config) -> Iterator[Finding]:
    """All findings, one by one as they are made. ``config`` need not be resolved."""
    yield from _versions()
    yield from _folders(config)
    room = survey(config)
    yield from _settings(config, room)
    yield from _memory(room)
    yield from _shared_memory(config, room)
    if config.disk.enabled:
        yield from _disk(config, room)
    if config.s3.enabled:
        yield from _bucket(config)
    yield from _gpu(config)
    yield from _limits()
    door = Door(config.daemon.runtime_dir)
    try:
        running = door.status(timeout_s=PROMPT_S)
    except NotRunning as nobody:
        yield Finding("daemon", "ok", f"none runs here ({nobody.message})", "start one with: terracekv serve")
        return
    except Partial as partial:
        yield Finding("daemon", "warn", f"it answers, and was not looked at: {partial.message}", partial.hint)
        return
    except (Answered, Silent) as refused:
        yield Finding("daemon", "fail", refused.message, refused.hint)
        return
    yield from _running(config, running)
    tiers = [name for name in running["tiers"] if name != "gpu"]  # what is hot goes there, not what is stored
    if running["tiers"][tiers[-1]]["mode"] in ("down", "read-only"):
        tiers = tiers[:-1]  # nothing can be made durable now
    yield from round_trips(config.daemon.runtime_dir, door, tiers)


def _versions() -> Iterator[Finding]:
    parts, missing = [], []
    for library in LIBRARIES:
        try:
            parts.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            missing.append(library)
    says = f"terracekv {version()}, Python {platform.python_version()}, Linux {platform.release()}, {', '.join(parts)}"
    if missing:
        yield Finding("versions", "fail", f"{says}; missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("versions", "ok", says)
    torch = "is installed" if importlib.util.find_spec("torch") else "is not installed"
    yield Finding("optional parts", "ok", f"torch {torch} (only engines need it)")


def _folders(config: Config) -> Iterator[Finding]:
    try:
        require_folders(config)
    except TerraceError as error:
        yield Finding("folders", "fail", error.message, error.hint)


def _settings(config: Config, room: Budget) -> Iterator[Finding]:
    try:
        yield Finding("settings", "ok", summary(resolve(config, room), room))
    except TerraceError as error:
        yield Finding("settings", "fail", error.message, error.hint)


def _memory(room: Budget) -> Iterator[Finding]:
    readings = ", ".join(f"{name} {show(size)}" for name, size in room.memory.readings.items())
    groups = [name for name in room.memory.readings if name.startswith("cgroup")]
    says = f"{show(room.memory.available_bytes)} may be taken (limited by {room.memory.limited_by}; {readings})"
    yield Finding("memory", "ok", says + ("" if groups else "; no cgroup limits it"))


def _shared_memory(config: Config, room: Budget) -> Iterator[Finding]:
    shm = room.shm
    says = f"{shm.path} is {shm.filesystem} with {show(shm.free_bytes)} of {show(shm.total_bytes)} free"
    if not os.access(shm.path, os.W_OK | os.X_OK):
        yield Finding("shared memory", "fail", f"{shm.path} is not writable", "choose another daemon.runtime_dir")
    elif shm.filesystem != "tmpfs":
        advice = "point daemon.runtime_dir at a tmpfs, or the kernel writes the arena to that disk"
        yield Finding("shared memory", "warn", f"{says}, not tmpfs", advice)
    else:
        yield Finding("shared memory", "ok", says)


def _disk(config: Config, room: Budget) -> Iterator[Finding]:
    disk = room.disk
    says = f"{disk.path} is {disk.filesystem} with {show(disk.free_bytes)} of {show(disk.total_bytes)} free"
    if not os.access(disk.path, os.W_OK | os.X_OK):
        yield Finding("disk", "fail", f"{disk.path} is not writable", "choose another disk.path")
        return
    if disk.filesystem in NETWORK:
        advice = "point disk.path at a local file system: the catalog must not lie on a network"
        yield Finding("disk", "warn", says, advice)
    elif disk.filesystem == "overlay":
        advice = "mount a volume at disk.path: a container's own layer is slow, and gone with the container"
        yield Finding("disk", "warn", says, advice)
    elif disk.filesystem == "tmpfs":
        yield Finding(
            "disk", "warn", f"{says}: it is memory", "point disk.path at a disk, or set disk.enabled to false"
        )
    else:
        yield Finding("disk", "ok", says)
    trouble = direct_io(disk.path)
    if trouble is None:
        yield Finding("direct I/O", "ok", f"works at {disk.path}")
    elif config.disk.direct == "on":
        yield Finding("direct I/O", "fail", f"{trouble}, and disk.direct is on", "set disk.direct to auto")
    else:
        yield Finding("direct I/O", "warn", f"{trouble}: blocks go through the page cache", "ext4 and xfs can do it")


def _bucket(config: Config) -> Iterator[Finding]:
    """Ask the bucket something, with the settings of the daemon and the credentials that this command finds."""
    missing = [name for name in S3_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("s3", "fail", f"missing: {', '.join(missing)}", 'pip install "terracekv[s3]"')
        return
    from terracekv.daemon.bucket_view import opened

    place = f"bucket {config.s3.bucket} at {config.s3.endpoint or 'AWS'}"
    try:
        bucket = opened(config.s3)
        started = time.monotonic()
        found = bucket.found(started + BUCKET_S)
        spent_ms = (time.monotonic() - started) * 1e3
        bucket.close()
    except TerraceError as error:
        yield Finding("s3", "fail", f"{place}: {error.message}", error.hint)
        return
    if found is False and not config.s3.create_bucket:
        yield Finding("s3", "fail", f"there is no {place}", "create it, or set s3.create_bucket")
    elif found is None:
        yield Finding("s3", "warn", f"{place} answers 403", "check the credentials; grant s3:ListBucket")
    else:
        yield Finding("s3", "ok", f"{place} answers in {spent_ms:.0f} ms")


def _gpu(config: Config) -> Iterator[Finding]:
    """Whether the libraries are there; a GPU is not touched by a command that may run beside an engine."""
    if not config.gpu.enabled:
        yield Finding("gpu", "ok", "gpu.enabled is false: neither CUDA nor NVML is used")
        return
    missing = [name for name in GPU_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        state: Literal["warn", "fail"] = "fail" if config.gpu.strict else "warn"
        says = f"gpu.enabled is true and {' and '.join(missing)} cannot be imported"
        advice = 'pip install "terracekv[gpu]" (cupy-cuda12x for CUDA 12), or set gpu.enabled to false'
        yield Finding("gpu", state, says, advice)
    else:
        yield Finding("gpu", "ok", "CuPy and NVML's library are installed; the daemon's status says what came of them")


def direct_io(folder: Path) -> str | None:
    """None when a page can be written there past the page cache, else why not. The file never has a name."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        return f"a file cannot be opened with O_DIRECT at {folder}: {error.strerror}"
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(file, [page], 0)
    except OSError as error:
        return f"a page cannot be written with O_DIRECT at {folder}: {error.strerror}"
    finally:
        os.close(file)
    return None


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_MIN:
        yield Finding("open files", "warn", f"limit {soft}: few engines can connect", f"ulimit -n {FILES_MIN} or more")
    else:
        yield Finding("open files", "ok", f"limit {soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "none" if locked == resource.RLIM_INFINITY else show(locked)
    yield Finding("locked memory", "ok", f"limit {shown}; nothing is locked by this version")


def _running(config: Config, running: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("daemon", "ok", f"version {running['version']} answers at {config.daemon.runtime_dir}")
    if running["version"] != version():
        advice = "restart the daemon to bring it up to date"
        yield Finding("daemon", "warn", f"it is {running['version']}, this command {version()}", advice)
    if running["not_ready"]:
        yield Finding("daemon", "warn", f"it is not ready: {'; '.join(running['not_ready'])}", "see the daemon's log")
    if died := {**running.get("died", {}).get("threads", {}), **running.get("died", {}).get("tasks", {})}:
        says = "; ".join(f"{name} died {count} times" for name, count in died.items())
        yield Finding("daemon", "warn", f"{says}, and went on", "report it with the tracebacks in the daemon's log")
    yield from _running_gpu(running)
    yield from _engines(running)
    yield from _differences(describe(config), running["config"])
    for name, tier in running["tiers"].items():
        if tier["last_error"]:
            text, news = last_error(name, tier)
            advice = f"{tier['advice']} ({tier['last_event']})" if tier.get("last_event") else "see the daemon's log"
            yield Finding(f"{name} tier", "warn" if news else "ok", f"mode {tier['mode']}; {text}", advice)


def _running_gpu(running: dict[str, Any]) -> Iterator[Finding]:
    """What came of the gpu tier there, and who cannot share it. An older daemon says nothing of it."""
    tier = running.get("gpu_tier", {"state": "off"})
    if tier["state"] == "off":
        return
    if tier["reason"]:
        yield Finding("gpu tier", "warn", f"{tier['state']}: {tier['reason']}", GPU_PAGE)
    for session in running["sessions"]:
        if session["transport_reason"]:
            yield Finding("gpu tier", "warn", f"session {session['session']}: {session['transport_reason']}", GPU_PAGE)


def _engines(running: dict[str, Any]) -> Iterator[Finding]:
    """Engines of one model whose names for it differ: what the one stores is never a hit for the other."""
    spaces = {space["namespace_id"]: space for space in running["namespaces"]}
    used: dict[str, dict[str, Any]] = {}
    for session in running["sessions"]:
        space = spaces.get(session.get("namespace_id"))
        if space is not None:
            used.setdefault(space["model"], {})[space["namespace_id"]] = space
    for model, those in used.items():
        differs = [name for name in NAMED_BY if len({str(space.get(name)) for space in those.values()}) > 1]
        if len(those) > 1:
            what = ", ".join(f"{name} ({' and '.join(_values(those, name))})" for name in differs)
            says = f"engines of {model} use {len(those)} namespaces, which differ in {what or 'whose they are'}"
            advice = "what one stores is no hit for the other: give them the same weights and settings if it should be"
            yield Finding("engines", "warn", says, advice)


def _values(spaces: Mapping[str, Any], name: str) -> list[str]:
    return sorted({str(space.get(name))[:NAME_CHARS] for space in spaces.values()})


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings that somebody chose, here or there, and that are not the same. ``ours`` are not resolved: what comes of
    auto differs from hour to hour."""
    for key, mine in ours.items():
        its = theirs.get(key, mine)
        nobody_chose = mine["value"] is None and its["source"].startswith(("auto", "default"))
        if its["value"] != mine["value"] and not nobody_chose:
            here = "auto" if mine["value"] is None else repr(mine["value"])
            yield Finding(
                "settings",
                "warn",
                f"{key} is {its['value']!r} in the daemon ({its['source']}), {here} here ({mine['source']})",
                "give this command the daemon's settings (--config, --set, TERRACEKV_...), or restart the daemon",
            )

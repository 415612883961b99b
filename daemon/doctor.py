"""The doctor: looks at the machine and at a running daemon, and says what to change.

Owns nothing; leaves nothing behind but one small namespace of its own in a daemon that it tried out. Called by
``cli`` in its own process, never by the daemon. Imports ``config``, ``bucket_view``, ``http_client``, ``protocol`` and
``tiers.budget``.
"""

import contextlib
import importlib.util
import mmap
import os
import platform
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from terracekv.daemon import protocol
from terracekv.daemon.config import Config, describe, resolve, summary, survey, version
from terracekv.daemon.http_client import Answered, Door, NotRunning
from terracekv.tiers.budget import Budget, show
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.tier import PAGE

LIBRARIES = ("aiohttp", "lmdb", "msgspec", "numpy", "prometheus-client", "uvloop", "xxhash")
S3_LIBRARIES = ("boto3", "zstandard")
NOT_BUILT = "the gpu tier is not in this version"
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "fuse.sshfs", "fuse.s3fs", "glusterfs"}
FILES_MIN = 1024
HELLO_S = 5.0
BUCKET_S = 5.0
BYTES = {"Content-Type": "application/octet-stream"}
BLOCK = protocol.Layout("ND", "latent", 2, (protocol.LayerGroup(1, (16, 128), protocol.dense_strides((16, 128), 2)),))
"""The block that is tried out: one page."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``fail``: something will not work; ``warn``: it works, but less well than it could."""

    what: str
    state: Literal["ok", "warn", "fail"]
    says: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(config: Config) -> Iterator[Finding]:
    """All findings, one by one as they are made. ``config`` need not be resolved."""
    yield from _versions()
    room = survey(config)
    yield from _settings(config, room)
    yield from _memory(room)
    yield from _shared_memory(config, room)
    if config.disk.enabled:
        yield from _disk(config, room)
    if config.s3.enabled:
        yield from _bucket(config)
    yield from _limits()
    door = Door(config.daemon.runtime_dir)
    try:
        running = door.ask("GET", "/v1/status")
    except NotRunning as nobody:
        yield Finding("daemon", "ok", f"none runs here ({nobody.message})", "start one with: terracekv serve")
        return
    except Answered as refused:
        yield Finding("daemon", "fail", refused.message, refused.hint)
        return
    yield from _running(config, room, running)
    tiers = list(running["tiers"])
    if running["tiers"][tiers[-1]]["mode"] in ("down", "read-only"):
        tiers = tiers[:1]  # nothing can be made durable now
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
    yield Finding("optional parts", "ok", f"torch {torch} (only engines need it); {NOT_BUILT}")


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


def _running(config: Config, room: Budget, running: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("daemon", "ok", f"version {running['version']} answers at {config.daemon.runtime_dir}")
    if running["version"] != version():
        advice = "restart the daemon to bring it up to date"
        yield Finding("daemon", "warn", f"it is {running['version']}, this command {version()}", advice)
    try:
        ours, theirs = describe(resolve(config, room)), running["config"]
    except TerraceError:
        return
    for key, mine in ours.items():
        its = theirs.get(key, mine)
        if its["value"] != mine["value"] and not str(mine["source"]).startswith("auto"):
            says = (
                f"{key} is {its['value']!r} in the daemon ({its['source']}), {mine['value']!r} here ({mine['source']})"
            )
            yield Finding("settings", "warn", says, "give both the same settings, or restart the daemon")
    for name, tier in running["tiers"].items():
        if tier["last_error"]:
            yield Finding(f"{name} tier", "warn", f"mode {tier['mode']}; last error: {tier['last_error']}")


def round_trips(runtime_dir: Path, door: Door, tiers: list[str]) -> Iterator[Finding]:
    """Store a block in the running daemon, read it back from each tier, delete it."""
    try:
        with _session(runtime_dir / "engine.sock") as welcome:
            yield Finding("engine door", "ok", f"session {welcome.session}, arena of {show(welcome.arena_bytes)}")
            namespace = welcome.namespace_id.hex()
    except (OSError, TerraceError) as error:
        yield Finding("engine door", "fail", f"no session: {error}", "look at the daemon's log")
        return
    route = f"/v1/namespaces/{namespace}/blocks/{os.urandom(32).hex()}/0"
    payload = os.urandom(BLOCK.block_bytes)
    try:
        door.exchange("PUT", f"{route}?durable={int(len(tiers) > 1)}", payload, BYTES)
        for depth, tier in enumerate(tiers):
            # A tier below host is read once those above it have forgotten the block.
            for above in tiers[:depth]:
                door.ask("POST", "/v1/flush", {"namespace": namespace, "tier": above})
            yield _compare(tier, payload, _read(door, route))
        door.exchange("DELETE", route)
        if _read(door, route) is not None:
            yield Finding("delete", "fail", "a deleted block can still be read", "look at the daemon's log")
    except TerraceError as error:
        yield Finding("round trip", "fail", error.message, error.hint)


def _compare(tier: str, stored: bytes, found: bytes | None) -> Finding:
    if found is None:
        return Finding(f"{tier} tier", "fail", "a block that was stored is not found again", "look at the daemon's log")
    if found != stored:
        return Finding(f"{tier} tier", "fail", "a block that was stored came back with other bytes", "do not use it")
    return Finding(f"{tier} tier", "ok", f"a block of {show(len(stored))} was stored and came back the same")


def _read(door: Door, route: str) -> bytes | None:
    try:
        return door.exchange("GET", route)
    except Answered as error:
        if error.status == 404:
            return None
        raise


@contextlib.contextmanager
def _session(path: Path) -> Iterator[protocol.Welcome]:
    """A session of an engine, as short as it can be; it makes the doctor's namespace known."""
    hello = protocol.Hello(
        version=protocol.VERSION,
        probe=protocol.PROBE,
        model="terracekv/doctor",
        revision="1",
        dtype="bytes",
        block_tokens=16,
        layout=BLOCK,
        shards=1,
        shard=0,
        pid=os.getpid(),
        engine="terracekv doctor",
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, connection.makefile("rb") as answers:
        connection.settimeout(HELLO_S)
        connection.connect(str(path))
        connection.sendall(protocol.frame(hello))
        head = answers.read(protocol.LENGTH.size)
        if len(head) < protocol.LENGTH.size:
            raise TerraceError("the daemon closed the connection")
        answer = protocol.answer_decoder.decode(answers.read(protocol.LENGTH.unpack(head)[0]))
        if isinstance(answer, protocol.Refused):
            raise TerraceError(f"refused: {answer.field}: {answer.reason}")
        if not isinstance(answer, protocol.Welcome):
            raise TerraceError(f"answered with {type(answer).__name__}")
        yield answer

"""The doctor's trial of a running daemon: store a block as an engine does, through the arena, and get it back.

Owns, while it lasts, one session and mappings of the arena and the slot table; leaves behind one small namespace of its
own. Called by ``doctor``. Imports ``config``, ``http_client``, ``protocol``, ``tiers.budget`` and ``errors``.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.config import own_token
from terracekv.daemon.http_client import Answered, Door
from terracekv.tiers.budget import show
from terracekv.tiers.errors import TerraceError

ANSWER_S = 5.0
LOG = "look at the daemon's log"
RESTART = "restart the daemon: what it writes there, engines cannot see"
BLOCK = protocol.Layout("ND", "latent", 2, (protocol.LayerGroup(1, (16, 128), protocol.dense_strides((16, 128), 2)),))
"""The block that is tried out: one page."""
MODEL = "terracekv/doctor"
_GENERATION = struct.Struct("<Q")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``fail``: something will not work; ``warn``: it works, but less well than it could."""

    what: str
    state: Literal["ok", "warn", "fail"]
    says: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Engine:
    """An engine in as few lines as it takes: Hello on entry, ``store``, gone on exit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = contextlib.ExitStack()

    def __enter__(self) -> "Engine":
        """Makes the doctor's namespace known. OSError or TerraceError when there is no session."""
        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(str(self._path))
            self._answers: BinaryIO = undo.enter_context(self._socket.makefile("rb"))
            hello = protocol.Hello(
                version=protocol.VERSION,
                probe=protocol.PROBE,
                model=MODEL,
                revision="1",
                dtype="bytes",
                block_tokens=16,
                layout=BLOCK,
                shards=1,
                shard=0,
                pid=os.getpid(),
                credential=own_token().encode(),
                engine="terracekv doctor",
            )
            self.welcome = self._ask(hello, protocol.Welcome)
            self._left = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def store(self, key: bytes, payload: bytes, durable: bool) -> None:
        """Reserve, write through the arena, commit."""
        with self._mapped() as (arena, slots):
            reserved = self._ask(protocol.Reserve(1, key), protocol.Reserved)
            slot = reserved.slots[0]
            if slot is None:
                raise TerraceError(f"no slot was given: {reserved.refused.get(0, 'present')}", "is host full?")
            if _GENERATION.unpack_from(slots, slot.record)[0] != slot.generation:
                self._tell(protocol.Abort(reserved.reservation))
                raise TerraceError(
                    f"{self.welcome.slots} is not the slot table that the daemon writes: it was replaced", RESTART
                )
            arena[slot.offset : slot.offset + len(payload)] = payload
            committed = self._ask(protocol.Commit(1, reserved.reservation, [0], durable), protocol.Committed)
        if committed.stored != [0]:
            raise TerraceError("a block that was written was not stored", LOG)

    def meet(self, key: bytes) -> None:
        """Offer a stored block again: a tier that takes only what is met twice takes it now."""
        reserved = self._ask(protocol.Reserve(2, key), protocol.Reserved)
        if reserved.slots[0] is not None:
            self._tell(protocol.Abort(reserved.reservation))

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[tuple[mmap.mmap, mmap.mmap]]:
        """What Welcome names, mapped as engines do, and locked for as long as it may be written."""
        welcome = self.welcome
        with contextlib.ExitStack() as stack:
            maps = []
            for path, size, flags in (
                (welcome.arena, welcome.arena_bytes, os.O_RDWR),
                (welcome.slots, welcome.slots_bytes, os.O_RDONLY),
            ):
                file = os.open(path, flags | os.O_CLOEXEC)
                stack.callback(os.close, file)
                found = os.fstat(file).st_size
                if found != size:
                    raise TerraceError(f"{path} has {found} bytes, and the daemon made it with {size}", RESTART)
                protection = mmap.PROT_READ | (mmap.PROT_WRITE if flags == os.O_RDWR else 0)
                maps.append(stack.enter_context(mmap.mmap(file, size, prot=protection)))
            # Closing the file lets go of the lock.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, welcome.lock_byte)
            yield maps[0], maps[1]

    def _tell(self, message: protocol.Request) -> None:
        self._socket.sendall(protocol.frame(message))

    def _ask(self, message: protocol.Request, wanted: type[T]) -> T:
        self._tell(message)
        head = self._answers.read(protocol.LENGTH.size)
        if len(head) < protocol.LENGTH.size:
            raise TerraceError("the daemon closed the connection", LOG)
        answer = protocol.answer_decoder.decode(self._answers.read(protocol.LENGTH.unpack(head)[0]))
        match answer:
            case protocol.Refused():
                raise TerraceError(f"refused: {answer.field}: {answer.reason}", LOG)
            case protocol.Error():
                raise TerraceError(answer.message, answer.hint)
        if not isinstance(answer, wanted):
            raise TerraceError(f"answered with {type(answer).__name__}", LOG)
        return answer


def round_trips(runtime_dir: Path, door: Door, tiers: list[str]) -> Iterator[Finding]:
    """Store a block in the running daemon, read it back from each tier, delete it."""
    key, payload = os.urandom(32), os.urandom(BLOCK.block_bytes)
    part = "engine door"
    try:
        with Engine(runtime_dir / "engine.sock") as engine:
            yield Finding(part, "ok", f"session {engine.welcome.session} at {runtime_dir / 'engine.sock'}")
            part = "arena"
            engine.store(key, payload, len(tiers) > 1)
            engine.meet(key)
            says = f"{show(engine.welcome.arena_bytes)} mapped at {engine.welcome.arena}, and written to"
            yield Finding(part, "ok", says)
            namespace = engine.welcome.namespace_id.hex()
    except FileNotFoundError as gone:
        yield Finding(part, "fail", f"{gone.filename or runtime_dir / 'engine.sock'} is gone", RESTART)
        return
    except TimeoutError:
        yield Finding(part, "fail", f"no answer within {ANSWER_S:g} s", LOG)
        return
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        yield Finding(part, "fail", f"not as an engine needs it: {error}", LOG)
        return
    except TerraceError as error:
        yield Finding(part, "fail", error.message, error.hint)
        return
    route = f"/v1/namespaces/{namespace}/blocks/{key.hex()}/0"
    try:
        for depth, tier in enumerate(tiers):
            # A tier below host is read once it has written and those above it have forgotten the block.
            _written(door, tier)
            for above in tiers[:depth]:
                door.ask("POST", "/v1/flush", {"namespace": namespace, "tier": above})
            yield _tried(door, tier, {"namespace": namespace, "keys": [key.hex()]}, payload, route)
        door.exchange("DELETE", route)
        if _read(door, route) is not None:
            yield Finding("delete", "fail", "a deleted block can still be read", LOG)
    except TerraceError as error:
        yield Finding("round trip", "fail", error.message, error.hint)


def _written(door: Door, tier: str) -> None:
    """Wait, not for ever, until a tier has written what waits for it."""
    until = time.monotonic() + ANSWER_S
    while _status(door, tier)["in_flight_bytes"] and time.monotonic() < until:
        time.sleep(0.02)


def _tried(door: Door, tier: str, question: dict[str, object], stored: bytes, route: str) -> Finding:
    """What comes of reading a block from one tier: another one that has it too serves it unasked, and proves nothing
    of this one."""
    reach = door.ask("POST", "/v1/explain", question)["matched_blocks"]  # it counts as no lookup
    before = _status(door, tier)["counters"]["hits"]
    finding = _compare(tier, stored, _read(door, route) if reach else None)
    after = _status(door, tier)
    if finding.state == "ok" and tier != "host" and after["counters"]["hits"] == before:
        finding = Finding(finding.what, "fail", "a block that was stored could only be read from another tier", LOG)
    if finding.state == "fail" and after["last_error"]:
        return replace(finding, says=f"{finding.says}; last error: {after['last_error']}")
    return finding


def _status(door: Door, tier: str) -> dict[str, Any]:
    status: dict[str, Any] = door.ask("GET", "/v1/status")["tiers"][tier]
    return status


def _compare(tier: str, stored: bytes, found: bytes | None) -> Finding:
    if found is None:
        return Finding(f"{tier} tier", "fail", "a block that was stored is not found again", LOG)
    if found != stored:
        advice = f"what engines map is not what the daemon reads? {RESTART}; if it stays so, do not use it"
        return Finding(f"{tier} tier", "fail", "a block that was stored came back with other bytes", advice)
    return Finding(f"{tier} tier", "ok", f"a block of {show(len(stored))} was stored and came back the same")


def _read(door: Door, route: str) -> bytes | None:
    try:
        return door.exchange("GET", route)
    except Answered as error:
        if error.status == 404:
            return None
        raise

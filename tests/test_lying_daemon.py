"""A daemon that lies in every field of every answer: because of an error, of another version, or as another program on
its socket.

An engine is never hurt by it: its calls return, within their deadlines, with no more than there is; a session that lied
is over, the next one is tried; nothing is left behind.

The lies are in ``daemon_lies``: a field that has none yet fails the first test here.
"""

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from terracekv.connector import client as client_module
from terracekv.connector.client import Client
from terracekv.connector.connection import ANSWER_BYTES_MAX, MS_MAX, Connection, after
from terracekv.connector.leases import Leases
from terracekv.daemon import protocol
from terracekv.daemon.protocol import (
    Committed,
    Error,
    Failed,
    Found,
    GpuMemory,
    Leased,
    Ready,
    Refused,
    Reserved,
    Slot,
    Welcome,
)
from terracekv.tests.daemon_lies import DEADLINE, FENCED, LIES, NO_SESSION, PROTOCOL, TRUTH, Lie
from terracekv.tests.harness import TOKENS, layout_of, until
from terracekv.tests.hosts import is_locked
from terracekv.tests.lies import fields
from terracekv.tests.lying_daemon import BLOCK, GPU, LOCK_BYTE, LyingDaemon

KEYS = [bytes([number]) * 32 for number in range(6)]
TRUTHS = {"join": (None, 0), "lookup": (None, 6), "load": ("failed", 5), "hold": (None, 5), "store": ("full", 4)}
CASES = [
    (Welcome, Welcome, "join"),
    (GpuMemory, Welcome, "join"),
    (Refused, Refused, "join"),
    (Found, Found, "lookup"),
    (Error, Error, "lookup"),
    *((kind, kind, call) for kind in (Leased, Ready, Failed) for call in ("load", "hold")),
    (Slot, Leased, "load"),
    (Slot, Ready, "load"),
    (Slot, Reserved, "store"),
    (Reserved, Reserved, "store"),
    (Committed, Committed, "store"),
]


class Device:
    """What is used of a GPU to open another process's memory."""

    uuid = GPU

    def open(self, handle: bytes) -> int:
        if len(handle) != 64:
            raise RuntimeError("no handle")
        return 0

    def close(self, address: int) -> None: ...


@pytest.fixture
def daemon(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingDaemon]:
    monkeypatch.setattr(client_module, "JOIN_S", 30.0)  # a busy machine may take more than a second to say Welcome
    for name in ("arena", "slots"):
        os.mkfifo(shm_dir / f"{name}.pipe")
    with LyingDaemon(shm_dir) as running:
        yield running


def engine(path: Path, kind: Callable[..., Any] = Client, **changes: Any) -> Any:
    budgets = {"lookup_budget_ms": 10_000, "load_deadline_ms": 10_000, "store_deadline_ms": 10_000}
    names = {"model": "m", "revision": "r", "dtype": "u8", "block_tokens": TOKENS, "layout": layout_of(BLOCK)}
    return kind(path, **({**names, **budgets, "device": Device()} | changes))


def copied(index: int, payload: memoryview) -> None:
    """An engine's copier: it copies whole blocks, and knows six."""
    assert 0 <= index < 6 and len(payload) == BLOCK
    bytes(payload)


def fetched(index: int, memory: Any, offset: int) -> None:
    assert 0 <= index < 6
    memory.address(offset, BLOCK)


def held(client: Leases, patience_s: float) -> tuple[str | None, int]:
    """What a scheduler holds, once all of it has come or is late; it never sees more than there is."""
    lease = client.hold(KEYS)
    if lease is None:
        return str(client.last_trouble).partition(":")[0], 0
    deadline = time.monotonic() + patience_s
    while client.lasts(lease) and lease.pending and time.monotonic() < deadline:
        client.listen()
        assert 0 <= lease.ready <= lease.blocks <= 6
        time.sleep(0.002)
    if not client.lasts(lease):
        return str(client.last_trouble).partition(":")[0], 0
    client.release(lease)
    return DEADLINE if lease.pending else None, lease.ready


def did(client: Any, call: str, *, late: bool = False) -> tuple[str | None, int]:
    """Why there was not more, and how much there was. ``late``: it will not be answered."""
    if call == "join":
        return (None if client.joined else str(client.last_trouble).partition(":")[0]), 0
    if call == "hold":
        return held(client, 0.2 if late else 30.0)
    if call == "lookup":
        found = client.lookup(KEYS)
        assert 0 <= found.load_ms < math.inf and all(0 <= reach <= 6 for reach in found.per_tier.values())
        return found.reason, found.blocks
    if call == "store":
        stored = client.store(KEYS, copied, True)
        assert 0 <= stored.durable <= stored.stored <= 4 and stored.present <= 1
        return stored.why, stored.stored
    client.load_deadline_ms = 200 if late else 10_000
    loaded = client.load(KEYS, copied, fetch=fetched)
    client.load_deadline_ms = 10_000
    return loaded.why, loaded.blocks


def telling(kind: type[msgspec.Struct], name: str, lie: Lie, carrier: Any) -> Callable[[Any], Any]:
    """Changes one field of a kind of answers, or of what they carry."""

    def changed(truth: Any) -> Any:
        return msgspec.structs.replace(truth, **{name: lie.value(getattr(truth, name))})

    def tell(answer: Any) -> Any:
        if not isinstance(answer, carrier):
            return answer
        if kind is GpuMemory:
            return msgspec.structs.replace(answer, gpu=changed(answer.gpu))
        if kind is not Slot:
            return changed(answer)
        at = max(index for index, slot in enumerate(answer.slots) if slot is not None and not slot.gpu)
        return msgspec.structs.replace(
            answer, slots=[*answer.slots[:at], changed(answer.slots[at]), *answer.slots[at + 1 :]]
        )

    return tell


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("terracekv")]


def left_nothing(daemon: LyingDaemon, client: Client, before: int) -> None:
    """Of a client that is closed: no session, thread, descriptor or lock."""
    client.close()
    until(lambda: not daemon.open and descriptors() == before, "sessions and descriptors are gone")
    assert not threads() and not is_locked(daemon.slots, LOCK_BYTE)


def test_there_is_a_lie_for_every_field_of_every_answer() -> None:
    assert set(LIES) == set(fields(protocol.Answer)), "give a new field a lie, and take out what is no field any more"
    assert all(LIES.values()) and {kind for kind, _ in LIES} == {kind for kind, _, _ in CASES}


@pytest.mark.fault(59)
@pytest.mark.parametrize("call", TRUTHS)
def test_a_daemon_that_tells_the_truth_is_believed(daemon: LyingDaemon, call: str) -> None:
    """Or the lies below would prove nothing."""
    before = descriptors()
    client = engine(daemon.path, Leases if call == "hold" else Client)
    assert did(client, call) == TRUTHS[call] and client.troubles == 0
    left_nothing(daemon, client, before)


@pytest.mark.fault(59)
@pytest.mark.parametrize(("kind", "carrier", "call"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_no_lie_of_the_daemon_hurts_an_engine(
    daemon: LyingDaemon, kind: type[msgspec.Struct], carrier: type[msgspec.Struct], call: str
) -> None:
    for (of, name), lies in LIES.items():
        for number, lie in enumerate(lies if of is kind else []):
            where = f"{kind.__name__}.{name}, lie {number}"
            why = lie.held if call == "hold" and lie.held is not None else lie.why
            why = TRUTH if why == FENCED and call == "store" else why  # nobody reads what it writes
            before, told = descriptors(), daemon.told
            daemon.refuses, daemon.shut = kind is Error, kind is Refused
            tell = telling(kind, name, lie, carrier)
            daemon.lie = tell if call == "join" else None
            client = engine(daemon.path, Leases if call == "hold" else Client)
            daemon.lie, sessions = tell, daemon.sessions
            said, count = did(client, call, late=why == DEADLINE)
            until(lambda: daemon.told > told, f"it lies: {where}")  # noqa: B023
            truth, most = TRUTHS[call]
            assert said == (truth if why == TRUTH else said if why == NO_SESSION else why), f"{where}: {said}"
            assert count <= most and client.joined >= (why == TRUTH) and (said is not None or why != NO_SESSION), where
            assert str(client.last_trouble).isprintable() and len(str(client.last_trouble)) < 3000, "it fills no log"
            daemon.lie, daemon.refuses, daemon.shut = None, False, False
            until(lambda: client.lookup(KEYS).blocks == 6, f"a session is tried anew after {where}")  # noqa: B023
            if call != "join":
                ended = why in (PROTOCOL, FENCED) or (why == DEADLINE and call == "load")
                assert (daemon.sessions > sessions) == ended, where
            if call != "hold":
                assert did(client, "load") == TRUTHS["load"], where
            left_nothing(daemon, client, before)


DEEP = b"\x91" * 100_000 + b"\xc0"


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


NONSENSE = {
    "nested without end": framed(DEEP),
    "nested in a field that is to come": framed(
        b"\x98" + msgspec.msgpack.encode(Found(1, 6, {}, None, None, 1.0))[1:] + DEEP  # of eight fields, not seven
    ),
    "longer than any answer": struct.pack("<I", ANSWER_BYTES_MAX + 1) + b"x",
}


@pytest.mark.fault(59)
@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("call", ["lookup", "load", "store", "hold"])
def test_what_is_no_answer_ends_the_session(daemon: LyingDaemon, what: str, call: str) -> None:
    before = descriptors()
    client = engine(daemon.path, Leases if call == "hold" else Client)
    daemon.lie = lambda answer: NONSENSE[what]
    assert did(client, call) == (PROTOCOL, 0)
    daemon.lie = None
    until(lambda: client.lookup(KEYS).blocks == 6, "a session is tried anew")
    left_nothing(daemon, client, before)


@pytest.mark.fault(59)
@pytest.mark.parametrize("count", [2, 9, 40])
def test_descriptors_that_are_no_files_are_closed_again(daemon: LyingDaemon, shm_dir: Path, count: int) -> None:
    """Pipes, and more of them than a daemon hands over; a few with each piece of its Welcome."""
    path = shm_dir / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                paths = str(daemon.arena), 1, str(daemon.slots), 1
                said = protocol.frame(Welcome(1, bytes(32), 0, BLOCK, *paths, LOCK_BYTE))
                ends = os.pipe()
                with contextlib.suppress(OSError):  # hung up on, in the middle of it
                    for at in range(0, count, 2):  # two bytes and two descriptors at a time
                        part = said[at:] if at + 2 >= count else said[at : at + 2]
                        socket.send_fds(peer, [part], ends[: count - at])
                    while peer.recv(1 << 16):
                        pass
                for end in ends:
                    os.close(end)

        before = descriptors()
        serving = threading.Thread(target=serve)
        serving.start()
        client = engine(path)
        assert not client.joined and str(client.last_trouble).startswith(PROTOCOL), client.last_trouble
        client.close()
        serving.join()
        until(lambda: descriptors() == before, "they are closed")


class Endless:
    """A socket on which one notice comes after the other."""

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, size: int) -> bytes:
        return protocol.frame(Ready(99, [0], [])) * 100

    def close(self) -> None: ...


def test_notices_without_end_are_read_until_the_deadline(daemon: LyingDaemon) -> None:
    connection = Connection(str(daemon.path), after(10_000))
    connection._socket.close()
    connection._socket = Endless()  # type: ignore[assignment]
    connection.notices = []
    connection.read_notices(after(0))
    assert len(connection.notices) == 100
    connection.close()


@pytest.mark.parametrize("call", ["lookup", "load", "store", "hold"])
@pytest.mark.parametrize("keys", [[b""], [b"k" * 31], [b"k" * 31, b"k" * 33], [bytes(32), bytes(64)]], ids=str)
def test_a_key_of_another_length_is_refused_and_ends_no_session(
    daemon: LyingDaemon, call: str, keys: list[bytes]
) -> None:
    client = engine(daemon.path, Leases if call == "hold" else Client)
    if call == "lookup":
        adds_up = sum(map(len, keys)) == 32 * len(keys)  # two other names, of which a lookup tells no wrong bytes
        assert client.lookup(keys).reason == (None if adds_up else "refused")
    elif call == "hold":
        assert client.hold(keys) is None and client.keep(keys, 1.0) is None
    else:
        assert getattr(client, call)(keys, copied).why == "refused"
    assert client.joined and client.lookup(KEYS).blocks == 6 and daemon.sessions == 1
    client.close()


@pytest.mark.parametrize("ms", [math.nan, math.inf, -math.inf, -1, None, "20", 0.5, True, MS_MAX + 1, 1 << 70], ids=str)
@pytest.mark.parametrize("name", ["lookup_budget_ms", "load_deadline_ms", "store_deadline_ms"])
def test_a_budget_that_is_none_is_refused_by_name_before_the_engine_begins(
    daemon: LyingDaemon, name: str, ms: Any
) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*milliseconds"):
        engine(daemon.path, Client, **{name: ms})
    assert daemon.sessions == 0


def test_the_longest_budget_there_is_can_be_waited(daemon: LyingDaemon) -> None:
    client = engine(daemon.path, lookup_budget_ms=MS_MAX, load_deadline_ms=MS_MAX, store_deadline_ms=MS_MAX)
    assert did(client, "lookup") == TRUTHS["lookup"] and did(client, "store") == TRUTHS["store"]
    client.close()

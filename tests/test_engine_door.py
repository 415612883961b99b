"""The engine door, spoken to by hand: whatever comes is answered, by name, and costs nobody else anything."""

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from terracekv.daemon import protocol
from terracekv.daemon.protocol import (
    FRAME_BYTES_MAX,
    LENGTH,
    Abort,
    Acquire,
    Commit,
    Committed,
    Error,
    Found,
    LayerGroup,
    Layout,
    Leased,
    Lookup,
    Pin,
    Prefetch,
    Refused,
    Release,
    Reserve,
    Reserved,
    Welcome,
    frame,
)
from terracekv.tests.conftest import PREFIX
from terracekv.tests.harness import TOKENS, Daemon, Wire, hello, layout_of, until
from terracekv.tests.stores import key

KEYS = [key(index) for index in range(4)]
MORE = b"".join(KEYS)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests; in the end its log must be clean."""
    runtime = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
    state = Path(tempfile.mkdtemp())
    with Daemon(runtime, state) as running:
        yield running
        assert running.errors() == [] and running.term() == 0
    shutil.rmtree(runtime)
    shutil.rmtree(state)


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    """A session; after the test it is still answered, and so is another."""
    with daemon.wire(hello()) as session:
        yield session
        answer = session.ask(Lookup(77, b"", 1000))
        assert isinstance(answer, Found) and answer.id == 77


def packed(*parts: Any) -> bytes:
    body = msgspec.msgpack.encode(parts)
    return LENGTH.pack(len(body)) + body


DEEP = msgspec.msgpack.encode(["lookup", 1, b"", 10, None])[:-1] + b"\x91" * 100_000 + b"\xc0"
MALFORMED = {
    "nothing": LENGTH.pack(0),
    "not msgpack": LENGTH.pack(4) + b"\xc1\xc1\xc1\xc1",
    "cut short": LENGTH.pack(3) + b"\xdc\xff\xff",
    "text": LENGTH.pack(16) + b"GET / HTTP/1.1\r\n",
    "no array": packed()[:4] + b"\x07",
    "an empty array": packed(),
    "no tag": packed(1, 2, 3),
    "an unknown tag": packed("steal", 1, b""),
    "an answer": frame(Committed(1, [], [])),
    "too few fields": packed("lookup", 1),
    "a text for a number": packed("lookup", "one", b"", 10),
    "a number for keys": packed("lookup", 1, 12, 10),
    "a list for keys": packed("lookup", 1, [b"x" * 32], 10),
    "a float for a number": packed("lookup", 1.5, b"", 10),
    "no number at all": packed("lookup", None, b"", None),
    "indices of text": packed("commit", 1, 1, ["a"], False),
    "indices that are bytes": packed("commit", 1, 1, b"\x00", False),
    "deep nesting": LENGTH.pack(100_001) + b"\x91" * 100_000 + b"\x90",
    "deep nesting behind what is known": LENGTH.pack(len(DEEP)) + DEEP,
    "keys of another length": frame(Lookup(0, b"x" * 33, 10)),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_read_is_answered_and_the_session_goes_on(wire: Wire, what: str) -> None:
    wire.send(MALFORMED[what])
    answer = wire.read()
    assert isinstance(answer, Error) and answer.id == 0 and answer.kind == "bad_request", answer
    assert answer.message and answer.hint


def test_requests_that_arrive_in_drops_or_all_at_once_are_answered_in_order(wire: Wire) -> None:
    requests = [Lookup(id, MORE, 1000) for id in range(1, 6)]
    whole = b"".join(map(frame, requests))
    for start in range(len(whole)):
        wire.send(whole[start : start + 1]) if start < 60 else None
    wire.send(whole[60:])
    assert [getattr(wire.read(), "id", None) for _ in requests] == [1, 2, 3, 4, 5]


def test_a_frame_over_the_limit_is_answered_and_ends_the_connection(daemon: Daemon) -> None:
    for length in (FRAME_BYTES_MAX + 1, 2**32 - 1):
        with daemon.wire(hello()) as wire:
            wire.send(LENGTH.pack(length) + b"x" * 100)
            answer = wire.read()
            assert (
                isinstance(answer, Error) and str(length) in answer.message and str(FRAME_BYTES_MAX) in answer.message
            )
            assert wire.closed()


def test_a_frame_of_exactly_the_limit_is_served(wire: Wire) -> None:
    count = (FRAME_BYTES_MAX - 64) // 32
    keys = b"".join(struct.pack("<Q", index) * 4 for index in range(count))
    answer = wire.ask(Lookup(5, keys, 1000))
    assert isinstance(answer, Found) and answer.blocks == 0 and answer.first_miss == 0


@pytest.mark.parametrize("part", [b"", b"\x01", LENGTH.pack(100), LENGTH.pack(100) + b"half", frame(hello())[:20]])
def test_who_hangs_up_in_the_middle_of_a_frame_leaves_nothing(daemon: Daemon, part: bytes) -> None:
    before = daemon.descriptors()
    for greeting in (None, hello()):
        with daemon.wire(greeting) as wire:
            wire.send(part)
    until(lambda: daemon.descriptors() <= before, "the daemon closes its end")


@pytest.mark.parametrize(
    "request_",
    [
        Lookup(9, MORE, 10),
        Acquire(9, MORE, 10),
        Reserve(9, MORE),
        Commit(9, 1, [0]),
        Release(1),
        Abort(1),
        Prefetch(MORE),
    ],
    ids=lambda each: type(each).__name__,
)
def test_nothing_is_done_before_hello(daemon: Daemon, request_: protocol.Request) -> None:
    with daemon.wire() as wire:
        answer = wire.ask(request_)
        assert isinstance(answer, Error) and "before Hello" in answer.message
        assert answer.id == getattr(request_, "id", 0)
        assert isinstance(wire.ask(hello()), Welcome), "the connection can still become a session"


def test_a_second_hello_is_refused_and_the_session_stays(wire: Wire) -> None:
    answer = wire.ask(hello(model="another"))
    assert isinstance(answer, Error) and "second Hello" in answer.message


def bad_layout(**changes: Any) -> Layout:
    return msgspec.structs.replace(layout_of(4096), **changes)


REFUSED: dict[str, dict[str, Any]] = {
    "version": {"version": 99},
    "probe": {"probe": b"\x00" * 32},
    "model": {"model": "m" * 2000},
    "revision": {"revision": "r" * 2000},
    "dtype": {"dtype": "d" * 2000},
    "block_tokens": {"block_tokens": 0},
    "layout.axes": {"layout": bad_layout(axes="XYZ")},
    "layout.packing": {"layout": bad_layout(packing="woven")},
    "layout.groups": {"layout": bad_layout(groups=())},
    "layout.groups[0].layers": {"layout": bad_layout(groups=(LayerGroup(-1, (4, 8), (8, 1)),))},
    "layout.groups[0].shape": {"layout": bad_layout(groups=(LayerGroup(1, (-4, 8), (8, 1)),))},
    "layout.groups[0].strides": {"layout": bad_layout(groups=(LayerGroup(1, (4, 8), (1, 4)),))},
    "layout": {"layout": layout_of(4 << 20)},
    "shards": {"shards": 0},
    "shard": {"shards": 2, "shard": 2},
}


@pytest.mark.fault(5)
@pytest.mark.fault(96)
@pytest.mark.parametrize("field", REFUSED)
def test_a_hello_that_cannot_be_meant_is_refused_by_the_name_of_its_field(daemon: Daemon, field: str) -> None:
    with daemon.wire() as wire:
        answer = wire.ask(hello(**REFUSED[field]))
        assert isinstance(answer, Refused) and answer.field == field, answer
        assert answer.reason and not answer.reason.startswith(field) and wire.closed()


def test_an_engine_that_is_refused_is_not_told_that_there_is_no_daemon(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon.client(model="m" * 2000) as client:
        assert not client.joined
    said = f"the daemon at {daemon.socket} refused: model: longer than"
    assert said in caplog.text and "no daemon" not in caplog.text


@pytest.mark.parametrize("number", [-1, 2**40, 2**63 - 1, -(2**63)])
def test_numbers_out_of_all_proportion_are_refused_too(daemon: Daemon, number: int) -> None:
    shape = LayerGroup(1, (TOKENS, number), (number if abs(number) < 2**62 else 1, 1))
    wide = bad_layout(groups=(shape,))
    many = bad_layout(groups=(LayerGroup(number, (TOKENS, 1024), (1024, 1)),))
    out_of_proportion: list[dict[str, Any]] = [
        {"block_tokens": number},
        {"shards": number},
        {"layout": wide},
        {"layout": many},
    ]
    for changes in out_of_proportion:
        with daemon.wire() as wire:
            assert isinstance(wire.ask(hello(**changes)), Refused), changes
    with daemon.wire(hello(pid=number)) as wire:
        assert wire.welcome is not None


@pytest.mark.fault(30)
def test_engines_that_divide_a_block_differently_never_meet(daemon: Daemon) -> None:
    """Though a shard of the one looks like a shard of the other, as where heads are repeated on several ranks."""
    found = set()
    for shards in (1, 2, 4):
        with daemon.wire(hello(model="ranks", shards=shards)) as wire:
            assert wire.welcome is not None
            found.add(wire.welcome.namespace_id)
    assert len(found) == 3


@pytest.mark.fault(28)
def test_tenants_share_nothing_and_one_tenants_sessions_all(daemon: Daemon) -> None:
    def namespace(credential: bytes) -> bytes:
        with daemon.wire(hello(credential=credential)) as wire:
            assert wire.welcome is not None
            return wire.welcome.namespace_id

    assert len({namespace(credential) for credential in (b"", b"a", b"b")}) == 3
    assert namespace(b"a") == namespace(b"a")


@pytest.mark.parametrize("make", [Acquire, Lookup, Reserve], ids=lambda kind: kind.__name__)
def test_the_same_key_twice_or_half_a_key_is_refused(wire: Wire, make: Any) -> None:
    rest = () if make is Reserve else (1000,)
    half = wire.ask(make(3, MORE[:-1], *rest))
    assert isinstance(half, Error) and half.id == 3 and "multiple of 32" in half.message
    if make is not Lookup:
        twice = wire.ask(make(4, MORE + MORE[:32], *rest))
        assert isinstance(twice, Error) and twice.id == 4 and "twice" in twice.message


def test_only_ones_own_open_slots_can_be_committed(daemon: Daemon, wire: Wire) -> None:
    reserved = wire.ask(Reserve(1, MORE))
    assert isinstance(reserved, Reserved) and None not in reserved.slots
    mine = reserved.reservation
    wrong = [(mine, [4]), (mine, [-1]), (mine, [0, 0]), (mine, [2**62]), (mine + 1, [0]), (-1, [0]), (2**63 - 1, [0])]
    for reservation, indices in wrong:
        answer = wire.ask(Commit(2, reservation, indices))
        assert isinstance(answer, Error) and (answer.id, answer.kind) == (2, "not_found"), (reservation, indices)
    with daemon.wire(hello()) as stranger:
        answer = stranger.ask(Commit(2, mine, [0]))
        assert isinstance(answer, Error) and answer.kind == "not_found"
        stranger.tell(Abort(mine))
        stranger.tell(Release(mine))
        lookup = stranger.ask(Lookup(3, MORE, 1000))
        assert isinstance(lookup, Found) and lookup.blocks == 0
    assert wire.ask(Commit(4, mine, [0, 1])) == Committed(4, [0, 1], [])
    assert isinstance(wire.ask(Commit(5, mine, [1, 2])), Error)
    wire.tell(Abort(mine))
    found = wire.ask(Lookup(6, MORE, 1000))
    assert isinstance(found, Found) and found.blocks == 2


@pytest.mark.fault(42)
def test_releasing_or_aborting_what_is_over_or_never_was_is_no_error(wire: Wire) -> None:
    leased = wire.ask(Acquire(1, MORE, 1000))
    assert isinstance(leased, Leased)
    for lease in (leased.lease, leased.lease, 999, -1, 2**63 - 1):
        wire.tell(Release(lease))
        wire.tell(Abort(lease))
    assert isinstance(wire.ask(Lookup(2, b"", 1000)), Found)


def test_a_scheduler_cannot_write(daemon: Daemon) -> None:
    with daemon.wire(hello(shard=None)) as wire:
        answer = wire.ask(Reserve(1, MORE))
        assert isinstance(answer, Error) and (answer.id, answer.kind) == (1, "bad_request")
        assert "shard" in answer.hint


def test_negative_and_endless_deadlines_are_taken_for_none_and_the_longest(wire: Wire) -> None:
    for deadline_ms in (-1, 0, 2**62):
        assert isinstance(wire.ask(Acquire(1, MORE, deadline_ms)), Leased)
        assert isinstance(wire.ask(Lookup(2, MORE, deadline_ms)), Found)


def test_an_engine_that_reads_no_answers_is_asked_to_wait_and_loses_none(daemon: Daemon) -> None:
    """Its requests stay in its own socket: the daemon's memory does not grow with them."""
    before = daemon.memory_bytes()["anonymous"]
    with daemon.wire(hello()) as wire, daemon.wire(hello()) as other:
        sent = 0
        wire.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while sent < 1_000_000:
                wire.send(b"".join(frame(Lookup(sent + n + 1, KEYS[0], 1000)) for n in range(100)))
                sent += 100
        assert daemon.memory_bytes()["anonymous"] - before < 16 << 20
        assert isinstance(other.ask(Lookup(1, MORE, 1000)), Found)
        wire.socket.settimeout(30.0)
        for id in range(1, sent + 1):
            answer = wire.read()
            assert isinstance(answer, Found) and answer.id == id


def test_an_engine_that_reads_nothing_and_then_breaks_the_protocol_is_let_go(daemon: Daemon) -> None:
    before = daemon.descriptors()
    with daemon.wire(hello()) as wire:
        wire.socket.settimeout(0.3)
        try:
            for _ in range(1000):
                wire.send(frame(Lookup(1, b"", 1000)) * 1000)
        except TimeoutError:
            pass
    until(lambda: daemon.descriptors() <= before, "the daemon closes its end")


def test_many_sessions_come_and_go_and_leave_nothing(daemon: Daemon) -> None:
    with daemon.wire(hello()) as wire:
        until(lambda: isinstance(wire.ask(Lookup(1, b"", 1000)), Found), "an answer")
        before = daemon.descriptors()
        for round in range(5):
            wires = [daemon.wire(hello()) for _ in range(40)]
            for number, each in enumerate(wires):
                each.tell(Acquire(1, MORE, 1000))
                each.tell(Reserve(2, key(1000 + round * 100 + number)))
            for each in wires:
                with closing(each.socket):
                    assert isinstance(each.read(), Leased)
        until(lambda: daemon.descriptors() <= before, "the daemon closes its ends")
        reserved = wire.ask(Reserve(3, b"".join(key(5000 + n) for n in range(512))))
        assert isinstance(reserved, Reserved) and None not in reserved.slots, "slots of ended sessions are free again"
        wire.tell(Abort(reserved.reservation))


def test_the_socket_is_ours_only(daemon: Daemon) -> None:
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.runtime.stat().st_mode & 0o077 == 0
    assert {name for name in os.listdir(daemon.runtime) if not name.endswith(".sock")} == {
        "arena",
        "slots",
        "owner.lock",
    }


def test_an_engine_can_ask_that_its_blocks_stay(daemon: Daemon, wire: Wire) -> None:
    with daemon.client() as client:
        keys = client.chain(99, 3)
        assert client.put(keys).stored == 3
        wire.tell(Pin(b"".join(keys), 60_000))
        wrong = wire.ask(Pin(b"half a key", 60_000))
        assert isinstance(wrong, Error) and "multiple of 32" in wrong.message
        until(lambda: daemon.http("/v1/status")[1]["tiers"]["host"]["leased_blocks"] >= 3, "they are pinned")
        assert isinstance(wire.ask(Lookup(1, b"".join(keys), 1000)), Found), "the session goes on"

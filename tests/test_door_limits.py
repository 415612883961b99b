"""What one program may take from the daemon by asking for ever more: connections, memory of unfinished requests,
leases, the time of the loop. The others are served beside it."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from terracekv.daemon import descriptors, sessions
from terracekv.daemon.access import Access
from terracekv.daemon.config import Config
from terracekv.daemon.engine_door import EngineDoor
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH, Error, Found, Layout, Lookup, Refused, frame
from terracekv.daemon.unfinished import BYTES_MAX, SMALL_BYTES, Unfinished
from terracekv.tests.fuzz.door import Peer
from terracekv.tests.harness import MIB, Daemon, Wire, hello, layout_of, until
from terracekv.tests.hosts import BLOCK
from terracekv.tests.stores import World, Worlds, key, opened_worlds
from terracekv.tiers.errors import BadRequest

worlds = pytest.fixture(opened_worlds)


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running
        assert running.errors() == [] and running.term() == 0


def sent(wire: Wire, data: bytes) -> None:
    """Sent as far as the daemon takes it."""
    try:
        wire.send(data)
    except (BrokenPipeError, ConnectionResetError):
        return


def test_frames_that_never_end_take_bounded_memory_and_say_so(daemon: Daemon) -> None:
    before = daemon.memory_bytes()["anonymous"]
    with ExitStack() as open, daemon.client() as client:
        many = [open.enter_context(daemon.wire(hello())) for _ in range(40)]
        for wire in many:
            sent(wire, LENGTH.pack(FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX - 1))
        refused = 0
        for wire in many[BYTES_MAX // FRAME_BYTES_MAX :]:
            answer = wire.read()
            assert isinstance(answer, Error) and str(BYTES_MAX) in answer.message and wire.closed()
            refused += 1
        assert refused == len(many) - BYTES_MAX // FRAME_BYTES_MAX
        assert daemon.memory_bytes()["anonymous"] < before + BYTES_MAX + 32 * MIB
        keys = client.chain(1, 4)
        assert client.put(keys).stored == 4 and client.get(keys).blocks == 4
    with daemon.wire(hello()) as wire:
        until(lambda: len(daemon.http("/v1/status")[1]["sessions"]) <= 1, "the others are gone")
        whole = bytes(FRAME_BYTES_MAX // 64 * 32)
        assert isinstance(wire.ask(Lookup(1, whole, 1000)), Found), "a frame as large as that which ends is served"


def test_what_is_kept_is_counted_by_connection_and_given_back() -> None:
    kept, size = Unfinished(), BYTES_MAX // 4
    assert all(kept.keep(name, size) for name in "abcd") and kept.bytes == BYTES_MAX
    assert not kept.keep("e", SMALL_BYTES + 1) and kept.keep("e", SMALL_BYTES)
    assert kept.keep("a", size - 1) and kept.keep("b", 0) and kept.keep("e", size) and kept.bytes == BYTES_MAX - 1
    for name in "abcde":
        assert kept.keep(name, 0)
    assert kept.bytes == 0


def test_a_session_that_releases_nothing_gets_no_more_leases(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEASES_MAX", 3)

    async def story(w: World) -> None:
        await w.put(1)
        hoarder, other = w.session(), w.session()
        held = [w.sessions.acquire(hoarder, [key(1)], lambda *_: None)[0] for _ in range(3)]
        with pytest.raises(BadRequest, match="3 leases"):
            w.sessions.acquire(hoarder, [key(1)], lambda *_: None)
        w.sessions.acquire(other, [key(1)], lambda *_: None)
        w.sessions.release(hoarder, held[0])
        w.sessions.acquire(hoarder, [key(1)], lambda *_: None)
        w.sessions.close(hoarder)
        w.sessions.close(other)

    worlds.run(story)


@pytest.mark.fault(76)
def test_who_asks_one_thing_does_not_wait_behind_those_who_have_asked_much(worlds: Worlds, shm_dir: Path) -> None:
    async def story(w: World) -> None:
        door = EngineDoor(
            shm_dir / "x.sock",
            store=w.store,
            table=w.host.table,
            arena=w.host.arena.path,
            secret=bytes(32),
            access=Access(Config()),
        )
        many, one = Peer(door), Peer(door)
        for peer in (many, one):
            peer.send(frame(hello(BLOCK)))
        while len(door.sessions.open) < 2:
            await asyncio.sleep(0.001)
        assert len(many.answers()) == len(one.answers()) == 1
        many.send(b"".join(frame(Lookup(id, key(1), 1000)) for id in range(1, 501)))
        assert [answer.id for answer in many.answers() if isinstance(answer, Found)] == [1]
        one.send(frame(Lookup(7, key(1), 1000)))
        (answer,) = one.answers()
        assert isinstance(answer, Found) and answer.id == 7
        rest: list[int] = []
        while len(rest) < 499:
            await asyncio.sleep(0)
            rest += [answer.id for answer in many.answers() if isinstance(answer, Found)]
        assert rest == list(range(2, 501)), "each in its order"
        for peer in (many, one):
            peer.hang_up()
        while door.connections:
            await asyncio.sleep(0.001)

    worlds.run(story)


def test_a_lease_remembers_no_more_blocks_than_it_holds(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        session = w.session()
        _, lease = w.sessions.acquire(session, [key(index) for index in range(1, 1000)], lambda *_: None)
        assert len(lease.slots) == len(lease.ids) == 1
        w.sessions.close(session)

    worlds.run(story)


def test_a_layout_of_more_groups_than_any_model_has_is_not_even_read(daemon: Daemon) -> None:
    (group,) = layout_of(4096).groups
    with daemon.wire() as wire:
        answer = wire.ask(hello(layout=Layout("ND", "latent", 1, (group,) * 100_000)))
        assert isinstance(answer, Error) and "length <= 1024" in answer.message


@contextmanager
def idle(path: Path, count: int) -> Iterator[list[socket.socket]]:
    """Connections on which nothing is said."""
    with ExitStack() as open:
        made = []
        for _ in range(count):
            made.append(open.enter_context(closing(socket.socket(socket.AF_UNIX))))
            made[-1].connect(str(path))
            made[-1].settimeout(30.0)
        yield made


@pytest.mark.fault(107)
@pytest.mark.parametrize("door", ["engine.sock", "http.sock"])
def test_idle_connections_without_number_leave_files_for_the_disk_and_the_other_door(daemon: Daemon, door: str) -> None:
    limit, other = 400, "http.sock" if door == "engine.sock" else "engine.sock"
    with daemon.client() as client:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        keys, before = client.chain(1, 4), daemon.descriptors()
        with idle(daemon.runtime / door, 2 * limit) as crowd:
            assert client.put(keys, durable=True).durable == 4 and client.get(keys).blocks == 4
            told = crowd[-1].recv(1 << 16)
            assert b"engines are connected already" in told or b"too many connections" in told
            assert daemon.descriptors() < limit
            with idle(daemon.runtime / other, 1) as (one,):
                ask = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
                one.sendall(ask if other == "http.sock" else LENGTH.pack(0))
                assert one.recv(1 << 16)
        until(lambda: daemon.descriptors() <= before, "the daemon closes its ends")


def test_a_door_takes_what_was_wanted_or_half_of_what_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((resource.RLIM_INFINITY, 1024), (1 << 20, 1024), (1024, 448), (20, descriptors.LEAST)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert descriptors.most(1024) == expected


def test_at_its_start_the_daemon_takes_as_many_descriptors_as_it_may(daemon: Daemon) -> None:
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_more_engines_than_descriptors_allow_are_told_the_number(daemon: Daemon) -> None:
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (200, 200))
    with ExitStack() as open:
        for _ in range(36):
            open.enter_context(daemon.wire(hello()))
        with daemon.wire() as one_more:
            answer = one_more.read()
            assert isinstance(answer, Refused) and answer.field == "connections" and "36 engines" in answer.reason

"""What one connection of the engine door may have waiting: beyond it, it is served no further, and goes on when some of
that has ended."""

import asyncio

import pytest

from terracekv.daemon import inbox, protocol
from terracekv.daemon.protocol import (
    Acquire,
    Commit,
    Found,
    Leased,
    Lookup,
    Ready,
    Release,
    Reserve,
    Reserved,
)
from terracekv.tests.stores import World, Worlds, opened_worlds
from terracekv.tests.test_engine_door_waits import KEYS, MORE, Doors, Peer, lost_from_host, told
from terracekv.tiers.block import block_id

worlds = pytest.fixture(opened_worlds)


@pytest.mark.parametrize("kind", ["lookup", "acquire", "prefetch", "pin", "commit"])
def test_a_connection_whose_requests_wait_with_much_is_not_served_further_until_some_have_ended(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(inbox, "WAITING_BYTES_MAX", 8 * inbox.WAITING_BYTES_MIN)

    async def story(w: World, doors: Doors) -> None:
        greedy, other = await doors.engine(), await doors.engine()
        answered = asyncio.get_running_loop().create_future()
        begun = 0

        def question(*_: object) -> asyncio.Future[int]:
            nonlocal begun
            begun += 1
            return answered

        async def waits(*_: object) -> tuple[list[int], list[int]]:
            await question()
            return [], []

        monkeypatch.setattr(w.store, "begin_lookup", question)
        monkeypatch.setattr(w.store, "question", question)
        monkeypatch.setattr(w.store.pins, "pin", waits)
        monkeypatch.setattr(doors.door.sessions, "commit", waits)
        messages: dict[str, protocol.Request] = {
            "lookup": Lookup(5, MORE, 20_000),
            "acquire": Acquire(5, MORE, 20_000),
            "prefetch": protocol.Prefetch(MORE),
            "pin": protocol.Pin(MORE, 1000),
            "commit": Commit(5, 1, [], False),
        }
        for _ in range(1000):
            greedy.tell(messages[kind])
        greedy.tell(Reserve(7, KEYS[3]))
        for _ in range(5):
            assert isinstance(await other.ask(Reserve(6, b"")), Reserved), "the others are served"
        assert begun == 8
        answered.set_result(0)
        while not isinstance(answer := await greedy.read(), Reserved):
            assert kind in ("lookup", "acquire", "commit")
        assert answer.id == 7 and begun == 1000

    worlds.run(told(story))


async def lease_from_disk(w: World, engine: Peer) -> None:
    """Of all of ``MORE`` the first three blocks have to come up."""
    await engine.store(MORE)
    await lost_from_host(w, *(block_id(key, 0) for key in KEYS[:3]))
    leased = await engine.ask(Acquire(5, MORE, 20_000))
    assert isinstance(leased, Leased) and leased.pending == [0, 1, 2]


def test_one_request_that_is_longer_than_a_connection_may_wait_with_is_served(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "WAITING_BYTES_MAX", 1)

    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        await lease_from_disk(w, engine)
        for _ in range(3):
            assert isinstance(await engine.read(), Ready)
        assert isinstance(await engine.ask(Lookup(6, MORE, 1000)), Found)

    worlds.run(told(story))


def test_what_a_lease_of_several_blocks_keeps_is_given_back_once_when_the_last_has_come(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        await lease_from_disk(w, engine)
        (connection,) = doors.door.connections
        for _ in range(3):
            assert isinstance(await engine.read(), Ready)
        assert not connection._inbox._waiting_bytes

    worlds.run(told(story))


def test_who_asks_again_and_again_for_a_block_on_its_way_is_told_of_it_no_more_often_than_a_connection_may_wait(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "WAITING_BYTES_MAX", 8 * inbox.WAITING_BYTES_MIN)

    async def story(w: World, doors: Doors) -> None:
        engine, other = await doors.engine(), await doors.engine()
        await engine.store(KEYS[0])
        id = block_id(KEYS[0], 0)
        await lost_from_host(w, id)
        assert w.disk
        w.disk.reading.clear()
        for _ in range(100):
            engine.tell(protocol.Prefetch(KEYS[0]))
            engine.tell(Acquire(5, KEYS[0], 20_000))
        for lease in range(1, 9):
            leased = await engine.read()
            assert isinstance(leased, Leased) and leased.pending == [0]
            engine.tell(Release(lease))
        for _ in range(5):
            assert isinstance(await other.ask(Lookup(6, b"", 1000)), Found)
        (coming,) = w.store.promoter.under_way(w.namespace, [id])
        assert len(coming._callbacks) == 9, "eight leases and the prefetch that brings it up"
        w.disk.reading.set()
        for _ in range(9, 101):
            while not isinstance(answer := await engine.read(), Leased):
                assert isinstance(answer, Ready)
            assert answer.slots

    worlds.run(told(story))


def test_what_is_sent_ahead_of_requests_that_wait_stays_with_the_engine(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "WAITING_BYTES_MAX", 1)

    async def story(w: World, doors: Doors) -> None:
        greedy, other = await doors.engine(), await doors.engine()
        answered = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(w.store, "begin_lookup", lambda *_: answered)
        count, keys = 100, KEYS[0] * 4096
        for id in range(count):
            greedy.tell(Lookup(id, keys, 20_000))
        for _ in range(50):
            assert isinstance(await other.ask(Reserve(6, b"")), Reserved)
            assert doors.door.unfinished.bytes < 1 << 20
        answered.set_result(0)
        assert [answer.id for answer in [await greedy.read() for _ in range(count)] if isinstance(answer, Found)] == [
            *range(count)
        ]

    worlds.run(told(story))


def test_who_hangs_up_while_much_of_its_waits_leaves_nothing(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "WAITING_BYTES_MAX", 1)

    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        answered = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(w.store, "begin_lookup", lambda *_: answered)
        for id in range(1000):
            engine.tell(Lookup(id, MORE * 10, 20_000))
        while not doors.door.unfinished.bytes:
            await asyncio.sleep(0.001)
        engine.writer.transport.abort()
        await asyncio.sleep(0.01)
        answered.set_result(0)
        while doors.door.connections:
            await asyncio.sleep(0.001)
        assert not doors.door.unfinished.bytes and not doors.door.sessions.open

    worlds.run(told(story))

"""The engine door when something takes its time: deadlines, shards that come one by one, silent and too many engines,
and its own end."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from terracekv.daemon import protocol
from terracekv.daemon.access import Access
from terracekv.daemon.config import Config
from terracekv.daemon.engine_door import EngineDoor
from terracekv.daemon.protocol import (
    LENGTH,
    Acquire,
    Commit,
    Committed,
    Error,
    Failed,
    Found,
    Leased,
    Lookup,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Welcome,
)
from terracekv.tests.harness import hello
from terracekv.tests.hosts import BLOCK
from terracekv.tests.stores import World, Worlds, key, opened_worlds
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id
from terracekv.tiers.errors import InUse

worlds = pytest.fixture(opened_worlds)

KEYS = [key(index) for index in range(4)]
MORE = b"".join(KEYS[:3])


class Peer:
    """An engine on the same loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def tell(self, message: protocol.Request) -> None:
        self.writer.write(protocol.frame(message))

    async def read(self) -> protocol.Answer:
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return protocol.answer_decoder.decode(await self.reader.readexactly(length))

    async def ask(self, message: protocol.Request) -> protocol.Answer:
        self.tell(message)
        return await self.read()

    async def store(self, keys: bytes) -> None:
        """Reserve and commit; the bytes do not matter here."""
        reserved = await self.ask(Reserve(1, keys))
        assert isinstance(reserved, Reserved)
        indices = [index for index, slot in enumerate(reserved.slots) if slot is not None]
        assert isinstance(await self.ask(Commit(2, reserved.reservation, indices, True)), Committed)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class Doors:
    """A door on a world, and engines at it."""

    def __init__(self, world: World, door: EngineDoor) -> None:
        self.world = world
        self.door = door
        self.peers: list[Peer] = []

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_unix_connection(str(self.door.path)))
        self.peers.append(peer)
        return peer

    async def engine(self, shard: int | None = 0, shards: int = 1) -> Peer:
        peer = await self.connect()
        welcome = await peer.ask(hello(BLOCK, shard=shard, shards=shards))
        assert isinstance(welcome, Welcome), welcome
        present = self.world.host.namespaces.get(welcome.namespace_id)
        assert present is not None
        self.world.host.namespace = present
        return peer


@asynccontextmanager
async def open_door(w: World) -> AsyncIterator[Doors]:
    door = EngineDoor(
        w.host.arena.path.with_name("engine.sock"),
        store=w.store,
        table=w.host.table,
        arena=w.host.arena.path,
        secret=b"s" * 32,
        access=Access(Config()),
    )
    w.sessions = door.sessions
    await door.listen()
    doors = Doors(w, door)
    try:
        yield doors
    finally:
        for peer in doors.peers:
            await peer.close()
        await door.close(0.0)
        while door.connections:
            await asyncio.sleep(0.001)


def told(story: Callable[[World, Doors], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    async def with_door(w: World) -> None:
        async with open_door(w) as doors:
            await story(w, doors)

    return with_door


async def lost_from_host(w: World, *ids: bytes) -> None:
    await w.idle()
    assert w.host.delete(w.namespace, ids) == len(ids)


@pytest.mark.fault(125)
@pytest.mark.fault(7)
def test_what_does_not_come_in_time_fails_by_name_and_is_not_leased_when_it_comes(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        await engine.store(MORE)
        await lost_from_host(w, block_id(KEYS[1], 0), block_id(KEYS[2], 0))
        assert w.disk
        w.disk.held.add(block_id(KEYS[2], 0))
        leased = await engine.ask(Acquire(5, MORE, 2000))
        assert isinstance(leased, Leased) and leased.pending == [1, 2] and leased.blocks == 3
        ready = await engine.read()
        assert isinstance(ready, Ready) and (ready.lease, ready.indices) == (leased.lease, [1]) and ready.slots[0]
        failed = await engine.read()
        assert failed == Failed(leased.lease, [2], "deadline")
        w.disk.held.clear()
        await w.idle()
        assert sum(w.host.leases().values()) == 2
        found = await engine.ask(Lookup(6, MORE, 1000))
        assert isinstance(found, Found) and found.per_tier["host"] == 3
        engine.tell(Release(leased.lease))
        await engine.ask(Lookup(7, b"", 1000))
        assert w.host.leases() == {}

    worlds.run(told(story))


@pytest.mark.fault(7)
def test_a_block_that_cannot_be_read_fails_by_name_and_the_others_come(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        await engine.store(MORE)
        await lost_from_host(w, *(block_id(key, 0) for key in KEYS[:3]))
        failpoint.arm("segment.read*3=errno:EIO")
        leased = await engine.ask(Acquire(5, MORE, 20_000))
        assert isinstance(leased, Leased) and leased.pending == [0, 1, 2]
        answers = [await engine.read() for _ in range(3)]
        failpoint.disarm()
        ready = [answer.indices for answer in answers if isinstance(answer, Ready)]
        failed = [(answer.indices, answer.why) for answer in answers if isinstance(answer, Failed)]
        assert len(ready) == 2 and len(failed) == 1 and failed[0][1] == "failed"
        assert sorted(index for indices in [*ready, failed[0][0]] for index in indices) == [0, 1, 2]

    worlds.run(told(story))


@pytest.mark.fault(126)
def test_a_scheduler_is_told_ready_when_all_shards_are_in_and_not_before(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        workers = [await doors.engine(shard, 2) for shard in (0, 1)]
        scheduler = await doors.engine(None, 2)
        for worker in workers:
            await worker.store(KEYS[0] + KEYS[1])
        await lost_from_host(w, *(block_id(key, shard) for key in KEYS[:2] for shard in (0, 1)))
        assert w.disk
        w.disk.held.update([block_id(KEYS[0], 1), block_id(KEYS[1], 0)])
        leased = await scheduler.ask(Acquire(5, KEYS[0] + KEYS[1], 20_000))
        assert leased == Leased(5, leased.lease, 2, [], [0, 1])  # type: ignore[union-attr]
        while sum(w.host.leases().values()) < 2:
            await asyncio.sleep(0.001)
        found = await scheduler.ask(Lookup(6, KEYS[0] + KEYS[1], 1000))
        assert isinstance(found, Found), "half a block is not ready"
        w.disk.held.discard(block_id(KEYS[1], 0))
        ready = await scheduler.read()
        assert ready == Ready(leased.lease, [1], [])
        w.disk.held.clear()
        assert await scheduler.read() == Ready(leased.lease, [0], [])
        assert sum(w.host.leases().values()) == 4
        mine = await workers[0].ask(Acquire(7, KEYS[0], 1000))
        assert isinstance(mine, Leased) and mine.slots[0] is not None
        scheduler.tell(Release(leased.lease))
        await scheduler.ask(Lookup(8, b"", 1000))
        assert sum(w.host.leases().values()) == 1, "the worker's lease is its own"

    worlds.run(told(story), shards=2, threads=5)


@pytest.mark.fault(126)
def test_a_block_of_which_one_shard_is_missing_is_not_promised_to_a_scheduler(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        workers = [await doors.engine(shard, 2) for shard in (0, 1)]
        scheduler = await doors.engine(None, 2)
        await workers[0].store(KEYS[0] + KEYS[1])
        await workers[1].store(KEYS[0])
        await lost_from_host(w, block_id(KEYS[1], 0))
        leased = await scheduler.ask(Acquire(5, KEYS[0] + KEYS[1], 20_000))
        assert isinstance(leased, Leased) and leased.blocks == 1 and leased.pending == []
        await w.idle()
        found = await scheduler.ask(Lookup(6, KEYS[0] + KEYS[1], 1000))
        assert isinstance(found, Found) and found.blocks == 1, "and no Ready in between"

    worlds.run(told(story), shards=2)


def test_a_block_whose_shards_all_fail_is_told_of_once(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        workers = [await doors.engine(shard, 2) for shard in (0, 1)]
        scheduler = await doors.engine(None, 2)
        for worker in workers:
            await worker.store(KEYS[0])
        await lost_from_host(w, block_id(KEYS[0], 0), block_id(KEYS[0], 1))
        failpoint.arm("segment.read=errno:EIO")
        leased = await scheduler.ask(Acquire(5, KEYS[0], 20_000))
        assert isinstance(leased, Leased)
        assert await scheduler.read() == Failed(leased.lease, [0], "failed")
        await w.idle()
        failpoint.disarm()
        assert isinstance(await scheduler.ask(Lookup(6, b"", 1000)), Found), "told once"

    worlds.run(told(story), shards=2)


def test_who_does_not_say_hello_is_let_go(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.daemon.engine_door.HELLO_S", 0.5)

    async def story(w: World, doors: Doors) -> None:
        polite, silent = await doors.engine(), await doors.connect()
        answer = await silent.read()
        assert isinstance(answer, Error) and "no Hello" in answer.message, "later than the polite one would be let go"
        assert await silent.reader.read() == b""
        assert isinstance(await polite.ask(Lookup(1, b"", 1000)), Found)

    worlds.run(told(story))


def test_more_engines_than_the_limit_are_refused_and_room_is_found_again(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terracekv.daemon.engine_door.CONNECTIONS_MAX", 2)

    async def story(w: World, doors: Doors) -> None:
        first = await doors.engine()
        await doors.engine()
        third = await doors.connect()
        answer = await third.read()
        assert isinstance(answer, Refused) and answer.field == "connections" and "2 engines" in answer.reason
        assert await third.reader.read() == b""
        await first.close()
        while len(doors.door.connections) > 1:
            await asyncio.sleep(0.001)
        await doors.engine()

    worlds.run(told(story))


def test_a_hello_whose_engine_hung_up_meanwhile_opens_no_session(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        hasty = await doors.connect()
        hasty.tell(hello(BLOCK, model="another"))
        await hasty.close()
        while doors.door.connections:
            await asyncio.sleep(0.001)
        await w.idle()
        assert doors.door.sessions.open == {}

    worlds.run(told(story))


@pytest.mark.fault(55)
def test_a_door_that_closes_takes_no_new_work_and_lets_open_work_end(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        engine, other = await doors.engine(), await doors.engine()
        reserved = await engine.ask(Reserve(1, KEYS[0]))
        assert isinstance(reserved, Reserved)
        closing = asyncio.create_task(doors.door.close(20.0))
        await asyncio.sleep(0.02)
        answer = await other.ask(Reserve(2, KEYS[1]))
        assert isinstance(answer, Error) and "going down" in answer.message
        with pytest.raises(OSError):
            await asyncio.open_unix_connection(str(doors.door.path))
        assert not closing.done()
        assert await engine.ask(Commit(3, reserved.reservation, [0], True)) == Committed(3, [0], [0])
        await closing
        assert await engine.reader.read() == b"" == await other.reader.read()
        assert not doors.door.path.exists() and w.disk and w.disk.leading(w.namespace, [block_id(KEYS[0], 0)]) == 1

    worlds.run(told(story))


@pytest.mark.fault(55)
def test_a_door_does_not_wait_longer_than_its_grace_for_who_never_commits(worlds: Worlds) -> None:
    async def story(w: World, doors: Doors) -> None:
        engine = await doors.engine()
        await engine.ask(Reserve(1, KEYS[0]))
        await doors.door.close(0.05)
        assert await engine.reader.read() == b""
        await w.idle()
        assert w.host.detail("reserved_blocks") == 0

    worlds.run(told(story))


@pytest.mark.fault(54)
def test_a_socket_left_behind_is_replaced_and_a_living_one_or_a_file_is_not(worlds: Worlds, shm_dir: Path) -> None:
    def door_of(w: World) -> EngineDoor:
        path = shm_dir / "engine.sock"
        return EngineDoor(
            path, store=w.store, table=w.host.table, arena=w.host.arena.path, secret=b"s" * 32, access=Access(Config())
        )

    async def story(w: World, doors: Doors) -> None:
        with pytest.raises(InUse, match=f"process {os.getpid()} listens"):
            await door_of(w).listen()
        assert isinstance(await doors.engine(), Peer)

    worlds.run(told(story))
    (shm_dir / "engine.sock").write_text("a file")

    async def in_the_way(w: World) -> None:
        with pytest.raises(InUse, match="not a socket"):
            await door_of(w).listen()
        assert (shm_dir / "engine.sock").read_text() == "a file"

    worlds.run(in_the_way)

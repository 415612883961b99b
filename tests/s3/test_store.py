"""A daemon's store over a bucket: what one node stored another loads, and nothing above waits for the bucket."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.sessions import tenant_salt
from terracekv.daemon.store import Found
from terracekv.tests.hosts import SLOTS
from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.stores import SLOT, Arrivals, World, ids_of, key
from terracekv.tiers.block import block_id, namespace_id
from terracekv.tiers.breaker import State
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Miss, Outcome

CHAIN = list(range(8))
KEYS = [key(index) for index in CHAIN]
RETURN_S = 10.0
"""In which the breaker closes after the server's return."""


class Cluster:
    """Opens nodes that share the stub's bucket; each has a host, a disk unless told otherwise, and a loop in common."""

    def __init__(self, stub: S3Stub, shm: Path, folder: Path) -> None:
        self.stub = stub
        self._shm = shm
        self._folder = folder

    def settings(self, **more: Any) -> S3Settings:
        usual: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint": self.stub.endpoint,
            "credentials_file": str(self.stub.credentials),
        }
        usual |= {"read_timeout_s": 0.3, "connect_timeout_s": 0.3, "timeout_s": 2.0, "workers": 4, "codec": "off"}
        return S3Settings(**(usual | more))

    @asynccontextmanager
    async def node(self, label: str, *, slabs: int = 4, disk: bool = False, **options: Any) -> Any:
        s3 = {name[3:]: options.pop(name) for name in list(options) if name.startswith("is_")}
        shm, folder = self._shm / label, self._folder / label
        shm.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        world = World(shm, folder, slabs=slabs, shards=1, disk=disk, s3=self.settings(**s3), **options)
        try:
            if not options.get("down"):
                assert await world.mover.load(world.store.far.tier.probe)  # type: ignore[union-attr]
            yield world
            self.stub.switches.stall = False
            await asyncio.wait_for(world.balanced(), 30)
        finally:
            self.stub.switches.stall = False
            world.close()

    def run(self, story: Callable[["Cluster"], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(story(self), 60))


@pytest.fixture
def cluster(stub: S3Stub, shm_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Cluster]:
    yield Cluster(stub, shm_dir, tmp_path)
    caplog.get_records("call").clear()


async def come(true: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"did not come: {what}"
        await asyncio.sleep(0.01)


async def loaded(w: World, *indices: int) -> list[Slot | Outcome]:
    """What comes of an acquire; leases are given back."""
    results = await w.store.promoter.gather(w.namespace, ids_of(*indices))
    for index, slot in zip(indices, results, strict=True):
        assert not isinstance(slot, Slot) or w.right(slot, ids_of(index)[0])
    w.host.release([slot for slot in results if isinstance(slot, Slot)])
    return results


@pytest.mark.parametrize("disk", [False, True])
def test_a_node_that_never_saw_a_prompt_loads_it_from_the_bucket(cluster: Cluster, disk: bool) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b", disk=disk) as b:
            await a.put(*CHAIN)
            await a.idle()
            assert a.far.flow.written == len(CHAIN)
            before = b.store.lookup(b.namespace, KEYS)
            assert (before.blocks, before.reason) == (0, Miss.DEADLINE), "nobody was asked"
            found = await b.store.find(b.namespace, [*KEYS, key(99)], 5.0)
            assert (found.blocks, found.per_tier["s3"], found.split["s3"]) == (8, 8, 8)
            assert found.reason is Miss.ABSENT and found.per_tier["host"] == 0 and found.load_ms > 0
            arrivals = Arrivals()
            slots, pending = b.store.acquire(b.namespace, ids_of(*CHAIN), arrivals)
            assert slots == [None] * 8 and pending == CHAIN
            await b.idle()
            assert all(b.right(arrivals.came[index], ids_of(index)[0]) for index in CHAIN)
            assert b.store.stats.loaded["s3"] == 8 and b.far.flow.promoted == 8
            b.host.release(arrivals.slots)
            again = b.store.lookup(b.namespace, KEYS)
            assert again.per_tier["host"] == 8
            if disk:
                assert again.per_tier["disk"] == 8 and b.disk.leading(b.namespace, ids_of(*CHAIN)) == 8
                assert b.far.flow.written == 0, "what came from the bucket is not sent back"

    cluster.run(story)


def test_blocks_are_taken_from_the_uppermost_tier_that_has_them(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", disk=True) as a:
            await a.put(*CHAIN, durable=True)
            await a.idle()
            a.host.delete(a.namespace, ids_of(*CHAIN))
            a.disk.delete(a.namespace, ids_of(1, 2, 6))
            found = a.store.lookup(a.namespace, KEYS)
            assert found.split == {"host": 0, "disk": 5, "s3": 3}
            assert (found.per_tier["disk"], found.per_tier["s3"]) == (1, 8)
            asked = c.stub.asked["GET"]
            await loaded(a, *CHAIN)
            assert sorted(a.disk.reads) == sorted(ids_of(0, 3, 4, 5, 7))
            assert c.stub.asked["GET"] == asked + 3

    cluster.run(story)


def test_many_who_ask_at_once_cause_one_question_and_many_who_load_one_read(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b") as b:
            await a.put(*CHAIN)
            await a.idle()
            await b.store.learn(b.namespace, ids_of(99), 5.0)  # the epoch is known now
            heads, gets = c.stub.asked["HEAD"], c.stub.asked["GET"]
            answers = await asyncio.gather(*(b.store.find(b.namespace, KEYS, 5.0) for _ in range(10)))
            assert [found.blocks for found in answers] == [8] * 10
            assert c.stub.asked["HEAD"] - heads <= 6 and b.far.asked == 2
            await asyncio.gather(*(loaded(b, *CHAIN) for _ in range(5)))
            assert c.stub.asked["GET"] - gets == 8

    cluster.run(story)


def test_a_prompt_in_host_is_answered_at_once_while_the_endpoint_hangs(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a:
            await a.put(*CHAIN)
            await a.idle()
            c.stub.switches.stall = True
            asked = c.stub.asked.total()
            begun = a.store.begin_lookup(a.namespace, KEYS)
            assert isinstance(begun, Found) and begun.blocks == 8, "no task, no await: the answer itself"
            slots, pending = a.store.acquire(a.namespace, ids_of(*CHAIN), Arrivals())
            assert pending == [] and c.stub.asked.total() == asked
            a.host.release([slot for slot in slots if slot])
            # A prompt that goes on where host ends waits as long as it says, and is answered with what is known.
            more = a.store.begin_lookup(a.namespace, [*KEYS, key(50)])
            assert isinstance(more, asyncio.Future)
            found = await a.store.find(a.namespace, [*KEYS, key(50)], 0.01)
            assert (found.blocks, found.reason) == (8, Miss.DEADLINE) and not more.done()
            c.stub.switches.stall = False
            await more
            assert a.store.lookup(a.namespace, [*KEYS, key(50)]).reason is Miss.ABSENT, "the late answer was kept"

    cluster.run(story)


@pytest.mark.fault(10)
def test_an_object_that_is_gone_ends_the_prefix_and_is_counted_and_remembered(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b") as b:
            await a.put(*CHAIN)
            await a.idle()
            assert (await b.store.find(b.namespace, KEYS, 5.0)).blocks == 8
            id = ids_of(3)[0]
            (gone,) = [name for name in c.stub.blocks() if name.endswith(f"{id[:32].hex()}.0")]
            del c.stub.objects[gone]
            results = await loaded(b, *CHAIN)
            assert [isinstance(slot, Slot) for slot in results] == [index != 3 for index in CHAIN]
            assert results[3] is Outcome.MISS and b.far.flow.vanished == 1
            heads = c.stub.asked["HEAD"]
            found = await b.store.find(b.namespace, KEYS, 5.0)
            assert (found.blocks, found.reason) == (3, Miss.ABSENT) and c.stub.asked["HEAD"] == heads

    cluster.run(story)


@pytest.mark.fault(123)
def test_a_slow_bucket_bounds_the_queue_and_what_it_cannot_take_is_dropped_and_counted(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        offered, cap = 400, 16 * SLOT
        async with c.node("a", slabs=16, s3_queue_bytes=cap, is_workers=2) as a:
            await a.put(1000)
            await a.idle()
            a.host.delete(a.namespace, ids_of(1000))
            c.stub.switches.bytes_per_s = 100_000.0
            queued = 0
            for start in range(0, offered, 4):
                await a.put(*range(start, start + 4))
                queued = max(queued, a.far.mover.queue_bytes)
            assert 0 < queued <= cap
            flow = a.far.flow
            assert flow.writes_dropped > 0 and flow.writes_dropped_bytes == flow.writes_dropped * SLOT
            waiting = a.far.mover.queue_bytes
            assert isinstance((await loaded(a, 1000))[0], Slot)
            assert a.far.mover.queue_bytes > 0 and waiting > 2 * SLOT, "the load went before the stores that waited"
            c.stub.switches.bytes_per_s = 0.0
            await a.idle()
            assert flow.written + flow.writes_dropped + flow.writes_failed == offered + 1
            assert a.store.stats.writes_dropped == flow.writes_dropped

    cluster.run(story)


def test_the_server_dies_during_stores_and_loads_and_comes_back(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", slabs=8) as a:
            await a.put(*CHAIN)
            await a.idle()
            a.host.delete(a.namespace, ids_of(*CHAIN))
            c.stub.go()
            results = await asyncio.wait_for(loaded(a, *CHAIN), 10)
            assert results == [Outcome.FAILED] * 8
            await come(lambda: a.far.tier.breaker.state is not State.CLOSED, "the breaker opens")
            found = await a.store.find(a.namespace, KEYS, 5.0)
            assert (found.blocks, found.reason) == (0, Miss.TIER_DOWN)
            session = a.session()
            handle, slots = a.sessions.reserve(session, [key(20)])
            a.fill(slots, ids_of(20))
            assert await a.sessions.commit(session, handle, [0], True) == ([0], []), "in host, not durable, at once"
            await a.put(*range(30, 34))
            assert a.far.flow.writes_dropped == 5 and a.far.mover.queue_bytes == 0
            a.sessions.close(session)
            c.stub.come_back()
            await come(lambda: a.far.tier.breaker.state is State.CLOSED, "the breaker closes", RETURN_S)
            assert all(isinstance(slot, Slot) for slot in await loaded(a, *CHAIN))
            await a.put(40, durable=True)
            assert a.far.has(a.namespace, ids_of(40)[0])

    cluster.run(story)


@pytest.mark.fault(15)
@pytest.mark.parametrize("disk", [False, True])
def test_a_flush_on_one_node_is_a_flush_on_the_other(cluster: Cluster, disk: bool) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b", disk=disk, is_epoch_ttl_s=0.0) as b:
            await a.put(*CHAIN)
            await a.idle()
            await b.store.find(b.namespace, KEYS, 5.0)
            await loaded(b, *CHAIN)
            await b.idle()
            old = b.namespace
            counts = await a.store.flush(a.namespace)
            assert counts["host"] == 8 and counts["s3"] == 8 and c.stub.blocks() == []
            found = await b.store.find(b.namespace, [*KEYS, key(77)], 5.0)  # asks, and learns of the epoch
            assert b.namespace.epoch == a.namespace.epoch > old.epoch and found.blocks == 0
            await b.store.keep_house()
            assert b.host.status().used_bytes == 0, "what the old epoch held was given back"
            assert not disk or b.disk.status().blocks == 0
            assert await b.put(*CHAIN) == CHAIN
            await b.idle()
            assert (await a.store.find(a.namespace, KEYS, 5.0)).blocks == 8

    cluster.run(story)


@pytest.mark.fault(15)
def test_a_flush_while_the_bucket_is_down_holds_here_and_is_told_later(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b", is_epoch_ttl_s=0.0) as b:
            await a.put(*CHAIN)
            await a.idle()
            c.stub.go()
            counts = await a.store.flush(a.namespace)
            assert counts["host"] == 8 and a.store.lookup(a.namespace, KEYS).blocks == 0
            assert a.far.tier.status().details["unheard_flushes"] == 1
            c.stub.come_back()
            await come(lambda: a.far.tier.breaker.state is State.CLOSED, "the breaker closes", RETURN_S)
            await a.store.find(a.namespace, KEYS, 5.0)
            assert a.far.tier.status().details["unheard_flushes"] == 0
            assert (await b.store.find(b.namespace, KEYS, 5.0)).blocks == 0

    cluster.run(story)


@pytest.mark.fault(15)
def test_a_node_that_has_all_it_needs_in_host_hears_of_a_flush_too(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b", is_epoch_ttl_s=0.0) as b:
            await a.put(*CHAIN)
            await a.idle()
            await b.store.find(b.namespace, KEYS, 5.0)
            await loaded(b, *CHAIN)
            await a.store.flush(a.namespace)
            assert b.store.lookup(b.namespace, KEYS).per_tier["host"] == 8, "nobody has told it"
            await b.store.keep_house()
            await b.idle()
            await b.store.keep_house()
            assert b.namespace.epoch == 1 and b.store.lookup(b.namespace, KEYS).blocks == 0
            assert b.host.status().used_bytes == 0
            asked = c.stub.asked.total()
            await b.idle()
            await b.store.keep_house()
            await b.idle()
            await b.store.keep_house()
            await b.idle()
            assert c.stub.asked.total() <= asked + 2, "who does not use a namespace does not ask about it"

    cluster.run(story)


def test_on_evict_writes_what_is_next_to_go_and_nothing_else(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", slabs=2, s3_admission="on_evict") as a:
            room = 2 * SLOTS
            await a.put(*range(room // 2))
            await a.store.keep_house()
            await a.idle()
            assert c.stub.blocks() == [], "there is room yet"
            await a.put(*range(room // 2, room))
            order = a.host.next_out(room)
            await a.store.keep_house()
            await a.idle()
            assert len(c.stub.blocks()) == room
            await a.store.keep_house()
            await a.idle()
            assert a.far.flow.written == room, "once is enough"
            assert a.host.next_out(room) == order, "being written is not being used"
            await a.put(*range(100, 100 + room))
            assert a.store.stats.evicted_before_persist == 0
            assert (await a.store.find(a.namespace, [key(0)], 5.0)).per_tier["s3"] == 1

    cluster.run(story)


def test_second_touch_sends_what_is_met_again(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", s3_admission="second_touch") as a:
            await a.put(1, 2)
            await loaded(a, 1)
            await a.idle()
            a.host.release([s for s in a.store.acquire(a.namespace, ids_of(1), Arrivals())[0] if s])
            await a.idle()
            assert a.far.flow.written == 1 and a.far.flow.not_admitted == 2

    cluster.run(story)


def test_reading_a_chain_begins_its_objects_lives_anew(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", is_ttl_s=1000.0) as a, c.node("b", is_ttl_s=1000.0) as b:
            await a.put(*CHAIN)
            await a.idle()
            for name in c.stub.blocks():
                c.stub.age(name, 600)
            old = {name: c.stub.objects[name].modified for name in c.stub.blocks()}
            await b.store.find(b.namespace, KEYS, 5.0)
            arrivals = Arrivals()
            b.store.acquire(b.namespace, ids_of(*CHAIN), arrivals)
            await b.idle()
            b.host.release(arrivals.slots)
            await b.idle()
            assert all(c.stub.objects[name].modified > modified for name, modified in old.items())

    cluster.run(story)


@pytest.mark.fault(128)
def test_what_loads_slower_than_it_computes_is_not_offered(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", prefill_tokens_per_s=1e7) as a:
            await a.put(*CHAIN)
            await a.idle()
            a.host.delete(a.namespace, ids_of(*CHAIN[2:]))
            assert a.store.lookup(a.namespace, KEYS).blocks == 8, "nothing is measured yet"
            c.stub.switches.bytes_per_s = 50_000.0
            await loaded(a, 2)
            c.stub.switches.bytes_per_s = 0.0
            a.host.delete(a.namespace, ids_of(2))
            found = a.store.lookup(a.namespace, KEYS)
            assert (found.blocks, found.reason, found.split["s3"]) == (2, Miss.TOO_SLOW, 0)

    cluster.run(story)


def test_a_slow_link_is_not_shared_by_all_reads_at_once(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", is_workers=4) as a:
            await a.put(*CHAIN)
            await a.idle()
            assert a.far.window(SLOT) == 4, "nothing is measured yet"
            with a.far.read as meter:
                await asyncio.sleep(0.2)
                meter.moved(SLOT // 8)
            a.far.read._bytes = 1000.0 * a.far.read._busy_s
            assert a.far.window(SLOT) == 1 and a.far.window(100) == 4
            a.host.delete(a.namespace, ids_of(*CHAIN))
            c.stub.at_once_max = 0
            c.stub.switches.delay_s = 0.01
            task = asyncio.create_task(loaded(a, *CHAIN[:3]))
            await come(lambda: a.far._reading == 1 and a.far.queued == 2, "one is read, two wait")
            await task

    cluster.run(story)


@pytest.mark.fault(28)
def test_a_tenant_whose_daemon_has_another_secret_finds_nothing(cluster: Cluster) -> None:
    """The salt of a namespace comes from the secret: with another one all keys differ, whatever credential is tried."""

    async def story(c: Cluster) -> None:
        names = {"model": "m", "revision": "r", "dtype": "u8", "layout": bytes(32), "block_tokens": 4}
        ids = [namespace_id(**names, salt=tenant_salt(secret, b"tenant")) for secret in (b"1" * 32, b"2" * 32)]  # type: ignore[arg-type]
        assert ids[0] != ids[1]
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(c.node(label)) for label in "ab"]
            await a.put(*CHAIN)
            await a.idle()
            from dataclasses import replace

            other = b.host.namespaces.register(replace(b.namespace, id=ids[1]))
            found = await b.store.find(other, KEYS, 5.0)
            assert found.blocks == 0
            results = await b.store.promoter.gather(other, [block_id(KEYS[0], 0)])
            assert results == [Outcome.MISS]

    cluster.run(story)


def test_deleting_forgets_in_the_bucket_and_says_when_it_cannot(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a:
            await a.put(*CHAIN)
            await a.idle()
            assert await a.store.delete(a.namespace, ids_of(0, 1)) == {"host": 2, "s3": 2}
            assert len(c.stub.blocks()) == 6
            c.stub.go()
            counts = await a.store.delete(a.namespace, ids_of(2))
            assert counts["host"] == 1 and not counts.get("s3")
            c.stub.come_back()

    cluster.run(story)

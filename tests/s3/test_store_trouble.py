"""A store over a bucket that is slow, dies, loses objects, or is flushed and emptied by somebody else."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from terracekv.daemon.sessions import tenant_salt
from terracekv.tests.blocks import registered
from terracekv.tests.s3_cluster import CHAIN, KEYS, RETURN_S, Cluster, come, loaded, opened_cluster
from terracekv.tests.stores import SLOT, Arrivals, ids_of, key
from terracekv.tiers.block import block_id, namespace_id
from terracekv.tiers.breaker import State
from terracekv.tiers.entry import name_of
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import PAGE, Miss, Outcome

cluster = pytest.fixture(opened_cluster)


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
            used, _ = a.store.acquire(a.namespace, ids_of(31, 32), lambda index, result: False)
            a.host.release([slot for slot in used if slot is not None])
            await a.idle()
            there = [a.far.has(a.namespace, ids_of(index)[0]) for index in (30, 31, 32, 33)]
            assert there == [False, True, True, False], "what was dropped is written when it is next used"

    cluster.run(story)


def test_what_another_namespace_has_in_the_bucket_makes_no_block_durable(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", slabs=8) as a:
            other = registered(a.host.namespaces, 7, a.namespace.block_bytes)
            liar = a.sessions.start(a.host.table.next_session(), other, 0, 0, "with another's keys")
            assert await a.put(20, session=liar, durable=True) == [20] and a.far.keeps(other, ids_of(20)[0])
            c.stub.go()
            session = a.session()
            handle, slots = a.sessions.reserve(session, [key(20)])
            a.fill(slots, ids_of(20))
            assert await a.sessions.commit(session, handle, [0], True) == ([0], [])
            await a.store.delete(other, ids_of(20))
            assert not a.far.keeps(other, ids_of(20)[0])
            a.sessions.close(session)
            a.sessions.close(liar)
            c.stub.come_back()

    cluster.run(story)


@pytest.mark.fault(10)
def test_a_block_whose_copy_on_disk_is_damaged_comes_from_the_bucket(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", disk=True) as a:
            await a.put(*CHAIN, durable=True)
            await a.idle()
            a.host.delete(a.namespace, ids_of(*CHAIN))
            place = a.disk._catalog.get(name_of(a.namespace.stamp, ids_of(3)[0]))
            with open(a.disk._files.path(place.segment), "r+b") as file:
                file.seek((place.page + 1) * PAGE)
                file.write(b"damage")
            assert all(isinstance(slot, Slot) for slot in await loaded(a, *CHAIN))
            assert a.disk.status().counters.checksum_failures == 1
            assert (a.store.stats.loaded["disk"], a.store.stats.loaded["s3"]) == (7, 1)

    cluster.run(story)


def test_a_block_stored_while_no_tier_gives_its_copy_is_on_disk_afterwards_though_the_bucket_is_gone(
    cluster: Cluster,
) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", disk=True) as a:
            await a.put(3, durable=True)
            await a.idle()
            a.host.delete(a.namespace, ids_of(3))
            place = a.disk._catalog.get(name_of(a.namespace.stamp, ids_of(3)[0]))
            with open(a.disk._files.path(place.segment), "r+b") as file:
                file.seek((place.page + 1) * PAGE)
                file.write(b"damage")
            a.disk.reading.clear()
            arrivals = Arrivals()
            a.store.acquire(a.namespace, ids_of(3), arrivals)
            c.stub.go()
            assert await a.put(3) == [3]
            while a.store.through[0].blocks_under_way:
                await asyncio.sleep(0.001)
            a.disk.reading.set()
            await a.idle()
            assert not arrivals.slots and a.disk.status().counters.checksum_failures == 1
            assert a.disk.leading(a.namespace, ids_of(3)) == 1

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
            flushed = await a.store.flush(a.namespace)
            counts = flushed.dropped
            assert counts["host"] == 8 and counts["s3"] == 8 and c.stub.blocks() == []
            found = await b.store.find(b.namespace, [*KEYS, key(77)], 5.0)  # asks, and learns of the epoch
            assert b.namespace.epoch == a.namespace.epoch > old.epoch and found.blocks == 0
            await b.store.keep_house()
            await b.idle()
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
            flushed = await a.store.flush(a.namespace)
            counts = flushed.dropped
            assert counts["host"] == 8 and a.store.lookup(a.namespace, KEYS).blocks == 0
            assert a.far.tier.status().details["unheard_flushes"] == 1
            assert flushed.skipped == {"s3_unheard": 1, "s3_unswept": 1} and counts["s3"] == 0
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
            await b.idle()
            assert b.host.status().used_bytes == 0
            asked = c.stub.asked.total()
            await b.idle()
            await b.store.keep_house()
            await b.idle()
            await b.store.keep_house()
            await b.idle()
            assert c.stub.asked.total() <= asked + 2, "who does not use a namespace does not ask about it"

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

"""A daemon's store over a bucket: what one node stored another loads, and nothing above waits for the bucket."""

import asyncio
import threading
from typing import Any

import pytest

from terracekv.daemon.stats import Found
from terracekv.tests.hosts import SLOTS
from terracekv.tests.s3_cluster import CHAIN, KEYS, Cluster, come, loaded, opened_cluster
from terracekv.tests.stores import SLOT, Arrivals, ids_of, key
from terracekv.tiers.tier import Miss, Outcome

cluster = pytest.fixture(opened_cluster)


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


@pytest.mark.parametrize("hole", range(8))
def test_what_is_only_believed_to_be_in_the_bucket_is_not_durable_until_it_is_there(
    cluster: Cluster, hole: int
) -> None:
    """Of a chain only some blocks are asked about, so one that a node could not write is believed to be there, too."""

    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b") as b:
            await a.put(*CHAIN, durable=True)
            missing = next(name for name in c.stub.objects if key(hole).hex() in name)
            del c.stub.objects[missing]
            await b.store.find(b.namespace, KEYS, 5.0)
            session = b.session()
            handle, slots = b.sessions.reserve(session, KEYS)
            b.fill(slots, ids_of(*CHAIN))
            stored, durable = await b.sessions.commit(session, handle, CHAIN, True)
            assert stored == durable == CHAIN
            assert missing in c.stub.objects, "answered as durable, and nowhere"
            b.sessions.close(session)

    cluster.run(story)


def test_a_block_that_somebody_else_stored_is_durable_once_it_is_in_the_bucket(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a, c.node("b", s3_admission="second_touch") as b:
            await a.put(*CHAIN, durable=True)
            missing = next(name for name in c.stub.objects if key(3).hex() in name)
            del c.stub.objects[missing]
            await b.store.find(b.namespace, KEYS, 5.0)
            first, second = b.session(), b.session()
            reserved = [(each, *b.sessions.reserve(each, KEYS)) for each in (first, second)]
            for _, _, slots in reserved:
                b.fill(slots, ids_of(*CHAIN))
            assert (await b.sessions.commit(first, reserved[0][1], CHAIN, False))[1] == []
            assert missing not in c.stub.objects
            assert (await b.sessions.commit(second, reserved[1][1], CHAIN, True))[1] == CHAIN
            assert missing in c.stub.objects
            b.sessions.close(first)
            b.sessions.close(second)

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


def test_what_was_flushed_while_the_bucket_was_asked_is_not_found(cluster: Cluster) -> None:
    """Another node's flush is heard of with the answer: the blocks that were here are of the epoch before."""

    async def story(c: Cluster) -> None:
        async with c.node("a") as a:
            await a.put(*CHAIN)
            await a.idle()
            c.stub.switches.stall = True
            asked = a.far.asked
            finding = asyncio.create_task(a.store.find(a.namespace, [*KEYS, key(50)], 30.0))
            await come(lambda: a.far.asked > asked, "the bucket is asked")
            a.host.namespaces.adopt(a.namespace.id, a.namespace.epoch + 1)
            c.stub.switches.stall = False
            assert (await finding).blocks == 0

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


def test_a_slow_link_is_not_shared_by_all_reads_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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
            go_on, get = threading.Event(), a.far.tier.get

            def held(*about: Any) -> Outcome:
                assert go_on.wait(30)
                outcome: Outcome = get(*about)
                return outcome

            monkeypatch.setattr(a.far.tier, "get", held)
            task = asyncio.create_task(loaded(a, *CHAIN[:3]))
            await come(lambda: a.far._reading == 1 and a.far.queued == 2, "one is read, two wait")
            go_on.set()
            await task

    cluster.run(story)

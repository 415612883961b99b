"""The store: what a lookup says, what a flush and a delete leave, what its events tell."""

import asyncio
import os
import random

import pytest

from terracekv.daemon.naming import find_namespace
from terracekv.tests.hosts import BLOCK, SLOTS
from terracekv.tests.stores import Arrivals, World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers.errors import NotFound
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Miss, Outcome

worlds = pytest.fixture(opened_worlds)


@pytest.mark.fault(113)
@pytest.mark.fault(117)
@pytest.mark.fault(135)
def test_a_lookup_says_how_much_from_where_and_why_not_more(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(2, 3)
        await w.put(1, 4)
        found = w.store.lookup(w.namespace, [key(i) for i in range(1, 11)])
        assert (found.blocks, found.first_miss, found.reason) == (4, 4, Miss.ABSENT)
        assert found.per_tier == {"host": 1, "disk": 4} and found.bytes == 4 * BLOCK
        assert found.split == {"host": 2, "disk": 2} and found.load_ms > 0
        stats = w.store.stats
        assert (stats.lookups, stats.asked_blocks, stats.matched_blocks) == (1, 10, 4)
        assert sum(stats.matched.values()) == 4 and stats.misses["absent"] == 1
        whole = w.store.lookup(w.namespace, [key(i) for i in range(1, 5)])
        assert (whole.blocks, whole.first_miss, whole.reason) == (4, None, None)
        assert sum(stats.misses.values()) == 1

    worlds.run(story)


@pytest.mark.fault(115)
@pytest.mark.fault(117)
def test_a_miss_says_why(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.store.lookup(w.namespace, []).reason is Miss.SHORTER_THAN_BLOCK
        assert w.store.lookup(w.namespace, [key(1)]).reason is Miss.ABSENT
        await w.put(1)
        await w.put(*range(10, 10 + SLOTS))
        assert w.store.lookup(w.namespace, [key(1)]).reason is Miss.EVICTED

    worlds.run(story, slabs=1, disk=False)


@pytest.mark.fault(41)
def test_ten_thousand_lookups_pin_nothing(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(*range(SLOTS))
        for _ in range(10_000):
            assert w.store.lookup(w.namespace, [key(i) for i in range(SLOTS)]).blocks == SLOTS
        assert w.host.detail("leased_blocks") == 0
        assert await w.put(*range(10, 10 + SLOTS)) == list(range(10, 10 + SLOTS))

    worlds.run(story, slabs=1, disk=False)


def test_a_tier_that_fails_as_nobody_expects_is_a_miss_and_leaves_nothing_under_way(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(w: World) -> None:
        def broken(*about: object) -> Outcome:
            raise RuntimeError("a bug of the tier's")

        await w.only_on_disk(1)
        with monkeypatch.context() as patched:
            patched.setattr(w.disk, "get", broken)
            patched.setattr(w.disk, "put", broken)
            arrivals = Arrivals()
            w.store.acquire(w.namespace, ids_of(1), arrivals)
            await w.put(2)
            await w.idle()
        assert arrivals.came == {0: Outcome.FAILED}
        assert w.store.stats.writes_failed == 1 and w.store.stats.promotions_failed == 1
        assert w.host.leases() == {} and w.host.status().blocks == 1

    worlds.run(story)


@pytest.mark.fault(15)
def test_a_commit_that_a_flush_overtook_is_refused(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2)])
        w.fill(slots, ids_of(1, 2))
        await w.store.flush(w.namespace)
        assert await w.sessions.commit(session, handle, [0], False) == ([], [])
        assert w.store.stats.stale_commits == 1 and w.store.lookup(w.namespace, [key(1)]).blocks == 0
        w.sessions.abort(session, handle)
        assert w.host.status().used_bytes == 0 and await w.put(1, session=session) == [1]
        w.sessions.close(session)

    worlds.run(story)


@pytest.mark.fault(15)
def test_a_flush_is_a_miss_everywhere_at_once_and_after_a_restart(worlds: Worlds) -> None:
    async def before(w: World) -> None:
        await w.put(1, 2, durable=True)
        await w.put(3)
        await w.idle()
        counts = (await w.store.flush(w.namespace)).dropped
        assert counts == {"host": 3, "disk": 3}
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0
        await w.put(3, durable=True)

    async def after(w: World) -> None:
        assert w.namespace.epoch == 1
        assert [w.store.lookup(w.namespace, [key(i)]).blocks for i in (1, 2, 3)] == [0, 0, 1]

    worlds.run(before)
    worlds.run(after)


@pytest.mark.fault(112)
def test_one_tier_alone_can_be_flushed_and_says_what_it_had(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1, 2, durable=True)
        assert (await w.store.flush(w.namespace, "host")).dropped == {"host": 2}
        assert w.store.lookup(w.namespace, [key(1)]).per_tier == {"host": 0, "disk": 1}
        assert (await w.store.flush(w.namespace, "disk")).dropped == {"disk": 2}
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0 and w.namespace.epoch == 0
        with pytest.raises(NotFound, match="no tier 's3'"):
            await w.store.flush(w.namespace, "s3")

    worlds.run(story)


def test_two_flushes_at_once_leave_nothing_of_either_epoch(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        snapshot = w.namespace
        await w.put(1)
        first = asyncio.create_task(w.store.flush(snapshot))
        while w.namespace.epoch == 0:
            await asyncio.sleep(0)
        await w.put(2)
        await asyncio.gather(first, w.store.flush(snapshot))
        await w.idle()
        assert w.namespace.epoch == 2 and w.store.lookup(w.namespace, [key(2)]).blocks == 0
        assert w.host.status().used_bytes == 0 and w.disk and w.disk.status().blocks == 0

    worlds.run(story)


@pytest.mark.fault(112)
def test_deleting_says_what_each_tier_had_and_ends_pins(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1, 2, durable=True)
        await w.store.pins.pin(w.namespace, ids_of(1), 60)
        w.host.delete(w.namespace, ids_of(2))
        assert await w.store.delete(w.namespace, ids_of(1, 2, 3)) == {"host": 1, "disk": 2}
        assert len(w.store.pins) == 0 and w.host.leases() == {}
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0

    worlds.run(story)


@pytest.mark.fault(132)
@pytest.mark.fault(133)
def test_the_events_of_a_random_run_replay_to_what_is_there(worlds: Worlds) -> None:
    seed = int.from_bytes(os.urandom(4))
    dice = random.Random(seed)

    async def story(w: World) -> None:
        replayed = set[str]()
        seen = [0]

        async def follow() -> None:
            async for event in w.store.events.listen(after=0):
                assert event["event"] != "gap" and event["seq"] == seen[0] + 1, f"seed {seed}: {event}"
                seen[0] = event["seq"]
                if event["event"] == "flushed":
                    replayed.clear()
                elif event["tier"] == "host":
                    (replayed.add if event["event"] == "stored" else replayed.discard)(event["block"])

        follower = asyncio.create_task(follow())
        await asyncio.sleep(0)
        for _ in range(60):
            match dice.randrange(10):
                case 0:
                    await w.store.flush(w.namespace)
                case 1 | 2:
                    await w.store.delete(w.namespace, ids_of(dice.randrange(12)))
                case 3 | 4 | 5:
                    start = dice.randrange(12)
                    found = await w.store.promoter.gather(w.namespace, ids_of(start, start + 1))
                    w.host.release([slot for slot in found if isinstance(slot, Slot)])
                case _:
                    start = dice.randrange(12)
                    await w.put(*range(start, start + dice.randrange(1, 4)), durable=dice.random() < 0.5)
        await w.idle()
        while seen[0] < w.store.events.last:
            await asyncio.sleep(0.001)
        follower.cancel()
        there = {id.hex() for id in ids_of(*range(15)) if w.host.has(w.namespace, id)}
        assert replayed == there, f"seed {seed}"

    worlds.run(story, slabs=1)


def test_a_late_listener_is_told_of_the_gap(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1, 2, 3)  # nobody listens: numbered, not kept
        listening = w.store.events.listen(after=0)
        w.store.events.publish("flushed")
        assert await anext(listening) == {"seq": 3, "event": "gap", "missed": 3}
        assert (await anext(listening))["seq"] == 4
        await listening.aclose()  # type: ignore[attr-defined]
        assert w.store.events.listeners == 0

    worlds.run(story)


def test_a_namespace_is_called_by_its_id_a_prefix_of_it_or_a_name_that_only_it_bears(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        id = w.namespace.id
        known = w.host.namespaces
        for name_ in (id.hex(), id.hex()[:8].upper(), "model 1"):
            assert find_namespace(known, name_).id == id
        for unknown in (id.hex()[:7], "model 2", "", "ffffffff"):
            with pytest.raises(NotFound, match="no namespace"):
                find_namespace(known, unknown)

    worlds.run(story)

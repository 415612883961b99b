"""Blocks that come up from disk: one read for all who wait, nothing promised that does not come."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.below import Lower
from terracekv.tests.blocks import payload_of, registered
from terracekv.tests.hosts import BLOCK, SLOTS
from terracekv.tests.stores import Arrivals, World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers import failpoint
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Outcome

worlds = pytest.fixture(opened_worlds)


def test_many_who_wait_for_a_block_cause_one_read_and_all_get_it(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1, 2)
        assert w.disk
        w.disk.reading.clear()
        waiting = [Arrivals() for _ in range(5)]
        for arrivals in waiting:
            slots, pending = w.store.acquire(w.namespace, ids_of(1, 2), arrivals)
            assert slots == [None, None] and pending == [0, 1] and not arrivals.came
        w.disk.reading.set()
        await w.idle()
        assert sorted(w.disk.reads) == sorted(ids_of(1, 2)) and w.store.stats.promoted == 2
        for arrivals in waiting:
            assert w.right(arrivals.came[0], ids_of(1)[0]) and w.right(arrivals.came[1], ids_of(2)[0])
            w.host.release(arrivals.slots)

    worlds.run(story)


def test_nobody_waits_for_another_namespaces_block_of_the_same_name(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        other = registered(w.host.namespaces, 7, BLOCK)
        await w.only_on_disk(1)
        assert w.disk
        w.disk.reading.clear()
        arrivals, none = Arrivals(), Arrivals()
        assert w.store.acquire(w.namespace, ids_of(1), arrivals) == ([None], [0])
        assert w.store.acquire(other, ids_of(1), none) == ([None], [])
        assert not w.store.promoter.under_way(other, ids_of(1)) and w.store.promoter.coming == 1
        w.disk.reading.set()
        await w.idle()
        assert w.right(arrivals.came[0], ids_of(1)[0]) and not none.came
        w.host.release(arrivals.slots)

    worlds.run(story)


@pytest.mark.parametrize("order", [(2,), (3, 2), (1, 3)])
def test_prompts_that_meet_in_the_middle_read_each_block_once(worlds: Worlds, order: tuple[int, ...]) -> None:
    """Some of a run are on their way up already, not only its first."""

    async def story(w: World) -> None:
        await w.only_on_disk(1, 2, 3, 4)
        assert w.disk
        w.disk.reading.clear()
        early = [Arrivals() for _ in order]
        for index, arrivals in zip(order, early, strict=True):
            w.store.acquire(w.namespace, ids_of(index), arrivals)
        late = Arrivals()
        slots, pending = w.store.acquire(w.namespace, ids_of(1, 2, 3, 4), late)
        assert slots == [None] * 4 and pending == [0, 1, 2, 3]
        w.disk.reading.set()
        await w.idle()
        assert sorted(w.disk.reads) == sorted(ids_of(1, 2, 3, 4)) and w.store.stats.promoted == 4
        assert all(w.right(late.came[index], ids_of(index + 1)[0]) for index in range(4))
        for arrivals in (*early, late):
            w.host.release(arrivals.slots)
        assert w.host.detail("leased_blocks") == 0

    worlds.run(story)


def test_a_promoted_block_cannot_be_evicted_before_all_who_wait_have_had_their_turn(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1)

        def greedy(namespace: Namespace, id: bytes, source: Lower) -> None:
            """Takes all the room there is when the block has come and nobody was told yet."""
            reserved = w.store.reserve(w.namespace, ids_of(*range(10, 10 + SLOTS)), 1)
            w.host.abort([slot for slot in reserved if isinstance(slot, Slot)])

        monkeypatch.setattr(w.store.promoter, "_promoted", greedy)
        patient = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), Arrivals(wanted=False))
        w.store.acquire(w.namespace, ids_of(1), patient)
        await w.idle()
        assert w.right(patient.came[0], ids_of(1)[0])
        w.host.release(patient.slots)

    worlds.run(story, slabs=1)


def test_a_block_that_comes_up_for_one_namespace_does_not_for_anothers_of_the_same_id(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        other = w.host.namespaces.register(replace(w.namespace, id=bytes([77]) * 32, model="another"))
        await w.only_on_disk(1)
        mine, theirs = Arrivals(), Arrivals()
        assert w.store.acquire(w.namespace, ids_of(1), mine)[1] == [0]
        assert w.store.acquire(other, ids_of(1), theirs) == ([None], []), "it is not told that there is any"
        assert w.store.promoter.under_way(other, ids_of(1)) == []
        await w.idle()
        assert w.right(mine.came[0], ids_of(1)[0]) and not theirs.came
        w.host.release(mine.slots)

    worlds.run(story)


def test_a_prefix_has_no_holes(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(2)
        await w.put(1, 4)
        arrivals = Arrivals()
        slots, pending = w.store.acquire(w.namespace, ids_of(1, 2, 3, 4), arrivals)
        assert [slot is not None for slot in slots] == [True, False, False, False] and pending == [1]
        await w.idle()
        assert w.right(slots[0], ids_of(1)[0]) and w.right(arrivals.came[1], ids_of(2)[0])
        assert w.host.detail("leased_blocks") == 2
        w.host.release([slot for slot in slots if slot] + arrivals.slots)

    worlds.run(story)


@pytest.mark.fault(2)
@pytest.mark.parametrize("fault", ["EIO", "EINVAL"])
def test_a_read_that_fails_is_never_a_loaded_block(worlds: Worlds, fault: str) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1)
        failpoint.arm(f"segment.read=errno:{fault}")
        arrivals = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), arrivals)
        await w.idle()
        assert arrivals.came[0] is Outcome.FAILED
        assert w.store.stats.loaded == {"host": 0, "disk": 0} and w.store.stats.promotions_failed == 1
        assert w.host.status().used_bytes == 0
        failpoint.disarm()
        again = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), again)
        await w.idle()
        if fault == "EIO":  # of the pages themselves: the block is not listed any more
            assert again.came == {} and w.store.lookup(w.namespace, [key(1)]).blocks == 0
            return
        assert w.right(again.came[0], ids_of(1)[0]) and w.store.stats.loaded["disk"] == 1
        w.host.release(again.slots)

    worlds.run(story)


@pytest.mark.fault(10)
def test_a_block_that_is_damaged_on_disk_is_a_miss_and_the_next_put_heals_it(worlds: Worlds, tmp_path: Path) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1, 2)
        _damage(tmp_path, 1, "wrong bytes")
        arrivals = Arrivals()
        w.store.acquire(w.namespace, ids_of(1, 2), arrivals)
        await w.idle()
        assert arrivals.came[0] is Outcome.DAMAGED and w.right(arrivals.came[1], ids_of(2)[0])
        w.host.release(arrivals.slots)
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0
        assert await w.put(1, durable=True) == [1]
        assert w.store.lookup(w.namespace, [key(1)]).per_tier == {"host": 1, "disk": 1}

    worlds.run(story)


@pytest.mark.parametrize("admission", ["all", "second_touch"])
@pytest.mark.parametrize("trouble", ["wrong bytes", "a bad sector", "no file"])
def test_a_block_stored_while_its_damaged_copy_is_read_is_on_disk_afterwards(
    worlds: Worlds, tmp_path: Path, admission: str, trouble: str
) -> None:
    """It was not written when it was stored: the disk had it, as far as anybody knew."""

    async def story(w: World) -> None:
        await w.only_on_disk(1)
        assert w.disk
        w.disk.reading.clear()
        arrivals, again = Arrivals(), Arrivals()
        w.store.acquire(w.namespace, ids_of(1), arrivals)
        assert await w.put(1, durable=True) == [1]
        _damage(tmp_path, 1, trouble)
        w.disk.reading.set()
        await w.idle()
        assert isinstance(arrivals.came[0], Outcome)
        assert w.store.lookup(w.namespace, [key(1)]).per_tier == {"host": 1, "disk": 1}
        w.host.delete(w.namespace, ids_of(1))
        w.store.acquire(w.namespace, ids_of(1), again)
        await w.idle()
        assert w.right(again.came[0], ids_of(1)[0])
        w.host.release(again.slots)

    worlds.run(story, admission=admission)


def _damage(folder: Path, index: int, trouble: str) -> None:
    if trouble == "a bad sector":
        return failpoint.arm("segment.read*1-1=errno:EIO")
    (begins,) = [payload_of(id, bytes([1]) * 32, BLOCK)[:64] for id in ids_of(index)]
    (segment,) = [path for path in (folder / "disk").rglob("*.segment") if begins in path.read_bytes()]
    if trouble == "no file":
        return segment.unlink()
    with open(segment, "r+b") as file:
        file.seek(segment.read_bytes().find(begins) + 100)
        file.write(b"\xff\x00\xff")


def test_a_tier_full_of_leases_fails_a_promotion_by_name_and_leaves_the_block_where_it_is(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1)
        await w.put(*range(10, 10 + SLOTS))
        held = w.host.held(w.namespace, ids_of(*range(10, 10 + SLOTS)))
        arrivals = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), arrivals)
        assert not arrivals.came, "told before the lease was answered"
        await w.idle()
        assert arrivals.came[0] is Outcome.FULL
        w.host.release(held)
        again = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), again)
        await w.idle()
        assert w.right(again.came[0], ids_of(1)[0])
        w.host.release(again.slots)

    worlds.run(story, slabs=1)


@pytest.mark.fault(15)
def test_a_promotion_that_a_flush_overtook_brings_nothing_up(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1)
        assert w.disk
        w.disk.reading.clear()
        arrivals = Arrivals()
        w.store.acquire(w.namespace, ids_of(1), arrivals)
        flush = asyncio.create_task(w.store.flush(w.namespace))
        while w.namespace.epoch == 0:
            await asyncio.sleep(0.001)
        late = Arrivals()
        assert w.store.acquire(w.namespace, ids_of(1), late)[0] == [None]
        w.disk.reading.set()
        await flush
        await w.idle()
        assert arrivals.came[0] in (Outcome.STALE, Outcome.MISS) and not late.slots
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0 and w.host.status().used_bytes == 0
        assert await w.put(1) == [1]

    worlds.run(story)


def held_up(monkeypatch: pytest.MonkeyPatch, tier: object, step: str) -> threading.Event:
    """What a step of a tier finds is known only once this is set."""
    found, heard = getattr(tier, step), threading.Event()

    def slow(*about: Any) -> Outcome:
        outcome: Outcome = found(*about)
        assert heard.wait(30)
        return outcome

    monkeypatch.setattr(tier, step, slow)
    return heard


async def flushed_and_heard(w: World, heard: threading.Event) -> None:
    flush = asyncio.create_task(w.store.flush(w.namespace))
    while w.namespace.epoch == 0:
        await asyncio.sleep(0.001)
    heard.set()
    await flush
    await w.idle()


@pytest.mark.fault(15)
def test_what_was_read_before_a_flush_is_not_listed_after_it(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1)
        heard, arrivals = held_up(monkeypatch, w.disk, "get"), Arrivals()
        w.store.acquire(w.namespace, ids_of(1), arrivals)
        while w.disk and not w.disk.reads:
            await asyncio.sleep(0.001)
        await flushed_and_heard(w, heard)
        assert arrivals.came == {0: Outcome.STALE} and w.host.status().used_bytes == w.store.stats.promoted == 0

    worlds.run(story)


@pytest.mark.fault(15)
def test_what_was_checked_before_a_flush_is_stale_after_it(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def before(w: World) -> None:
        assert await w.put(1)

    async def after(w: World) -> None:
        heard, arrivals = held_up(monkeypatch, w.host, "verify"), Arrivals()
        assert w.store.acquire(w.namespace, ids_of(1), arrivals) == ([None], [0])
        await flushed_and_heard(w, heard)
        assert arrivals.came == {0: Outcome.STALE}
        assert w.host.status().used_bytes == 0 and w.store.stats.loaded["host"] == 0

    worlds.run(before, disk=False)
    worlds.run(after, disk=False)


@pytest.mark.fault(17)
def test_who_gives_up_waiting_keeps_no_lease(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1, 2)
        assert w.disk
        w.disk.reading.clear()
        gather = asyncio.create_task(w.store.promoter.gather(w.namespace, ids_of(1, 2)))
        unwanted = Arrivals(wanted=False)
        w.store.acquire(w.namespace, ids_of(1, 2), unwanted)
        await asyncio.sleep(0.01)
        gather.cancel()
        w.disk.reading.set()
        await w.idle()
        assert gather.cancelled() and len(unwanted.slots) == 2
        assert w.host.leases() == {} and w.store.lookup(w.namespace, [key(1), key(2)]).per_tier["host"] == 2

    worlds.run(story)


def test_gathering_waits_for_what_is_below_and_says_what_is_nowhere(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(2)
        await w.put(1)
        first, second, third = await w.store.promoter.gather(w.namespace, ids_of(1, 2, 3))
        assert w.right(first, ids_of(1)[0]) and w.right(second, ids_of(2)[0]) and third is Outcome.MISS
        w.host.release([slot for slot in (first, second) if isinstance(slot, Slot)])
        assert await w.store.promoter.gather(w.namespace, []) == []

    worlds.run(story)


def test_a_prefetch_brings_blocks_up_and_holds_none(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(2, 3)
        await w.put(1)
        assert w.store.promoter.prefetch(w.namespace, ids_of(1, 2, 3, 4)) == (1, 2)
        await w.idle()
        assert w.host.leases() == {}
        assert w.store.lookup(w.namespace, [key(i) for i in (1, 2, 3, 4)]).per_tier == {"host": 3, "disk": 3}

    worlds.run(story)


@pytest.mark.fault(10)
@pytest.mark.fault(49)
@pytest.mark.parametrize("on_disk", [True, False])
def test_adopted_bytes_that_are_wrong_are_replaced_from_disk_or_missed(worlds: Worlds, on_disk: bool) -> None:
    async def before(w: World) -> None:
        await w.put(1, 2, durable=on_disk)

    async def after(w: World) -> None:
        (slot,) = w.host.held(w.namespace, ids_of(1))
        w.host.arena.view[slot.offset] ^= 1
        w.host.release([slot])
        waiting = [Arrivals() for _ in range(3)]
        for arrivals in waiting:
            slots, pending = w.store.acquire(w.namespace, ids_of(1, 2), arrivals)
            assert slots[0] is None and pending[0] == 0
            arrivals.came.update((index, slot) for index, slot in enumerate(slots) if slot is not None)
        while any(len(arrivals.came) < 2 for arrivals in waiting):
            await asyncio.sleep(0.001)
        for arrivals in waiting:
            assert w.right(arrivals.came[1], ids_of(2)[0])
            if on_disk:
                assert w.right(arrivals.came[0], ids_of(1)[0])
            else:
                assert arrivals.came[0] in (Outcome.DAMAGED, Outcome.MISS)
            w.host.release(arrivals.slots)
        assert w.store.lookup(w.namespace, [key(1)]).blocks == on_disk

    worlds.run(before, disk=on_disk)
    worlds.run(after, disk=on_disk)


@pytest.mark.parametrize("kept", [0, 2])
def test_of_a_chain_that_came_up_the_tail_goes_first(worlds: Worlds, kept: int) -> None:
    async def story(w: World) -> None:
        await w.put(1, 2, 3, 4, durable=True)
        await w.idle()
        w.host.delete(w.namespace, ids_of(*range(1 + kept, 5)))
        arrivals = Arrivals()
        slots, _ = w.store.acquire(w.namespace, ids_of(1, 2, 3, 4), arrivals)
        await w.idle()
        w.host.release([*arrivals.slots, *(slot for slot in slots if slot is not None)])
        assert [id for _, id in w.host.next_out(4)] == ids_of(4, 3, 2, 1)

    worlds.run(story, threads=1)

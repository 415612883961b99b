"""Blocks that go to disk: what is admitted, what is dropped and counted, and what may be called durable."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from terracekv.daemon import write_through
from terracekv.tests.hosts import SLOTS
from terracekv.tests.stores import SLOT, Arrivals, World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers import failpoint
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot

worlds = pytest.fixture(opened_worlds)


@pytest.mark.fault(49)
def test_a_durable_commit_says_what_is_on_disk(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2)])
        w.fill(slots, ids_of(1, 2))
        assert w.disk
        w.disk.writing.clear()
        commit = asyncio.create_task(w.sessions.commit(session, handle, [0, 1], True))
        while not w.disk.writes:
            await asyncio.sleep(0.001)
        assert not commit.done() and w.store.lookup(w.namespace, [key(1)]).per_tier == {"host": 1, "disk": 1}
        w.disk.writing.set()
        assert await commit == ([0, 1], [0, 1])
        assert w.disk.leading(w.namespace, ids_of(1, 2)) == 2
        w.sessions.close(session)

    worlds.run(story)


@pytest.mark.fault(1)
@pytest.mark.parametrize("point", ["segment.create", "segment.write", "disk.publish", "disk.published"])
def test_a_write_that_fails_is_not_called_durable(worlds: Worlds, point: str) -> None:
    async def story(w: World) -> None:
        failpoint.arm(f"{point}=errno:ENOSPC")
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1)])
        w.fill(slots, ids_of(1))
        stored, durable = await w.sessions.commit(session, handle, [0], True)
        assert stored == [0] and w.disk
        assert bool(durable) == bool(w.disk.leading(w.namespace, ids_of(1)))
        failpoint.disarm()
        if not durable:
            assert w.store.stats.writes_failed == 1
            w.host.delete(w.namespace, ids_of(1))
            assert w.store.lookup(w.namespace, [key(1)]).blocks == 0
        assert w.host.leases() == {}
        await w.put(1, durable=True, session=session)
        w.sessions.close(session)

    worlds.run(story)


def test_second_touch_writes_what_is_met_again_and_nothing_else(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.disk
        await w.put(1, 2, 3)
        await w.idle()
        assert w.disk.writes == [] and w.store.stats.not_admitted == 3
        slots, _ = w.store.acquire(w.namespace, ids_of(1), Arrivals())
        await w.idle()
        assert w.disk.writes == ids_of(1)
        w.host.release([slot for slot in slots if slot])
        w.host.delete(w.namespace, ids_of(2))
        await w.put(2)
        await w.put(3)
        await w.idle()
        assert Counter(w.disk.writes) == Counter(ids_of(1, 2, 3))
        for _ in range(3):
            w.host.release([slot for slot in w.store.acquire(w.namespace, ids_of(1, 2, 3), Arrivals())[0] if slot])
        await w.idle()
        assert Counter(w.disk.writes) == Counter(ids_of(1, 2, 3)), "written once, however often they are met"
        await w.put(4, durable=True)
        assert ids_of(4)[0] in w.disk.writes, "durable asks for the write whatever admission says"

    worlds.run(story, admission="second_touch")


@pytest.mark.fault(123)
def test_writes_over_the_bound_are_dropped_and_counted_and_hold_nothing(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.disk
        w.disk.writing.clear()
        assert await w.put(*range(6)) == list(range(6))
        assert w.mover.queue_bytes == 2 * SLOT and len(w.host.leases()) == 2
        assert w.store.stats.writes_dropped == 4 and w.store.stats.writes_dropped_bytes == 4 * SLOT
        w.disk.writing.set()
        await w.idle()
        assert w.host.leases() == {} and w.store.stats.written == 2

    worlds.run(story, queue_bytes=2 * SLOT)


def test_while_there_is_no_room_the_tier_is_asked_about_none_of_what_is_due(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of a long prompt would cost a question of the disk's index, at each use, on the event loop."""

    async def story(w: World) -> None:
        assert w.disk
        asked: list[bytes] = []
        real = w.disk.leading

        def leading(namespace: Namespace, ids: Sequence[bytes]) -> int:
            asked.extend(ids)
            return real(namespace, ids)

        def use() -> None:
            slots, _ = w.store.acquire(w.namespace, ids_of(*range(6)), Arrivals())
            assert all(slots)
            w.host.release([slot for slot in slots if slot])

        w.disk.writing.clear()
        await w.put(*range(6))
        monkeypatch.setattr(w.disk, "leading", leading)
        use()
        assert asked == [] and w.store.stats.writes_dropped == 8, "four, twice"
        w.disk.writing.set()
        for written in (2, 4, 6):
            await w.idle()
            assert w.store.stats.written == written
            use()
        assert asked == ids_of(*range(2, 6)), "as many as there is room for, from the head on"

    worlds.run(story, queue_bytes=2 * SLOT)


def test_of_what_is_stored_no_more_is_leased_than_there_is_room_for(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(w: World) -> None:
        assert w.disk
        leased: list[bytes] = []
        real = w.host.acquire

        def acquire(namespace: Namespace, ids: Sequence[bytes], **how: bool) -> list[Slot | None]:
            leased.extend(ids)
            return real(namespace, ids, **how)

        w.disk.writing.clear()
        await w.put(0)
        monkeypatch.setattr(w.host, "acquire", acquire)
        await w.put(*range(1, 6))
        assert leased == ids_of(1) and w.store.stats.writes_dropped == 4
        w.disk.writing.set()
        await w.idle()
        assert w.store.stats.written == 2

    worlds.run(story, queue_bytes=2 * SLOT)


@pytest.mark.fault(44)
def test_what_leaves_host_before_it_is_on_disk_is_counted(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.disk
        await w.put(1)
        await w.idle()
        w.disk.writing.clear()
        await w.put(2, 3, 4)  # one is being written, and so cannot be evicted; two were dropped
        await w.put(5, 6, 7)
        assert w.store.stats.evicted_before_persist == 2
        assert w.host.has(w.namespace, ids_of(2)[0]) and not w.host.has(w.namespace, ids_of(1)[0])
        w.disk.writing.set()

    worlds.run(story, slabs=1, queue_bytes=SLOT)


@pytest.mark.fault(44)
def test_when_nothing_left_before_it_was_written_all_of_it_comes_back(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        for index in range(5 * SLOTS):
            await w.put(index)
            await w.idle()
        assert w.store.stats.evicted_before_persist == 0
        for index in range(5 * SLOTS):
            (slot,) = await w.store.promoter.gather(w.namespace, ids_of(index))
            assert w.right(slot, ids_of(index)[0]) and isinstance(slot, Slot)
            w.host.release([slot])

    worlds.run(story, slabs=1)


def test_bytes_that_nobody_has_checked_since_a_restart_are_not_written(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        await w.idle()
        assert w.disk and w.disk.delete(w.namespace, ids_of(1)) == 1
        (slot,) = w.host.held(w.namespace, ids_of(1))
        w.host._unverified.add(slot.record)
        assert w.store.through[0].committed(w.namespace, ids_of(1), True) == [None]
        assert w.host.leases() == {slot.record: 1}
        w.host.release([slot])

    worlds.run(story)


def test_on_evict_passes_over_a_namespace_of_which_only_blocks_are_known(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        found = w.host.namespaces.adopt(bytes([9]) * 32, 0)
        blocks = replace(found, block_bytes=w.namespace.block_bytes)
        w.host.put_chain(blocks, ids_of(*range(SLOTS)))
        assert w.host.status().blocks == SLOTS
        assert w.store.through[0].sweep() == 0 and w.disk and not w.disk.writes

    worlds.run(story, slabs=1, admission="on_evict")


@pytest.mark.fault(15)
def test_a_write_that_a_flush_overtook_does_not_reach_the_disk(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.disk
        w.disk.writing.clear()
        await w.put(1, 2, 3, 4)
        flush = asyncio.create_task(w.store.flush(w.namespace))
        while w.namespace.epoch == 0:
            await asyncio.sleep(0.001)
        w.disk.writing.set()
        await flush
        await w.idle()
        assert w.disk.leading(w.namespace, ids_of(1)) == 0 and w.disk.status().blocks == 0
        assert w.host.status().used_bytes == 0 and w.store.stats.writes_failed == 0

    worlds.run(story)


def test_a_queue_that_is_smaller_than_a_block_is_said_once(worlds: Worlds, caplog: pytest.LogCaptureFixture) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        await w.put(2, 3)
        assert w.store.stats.writes_dropped == 3

    worlds.run(story, queue_bytes=SLOT - 1)
    (said,) = [record.getMessage() for record in caplog.records if "is written to" in record.getMessage()]
    assert f"one takes {SLOT} bytes, and daemon.queue is {SLOT - 1}" in said


def test_what_could_not_be_written_is_remembered_for_as_many_blocks_as_the_tier_holds(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_through, "SEEN_MIN", 2)

    async def story(w: World) -> None:
        assert w.disk
        w.disk.writing.clear()
        assert await w.put(*range(7)) == list(range(7))
        assert w.store.stats.writes_dropped == 6
        w.disk.writing.set()
        await w.idle()
        for index in range(7):
            (slot,), _ = w.store.acquire(w.namespace, ids_of(index), Arrivals())
            assert isinstance(slot, Slot)
            w.host.release([slot])
            await w.idle()
        assert w.disk.leading(w.namespace, ids_of(*range(7))) == 7

    worlds.run(story, queue_bytes=SLOT)

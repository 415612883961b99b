"""Pins: they hold blocks for a while, and never more than their share."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from terracekv.daemon.pins import TTL_S_MAX
from terracekv.tests.blocks import registered
from terracekv.tests.hosts import SLOTS
from terracekv.tests.stores import SLOT, World, Worlds, ids_of, key, opened_worlds

worlds = pytest.fixture(opened_worlds)


@pytest.mark.fault(41)
def test_a_pin_holds_until_it_is_ended_or_its_time_is_over(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(w: World) -> None:
        now = [1000.0]
        monkeypatch.setattr("terracekv.daemon.pins.time", SimpleNamespace(monotonic=lambda: now[0]))
        await w.put(1, 2, durable=True)
        counts = await w.store.pins.pin(w.namespace, ids_of(1, 2, 3), ttl_s=60)
        assert counts["pinned"] == 2 and counts["skipped_miss"] == 1 and len(w.store.pins) == 2
        assert w.store.pins.bytes == 2 * SLOT
        await w.put(*range(10, 20))
        assert w.store.lookup(w.namespace, [key(1), key(2)]).per_tier["host"] == 2
        assert w.store.pins.unpin(w.namespace, ids_of(1)) == 1
        assert w.store.pins.unpin(w.namespace, ids_of(1)) == 0
        now[0] += 59
        w.store.pins.expire()
        assert len(w.store.pins) == 1
        assert (await w.store.pins.pin(w.namespace, ids_of(2), ttl_s=60))["renewed"] == 1
        now[0] += 59
        w.store.pins.expire()
        assert len(w.store.pins) == 1
        now[0] += 2
        w.store.pins.expire()
        assert len(w.store.pins) == 0 == w.store.pins.bytes
        await w.idle()
        assert w.host.leases() == {}

    worlds.run(story)


@pytest.mark.fault(41)
def test_pins_take_at_most_their_share_even_when_asked_for_at_once(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(*range(4))
        await w.only_on_disk(*range(4, 8))
        limit = w.store.pins.bytes_max // SLOT
        assert limit == SLOTS
        parts = [w.store.pins.pin(w.namespace, ids_of(*range(start, start + 4)), 60) for start in (0, 4)]
        counts = Counter[str]()
        for part in await asyncio.gather(*parts):
            counts.update(part)
        assert counts["pinned"] == limit == len(w.store.pins) and w.store.pins.bytes <= w.store.pins.bytes_max
        assert counts["skipped_pin_limit"] == 8 - limit
        await w.balanced()
        await w.store.flush(w.namespace)
        assert len(w.store.pins) == 0 == w.store.pins.bytes and w.host.leases() == {}

    worlds.run(story)


def test_nobody_ends_a_pin_by_another_nor_by_the_same_keys_in_another_namespace(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        other = registered(w.host.namespaces, 7, w.namespace.block_bytes)
        await w.put(1)
        assert (await w.store.pins.pin(w.namespace, ids_of(1), 1000))["pinned"] == 1
        assert (await w.store.pins.pin(other, ids_of(1), -1))["renewed"] == 0
        assert (await w.store.pins.pin(w.namespace, ids_of(1), -1))["renewed"] == 1
        w.store.pins.expire()
        assert w.store.pins.unpin(other, ids_of(1)) == 0 and len(w.store.pins) == 1
        assert w.store.pins.end(other) == 0 and w.store.pins.end(w.namespace) == 1

    worlds.run(story)


def test_no_pin_is_for_ever(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        assert (await w.store.pins.pin(w.namespace, ids_of(1), 2.0**62))["pinned"] == 1
        later = time.monotonic() + TTL_S_MAX + 1
        monkeypatch.setattr("terracekv.daemon.pins.time.monotonic", lambda: later)
        w.store.pins.expire()
        monkeypatch.undo()
        assert len(w.store.pins) == 0

    worlds.run(story)


def test_a_block_that_is_deleted_while_it_is_being_pinned_leaves_no_pin_behind(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.disk is not None
        await w.only_on_disk(2)
        await w.put(1)
        w.disk.reading.clear()  # block 2 is on its way up, and block 1 leased meanwhile
        pinning = asyncio.ensure_future(w.store.pins.pin(w.namespace, ids_of(1, 2), 1000))
        await asyncio.sleep(0)
        deleting = asyncio.ensure_future(w.store.delete(w.namespace, ids_of(1)))
        await until_gone(w)
        w.disk.reading.set()
        counts = await pinning
        await deleting
        assert (counts["pinned"], counts["skipped_miss"]) == (1, 1)
        assert w.store.pins.bytes == SLOT == len(w.host.leases()) * SLOT, "nothing is kept of what is gone"
        await w.put(1)
        assert (await w.store.pins.pin(w.namespace, ids_of(1), 1000))["pinned"] == 1, "the new block is pinned"
        w.store.pins.end(w.namespace)

    worlds.run(story)


def test_a_pin_ends_with_its_block(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1, 2)
        assert (await w.store.pins.pin(w.namespace, ids_of(1, 2), 1000))["pinned"] == 2
        w.host.delete(w.namespace, ids_of(1, 2))  # as when its bytes turn out to be wrong
        await w.put(1)
        counts = await w.store.pins.pin(w.namespace, ids_of(1), 1000)
        assert (counts["pinned"], counts["renewed"]) == (1, 0)
        w.store.pins.expire()
        assert len(w.store.pins) == 1 and w.store.pins.bytes == SLOT
        w.store.pins.end(w.namespace)

    worlds.run(story)


async def until_gone(w: World) -> None:
    """Wait until block 1 is not listed in host any more."""
    while w.host.has(w.namespace, ids_of(1)[0]):
        await asyncio.sleep(0.001)

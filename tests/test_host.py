"""The host tier: what is evicted and what never is, and leases that outlive the block."""

import random
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.blocks import get, in_threads, name, payload_of, registered, verified
from terracekv.tests.hosts import BLOCK, SLAB, SLOTS, Host, host_in
from terracekv.tiers.slots import RECORD_BYTES, Slot
from terracekv.tiers.tier import PAGE, Outcome

CHAIN = [name(index) for index in range(10)]

STORED, PRESENT, FULL = Outcome.STORED, Outcome.PRESENT, Outcome.FULL


def slots_of(reserved: list[Slot | Outcome]) -> list[Slot]:
    return [slot for slot in reserved if isinstance(slot, Slot)]


def listed(host: Host, ids: list[bytes] = CHAIN) -> list[int]:
    return [index for index, id in enumerate(ids) if host.has(host.namespace, id)]


@pytest.mark.breaks("commits with checksums that are made up")
@pytest.mark.fault(1)
def test_nothing_is_findable_before_its_commit(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        slot, other = slots_of(host.reserve(host.namespace, CHAIN[:2], 1))
        host.payload(slot, BLOCK)[:] = payload_of(CHAIN[0])[:BLOCK]
        assert listed(host) == [] and host.acquire(host.namespace, CHAIN[:2]) == [None, None]
        assert get(host, host.namespace, CHAIN[0])[0] is Outcome.MISS
        assert host.commit(host.namespace, [(CHAIN[0], slot, 0)]) == [STORED]
        assert listed(host) == [0] and host.detail("reserved_blocks") == 1
        host.abort([other])
        host.abort([other])
        assert listed(host) == [0] and host.detail("reserved_blocks") == 0


def test_what_follows_a_payload_in_its_slot_is_zero(shm_dir: Path) -> None:
    """It is written to disk with the payload: another tenant's bytes must not be."""
    with host_in(shm_dir) as host:
        host.arena.view[:] = b"\xff" * SLAB
        for slot in slots_of(host.reserve(host.namespace, CHAIN[:SLOTS], 1)):
            assert host.payload(slot, PAGE)[BLOCK:] == bytes(PAGE - BLOCK)
            host.abort([slot])


@pytest.mark.breaks("commits with checksums that are made up")
def test_the_slower_of_two_sessions_with_the_same_block_finds_it_present(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        (quick,) = slots_of(host.reserve(host.namespace, CHAIN[:1], 1))
        (slow,) = slots_of(host.reserve(host.namespace, CHAIN[:1], 2))
        assert quick.offset != slow.offset
        assert host.commit(host.namespace, [(CHAIN[0], quick, 0)]) == [STORED]
        assert host.commit(host.namespace, [(CHAIN[0], slow, 0)]) == [PRESENT]
        assert host.status().used_bytes == PAGE and not host.table.current(slow)


@pytest.mark.breaks("commits with checksums that are made up")
def test_a_slot_is_committed_once(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        (slot,) = slots_of(host.reserve(host.namespace, CHAIN[:1], 1))
        host.commit(host.namespace, [(CHAIN[0], slot, 0)])
        with pytest.raises(AssertionError, match="not being written"):
            host.commit(host.namespace, [(CHAIN[1], slot, 0)])


@pytest.mark.breaks("commits with checksums that are made up")
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_commit_that_fails_midway_leaves_no_slot_reserved(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    with host_in(shm_dir) as host:
        ids = [name(index) for index in range(SLOTS)]
        slots = [slot for slot in host.reserve(host.namespace, ids, 1) if isinstance(slot, Slot)]
        seal = host.table.seal

        def seal_or_fail(slot: Slot, id: bytes, *rest: Any) -> None:
            if id == ids[bad]:
                raise struct.error("does not fit")
            seal(slot, id, *rest)

        monkeypatch.setattr(host.table, "seal", seal_or_fail)
        with pytest.raises(struct.error):
            host.commit(host.namespace, [(id, slot, 0) for id, slot in zip(ids, slots, strict=True)])
        assert host.detail("reserved_blocks") == 0
        assert host.status().used_bytes == host.status().blocks * PAGE, "what was sealed before it is kept"
        monkeypatch.undo()
        assert host.put_chain(host.namespace, ids[: bad + 1])[-1] is Outcome.STORED


def test_the_tail_is_evicted_before_the_head(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        assert host.put_chain(host.namespace, CHAIN[:4]) == [STORED] * 4
        assert host.put_chain(host.namespace, CHAIN[4:6]) == [STORED] * 2
        assert listed(host) == [0, 1, 4, 5]
        assert host.put_chain(host.namespace, CHAIN[6:7]) == [STORED]
        assert listed(host) == [0, 4, 5, 6]


def test_a_chain_used_again_is_evicted_after_one_that_was_not(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:2])
        host.put_chain(host.namespace, CHAIN[2:4])
        host.release(host.held(host.namespace, CHAIN[:2]))
        host.put_chain(host.namespace, CHAIN[4:5])
        assert listed(host) == [0, 1, 2, 4]


def test_the_oldest_goes_first_whatever_its_namespace(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        other = registered(host.namespaces, 2, BLOCK)
        host.put_chain(host.namespace, CHAIN[:1])
        host.put_chain(other, CHAIN[:2])
        host.put_chain(host.namespace, CHAIN[1:2])
        host.put_chain(host.namespace, CHAIN[2:4])
        assert listed(host) == [1, 2, 3] and host.leading(other, CHAIN) == 1
        host.put_chain(other, CHAIN[5:7])
        assert listed(host) == [2, 3] and not host.has(other, CHAIN[0])


def test_a_chain_never_evicts_itself(shm_dir: Path) -> None:
    """Evicting the head to store the tail would leave nothing that can be found."""
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:3])
        assert host.put_chain(host.namespace, CHAIN[:6]) == [PRESENT] * 3 + [STORED] + [FULL] * 2
        assert host.leading(host.namespace, CHAIN) == 4


def test_the_same_keys_in_another_namespace_are_no_part_of_a_chain(shm_dir: Path) -> None:
    """Nobody keeps a chain from being stored by having stored its keys elsewhere before."""
    with host_in(shm_dir) as host:
        other = registered(host.namespaces, 2, BLOCK)
        host.put_chain(other, CHAIN[:SLOTS])
        assert host.put_chain(host.namespace, CHAIN[:SLOTS]) == [STORED] * SLOTS
        assert host.leading(other, CHAIN) == 0


@pytest.mark.fault(6)
def test_what_has_no_room_is_refused_by_name_and_the_rest_proceeds(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        assert host.put_chain(host.namespace, CHAIN) == [STORED] * SLOTS + [FULL] * (10 - SLOTS)
        assert verified(host, host.namespace, CHAIN) == SLOTS


def test_what_is_leased_or_reserved_is_never_evicted(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:2])
        leased = host.held(host.namespace, CHAIN[:1])
        reserved = slots_of(host.reserve(host.namespace, CHAIN[2:3], 1))
        assert host.put_chain(host.namespace, CHAIN[3:6]) == [STORED, STORED, FULL]
        assert listed(host) == [0, 3, 4]
        assert all(host.table.current(slot) for slot in leased + reserved)
        host.release(leased)
        host.abort(reserved)


@pytest.mark.fault(43)
def test_a_tier_full_of_leased_blocks_takes_new_ones_as_soon_as_they_are_released(shm_dir: Path) -> None:
    with host_in(shm_dir, slabs=8) as host:
        many = [name(index) for index in range(8 * SLOTS)]
        host.put_chain(host.namespace, many)
        leases = host.held(host.namespace, many)
        for _ in range(3):
            assert host.put_chain(host.namespace, [name(100)]) == [FULL]
        assert host.detail("leased_blocks") == len(many) == host.status().blocks
        host.release(leases)
        assert host.detail("leased_blocks") == 0
        assert host.put_chain(host.namespace, [name(100), name(101)]) == [STORED] * 2


def test_one_lease_in_the_way_spares_one_block_only(shm_dir: Path) -> None:
    with host_in(shm_dir, slabs=4) as host:
        many = [name(index) for index in range(4 * SLOTS)]
        host.put_chain(host.namespace, many)
        lease = host.held(host.namespace, many[-1:])
        for index in range(100, 120):
            assert host.put_chain(host.namespace, [name(index)]) == [STORED]
        assert host.has(host.namespace, many[-1])
        host.release(lease)


@pytest.mark.parametrize("eviction", ["lru", "frequency", "auto"])
def test_a_namespace_of_which_all_is_leased_does_not_keep_those_of_others(shm_dir: Path, eviction: str) -> None:
    """What is leased is the oldest, and however often it is passed over it is not the newest of all."""
    with host_in(shm_dir, slabs=4, eviction=eviction) as host:
        other = registered(host.namespaces, 2, BLOCK)
        host.put_chain(host.namespace, CHAIN[:2])
        leases = host.held(host.namespace, CHAIN[:2])
        assert host.put_chain(other, [name(index) for index in range(100, 100 + 4 * SLOTS)])[:-2] == [STORED] * (
            4 * SLOTS - 2
        )
        for index in (200, 210):
            assert host.put_chain(other, [name(index), name(index + 1)]) == [STORED] * 2
        assert listed(host) == [0, 1]
        host.release(leases)


def test_a_block_of_another_size_takes_the_slab_used_longest_ago(shm_dir: Path) -> None:
    with host_in(shm_dir, slabs=2) as host:
        large = registered(host.namespaces, 2, SLAB // 2)
        host.put_chain(host.namespace, CHAIN[:4])
        host.put_chain(host.namespace, CHAIN[4:8])
        assert host.put_chain(large, [name(20), name(21)]) == [STORED] * 2
        assert listed(host) == [4, 5, 6, 7] and host.leading(large, [name(20), name(21)]) == 2
        assert host.put_chain(host.namespace, CHAIN[:4]) == [STORED] * 4
        assert verified(host, host.namespace, CHAIN) == 4
        assert host.status().used_bytes <= 2 * SLAB


def test_a_slab_with_a_slot_in_use_is_never_cut_anew(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        large = registered(host.namespaces, 2, SLAB)
        host.put_chain(host.namespace, CHAIN[:3])
        leased = host.held(host.namespace, CHAIN[1:2])
        assert host.put_chain(large, [name(20)]) == [FULL]
        host.release(leased)
        reserved = slots_of(host.reserve(host.namespace, CHAIN[3:4], 1))
        assert host.put_chain(large, [name(20)]) == [FULL]
        host.abort(reserved)
        assert host.put_chain(large, [name(20)]) == [STORED]
        assert listed(host) == []


def test_a_slab_in_use_does_not_keep_other_slabs_from_being_cut_anew(shm_dir: Path) -> None:
    """Its blocks are the oldest, and there are many of them; one is pinned for an hour."""
    slots = 64
    with host_in(shm_dir, slabs=2 * slots // SLOTS) as host:
        small = [name(index) for index in range(2 * slots)]
        for id in small:
            host.put_chain(host.namespace, [id])
        in_the_way = [host.held(host.namespace, small[index : index + 1]) for index in range(0, slots, SLOTS)]
        host.release(host.held(host.namespace, small[slots:]))
        large = registered(host.namespaces, 2, SLAB)
        assert host.put_chain(large, [name(900)]) == [STORED]
        for leases in in_the_way:
            host.release(leases)


@pytest.mark.fault(15)
@pytest.mark.fault(12)
def test_a_flush_ends_no_lease_and_lists_nothing(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:3])
        leases = host.held(host.namespace, CHAIN[:2]) + host.held(host.namespace, CHAIN[:1])
        flushed = host.namespaces.raise_epoch(host.namespace.id)
        assert host.drop(host.namespace) == 3 and host.drop(host.namespace) == 0
        assert host.detail("doomed_blocks") == 2 and host.status().blocks == 0
        host.check()
        assert host.put_chain(flushed, CHAIN[:3]) == [STORED, STORED, FULL]
        for slot, id in zip(leases, [CHAIN[0], CHAIN[1], CHAIN[0]], strict=True):
            assert host.table.current(slot)
            assert host.payload(slot, BLOCK) == payload_of(id, host.namespace.id, BLOCK)
        host.release(leases[1:])
        assert host.detail("doomed_blocks") == 1 and host.table.current(leases[0])
        host.release(leases[:1])
        assert host.detail("doomed_blocks") == 0 and not host.table.current(leases[0])
        assert verified(host, flushed, CHAIN[:3]) == 2


def test_a_block_deleted_under_a_lease_can_be_stored_again_meanwhile(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:1])
        (old,) = host.held(host.namespace, CHAIN[:1])
        assert host.delete(host.namespace, CHAIN[:2]) == 1 and host.delete(host.namespace, CHAIN[:2]) == 0
        assert host.put_chain(host.namespace, CHAIN[:1]) == [STORED]
        (new,) = host.held(host.namespace, CHAIN[:1])
        assert new.offset != old.offset
        host.release([old])
        assert not host.table.current(old) and host.table.current(new) and listed(host) == [0]
        host.release([new])


@pytest.mark.fault(133)
def test_every_block_that_leaves_is_told_with_its_reason(shm_dir: Path) -> None:
    told: list[tuple[str, list[bytes]]] = []
    with host_in(shm_dir) as host:
        host.on_evict = lambda namespace, ids, reason: told.append((reason, ids))
        host.put_chain(host.namespace, CHAIN[:4])
        host.put_chain(host.namespace, CHAIN[4:5])
        host.delete(host.namespace, CHAIN[:1])
        host.drop(host.namespace)
        assert [reason for reason, _ in told] == ["capacity", "delete", "flush"]
        assert told[0][1] == [CHAIN[3]] and told[1][1] == [CHAIN[0]]
        assert sorted(told[2][1]) == sorted([CHAIN[1], CHAIN[2], CHAIN[4]])
        assert host.counters.evictions == {"capacity": 1, "delete": 1, "flush": 3}


def test_a_payload_that_is_too_short_is_a_bug_and_costs_no_slot(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        with pytest.raises(AssertionError):
            host.put(host.namespace, CHAIN[0], memoryview(b"short"), 0)
        assert host.status().used_bytes == 0


@pytest.mark.fault(42)
def test_leases_are_counted_and_one_too_many_release_is_noticed(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:1])
        (slot,) = host.held(host.namespace, CHAIN[:1])
        host.held(host.namespace, CHAIN[:1])
        assert host.leases() == {slot.record: 2}
        host.release([slot])
        host.release([slot])
        with pytest.raises(KeyError):
            host.release([slot])
        assert host.leases() == {}


def test_check_finds_books_that_do_not_balance(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:2])
        (slot,) = host.held(host.namespace, CHAIN[:1])
        order = host._spaces[host.namespace.stamp].order
        place = order.discard(CHAIN[1])
        assert place is not None
        with pytest.raises(AssertionError, match="not those listed"):
            host.check()
        order.insert(CHAIN[1], place, 0)
        host._leases[slot.record + RECORD_BYTES * 3] = 1
        with pytest.raises(AssertionError, match="leases"):
            host.check()
        del host._leases[slot.record + RECORD_BYTES * 3]
        host.release([slot])


@pytest.mark.fault(3)
@pytest.mark.fault(12)
def test_threads_that_reserve_lease_delete_and_flush_never_meet_others_bytes(shm_dir: Path) -> None:
    """A lease's bytes are those of its block from first to last, and without a lease the generation tells."""
    with host_in(shm_dir, slabs=2) as host:
        small, large = host.namespace, registered(host.namespaces, 2, 2 * PAGE)
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        reading = threading.Semaphore(0)

        def write(seed: int) -> None:
            dice = random.Random(seed)
            while not reading.acquire(blocking=False):
                namespace = small if dice.random() < 0.8 else large
                start = dice.randrange(8)
                host.put_chain(namespace, CHAIN[start : start + dice.randrange(1, 4)], seed)
                if dice.random() < 0.1:
                    host.delete(namespace, [dice.choice(CHAIN)])
                if dice.random() < 0.02:
                    host.drop(namespace)

        def read(seed: int) -> None:
            dice, hits, deadline = random.Random(seed), 0, time.monotonic() + 60
            while hits < 60:
                assert time.monotonic() < deadline
                namespace = small if dice.random() < 0.8 else large
                id = dice.choice(CHAIN)
                (slot,) = host.acquire(namespace, [id])
                if slot is None:
                    continue
                expected = payload_of(id, namespace.id, namespace.block_bytes)
                assert host.payload(slot, namespace.block_bytes) == expected
                host.release([slot])
                late = bytes(host.payload(slot, namespace.block_bytes))
                current = host.table.current(slot)
                assert not current or late == expected
                hits += 1
            reading.release()

        try:
            in_threads(*(partial(write, seed) for seed in range(1, 4)), *(partial(read, seed) for seed in range(4, 7)))
        finally:
            sys.setswitchinterval(before)

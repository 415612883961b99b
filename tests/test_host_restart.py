"""What a restarted host tier takes over: whole blocks, unread as yet, and no slot that somebody may still write to."""

import os
from pathlib import Path

import pytest

from terracekv.tests.blocks import name, put, verified
from terracekv.tests.hosts import BLOCK, SLOTS, Host, host_in, lock_byte, writer_process
from terracekv.tiers.slot_tier import DAEMON
from terracekv.tiers.slots import RECORD_BYTES, Slot, State
from terracekv.tiers.tier import PAGE, Outcome

CHAIN = [name(index) for index in range(10)]

STORED, PRESENT, FULL = Outcome.STORED, Outcome.PRESENT, Outcome.FULL


def slots_of(reserved: list[Slot | Outcome]) -> list[Slot]:
    return [slot for slot in reserved if isinstance(slot, Slot)]


def listed(host: Host, ids: list[bytes] = CHAIN) -> list[int]:
    return [index for index, id in enumerate(ids) if host.has(host.namespace, id)]


@pytest.mark.fault(49)
def test_a_restarted_tier_has_what_was_there_and_checks_it_when_it_is_first_read(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:4])
    with host_in(shm_dir) as host:
        assert host.adopted_blocks == 4 and host.leading(host.namespace, CHAIN) == 4
        assert host.detail("unverified_blocks") == 4
        (slot,) = host.held(host.namespace, CHAIN[:1])
        assert host.unverified(slot) and host.verify(host.namespace, CHAIN[0], slot) is Outcome.HIT
        assert not host.unverified(slot)
        host.release([slot])
        assert verified(host, host.namespace, CHAIN) == 4 and host.detail("unverified_blocks") == 0


@pytest.mark.fault(10)
def test_an_adopted_block_with_other_bytes_is_a_miss_and_the_next_put_heals_it(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:2])
        (slot,) = host.held(host.namespace, CHAIN[:1])
        offset = slot.offset
        host.release([slot])
    with host_in(shm_dir) as host:
        host.arena.view[offset + 7] ^= 1
        first, second = host.held(host.namespace, CHAIN[:1]) + host.held(host.namespace, CHAIN[:1])
        assert host.verify(host.namespace, CHAIN[0], first) is Outcome.DAMAGED
        assert listed(host) == [1] and host.counters.checksum_failures == 1
        assert host.unverified(second), "another reader has it and has not asked yet"
        assert host.verify(host.namespace, CHAIN[0], second) is Outcome.DAMAGED
        host.release([first, second])
        assert not host.table.current(first)
        assert put(host, host.namespace, CHAIN[0]) is STORED
        assert verified(host, host.namespace, CHAIN) == 2


def test_a_damaged_block_found_late_does_not_take_its_healed_successor_along(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:1])
    with host_in(shm_dir) as host:
        host.arena.view[0] ^= 1
        first, second = host.held(host.namespace, CHAIN[:1]) + host.held(host.namespace, CHAIN[:1])
        assert host.verify(host.namespace, CHAIN[0], first) is Outcome.DAMAGED
        assert host.put_chain(host.namespace, CHAIN[:1]) == [STORED]
        assert host.verify(host.namespace, CHAIN[0], second) is Outcome.DAMAGED
        host.release([first, second])
        assert verified(host, host.namespace, CHAIN[:1]) == 1


@pytest.mark.parametrize("state", [State.SEALED, 77])
def test_torn_records_are_freed_and_whole_ones_kept(shm_dir: Path, state: int) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:3])
        (torn,) = host.held(host.namespace, CHAIN[1:2])
        host.release([torn])
    with open(shm_dir / "slots", "r+b") as file:
        file.seek(torn.record + 16)
        file.write(bytes([state]) + b"torn")
    with host_in(shm_dir) as host:
        assert host.adopted_blocks == 2 and listed(host) == [0, 2]
        assert not host.table.current(torn)
        assert host.put_chain(host.namespace, CHAIN[:4]) == [PRESENT, STORED, PRESENT, STORED]
        assert verified(host, host.namespace, CHAIN) == 4


@pytest.mark.fault(15)
def test_blocks_of_a_flushed_epoch_are_not_taken_over(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:3])
        flushed = host.namespaces.raise_epoch(host.namespace.id)  # and killed before the blocks were dropped
        host.put_chain(flushed, CHAIN[:1])
    with host_in(shm_dir) as host:
        assert host.adopted_blocks == 1 and host.namespace.epoch == 1
        assert host.leading(host.namespace, CHAIN) == 1 and host.status().used_bytes == PAGE


@pytest.mark.breaks("commits with checksums that are made up")
@pytest.mark.parametrize("older_first", [True, False])
def test_when_the_epochs_are_lost_the_newest_that_blocks_bear_is_the_present_one(
    shm_dir: Path, older_first: bool
) -> None:
    with host_in(shm_dir) as host:
        namespace = host.namespace
        old, new = slots_of(host.reserve(namespace, CHAIN[:2], 1))[:: 1 if older_first else -1]
        host.commit(namespace, [(CHAIN[0], old, 0)])
        host.commit(host.namespaces.raise_epoch(namespace.id), [(CHAIN[1], new, 0)])
    (shm_dir / "namespaces.json").unlink()
    with host_in(shm_dir) as host:
        assert host.namespace.epoch == 1 and host.namespace.registered
        assert listed(host) == [1]


def test_of_two_records_of_one_block_one_is_kept(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        host.put_chain(host.namespace, CHAIN[:2])
        first, second = host.held(host.namespace, CHAIN[:2])
        host.release([first, second])
    with open(shm_dir / "slots", "r+b") as file:
        file.seek(first.record)
        record = file.read(RECORD_BYTES)
        file.seek(second.record)
        file.write(record)
    with host_in(shm_dir) as host:
        assert host.adopted_blocks == 1 and host.status().used_bytes == PAGE


def test_slots_being_written_are_freed_when_their_writers_are_gone(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        slots_of(host.reserve(host.namespace, CHAIN[:2], 7))
        slots_of(host.reserve(host.namespace, CHAIN[2:3], DAEMON))
    with host_in(shm_dir) as host:
        assert host.detail("orphaned_blocks") == 2 == host.detail("reserved_blocks")
        assert host.reap() == 0
        assert host.status().used_bytes == 0


@pytest.mark.fault(17)
def test_a_slot_that_a_living_process_may_still_write_to_is_not_handed_out(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        (slot,) = slots_of(host.reserve(host.namespace, CHAIN[:1], 7))
    with writer_process(shm_dir / "slots", 7) as process, host_in(shm_dir) as host:
        assert host.reap() == 1
        assert host.put_chain(host.namespace, CHAIN) == [STORED] * (SLOTS - 1) + [FULL] * (10 - SLOTS + 1)
        host.payload(slot, BLOCK)[:] = b"\xff" * BLOCK  # as the process may at any moment
        assert host.reap() == 1 and verified(host, host.namespace, CHAIN) == SLOTS - 1
        process.kill()
        process.wait()
        assert host.reap() == 0
        assert host.put_chain(host.namespace, CHAIN[:SLOTS])[-1] is STORED
        assert verified(host, host.namespace, CHAIN) == SLOTS


@pytest.mark.fault(17)
def test_a_closed_session_whose_process_still_writes_keeps_its_slots_until_it_lets_go(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        held = lock_byte(shm_dir / "slots", 7)
        slots = slots_of(host.reserve(host.namespace, CHAIN[:2], 7))
        host.orphan(slots)
        assert host.reap() == 2 and all(host.table.current(slot) for slot in slots)
        os.close(held)
        assert host.reap() == 0 and not any(host.table.current(slot) for slot in slots)
        assert host.detail("orphaned_blocks") == 0

"""The slot table: no reader is fooled by a slot that was freed, reused, cut anew or taken over by another daemon."""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.tests.blocks import name
from terracekv.tiers.slots import LOCK_BASE, RECORD_BYTES, Slot, SlotTable, State, slot_bytes_for
from terracekv.tiers.tier import PAGE

SLAB = 16 * PAGE
SLABS = 3
NAMESPACE = bytes(range(32))
_SLABS_AT = PAGE
_STATE_AT = 16


@contextmanager
def table_in(
    folder: Path, *, adopt: bool = True, slabs: int = SLABS, slab_bytes: int = SLAB, ready: int | None = None
) -> Iterator[SlotTable]:
    table = SlotTable(folder / "slots", arena_bytes=slabs * slab_bytes, slab_bytes=slab_bytes, adopt=adopt)
    try:
        table.offer(slabs if ready is None else ready)
        yield table
        table.check()
    finally:
        table.close()


def taken(table: SlotTable, slot_bytes: int = PAGE, session: int = 1) -> Slot:
    slot = table.take(slot_bytes, session)
    assert slot is not None
    return slot


def seal(table: SlotTable, slot: Slot, block: int = 0) -> None:
    table.seal(slot, name(block), NAMESPACE, 3, slot_bytes_for(1), 42)


def damage(folder: Path, at: int, value: bytes) -> None:
    with open(folder / "slots", "r+b") as file:
        file.seek(at)
        file.write(value)


def test_a_slot_goes_from_free_to_writing_to_sealed_and_back(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        slot = taken(table, session=7)
        assert table.state(slot.record) is State.WRITING and table.writer(slot.record) == 7
        seal(table, slot, 5)
        held = table.sealed(slot.record)
        assert held == (slot.record, name(5), NAMESPACE, 3, PAGE, 42)
        assert table.current(slot) and table.used_bytes == PAGE
        table.free(slot.record)
        assert not table.current(slot) and table.used_bytes == 0


def test_a_step_out_of_order_is_a_bug_and_changes_nothing(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        slot, other = taken(table), taken(table)
        with pytest.raises(AssertionError):
            table.sealed(slot.record)
        seal(table, slot)
        with pytest.raises(AssertionError):
            seal(table, slot)
        table.free(other.record)
        with pytest.raises(AssertionError):
            table.free(other.record)
        again = taken(table)
        assert again.record == other.record
        with pytest.raises(AssertionError):
            seal(table, other)  # of a former life of the slot
        assert table.state(again.record) is State.WRITING and table.sealed(slot.record).block == name(0)


@pytest.mark.fault(12)
def test_a_slot_that_was_freed_never_looks_as_it_did_to_an_earlier_reader(tmp_path: Path) -> None:
    seen = set[tuple[int, int]]()
    with table_in(tmp_path) as table:
        for _ in range(50):
            slot = taken(table)
            assert (slot.record, slot.generation) not in seen
            seen.add((slot.record, slot.generation))
            seal(table, slot)
            assert table.slot(slot.record) == slot
            table.free(slot.record)
            assert not table.current(slot)


@pytest.mark.fault(12)
def test_a_reader_is_not_fooled_when_the_slab_serves_another_size(tmp_path: Path) -> None:
    with table_in(tmp_path, slabs=1) as table:
        old = [taken(table) for _ in range(SLAB // PAGE)]
        for slot in old:
            table.free(slot.record)
        large = [taken(table, 4 * PAGE) for _ in range(SLAB // PAGE // 4)]
        assert table.take(4 * PAGE, 1) is None and table.take(PAGE, 1) is None
        assert not any(table.current(slot) for slot in old)
        for slot in large:
            table.free(slot.record)
        again = [taken(table) for _ in range(SLAB // PAGE)]
        assert not any(table.current(slot) for slot in old + large)
        assert {slot.offset for slot in again} == {slot.offset for slot in old}


@pytest.mark.fault(12)
def test_a_reader_is_not_fooled_across_a_restart(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        slots = [taken(table) for _ in range(4)]
        for slot in slots:
            seal(table, slot, slot.record)
    with table_in(tmp_path) as table:
        assert table.adopted and all(table.current(slot) for slot in slots)
        table.free(slots[0].record)
        fresh = taken(table)
        assert fresh.record == slots[0].record and fresh.generation > slots[0].generation
        assert not table.current(slots[0]) and all(table.current(slot) for slot in slots[1:])


def test_slots_of_one_slab_never_overlap_whatever_their_size(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        spans = list[tuple[int, int]]()
        for size in (PAGE, 3 * PAGE, 5 * PAGE):
            while (slot := table.take(size, 1)) is not None and len(spans) < 100:
                spans.append((slot.offset, slot.offset + size))
                assert table.slot_bytes(slot.record) == size
                if len(spans) % 5 == 0:
                    break
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert all(start // SLAB == (end - 1) // SLAB for start, end in spans)


def test_only_slabs_that_are_ready_are_handed_out(tmp_path: Path) -> None:
    with table_in(tmp_path, ready=0) as table:
        assert table.free_slots(PAGE) == 0 and table.take(PAGE, 1) is None
        table.offer(1)
        slots = [slot for _ in range(17) if (slot := table.take(PAGE, 1))]
        assert len(slots) == 16 and table.free_slots(PAGE) == 0
        table.check()
        table.offer(2)
        assert table.free_slots(PAGE) == 16 and taken(table).offset >= SLAB
        for slot in slots:
            table.free(slot.record)
        assert table.free_slots(PAGE) == 31 and table.free_slots(2 * PAGE) == 8


def test_a_slot_larger_than_a_slab_is_never_handed_out(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        assert table.take(SLAB + PAGE, 1) is None
        assert table.free_slots(SLAB + PAGE) == 0


@given(st.lists(st.tuples(st.sampled_from([1, 2, 5, 16]), st.booleans(), st.integers(0, 99)), max_size=60))
def test_the_books_balance_with_several_sizes_at_once(steps: list[tuple[int, bool, int]]) -> None:
    """Takes and frees of several sizes beside a plain dict; every byte that is used is accounted, and only those."""
    folder = Path("/dev/shm") / f"terracekv-test-{os.getpid()}-slots"
    folder.mkdir(exist_ok=True)
    try:
        with table_in(folder, adopt=False) as table:
            held = dict[Slot, int]()
            for pages, give, which in steps:
                size = pages * PAGE
                if give and held:
                    slot = list(held)[which % len(held)]
                    del held[slot]
                    table.free(slot.record)
                elif (fresh := table.take(size, 1)) is not None:
                    held[fresh] = size
                else:
                    assert table.free_slots(size) == 0
                table.check()
                assert table.used_bytes == sum(held.values())
                spans = sorted((slot.offset, slot.offset + size) for slot, size in held.items())
                assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
            before = table.used_bytes
        with table_in(folder) as table:
            assert table.adopted and table.used_bytes == before
            assert set(table.occupied()) == {slot.record for slot in held}
    finally:
        (folder / "slots").unlink(missing_ok=True)
        folder.rmdir()


def test_session_numbers_are_never_used_twice(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        first = [table.next_session() for _ in range(3)]
    with table_in(tmp_path) as table:
        assert table.next_session() == max(first) + 1


@pytest.mark.parametrize(("slabs", "slab_bytes"), [(SLABS + 1, SLAB), (2 * SLABS, SLAB // 2)])
def test_a_table_of_another_arena_is_replaced_and_stays_whole_for_those_who_map_it(
    tmp_path: Path, slabs: int, slab_bytes: int
) -> None:
    with table_in(tmp_path) as old:
        slot = taken(old)
        seal(old, slot)
        with table_in(tmp_path, slabs=slabs, slab_bytes=slab_bytes) as table:
            assert not table.adopted and not list(table.occupied())
            taken(table)
        assert old.current(slot) and old.sealed(slot.record).block == name(0)


def test_a_table_is_not_adopted_when_its_bytes_are_not(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        seal(table, taken(table))
    with table_in(tmp_path, adopt=False) as table:
        assert not table.adopted and not list(table.occupied())


@pytest.mark.parametrize("cut", [8, 16, 17, 60, 100])
def test_a_record_written_in_part_is_told_from_a_whole_one(tmp_path: Path, cut: int) -> None:
    """A daemon killed while it seals: the first ``cut`` bytes are new, the rest is still that of the writing."""
    with table_in(tmp_path) as table:
        torn, whole = taken(table), taken(table)
        path = tmp_path / "slots"
        before = path.read_bytes()[torn.record : torn.record + RECORD_BYTES]
        seal(table, torn)
        seal(table, whole, 1)
        after = path.read_bytes()[torn.record : torn.record + RECORD_BYTES]
    if after[:cut] == before[:cut]:
        damage(tmp_path, torn.record, before)
    else:
        damage(tmp_path, torn.record, after[:cut] + before[cut:])
    with table_in(tmp_path) as table:
        assert table.adopted and table.intact(whole.record)
        assert table.intact(torn.record) == (after[:cut] == before[:cut])


@pytest.mark.parametrize("state", [9, 77, 255])
def test_a_state_that_does_not_exist_is_taken_for_a_torn_record(tmp_path: Path, state: int) -> None:
    with table_in(tmp_path) as table:
        slot, whole = taken(table), taken(table)
        seal(table, slot)
        seal(table, whole, 1)
    damage(tmp_path, slot.record + _STATE_AT, bytes([state]))
    table = SlotTable(tmp_path / "slots", arena_bytes=SLABS * SLAB, slab_bytes=SLAB, adopt=True)
    try:
        assert set(table.occupied()) == {slot.record, whole.record}
        assert not table.intact(slot.record) and table.intact(whole.record)
        table.free(slot.record)
        table.check()
        assert not table.current(slot)
    finally:
        table.close()


def test_a_slab_of_an_impossible_size_is_empty(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        seal(table, taken(table))
    for size in (PAGE + 1, SLAB + PAGE):
        damage(tmp_path, _SLABS_AT, struct.pack("<Q", size))
        with table_in(tmp_path) as table:
            assert table.adopted and not list(table.occupied())


def test_a_writer_is_gone_when_nobody_holds_its_byte(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        assert table.writer_gone(5)
        fd = os.open(tmp_path / "slots", os.O_RDONLY)
        flock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, LOCK_BASE + 5, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
        assert not table.writer_gone(5) and table.writer_gone(4) and table.writer_gone(6)
        os.close(fd)
        assert table.writer_gone(5)


def test_check_finds_a_slot_that_is_lost_or_counted_twice(tmp_path: Path) -> None:
    with table_in(tmp_path) as table:
        slot = taken(table)
        table.check()
        for wrong in (PAGE, -PAGE):
            table.used_bytes += wrong
            with pytest.raises(AssertionError):
                table.check()
            table.used_bytes -= wrong
        (free,) = [each for each in table._free if each]
        lost = free.pop()
        with pytest.raises(AssertionError, match="free list"):
            table.check()
        free.append(lost)
        free.append(slot.record)
        with pytest.raises(AssertionError, match="free list"):
            table.check()
        free.pop()


@pytest.mark.parametrize("number", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_numbers_at_their_end_in_an_adopted_table_go_on_from_the_beginning(tmp_path: Path, number: int) -> None:
    """They are written by counting; a table that was damaged may hold any, and the daemon must start all the same."""
    with table_in(tmp_path) as table:
        slot = taken(table)
        seal(table, slot)
        free = taken(table).record
        table.free(free)
    for at in (slot.record, free, 64):
        damage(tmp_path, at, struct.pack("<Q", number))
    with table_in(tmp_path) as table:
        session = table.next_session()
        assert 0 < session < 2**63 - LOCK_BASE and table.writer_gone(session) and table.next_session() != session
        table.free(slot.record)
        again = {taken(table).record for _ in range(SLABS * SLAB // PAGE)}
        assert {slot.record, free} <= again
        for record in again:
            table.free(record)

"""The shelf: who may use a segment while it fills, is read, is emptied and is reused."""

import errno
import os
import threading
from pathlib import Path

import pytest

from terracekv.tiers.segment import SegmentFiles
from terracekv.tiers.shelf import OVERHEAD_BYTES, Segment, Shelf
from terracekv.tiers.tier import PAGE

SEGMENT = 64 * PAGE


def shelf_for(folder: Path, segments: int, ends: dict[int, int] | None = None) -> Shelf:
    return Shelf(
        SegmentFiles(folder / "segments", "off"),
        segment_bytes=SEGMENT,
        limit_bytes=lambda: segments * (SEGMENT + OVERHEAD_BYTES),
        free_floor_bytes=0,
        ends={} if ends is None else ends,
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Two full segments."""
    made = shelf_for(tmp_path, 2)
    for _ in range(2):
        assert made.advance()
        taken = made.take(64)
        assert taken is not None
        made.done(*taken, 64, used=True)
    assert not made.advance()
    return made


def oldest(shelf: Shelf) -> Segment:
    return shelf.segments()[0]


def test_room_is_given_out_once_and_taken_back_only_at_the_end(tmp_path: Path) -> None:
    shelf = shelf_for(tmp_path, 2)
    assert shelf.take(1) is None
    assert shelf.advance()
    first, second = shelf.take(10), shelf.take(20)
    assert first is not None and second is not None
    assert (first[1], second[1]) == (0, 10)
    assert shelf.take(35) is None
    shelf.done(*first, 10, used=False)
    assert first[0].cursor == 30, "the second writer's room lies behind it"
    shelf.done(*second, 20, used=False)
    assert first[0].cursor == 10
    shelf.check()


def test_what_is_written_while_a_sync_runs_is_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_for(tmp_path, 3)
    assert shelf.advance()
    synced: list[int] = []
    monkeypatch.setattr(shelf.files, "sync", synced.append)
    room = shelf.take(10)
    assert room is not None
    assert shelf.sync() == 1 and synced == [1], "somebody writes in segment 1"
    shelf.done(*room, 10, used=True)
    assert shelf.advance()
    assert shelf.settled() == 1, "segment 1 is full, and not synced as it is now"
    assert shelf.sync() == 2 and synced == [1, 1]
    assert shelf.sync() == 2 and synced == [1, 1], "nothing was written since"


def test_a_segment_with_readers_or_writers_is_no_victim(shelf: Shelf) -> None:
    assert shelf.pin(1) is oldest(shelf)
    assert shelf.victim() is None, "the other one is active"
    shelf.unpin(oldest(shelf))
    assert shelf.victim() is oldest(shelf)


def test_a_reader_who_came_late_is_waited_for_before_the_file_is_reused(shelf: Shelf) -> None:
    victim = shelf.victim()
    assert victim is not None and shelf.pin(1) is victim
    retiring = threading.Thread(target=shelf.retire, args=(victim,))
    retiring.start()
    retiring.join(0.1)
    assert retiring.is_alive() and not shelf.can_advance()
    assert shelf.pin(1) is None, "nobody else comes in meanwhile"
    shelf.unpin(victim)
    retiring.join()
    assert shelf.can_advance() and shelf.advance()
    assert [segment.number for segment in shelf.segments()] == [2, 3]
    shelf.check()


def test_a_segment_that_is_being_emptied_can_be_read_but_not_listed(shelf: Shelf) -> None:
    victim = shelf.victim()
    assert victim is not None
    assert shelf.pin_to_list(1) is None
    assert shelf.pin(1) is victim
    shelf.unpin(victim)
    shelf.keep(victim)
    assert shelf.pin_to_list(1) is victim
    assert shelf.victim() is None, "it is being listed"
    shelf.unpin(victim)


def test_marks_of_neighbouring_records_are_their_own(tmp_path: Path) -> None:
    segment = Segment(1, SEGMENT, 0)
    assert not segment.hit
    for page in (0, 6, 14, 16, 62):
        segment.mark(page)
    assert [page for page in range(0, 64, 2) if segment.marked(page)] == [0, 6, 14, 16, 62]


def test_segments_come_back_with_their_ends_and_unknown_files_as_spares(tmp_path: Path, shelf: Shelf) -> None:
    again = shelf_for(tmp_path, 2, {1: 40, 7: 3})
    assert [(segment.number, segment.cursor) for segment in again.segments()] == [(1, 40)]
    assert again.spares() == [(2, SEGMENT)] and again.lost == [7]
    taken = again.take(10)
    assert taken is not None and (taken[0].number, taken[1]) == (1, 40)
    assert again.advance()
    assert [segment.number for segment in again.segments()] == [1, 8], "a number is never used again"


def test_a_file_that_was_not_finished_and_could_not_be_removed_is_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    shelf = shelf_for(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr(os, "unlink", refused)
        assert not shelf.advance()
        shelf.check()
    assert shelf.advance() and shelf.advance() and not shelf.advance(), "what could not be removed goes when it can"
    shelf.check()
    assert shelf.spares() == []


def test_whoever_asks_for_a_sync_beside_another_hears_of_it_when_all_is_on_the_medium(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = oldest(shelf).number
    under_way, goes_on, too_early = threading.Event(), threading.Event(), list[bool]()

    def slow(number: int) -> None:
        if number == first:
            under_way.set()
            assert goes_on.wait(30)

    def second() -> None:
        shelf.sync()
        too_early.append(not goes_on.is_set())

    monkeypatch.setattr(shelf.files, "sync", slow)
    threads = [threading.Thread(target=shelf.sync), threading.Thread(target=second)]
    threads[0].start()
    assert under_way.wait(30)
    threads[1].start()
    threads[1].join(0.5)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert too_early == [False]

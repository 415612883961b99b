"""Segments: the record's format, scanning, and direct I/O with its fallback."""

import errno
import logging
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from terracekv.tests.blocks import name, payload_of
from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.segment import HEADER_BYTES, Record, SegmentFiles, decode, pages_of
from terracekv.tiers.tier import PAGE

PAGES = 64
SIZES = [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 17]


def record(index: int, size: int, generation: int = 1) -> Record:
    payload = payload_of(name(index), size=size)
    return Record(name(index, 3), b"n" * 32, 7, size, size, checksum(payload), generation, 1_700_000_000_000)


def written(files: SegmentFiles, index: int, size: int, page: int, generation: int = 1) -> int:
    """Write a record; the page after it."""
    made = record(index, size, generation)
    files.write(made, page, memoryview(payload_of(name(index), size=size)))
    return page + made.pages


@pytest.fixture(params=["auto", "off"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> SegmentFiles:
    made = SegmentFiles(tmp_path / "segments", request.param)
    made.create(1, PAGES * PAGE)
    return made


@pytest.fixture
def opened_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The flags of every file that is opened."""
    flags_seen: list[int] = []
    real = os.open

    def spy(path: str, flags: int, *rest: int) -> int:
        flags_seen.append(flags)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", spy)
    yield flags_seen


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, when: Callable[[int], bool]) -> None:
    """Let ``os.open`` or ``os.pwritev`` answer EINVAL where the file is opened directly and ``when(nth)`` says so."""
    real_open, real_call = os.open, getattr(os, call)
    direct: set[int] = set()
    count = 0

    def refused() -> bool:
        nonlocal count
        count += 1
        return when(count)

    def opening(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and call == "open" and refused():
            raise OSError(errno.EINVAL, "refused")
        file = int(real_open(path, flags, *rest))
        direct.discard(file)
        if flags & os.O_DIRECT:
            direct.add(file)
        return file

    def writing(file: int, *rest: object) -> object:
        if file in direct and refused():
            raise OSError(errno.EINVAL, "refused")
        return real_call(file, *rest)

    monkeypatch.setattr(os, "open", opening)
    if call != "open":
        monkeypatch.setattr(os, call, writing)


def test_a_header_lies_as_the_design_says() -> None:
    made = Record(name(1, 3), b"n" * 32, 7, 1000, 900, 0x1122, 5, 99, codec=2)
    head = made.encode()
    assert head[:4] == b"TRKV" and len(head) == HEADER_BYTES == 126
    fields = [(4, 2, 1), (6, 2, 2), (74, 4, 7), (78, 8, 1000), (86, 8, 900), (94, 8, 0x1122), (102, 8, 5), (110, 8, 99)]
    for start, size, value in fields:
        assert int.from_bytes(head[start : start + size], "little") == value, start
    assert head[8:42] == name(1, 3) and head[42:74] == b"n" * 32
    assert int.from_bytes(head[-8:], "little") == checksum(head[:-8])


def test_a_header_comes_back_and_any_changed_byte_of_it_is_noticed() -> None:
    made = record(1, 1000)
    page = bytearray(made.encode().ljust(PAGE, b"\0"))
    assert decode(page) == made
    for position in range(HEADER_BYTES):
        page[position] ^= 0x40
        assert decode(page) is None, position
        page[position] ^= 0x40
    assert decode(page[: HEADER_BYTES - 1]) is None


@pytest.mark.fault(71)
@pytest.mark.parametrize("size", SIZES)
def test_payloads_of_any_length_come_back_from_slots_and_from_odd_places(files: SegmentFiles, size: int) -> None:
    padded = pages_of(size) * PAGE
    with mmap.mmap(-1, 2 * padded + PAGE) as memory, memoryview(memory) as whole:
        with whole[:padded] as slot, whole[padded + 1 : padded + 1 + size] as odd:
            for page, source in ((0, slot), (16, odd)):
                source[:size] = payload_of(name(1), size=size)
                files.write(record(1, size), page, source)
                for into in (slot, odd):
                    into[:size] = bytes(size)
                    assert files.read(1, page, size, into) == record(1, size)
                    assert into[:size] == payload_of(name(1), size=size)
    assert [page for page, _ in files.scan(1, PAGES)] == [0, 16]


@pytest.mark.fault(71)
def test_the_mode_is_what_is_really_done(tmp_path: Path, opened_with: list[int]) -> None:
    for asked in ("auto", "off"):
        files = SegmentFiles(tmp_path / asked, asked)
        files.create(1, PAGES * PAGE)
        opened_with.clear()
        written(files, 1, 1000, 0)
        files.read(1, 0, 1000, memoryview(bytearray(1000)))
        list(files.scan(1, PAGES))
        assert len(opened_with) >= 3
        assert {bool(flags & os.O_DIRECT) for flags in opened_with} == {files.mode == "direct"}
    assert files.mode == "buffered"


@pytest.mark.fault(70)
@pytest.mark.parametrize("call", ["open", "pwritev"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_file_system_that_refuses_direct_io_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, nth: int
) -> None:
    """Refused at the probe (first call), or later, at a write of some other length."""
    refuse(monkeypatch, call, lambda count: count >= nth)
    with caplog.at_level(logging.WARNING):
        files = SegmentFiles(tmp_path / "segments", "auto")
        files.create(1, PAGES * PAGE)
        end = page = 0
        for size in SIZES:
            end = written(files, size, size, end)
    assert files.mode == "buffered"
    assert len([line for line in caplog.messages if "direct I/O" in line]) == 1
    for size in SIZES:
        into = memoryview(bytearray(size))
        assert files.read(1, page, size, into) == record(size, size)
        assert into == payload_of(name(size), size=size)
        page += record(size, size).pages


@pytest.mark.fault(71)
def test_direct_io_that_was_insisted_on_and_is_impossible_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "open", lambda count: True)
    with pytest.raises(ConfigError, match="direct I/O"):
        SegmentFiles(tmp_path / "on", "on")
    with pytest.raises(ConfigError, match="auto, on or off"):
        SegmentFiles(tmp_path / "on", "perhaps")


def test_buffered_on_request_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert SegmentFiles(tmp_path / "segments", "off").mode == "buffered"
    assert not caplog.messages


def test_a_scan_finds_records_behind_a_hole_and_none_of_an_earlier_life(files: SegmentFiles) -> None:
    end = 0
    for index in range(8):
        end = written(files, index, 6000, end)
    files.rename(1, 2)
    assert list(files.scan(2, PAGES)) == []
    first = written(files, 20, 3 * PAGE, 0, generation=2)
    hole = first + 5
    last = written(files, 21, 100, hole, generation=2)
    assert list(files.scan(2, PAGES)) == [(0, record(20, 3 * PAGE, 2)), (hole, record(21, 100, 2))]
    assert [page for page, _ in files.scan(2, last - 1)] == [0], "a record across the end is not whole"


def test_a_scan_of_a_shortened_file_ends_where_the_file_does(files: SegmentFiles) -> None:
    end = 0
    for index in range(4):
        end = written(files, index, 2 * PAGE, end)
    os.truncate(files.path(1), 7 * PAGE)
    assert [page for page, _ in files.scan(1, PAGES)] == [0, 3, 6]
    assert files.read(1, 6, 2 * PAGE, memoryview(bytearray(2 * PAGE))) is None


def test_a_scan_matches_what_was_written_whatever_the_sizes(tmp_path: Path) -> None:
    dice = random.Random(5)
    files = SegmentFiles(tmp_path / "segments", "auto")
    files.create(1, 512 * PAGE)
    expected = []
    page = 0
    while page < 400:
        size = dice.randrange(1, 20 * PAGE)
        expected.append((page, record(page, size)))
        page = written(files, page, size, page) + dice.choice([0, 0, 0, 1, 30])
    assert list(files.scan(1, 512)) == expected


def test_a_short_write_is_an_error(files: SegmentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, offset: real(file, parts[:1], offset))
    with pytest.raises(OSError, match="only 4096 of"):
        written(files, 1, 1000, 0)


def test_a_segment_that_cannot_be_allocated_leaves_no_file(
    files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        files.create(2, PAGES * PAGE)
    (files.folder / "notes.txt").write_text("mine")
    assert files.found() == ({1: PAGES * PAGE}, ["notes.txt"])

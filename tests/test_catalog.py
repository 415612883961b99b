"""The catalog: its verbs, growth under transactions, damage, forks."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import lmdb
import pytest

from terracekv.tests.blocks import in_threads, name
from terracekv.tiers import failpoint
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.entry import Entry
from terracekv.tiers.errors import Damaged, Fenced, TierDown, TierFull

STAMP = 5 << 32 | 2


def entry(index: int, stamp: int = STAMP, segment: int = 1) -> Entry:
    return Entry(stamp, segment, 2 * index, 4096, 4096, index)


def rows(first: int, last: int) -> list[tuple[bytes, Entry]]:
    return [(name(index), entry(index)) for index in range(first, last)]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path / "catalog")) as made:
        yield made
    failpoint.disarm()


def test_what_is_published_is_found_until_it_is_removed(catalog: Catalog) -> None:
    assert catalog.created and catalog.get(name(1)) is None
    assert catalog.publish(rows(0, 10)) == [True] * 10
    assert catalog.get(name(3)) == entry(3)
    assert catalog.publish([(name(3), entry(99))]) == [False]
    assert catalog.get(name(3)) == entry(3)
    assert catalog.count() == 10
    assert catalog.delete(STAMP, [name(3), name(77)]) == 1
    assert catalog.delete(STAMP, [name(3)]) == 0
    assert catalog.get(name(3)) is None


def test_leading_stops_at_the_first_absent_or_stale_block(catalog: Catalog) -> None:
    catalog.publish(rows(0, 10))
    names = [name(index) for index in range(12)]
    assert catalog.leading(STAMP, names) == 10
    assert catalog.leading(STAMP + 1, names) == 0
    catalog.delete(STAMP, [name(4)])
    assert catalog.leading(STAMP, names) == 4
    assert catalog.publish([(name(4), entry(4, STAMP + 1))]) == [True]
    assert catalog.leading(STAMP, names) == 4
    assert catalog.publish([(name(4), entry(4))]) == [False], "a later epoch's entry is not replaced"


def test_moving_and_forgetting_touch_only_what_is_still_at_its_place(catalog: Catalog) -> None:
    catalog.publish(rows(0, 2))
    elsewhere = entry(50, segment=9)
    assert catalog.move([(name(0), entry(0), elsewhere), (name(1), entry(7), elsewhere)]) == [True, False]
    assert catalog.forget([(name(0), 1, 0), (name(1), 1, 4), (name(8), 1, 0)]) == 0
    assert (catalog.get(name(0)), catalog.get(name(1))) == (elsewhere, entry(1))
    assert catalog.forget([(name(0), 9, 100)]) == 1


def test_segments_are_known_with_the_end_of_their_last_published_record(catalog: Catalog) -> None:
    catalog.publish(rows(0, 5))
    catalog.publish([(name(0), entry(400))])
    catalog.publish([(name(60), entry(1, segment=300))])
    assert catalog.segments() == {1: 10, 300: 4}
    assert catalog.drop_segment(1) == 5
    assert catalog.segments() == {300: 4}


def test_a_segment_is_dropped_with_what_still_lies_in_it(catalog: Catalog) -> None:
    catalog.publish([*rows(0, 5000), (name(6000), entry(0, segment=2)), (name(6001), entry(1, segment=0))])
    moved = entry(9, segment=2)
    catalog.move([(name(1), entry(1), moved)])
    catalog.delete(STAMP, [name(3)])
    held = catalog.held(1, limit=3)
    assert held == [(name(0), entry(0)), (name(2), entry(2)), (name(4), entry(4))]
    assert catalog.held(1, after=held[-1][1].page, limit=1) == [(name(5), entry(5))]
    assert catalog.drop_segment(1) == 4998
    assert catalog.drop_segment(1) == 0 and catalog.held(1) == []
    assert catalog.get(name(1)) == moved and catalog.count() == 3
    assert catalog.segments() == {0: 4, 2: 20}


def test_a_walk_meets_every_entry_once(catalog: Catalog) -> None:
    catalog.publish(rows(0, 500))
    walked = [row for batch in catalog.walk(7) for row in batch]
    assert walked == sorted(rows(0, 500))


def test_entries_outlive_the_process_and_the_map_fits_what_it_finds(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path, map_bytes=1 << 20)) as first:
        first.publish(rows(0, 20_000))
        grown = first.map_bytes
    assert grown > 1 << 20
    with closing(Catalog(tmp_path)) as second:
        assert not second.created
        assert second.leading(STAMP, [name(index) for index in range(20_000)]) == 20_000
        assert second.used_bytes() <= second.map_bytes <= grown
        assert os.stat(tmp_path / "data.mdb").st_size == second.map_bytes
        with pytest.raises(Damaged):
            Catalog(tmp_path)


@pytest.mark.fault(65)
def test_a_map_of_one_mebibyte_grows_without_the_caller_noticing(tmp_path: Path) -> None:
    asked: list[int] = []

    def may_grow(map_bytes: int) -> bool:
        asked.append(map_bytes)
        return True

    with closing(Catalog(tmp_path, map_bytes=1 << 20, may_grow=may_grow)) as catalog:
        for first in range(0, 30_000, 3000):
            assert all(catalog.publish(rows(first, first + 3000)))
        assert catalog.count() == 30_000
        assert asked == sorted(set(asked)) and catalog.map_bytes == asked[-1]


@pytest.mark.fault(65)
def test_a_batch_larger_than_any_growth_step_still_goes_in_whole(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path, map_bytes=256 << 10, step_bytes=64 << 10)) as catalog:
        assert all(catalog.publish(rows(0, 20_000)))


@pytest.mark.fault(65)
def test_a_full_map_that_may_not_grow_refuses_whole_batches_and_can_be_emptied(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path, map_bytes=1 << 20, may_grow=lambda map_bytes: False)) as catalog:
        stored = 0
        with pytest.raises(TierFull):
            while True:
                catalog.publish(rows(stored, stored + 100))
                stored += 100
        assert catalog.map_bytes == 1 << 20 and stored > 2000
        assert catalog.count() == stored == catalog.leading(STAMP, [name(index) for index in range(stored + 100)])
        assert catalog.forget([(name(index), 1, 2 * index) for index in range(stored)]) == stored
        assert all(catalog.publish(rows(0, 1000)))


@pytest.mark.fault(1)
def test_a_transaction_that_fails_leaves_nothing(catalog: Catalog) -> None:
    catalog.publish(rows(0, 2))
    failpoint.arm("catalog.commit=errno:EIO")
    for change in (
        lambda: catalog.publish(rows(2, 9)),
        lambda: catalog.forget([(name(0), 1, 0)]),
        lambda: catalog.move([(name(0), entry(0), entry(9))]),
    ):
        with pytest.raises(OSError, match="failpoint"):
            change()
    failpoint.disarm()
    assert catalog.leading(STAMP, [name(index) for index in range(9)]) == 2
    assert catalog.get(name(0)) == entry(0)
    assert catalog.segments() == {1: 4}


@pytest.mark.fault(64)
@pytest.mark.parametrize("round_", range(5))
def test_ten_growths_five_times_under_four_readers_and_a_writer(tmp_path: Path, round_: int) -> None:
    grown: list[int] = []
    done = threading.Event()

    def may_grow(map_bytes: int) -> bool:
        grown.append(map_bytes)
        return True

    with closing(Catalog(tmp_path, map_bytes=512 << 10, step_bytes=64 << 10, may_grow=may_grow)) as catalog:
        catalog.publish(rows(0, 64))
        names = [name(index) for index in range(64)]

        def read() -> None:
            while not done.wait(0.0005):  # without a pause, readers keep the interpreter from the writer
                assert catalog.leading(STAMP, names) == 64
                assert catalog.get(name(5)) == entry(5)

        def write() -> None:
            try:
                first = 64
                while len(grown) < 10:
                    assert all(catalog.publish(rows(first, first + 512)))
                    first += 512
            finally:
                done.set()

        in_threads(write, *[read] * 4)
        assert catalog.map_bytes == grown[-1]
        assert catalog.count() == len([row for batch in catalog.walk() for row in batch])


@pytest.mark.fault(67)
def test_a_forked_child_is_told_that_the_catalog_is_not_its_own(catalog: Catalog) -> None:
    catalog.publish(rows(0, 3))
    for use in (partial(catalog.get, name(1)), partial(catalog.publish, rows(3, 4)), catalog.sync, catalog.count):
        child = os.fork()
        if not child:
            try:
                use()
                os._exit(1)
            except Fenced:
                catalog.close()
                os._exit(42)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert catalog.leading(STAMP, [name(0), name(1), name(2)]) == 3


@pytest.mark.fault(10)
def test_an_entry_with_a_flipped_bit_is_not_believed(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path)) as catalog:
        catalog.publish(rows(0, 20))
        catalog.sync()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    at = data.find(name(7))
    assert at > 0
    while at > 0:
        data[at + 34 + 13] ^= 4
        at = data.find(name(7), at + 1)
    (tmp_path / "data.mdb").write_bytes(data)
    with closing(Catalog(tmp_path)) as catalog:
        with pytest.raises(Damaged, match=name(7).hex()):
            catalog.get(name(7))
        assert catalog.get(name(8)) == entry(8)
        assert dict(catalog.entries())[name(7)] is None
        assert catalog.forget_unsound(name(8)) == 0
        assert catalog.forget_unsound(name(7)) == 1
        assert catalog.get(name(7)) is None


OPEN = """
import sys
from contextlib import closing
from pathlib import Path
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.errors import Damaged, TierDown
for folder in sys.argv[1:]:
    try:
        with closing(Catalog(Path(folder))) as catalog:
            print("opened", sum(map(len, catalog.walk())))
    except (Damaged, TierDown):
        print("damaged")
"""


@pytest.mark.fault(68)
@pytest.mark.fault(10)
def test_a_truncated_or_foreign_file_is_refused_and_never_kills_the_process(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "whole")) as catalog:
        catalog.publish(rows(0, 3000))
        used = catalog.used_bytes()
    whole = (tmp_path / "whole" / "data.mdb").read_bytes()
    cases = {f"cut-{size}": whole[:size] for size in (1, 100, 4096, 8192, 12288, used // 2, used - 4096, used - 1)}
    cases |= {"noise": os.urandom(len(whole)), "text": b"not a database\n" * 5000}
    for label, content in cases.items():
        (tmp_path / label).mkdir()
        (tmp_path / label / "data.mdb").write_bytes(content)
    command = [sys.executable, "-c", OPEN, *(str(tmp_path / label) for label in cases), str(tmp_path / "whole")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:-1] == ["damaged"] * len(cases) + ["opened 3000"]


def test_a_closed_catalog_says_so(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.close()
    catalog.close()
    with pytest.raises(TierDown, match="closed"):
        catalog.get(name(1))


def test_names_in_lmdbs_answers_are_interned_once(catalog: Catalog) -> None:
    """Else Python's table of interned names grows with each call, and is made anew in the heap of whichever thread."""
    kept = [id(name) for name in catalog._environment.info()] + [id(name) for name in catalog._environment.stat()]
    strangers = [str(number) * 3 for number in range(1_000)]
    assert [id(name) for answer in catalog._answers for name in answer] == kept and strangers


def test_a_catalog_that_once_contradicted_itself_is_not_sound_again(catalog: Catalog) -> None:
    for error, sound in ((lmdb.DiskError, True), (lmdb.CorruptedError, False), (lmdb.DiskError, False)):
        with pytest.raises(TierDown), catalog._errors():
            raise error("said by LMDB")
        assert catalog.sound == sound

"""The disk tier: its cap, its owner and eviction. Restarts and faults have files of their own."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, in_threads, name, put, registered, verified
from terracekv.tests.disks import CAP, PER_SEGMENT, SEGMENT, Disks, du
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.disk import least_capacity_bytes
from terracekv.tiers.entry import Entry
from terracekv.tiers.errors import ConfigError, InUse
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.segment import SegmentFiles
from terracekv.tiers.shelf import Segment
from terracekv.tiers.tier import PAGE, Outcome


@pytest.fixture
def disk(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def test_a_capacity_too_small_for_its_segments_is_refused_with_numbers(disk: Disks) -> None:
    with pytest.raises(ConfigError, match=str(least_capacity_bytes(SEGMENT))):
        disk.open(least_capacity_bytes(SEGMENT) - 1)
    with closing(disk.open(least_capacity_bytes(SEGMENT))) as tier:
        assert tier.status().capacity_bytes == least_capacity_bytes(SEGMENT)


@pytest.mark.fault(33)
@pytest.mark.parametrize("capacity", [least_capacity_bytes(SEGMENT), CAP])
def test_ten_times_the_capacity_never_takes_more_than_the_capacity(disk: Disks, capacity: int) -> None:
    with closing(disk.open(capacity)) as tier:
        highest = 0
        total = 10 * capacity // BLOCK_BYTES
        for index in range(total):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            if index % 20 == 0:
                highest = max(highest, du(disk.path))
        tier.check()
        status = tier.status()
        assert highest <= capacity and status.used_bytes <= capacity
        assert abs(du(disk.path) - status.used_bytes) <= 256 << 10
        assert verified(tier, disk.namespace, map(name, range(total))) == status.blocks > 0
        files = len(disk.files())
        assert status.blocks >= (files - 2) * PER_SEGMENT, "all but the segment being filled and a spare are full"
        assert files * SEGMENT > capacity - least_capacity_bytes(SEGMENT), "the capacity is made use of"


@pytest.mark.fault(33)
@pytest.mark.fault(65)
def test_the_index_of_many_small_blocks_grows_within_the_cap(disk: Disks) -> None:
    tiny = registered(disk.namespaces, 2, block_bytes=100)
    capacity = 48 * SEGMENT
    with closing(disk.open(capacity)) as tier:
        total = 9000
        for index in range(total):
            assert put(tier, tiny, name(index)) is Outcome.STORED
        status = tier.status()
        assert int(str(status.details["catalog_map_bytes"])) > 1 << 20
        assert status.blocks + status.counters.evictions["capacity"] == total
        assert du(disk.path) <= capacity
        tier.check()


@pytest.mark.fault(33)
def test_other_writers_on_the_disk_are_made_way_for(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * SEGMENT
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        fields = list(real(path))
        fields[0] = fields[1] = 4096
        fields[4] = free // 4096
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with closing(disk.open(free_floor_bytes=50 * SEGMENT)) as tier:
        for index in range(4 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        before = tier.status().details["segments"]
        free = 50 * SEGMENT
        for index in range(4 * PER_SEGMENT, 6 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert len(list(disk.segments.iterdir())) <= int(str(before))
        free = 10 * SEGMENT
        for index in range(6 * PER_SEGMENT, 8 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert len(list(disk.segments.iterdir())) == 2
        tier.check()


@pytest.mark.fault(31)
def test_a_lowered_cap_holds_from_the_start(
    disk: Disks,
) -> None:
    total = CAP // BLOCK_BYTES
    with closing(disk.open()) as tier:
        for index in range(total):
            put(tier, disk.namespace, name(index))
    lower = CAP // 2
    assert du(disk.path) > lower
    with closing(disk.open(lower)) as tier:
        assert du(disk.path) <= lower
        assert abs(tier.status().used_bytes - du(disk.path)) <= 256 << 10
        assert not tier.rebuilding
        assert get(tier, disk.namespace, name(0))[0] is Outcome.MISS
        tier.check()
        assert verified(tier, disk.namespace, map(name, range(total))) == tier.status().blocks > PER_SEGMENT
        assert tier.leading(disk.namespace, [name(total - 1)]), "the newest stay"


@pytest.mark.fault(31)
def test_files_of_others_are_named_and_left_alone(disk: Disks, caplog: pytest.LogCaptureFixture) -> None:
    (disk.path / "segments").mkdir(parents=True)
    strangers = [disk.path / "holiday.jpg", disk.path / "segments" / "0001.segment"]
    for stranger in strangers:
        stranger.write_bytes(b"x" * 5000)
    with closing(disk.open()) as tier:
        assert all(stranger.name in caplog.text for stranger in strangers)
        assert tier.status().blocks == 0
        put(tier, disk.namespace, name(1))
        tier.check()
    assert all(stranger.read_bytes() == b"x" * 5000 for stranger in strangers)


@pytest.mark.fault(35)
@pytest.mark.fault(47)
def test_there_are_no_files_per_block_and_lookups_list_no_folder(
    disk: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = registered(disk.namespaces, 2, block_bytes=100)
    fixed = {"disk", "disk/catalog", "disk/segments"}
    with closing(disk.open()) as tier:
        for index in range(2000):
            assert put(tier, tiny, name(index)) is Outcome.STORED
        paths = list(tmp_path.rglob("*"))
        assert {path.relative_to(tmp_path).as_posix() for path in paths if path.is_dir()} == fixed
        assert len(paths) < 32
        for call in ("scandir", "listdir", "stat"):
            monkeypatch.setattr(os, call, lambda *_: pytest.fail("a lookup lists folders"))
        found = tier.leading(tiny, [name(index) for index in range(1999, 1500, -1)])
        monkeypatch.undo()
        assert found == 499


def test_blocks_that_were_hit_outlive_their_segment(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(PER_SEGMENT):
            put(tier, disk.namespace, name(index))
        loved = [name(3), name(17)]
        for index in range(PER_SEGMENT, 30 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            if index % PER_SEGMENT == 0:
                assert verified(tier, disk.namespace, loved) == 2, index
        assert not tier.leading(disk.namespace, [name(4)])
        tier.check()


def test_blocks_that_are_used_above_outlive_their_segment_though_they_are_never_read_here(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        above = {name(3), name(17)}
        tier.roller.held_above = lambda namespace, id: namespace == disk.namespace and id in above
        for index in range(30 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert verified(tier, disk.namespace, [name(3), name(17)]) == 2
        assert not tier.leading(disk.namespace, [name(4)])
        tier.check()


def test_blocks_that_are_saved_find_room_though_writers_take_all_they_can_get_meanwhile(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        above, taken = {name(3), name(17)}, list[tuple[Segment, int]]()

        def held_above(namespace: Namespace, id: bytes) -> bool:
            while room := tier._shelf.take(2):
                taken.append(room)
            return id in above

        tier.roller.held_above = held_above
        for index in range(30 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            while taken:
                segment, page = taken.pop()
                tier._shelf.done(segment, page, 2, used=False)
        assert verified(tier, disk.namespace, [name(3), name(17)]) == 2
        tier.check()


@pytest.mark.parametrize("capacity", [least_capacity_bytes(SEGMENT), CAP])
@pytest.mark.parametrize("part", [0.6, 0.99])
def test_a_block_of_more_than_half_a_segment_finds_room_though_all_others_are_to_be_saved(
    disk: Disks, capacity: int, part: float
) -> None:
    large = registered(disk.namespaces, 2, block_bytes=int(part * SEGMENT) // PAGE * PAGE)
    with closing(disk.open(capacity)) as tier:
        evicted = 0

        def held_above(namespace: Namespace, id: bytes) -> bool:
            nonlocal evicted
            evicted += 1
            assert evicted < 20 * PER_SEGMENT, "it goes on without end"
            return True

        for index in range(12 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        tier.roller.held_above = held_above
        assert put(tier, large, name(9999)) is Outcome.STORED
        assert verified(tier, large, [name(9999)]) == 1
        tier.check()


@pytest.mark.parametrize("where", ["here", "above"])
def test_when_everything_is_hit_at_most_half_of_a_segment_is_saved(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    saved, most = 0, 0
    move, drop = Catalog.move, Catalog.drop_segment

    def moving(self: Catalog, moves: Sequence[tuple[bytes, Entry, Entry]]) -> list[bool]:
        nonlocal saved
        saved += len(moves)
        return move(self, moves)

    def dropping(self: Catalog, number: int) -> int:
        nonlocal saved, most
        saved, most = 0, max(most, saved)
        return drop(self, number)

    monkeypatch.setattr(Catalog, "move", moving)
    monkeypatch.setattr(Catalog, "drop_segment", dropping)
    with closing(disk.open()) as tier:
        if where == "above":
            tier.roller.held_above = lambda namespace, id: True
        for index in range(20 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            assert where == "above" or get(tier, disk.namespace, name(index))[0] is Outcome.HIT
        counters = tier.status().counters
        assert tier.status().blocks + counters.evictions["capacity"] == 20 * PER_SEGMENT
        assert most == PER_SEGMENT // 2
        tier.check()


def test_segments_in_use_are_not_evicted_and_nothing_evictable_is_full(disk: Disks) -> None:
    with closing(disk.open(least_capacity_bytes(SEGMENT))) as tier:
        for index in range(PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        (segment,) = tier._shelf.segments()
        assert tier._shelf.pin(segment.number) is segment
        for index in range(PER_SEGMENT, 2 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert tier._shelf.pin(segment.number + 1) is not None
        assert put(tier, disk.namespace, name(9999)) is Outcome.FULL
        assert tier.status().last_error == "every segment is being read or written"
        assert verified(tier, disk.namespace, map(name, range(2 * PER_SEGMENT))) == 2 * PER_SEGMENT
        tier._shelf.unpin(segment)
        assert put(tier, disk.namespace, name(9999)) is Outcome.STORED
        assert verified(tier, disk.namespace, map(name, range(PER_SEGMENT, 2 * PER_SEGMENT))) == PER_SEGMENT
        tier.check()


def test_a_write_of_the_old_epoch_is_refused_after_a_flush(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        disk.namespaces.raise_epoch(disk.namespace.id)
        assert put(tier, disk.namespace, name(1)) is Outcome.STALE
        assert tier.status().blocks == 0


def test_reclaiming_after_a_flush_empties_the_catalog(disk: Disks) -> None:
    other = registered(disk.namespaces, 2)
    with closing(disk.open()) as tier:
        for index in range(60):
            put(tier, disk.namespace, name(index))
        put(tier, other, name(100))
        flushed = disk.namespaces.raise_epoch(disk.namespace.id)
        put(tier, flushed, name(5))
        assert tier.reclaim(flushed) == 59
        assert tier.reclaim(flushed) == 0
        assert tier.status().blocks == 2
        assert tier.status().counters.evictions["flush"] == 59
        assert verified(tier, flushed, [name(5)]) == 1 == verified(tier, other, [name(100)])


@pytest.mark.fault(63)
def test_a_folder_has_one_owner_by_whatever_path(disk: Disks, tmp_path: Path) -> None:
    with closing(disk.open()):
        with pytest.raises(InUse, match=str(os.getpid())):
            disk.open()
        (tmp_path / "link").symlink_to(disk.path)
        program = (
            "import sys; from pathlib import Path; from terracekv.tiers.folder import OwnedFolder\n"
            "from terracekv.tiers.errors import InUse\n"
            "try: OwnedFolder(Path(sys.argv[1]))\n"
            "except InUse as error: print(error); sys.exit(3)"
        )
        ran = subprocess.run([sys.executable, "-c", program, str(tmp_path / "link")], capture_output=True, text=True)
        assert ran.returncode == 3 and f"running (process {os.getpid()})" in ran.stdout, ran.stderr
    with closing(disk.open()):
        pass


def test_a_tier_that_cannot_open_gives_the_folder_up(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(SegmentFiles, "found", broken)
    with pytest.raises(PermissionError):
        disk.open()
    monkeypatch.undo()
    disk.open().close()


@pytest.mark.fault(11)
@pytest.mark.parametrize("seed", range(3))
def test_listed_means_readable_through_any_history(disk: Disks, seed: int) -> None:
    """A random history of puts, reads, deletions, flushes and restarts; the seed is in the test's name."""
    dice = random.Random(seed)
    names = [name(index) for index in range(900)]
    tier = disk.open(8 << 20)
    try:
        for _ in range(2500):
            step = dice.random()
            if step < 0.7:
                assert put(tier, disk.namespace, dice.choice(names)) in (Outcome.STORED, Outcome.PRESENT)
            elif step < 0.95:
                verified(tier, disk.namespace, [dice.choice(names)])
            elif step < 0.99:
                tier.delete(disk.namespace, dice.sample(names, 3))
            elif step < 0.993:
                disk.namespace = disk.namespaces.raise_epoch(disk.namespace.id)
            else:
                tier.check()
                tier.close()
                tier = disk.open(8 << 20)
        tier.check()
        assert 0 < verified(tier, disk.namespace, names) <= tier.status().blocks
        tier.reclaim(disk.namespace)
        assert verified(tier, disk.namespace, names) == tier.status().blocks
    finally:
        tier.close()


def test_syncing_reaches_every_segment_written_since(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(SegmentFiles, "sync", lambda self, number: synced.append(number))
    with closing(disk.open()) as tier:
        for index in range(PER_SEGMENT + 1):
            put(tier, disk.namespace, name(index))
        tier.sync()
        assert synced == [1, 2]
        put(tier, disk.namespace, name(1000))
        tier.sync()
        assert synced == [1, 2, 2]


def test_many_who_ask_for_a_sync_at_once_all_get_it(disk: Disks) -> None:
    with closing(disk.open()) as tier:

        def syncs() -> None:
            for _ in range(25):
                tier.sync()

        in_threads(*[syncs] * 4)

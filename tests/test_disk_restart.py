"""What a restart of the disk tier finds: after a clean end, a kill at any line, and without its catalog."""

import os
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from terracekv.daemon import recovery
from terracekv.tests.blocks import get, in_threads, name, put, verified
from terracekv.tests.disks import PER_SEGMENT, Disks, crash
from terracekv.tiers import folder
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.entry import id_of
from terracekv.tiers.errors import TierDown
from terracekv.tiers.segment import Record, SegmentFiles
from terracekv.tiers.tier import PAGE, Outcome


@pytest.fixture
def disk(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(*_: object) -> None:
        raise AssertionError("a segment is scanned")

    monkeypatch.setattr(SegmentFiles, "scan", scan)


@pytest.mark.fault(49)
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_two_hundred_blocks_are_found_again_without_reading_segments(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def work() -> None:
        tier = disk.open()
        for index in range(200):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        if end == "closed":
            tier.close()

    crash(work) if end == "killed" else work()
    no_scan(monkeypatch)
    with closing(disk.open()) as tier:
        assert not tier.rebuilding
        assert verified(tier, disk.namespace, map(name, range(200))) == 200 == tier.status().blocks
        tier.check()


@pytest.mark.breaks("entries go by names that nothing gives them any more")
def test_a_catalog_of_before_blocks_went_by_their_namespaces_is_rebuilt(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(5):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        rows = [(called, entry) for called, entry in tier._catalog.entries() if entry is not None]
        tier._catalog.forget([(called, entry.segment, entry.page) for called, entry in rows])
        tier._catalog.publish([(id_of(called), entry) for called, entry in rows])
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.rebuild() == 5
        assert verified(tier, disk.namespace, map(name, range(5))) == 5 == tier.status().blocks
        tier.check()
    with closing(disk.open()) as tier:
        assert not tier.rebuilding, "once"


POINTS = ["segment.create", "segment.created", "segment.write", "segment.written", "disk.publish", "disk.published"]
POINTS += ["catalog.commit", "catalog.committed"]
LATER = [
    "segment.create*2",
    "segment.written*50",
    "catalog.commit*60",
    "segment.reuse",
    "segment.reused",
    "disk.evicted",
    "disk.evicted*3",
]


@pytest.mark.fault(49)
@pytest.mark.parametrize("point", [*POINTS, *LATER])
def test_killed_at_any_line_no_acknowledged_block_is_lost_and_none_is_invented(
    disk: Disks, tmp_path: Path, point: str
) -> None:
    total = 20 * PER_SEGMENT
    journal = tmp_path / "acknowledged"

    def work() -> None:
        tier = disk.open()
        with open(journal, "w", buffering=1) as acknowledged:
            for index in range(total):
                assert put(tier, disk.namespace, name(index)) is Outcome.STORED
                acknowledged.write(f"{index} {tier.status().counters.evictions.get('capacity', 0)}\n")

    crash(work, f"{point}=kill")
    lines = journal.read_text().split("\n")[:-1]
    acknowledged = len(lines)
    evicted = int(lines[-1].split()[1]) if lines else 0
    with closing(disk.open()) as tier:
        assert not tier.rebuilding
        hits = verified(tier, disk.namespace, map(name, range(total)))
        under_way = PER_SEGMENT if "evicted" in point or "commit*" in point else 0
        assert acknowledged - evicted - under_way <= hits <= acknowledged + 1
        assert not acknowledged or tier.leading(disk.namespace, [name(acknowledged - 1)])
        tier.check()
        assert put(tier, disk.namespace, name(total)) is Outcome.STORED
        assert verified(tier, disk.namespace, [name(total)]) == 1


@pytest.mark.parametrize(
    "point", ["segment.remove", "segment.removed", "segment.sync", "segment.synced", "catalog.sync"]
)
def test_killed_while_it_gets_smaller_or_closes_it_keeps_what_fits(disk: Disks, point: str) -> None:
    with closing(disk.open()) as tier:
        for index in range(6 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    small = 6 << 20

    def work() -> None:
        tier = disk.open(small)
        for index in range(6 * PER_SEGMENT, 6 * PER_SEGMENT + 5):
            put(tier, disk.namespace, name(index))
        tier.close()

    crash(work, f"{point}=kill")
    with closing(disk.open(small)) as tier:
        tier.check()
        newest = list(map(name, range(5 * PER_SEGMENT, 6 * PER_SEGMENT)))
        assert verified(tier, disk.namespace, newest) == PER_SEGMENT
        verified(tier, disk.namespace, map(name, range(7 * PER_SEGMENT)))


def test_fifty_kills_in_a_row_cost_no_room(disk: Disks) -> None:
    """Three blocks are stored and a fourth is under way at each kill."""
    for turn in range(50):

        def work(turn: int = turn) -> None:
            tier = disk.open()
            for index in range(4):
                put(tier, disk.namespace, name(3 * turn + index))

        crash(work, "disk.publish*4=kill")
    with closing(disk.open()) as tier:
        assert verified(tier, disk.namespace, map(name, range(150))) == 150
        assert int(str(tier.status().details["segments"])) == -(-150 // PER_SEGMENT)
        tier.check()


@pytest.mark.fault(50)
@pytest.mark.parametrize("loss", ["catalog", "state", "both", "machine crash", "other namespaces"])
def test_a_lost_or_distrusted_catalog_comes_back_from_the_segments(
    disk: Disks,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
) -> None:
    def work() -> None:
        tier = disk.open()
        for index in range(200):
            put(tier, disk.namespace, name(index))

    crash(work)
    if loss in ("catalog", "both"):
        (disk.path / "catalog" / "data.mdb").unlink()
    if loss in ("state", "both"):
        (disk.path / "state.json").unlink()
    if loss == "machine crash":
        monkeypatch.setattr(folder, "boot_id", lambda: "another boot")
    if loss == "other namespaces":
        disk.namespaces.identity = "0" * 32
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.status().details["rebuilding"] == 1
        assert put(tier, disk.namespace, name(500)) is Outcome.STORED
        assert put(tier, disk.namespace, name(0)) is Outcome.STORED, "not listed yet, so stored again"
        assert tier.rebuild() == 199
        assert not tier.rebuilding and tier.rebuild() == 0
        assert verified(tier, disk.namespace, [name(index) for index in (*range(200), 500)]) == 201
        tier.check()
    with closing(disk.open()) as tier:
        assert not tier.rebuilding
        assert verified(tier, disk.namespace, map(name, range(200))) == 200


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("boot", ["the same", "another"])
def test_what_a_loss_of_power_tore_is_not_listed_where_nothing_was_synced(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, boot: str, synced: bool
) -> None:
    """A header may be on the medium without its bytes. Where those were synced, or no power was lost, they are there,
    and are not read once more."""

    def work() -> None:
        tier = disk.open()
        for index in range(3 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
        if synced:
            tier.sync()

    crash(work)
    with open(disk.files()[0], "r+b") as file:
        file.seek(PAGE + 100)
        file.write(bytes(5_000))
    (disk.path / "catalog" / "data.mdb").unlink()
    if boot == "another":
        monkeypatch.setattr(folder, "boot_id", lambda: "another boot")
    read: list[int] = []
    real = SegmentFiles.read

    def reading(files: SegmentFiles, number: int, page: int, stored_bytes: int, into: memoryview) -> Record | None:
        read.append(number)
        return real(files, number, page, stored_bytes, into)

    monkeypatch.setattr(SegmentFiles, "read", reading)
    with closing(disk.open()) as tier:
        whole = tier.rebuild()
        unsure = boot == "another" and not synced
        assert whole == 3 * PER_SEGMENT - unsure
        assert len(read) == (3 * PER_SEGMENT if unsure else PER_SEGMENT if boot == "another" else 0)
        assert tier.leading(disk.namespace, [name(0)]) == (not unsure)
        assert get(tier, disk.namespace, name(0))[0] is (Outcome.MISS if unsure else Outcome.DAMAGED)
        assert verified(tier, disk.namespace, map(name, range(3 * PER_SEGMENT))) == 3 * PER_SEGMENT - 1
    if unsure:
        (disk.path / "catalog" / "data.mdb").unlink()
        with closing(disk.open()) as tier:  # all was synced at the end, so nothing is read by this rebuild
            assert tier.rebuild() == 3 * PER_SEGMENT - 1, "what was found torn once is not taken for whole later"
            assert tier.leading(disk.namespace, [name(0)]) == 0


def test_after_a_clean_end_a_restart_of_the_machine_costs_no_scan(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(1))
    monkeypatch.setattr(folder, "boot_id", lambda: "another boot")
    no_scan(monkeypatch)
    with closing(disk.open()) as tier:
        assert not tier.rebuilding and verified(tier, disk.namespace, [name(1)]) == 1


@pytest.mark.fault(50)
def test_a_rebuild_that_is_killed_begins_again(
    disk: Disks,
) -> None:
    with closing(disk.open()) as tier:
        for index in range(5 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    (disk.path / "catalog" / "data.mdb").unlink()

    def work() -> None:
        disk.open().rebuild()

    crash(work, "catalog.commit*5=kill")
    with closing(disk.open()) as tier:
        assert tier.rebuilding
        tier.rebuild()
        assert verified(tier, disk.namespace, map(name, range(5 * PER_SEGMENT))) == 5 * PER_SEGMENT


def test_a_tier_that_is_closed_before_its_rebuild_is_done_begins_it_again(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(3):
            put(tier, disk.namespace, name(index))
    (disk.path / "catalog" / "data.mdb").unlink()
    for _ in range(2):
        with closing(disk.open()) as tier:
            assert tier.rebuilding
    with closing(disk.open()) as tier:
        assert tier.rebuild() == 3 and verified(tier, disk.namespace, map(name, range(3))) == 3


def test_a_catalog_that_could_not_be_synced_at_the_end_is_not_trusted_after_a_loss_of_power(
    disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(catalog: Catalog) -> None:
        raise OSError("no such medium any more")

    with monkeypatch.context() as patched, closing(disk.open()) as tier:
        put(tier, disk.namespace, name(1))
        patched.setattr(Catalog, "sync", broken)
        tier.close()
    monkeypatch.setattr(folder, "boot_id", lambda: "another boot")
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.rebuild() == 1


def test_a_catalog_that_contradicted_itself_is_rebuilt_at_the_next_start(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(1))
        with pytest.raises(TierDown), tier._catalog._errors():
            raise lmdb.CorruptedError("said by LMDB")
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.rebuild() == 1


def test_neither_a_rebuild_nor_an_audit_keeps_a_segment_from_being_evicted_afterwards(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(2 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    (disk.path / "catalog" / "data.mdb").unlink()
    with closing(disk.open()) as tier:
        assert tier.rebuild() == 2 * PER_SEGMENT
        assert not any(segment.readers for segment in tier._shelf.segments())
        assert tier.audit(None).checked
        assert not any(segment.readers for segment in tier._shelf.segments())


def test_a_rebuild_brings_back_no_flushed_block(
    disk: Disks,
) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(1))
        flushed = disk.namespaces.raise_epoch(disk.namespace.id)
        put(tier, flushed, name(2))
    (disk.path / "state.json").unlink()
    with closing(disk.open()) as tier:
        assert tier.rebuild() == 1
        assert verified(tier, flushed, [name(1), name(2)]) == 1


def test_puts_that_evict_during_a_rebuild_leave_true_listings(
    disk: Disks,
) -> None:
    total = 8 * PER_SEGMENT
    with closing(disk.open()) as tier:
        for index in range(total):
            put(tier, disk.namespace, name(index))
    (disk.path / "state.json").unlink()
    with closing(disk.open()) as tier:

        def store() -> None:
            for index in range(total, 2 * total):
                assert put(tier, disk.namespace, name(index)) is Outcome.STORED

        def rebuild() -> None:
            tier.rebuild()

        in_threads(store, rebuild)
        assert not tier.rebuilding
        tier.check()
        assert verified(tier, disk.namespace, map(name, range(2 * total))) == tier.status().blocks


def test_a_rebuild_lists_nothing_of_a_segment_that_is_being_emptied(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(3 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    (disk.path / "state.json").unlink()
    with closing(disk.open()) as tier:
        victim = tier._shelf.victim()
        assert victim is not None and victim.number == 1
        assert tier.rebuild() == 2 * PER_SEGMENT
        assert not tier.leading(disk.namespace, [name(0)])
        tier._shelf.keep(victim)


@pytest.mark.fault(10)
@pytest.mark.fault(69)
@pytest.mark.parametrize("page", range(0, 16, 3))
def test_a_catalog_that_is_not_as_it_was_left_is_rebuilt_before_it_is_looked_at(disk: Disks, page: int) -> None:
    """The database trusts the pages of its file: a wrong one in the middle can take the process with it."""
    with closing(disk.open()) as tier:
        for index in range(200):
            put(tier, disk.namespace, name(index))
    with open(disk.path / "catalog" / "data.mdb", "r+b") as file:
        file.seek(page * PAGE + 13)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.rebuild() == 200
        assert verified(tier, disk.namespace, map(name, range(200))) == 200
        tier.check()


@pytest.mark.fault(69)
def test_a_disk_behind_a_network_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recovery._warn_of_network(tmp_path / "disk")
    assert not caplog.records
    monkeypatch.setattr(recovery, "filesystem_type", lambda folder: "nfs4")
    recovery._warn_of_network(tmp_path / "disk")
    assert "nfs4" in caplog.text and "disk.path" in caplog.text

"""What goes wrong below the disk tier: full disks, errors, damaged, missing and swapped files."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, name, payload_of, put, verified
from terracekv.tests.disks import PER_SEGMENT, SEGMENT, Disks
from terracekv.tests.faults import FaultLayer
from terracekv.tiers import failpoint
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.segment import Record, SegmentFiles, decode
from terracekv.tiers.tier import PAGE, Outcome

Breaking = Callable[[Disks, pytest.MonkeyPatch], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disks]:
    yield Disks(tmp_path)
    failpoint.disarm()


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def short_write(monkeypatch: pytest.MonkeyPatch) -> None:
    FaultLayer(monkeypatch.setattr, ["os.pwritev"])
    failpoint.arm("os.pwritev=short")


def raising(owner: object, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not an error of the medium")

    return lambda monkeypatch: monkeypatch.setattr(owner, method, fail)


POINTS = ["segment.create", "segment.write", "segment.written", "disk.publish", "catalog.commit"]
ERRORS = [(point, code) for point in POINTS for code in ("ENOSPC", "EIO")]


@pytest.mark.fault(1)
@pytest.mark.parametrize(("point", "code"), ERRORS)
@pytest.mark.parametrize("before", [0, 5], ids=["the first block", "a later block"])
def test_an_error_at_any_stage_of_a_put_leaves_the_block_absent(
    disk: Disks, point: str, code: str, before: int
) -> None:
    with closing(disk.open()) as tier:
        for index in range(100, 100 + before):
            put(tier, disk.namespace, name(index))
        failpoint.arm(f"{point}=errno:{code}")
        outcome = put(tier, disk.namespace, name(1))
        if point == "segment.create" and before:
            assert outcome is Outcome.STORED
        else:
            assert outcome is (Outcome.FULL if (point, code) == ("segment.create", "ENOSPC") else Outcome.FAILED)
            assert tier.status().last_error
            assert tier.leading(disk.namespace, [name(1)]) == 0
            assert get(tier, disk.namespace, name(1))[0] is Outcome.MISS
        failpoint.disarm()
        tier.check()
        assert put(tier, disk.namespace, name(1)) in (Outcome.STORED, Outcome.PRESENT)
        assert verified(tier, disk.namespace, [name(1), *map(name, range(100, 100 + before))]) == 1 + before
        tier.check()


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    "broken",
    [short_write, raising(SegmentFiles, "write"), raising(Catalog, "publish"), raising(Record, "encode")],
    ids=["short write", "write raises", "publish raises", "encode raises"],
)
def test_a_short_write_or_a_bug_at_any_stage_leaves_the_block_absent(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(0))
        broken(monkeypatch)
        try:
            assert put(tier, disk.namespace, name(1)) is Outcome.FAILED
        except RuntimeError:
            pass
        monkeypatch.undo()
        assert tier.leading(disk.namespace, [name(1)]) == 0
        assert get(tier, disk.namespace, name(1))[0] is Outcome.MISS
        tier.check()
        assert put(tier, disk.namespace, name(1)) is Outcome.STORED
        assert verified(tier, disk.namespace, [name(0), name(1)]) == 2


@pytest.mark.fault(1)
def test_failing_writes_do_not_evict_what_is_stored(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(PER_SEGMENT):
            put(tier, disk.namespace, name(index))
        failpoint.arm("segment.write=errno:EIO")
        for index in range(1000, 1000 + 20 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.FAILED
        failpoint.disarm()
        assert verified(tier, disk.namespace, map(name, range(PER_SEGMENT))) == PER_SEGMENT
        assert tier.status().counters.io_errors == 20 * PER_SEGMENT


def test_a_full_disk_means_a_smaller_tier(disk: Disks) -> None:
    """Segments that cannot be allocated are made up for by reusing those that are there."""
    failpoint.arm("segment.create*3=errno:ENOSPC")
    with closing(disk.open()) as tier:
        for index in range(8 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert len(disk.files()) == 2
        assert verified(tier, disk.namespace, map(name, range(8 * PER_SEGMENT))) == tier.status().blocks
        tier.check()


REAL_ENOSPC = """
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from terracekv.tests.blocks import name, put, verified
from terracekv.tests.disks import Disks
disks = Disks(Path(sys.argv[1]))
with closing(disks.open(64 << 20)) as tier:
    outcomes = [put(tier, disks.namespace, name(index)).value for index in range(600)]
    listed = verified(tier, disks.namespace, map(name, range(600)))
    tier.check()
print(*sorted(set(outcomes)), listed > 0)
"""


@pytest.mark.fault(1)
@pytest.mark.fault(68)
@pytest.mark.parametrize("size", ["3m", "1500k", "9m"])
def test_a_disk_that_is_really_full_is_lived_with(tmp_path: Path, size: str) -> None:
    script = f"mount -t tmpfs -o size={size} none {tmp_path} && exec {sys.executable} -c '{REAL_ENOSPC}' {tmp_path}"
    ran = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"no user namespaces here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert "stored" in ran.stdout and "True" in ran.stdout and "failed" not in ran.stdout, ran.stdout


def rotten_payload(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(disk.files()[0], PAGE + 77)


def rotten_header(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(disk.files()[0], 50)


def rotten_entry(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of the block's entry, also those on pages that LMDB has replaced; as if the daemon had been killed,
    for what it closed bears a seal."""
    state = disk.path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_bytes()) | {"clean": False}))
    path = disk.path / "catalog" / "data.mdb"
    data = path.read_bytes()
    at = data.find(name(0))
    while at >= 0:
        damage(path, at + 34 + 9)
        at = data.find(name(0), at + 1)


def truncated(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(disk.files()[0], PAGE + 100)


def foreign(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk.files()[0]
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(os.urandom(size))


def swapped(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = disk.files()[:2]
    first.rename(disk.segments / "aside")
    second.rename(first)
    (disk.segments / "aside").rename(second)


@pytest.mark.breaks("cuts and replaces files of segments")
@pytest.mark.fault(10)
@pytest.mark.parametrize("live", [True, False], ids=["while open", "while closed"])
@pytest.mark.parametrize("breaking", [rotten_payload, rotten_header, rotten_entry, truncated, foreign, swapped])
def test_wrong_bytes_are_a_counted_miss_that_the_next_put_heals(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, breaking: Breaking, live: bool
) -> None:
    if live and breaking is rotten_entry:
        pytest.skip("LMDB's file is not written to behind its back while it is open")
    tier = disk.open()
    for index in range(2 * PER_SEGMENT):
        put(tier, disk.namespace, name(index))
    if not live:
        tier.close()
    breaking(disk, monkeypatch)
    if not live:
        tier = disk.open()
    with closing(tier):
        assert get(tier, disk.namespace, name(0))[0] is Outcome.DAMAGED
        assert tier.status().counters.checksum_failures == 1
        assert tier.status().counters.evictions["damaged"] == 1
        assert tier.leading(disk.namespace, [name(0)]) == 0
        assert get(tier, disk.namespace, name(0))[0] is Outcome.MISS
        for index in range(2 * PER_SEGMENT):
            into = bytearray(BLOCK_BYTES)
            outcome = tier.get(disk.namespace, name(index), memoryview(into))
            assert outcome is not Outcome.HIT or into == payload_of(name(index), disk.namespace.id)
        for index in range(2 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) in (Outcome.STORED, Outcome.PRESENT)
        assert verified(tier, disk.namespace, map(name, range(2 * PER_SEGMENT))) == 2 * PER_SEGMENT


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "lie",
    [{"id": name(9)}, {"namespace_id": b"x" * 32}, {"epoch": 1}, {"generation": 2}, {"checksum": 5}, {"codec": 3}],
    ids=lambda lie: next(iter(lie)),
)
def test_a_whole_record_of_something_else_is_not_served(disk: Disks, lie: dict[str, bytes | int]) -> None:
    """The payload is right and the header is sound, but it says that the block is another."""
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(0))
        with open(disk.files()[0], "r+b") as file:
            truth = decode(file.read(PAGE))
            assert truth is not None
            file.seek(0)
            file.write(replace(truth, **lie).encode())  # type: ignore[arg-type]
        assert get(tier, disk.namespace, name(0))[0] is Outcome.DAMAGED
        assert tier.leading(disk.namespace, [name(0)]) == 0


@pytest.mark.fault(10)
def test_a_longer_file_changes_nothing(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    os.truncate(disk.files()[0], SEGMENT + 7 * PAGE + 5)
    with closing(disk.open()) as tier:
        assert verified(tier, disk.namespace, map(name, range(PER_SEGMENT))) == PER_SEGMENT
        tier.check()


@pytest.mark.fault(10)
@pytest.mark.fault(50)
@pytest.mark.parametrize("kept", [0, 1, 5000, 8192, 30_000])
def test_a_truncated_catalog_is_rebuilt(disk: Disks, kept: int) -> None:
    with closing(disk.open()) as tier:
        for index in range(200):
            put(tier, disk.namespace, name(index))
    os.truncate(disk.path / "catalog" / "data.mdb", kept)
    with closing(disk.open()) as tier:
        assert tier.rebuilding and tier.rebuild() == 200
        assert verified(tier, disk.namespace, map(name, range(200))) == 200
        tier.check()


@pytest.mark.fault(10)
def test_damaged_headers_leave_nothing_listed_behind_when_their_segment_goes(disk: Disks) -> None:
    with closing(disk.open(6 << 20)) as tier:
        for index in range(PER_SEGMENT):
            put(tier, disk.namespace, name(index))
        for record in (0, 7, PER_SEGMENT - 1):
            damage(disk.files()[0], record * 6 * PAGE + 60)
        for index in range(PER_SEGMENT, 8 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
        assert tier.leading(disk.namespace, [name(0)]) == tier.leading(disk.namespace, [name(7)]) == 0
        tier.check()


def removed(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.files()[0].unlink()


def folder_removed(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in disk.files():
        path.unlink()
    disk.segments.rmdir()


def unreadable(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``chmod 000``, which does not keep root out."""
    real = os.open
    barred = disk.files()[0]

    def opening(path: Path | str, flags: int, *rest: int) -> int:
        if Path(path) == barred:
            raise PermissionError(errno.EACCES, "permission denied", str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opening)


@pytest.mark.fault(37)
@pytest.mark.parametrize("breaking", [removed, unreadable, folder_removed])
def test_a_segment_that_is_gone_or_barred_is_a_miss_and_its_blocks_can_be_put_again(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, breaking: Breaking
) -> None:
    with closing(disk.open()) as tier:
        for index in range(2 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
        breaking(disk, monkeypatch)
        for index in range(PER_SEGMENT):
            assert get(tier, disk.namespace, name(index))[0] is Outcome.MISS
            assert tier.leading(disk.namespace, [name(index)]) == 0
            assert tier.delete(disk.namespace, [name(index)]) == 0
        assert tier.status().counters.checksum_failures == 0
        if breaking is not unreadable:
            assert not tier.leading(disk.namespace, [name(0)])
        disk.segments.mkdir(exist_ok=True)
        for index in range(2 * PER_SEGMENT):
            get(tier, disk.namespace, name(index))
        for index in range(2 * PER_SEGMENT):
            assert put(tier, disk.namespace, name(index)) in (Outcome.STORED, Outcome.PRESENT)
        assert verified(tier, disk.namespace, map(name, range(2 * PER_SEGMENT))) == 2 * PER_SEGMENT
        monkeypatch.undo()
        tier.check()


@pytest.mark.fault(37)
def test_a_segment_that_vanished_while_closed_is_noticed_at_once(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        for index in range(2 * PER_SEGMENT):
            put(tier, disk.namespace, name(index))
    disk.files()[0].unlink()
    with closing(disk.open()) as tier:
        assert not tier.rebuilding
        assert get(tier, disk.namespace, name(0))[0] is Outcome.MISS
        assert verified(tier, disk.namespace, map(name, range(2 * PER_SEGMENT))) == PER_SEGMENT == tier.status().blocks
        tier.check()


@pytest.mark.fault(37)
def test_the_active_segment_may_vanish_under_the_writer(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(0))
        disk.files()[0].unlink()
        assert put(tier, disk.namespace, name(1)) is Outcome.FAILED
        assert put(tier, disk.namespace, name(1)) is Outcome.STORED
        assert verified(tier, disk.namespace, [name(0), name(1)]) == 1
        tier.check()


@pytest.mark.fault(37)
def test_a_replacement_published_while_damage_was_found_survives(disk: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(0))
        damage(disk.files()[0], PAGE + 5)
        real = SegmentFiles.read

        def read(self: SegmentFiles, number: int, page: int, stored_bytes: int, into: memoryview) -> Record | None:
            found = real(self, number, page, stored_bytes, into)
            monkeypatch.undo()
            publish_anew(tier)
            return found

        def publish_anew(tier: DiskTier) -> None:
            tier.delete(disk.namespace, [name(0)])
            assert put(tier, disk.namespace, name(0)) is Outcome.STORED

        monkeypatch.setattr(SegmentFiles, "read", read)
        assert get(tier, disk.namespace, name(0))[0] is Outcome.DAMAGED
        assert verified(tier, disk.namespace, [name(0)]) == 1


@pytest.mark.fault(2)
def test_an_error_of_the_medium_is_a_failure_that_is_kept_in_mind(disk: Disks) -> None:
    with closing(disk.open()) as tier:
        put(tier, disk.namespace, name(0))
        failpoint.arm("segment.read=errno:EIO")
        assert get(tier, disk.namespace, name(0))[0] is Outcome.FAILED
        status = tier.status()
        assert status.counters.io_errors == 1 and "segment.read" in str(status.last_error)
        assert status.counters.hits == 0
        failpoint.disarm()
        assert tier.leading(disk.namespace, [name(0)]) == 0, "what cannot be read is not listed"
        assert put(tier, disk.namespace, name(0)) is Outcome.STORED
        assert verified(tier, disk.namespace, [name(0)]) == 1

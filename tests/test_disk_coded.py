"""The disk tier with its codec: more blocks in the same room, coded and raw records side by side, and faults."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from terracekv.tests.blocks import get, like_numbers, name, payload_of, put, registered, verified
from terracekv.tests.disks import CAP, SEGMENT, Disks, crash, du
from terracekv.tiers import disk_record, failpoint
from terracekv.tiers.checksum import checksum
from terracekv.tiers.chooser import TRIES
from terracekv.tiers.codec_id import Codec
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.segment import Record, SegmentFiles, decode
from terracekv.tiers.tier import PAGE, Outcome

VECTORS = Path(__file__).parent / "vectors" / "disk_records.json"
SHRINKING = [name(index) for index in range(60) if name(index)[0] % 2]
"""Blocks that the codec makes smaller; see ``payload_of``."""


@pytest.fixture
def disk(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def records(disk: Disks) -> list[Record]:
    """All that lie in the segments, oldest first."""
    files = SegmentFiles(disk.segments, "off")
    return [record for number in files.found()[0] for _, record in files.scan(number, SEGMENT // PAGE)]


def spoil(disk: Disks, at: int) -> None:
    """Change a byte of the oldest segment."""
    with open(disk.files()[0], "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def lie(disk: Disks, page: int, **fields: int) -> None:
    """Let a sound header of the oldest segment say something else."""
    with open(disk.files()[0], "r+b") as file:
        file.seek(page * PAGE)
        truth = decode(file.read(PAGE))
        assert truth is not None
        file.seek(page * PAGE)
        file.write(replace(truth, **fields).encode())  # type: ignore[arg-type]


def test_with_the_codec_more_blocks_fit_and_the_cap_holds(disk: Disks) -> None:
    kept = {}
    for codec in ("off", "on"):
        namespace = registered(disk.namespaces, 2, block_bytes=64 << 10, dtype="bfloat16")
        with closing(disk.open(codec=codec)) as tier:
            highest = 0
            for index in range(2 * CAP // namespace.block_bytes):
                payload = like_numbers(payload_of(name(index), size=namespace.block_bytes))
                assert put(tier, namespace, name(index), payload) is Outcome.STORED
                highest = max(highest, du(disk.path))
            assert highest <= CAP
            kept[codec] = tier.status().blocks
            assert get(tier, namespace, name(index)) == (Outcome.HIT, payload)
            tier.check()
        shutil.rmtree(disk.path)
    assert kept["on"] > 1.3 * kept["off"]


def test_records_are_coded_only_where_that_saves_a_page(disk: Disks) -> None:
    five = registered(disk.namespaces, 5, block_bytes=4 * PAGE + 1)
    two = registered(disk.namespaces, 6, block_bytes=2 * PAGE)
    one = registered(disk.namespaces, 7, block_bytes=PAGE)
    with closing(disk.open(codec="on")) as tier:
        for index, (namespace, payload) in enumerate(
            [
                (five, like_numbers(payload_of(name(1), size=4 * PAGE + 1))),
                (five, os.urandom(4 * PAGE + 1)),
                (two, like_numbers(payload_of(name(1), size=2 * PAGE))),
                (one, bytes(PAGE)),
            ]
        ):
            assert put(tier, namespace, name(index), payload) is Outcome.STORED
            assert get(tier, namespace, name(index)) == (Outcome.HIT, payload)
        assert [record.codec for record in records(disk)] == [Codec.PLANES_16, Codec.RAW, Codec.RAW, Codec.RAW]
        assert [record.pages for record in records(disk)] == [4, 6, 3, 2]
        details = tier.status().details
        assert (details["codec"], details["coded_blocks"], details["raw_blocks"]) == ("on", 1, 3)


def test_a_daemon_that_codes_nothing_serves_what_was_coded_and_one_that_codes_what_was_not(disk: Disks) -> None:
    with closing(disk.open(codec="off")) as tier:
        for index in range(40):
            put(tier, disk.namespace, name(index))
        assert tier.status().details["codec"] == "off"
    with closing(disk.open(codec="on")) as tier:
        for index in range(40, 80):
            put(tier, disk.namespace, name(index))
        assert verified(tier, disk.namespace, map(name, range(80))) == 80
    with closing(disk.open(codec="off")) as tier:
        assert verified(tier, disk.namespace, map(name, range(80))) == 80
        assert {record.codec for record in records(disk)} == {Codec.RAW, Codec.PLANES_16}
        details = tier.status().details
        assert details["codec_chosen_namespaces"] == details["coded_blocks"] == 0
        assert details["codec_decode_bytes_per_s"], "what it had to decode it measured"
        tier.check()


@pytest.mark.fault(49)
@pytest.mark.fault(50)
@pytest.mark.parametrize("line", ["", "segment.write*9=kill", "segment.written*9=kill", "disk.publish*9=kill"])
@pytest.mark.parametrize("later", ["off", "on"])
def test_killed_and_rebuilt_the_tier_has_coded_and_raw_blocks(disk: Disks, line: str, later: str) -> None:
    with closing(disk.open(codec="off")) as tier:
        for index in range(20):
            put(tier, disk.namespace, name(index))

    def work() -> None:
        tier = disk.open(codec="on")
        for index in range(20, 40):
            put(tier, disk.namespace, name(index))

    crash(work, line)
    stored = 28 if line else 40
    for _ in range(2):  # with the catalog as the kill left it, then without
        with closing(disk.open(codec=later)) as tier:
            assert tier.rebuild() in (0, stored, stored + 1)
            assert verified(tier, disk.namespace, map(name, range(28))) == 28
            assert verified(tier, disk.namespace, map(name, range(40))) == tier.status().blocks >= stored
            tier.check()
            assert {record.codec for record in records(disk)} == {Codec.RAW, Codec.PLANES_16}
        shutil.rmtree(disk.path / "catalog")


def test_hit_blocks_are_appended_anew_as_they_were_coded(disk: Disks) -> None:
    loved = SHRINKING[:2]
    with closing(disk.open(codec="on")) as tier:
        for id in loved:
            assert put(tier, disk.namespace, id) is Outcome.STORED
    before = [(record.id, record.codec, record.stored_bytes, record.checksum) for record in records(disk)]
    with closing(disk.open(codec="off")) as tier:
        for index in range(100, 100 + 3 * CAP // (24 << 10)):
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            if index % 10 == 0:
                assert verified(tier, disk.namespace, loved) == 2
        moved = [(record.id, record.codec, record.stored_bytes, record.checksum) for record in records(disk)]
        assert set(before) <= set(moved) and before[0][1] == Codec.PLANES_16
        assert min(record.generation for record in records(disk) if record.id in loved) > 1
        tier.check()


@pytest.mark.fault(10)
@pytest.mark.parametrize("at", [50, PAGE, PAGE + 3, PAGE + 5000], ids=["header", "size", "kind", "plane"])
def test_a_damaged_coded_record_is_a_counted_miss_that_the_next_put_heals(disk: Disks, at: int) -> None:
    id = SHRINKING[0]
    with closing(disk.open(codec="on")) as tier:
        put(tier, disk.namespace, id)
        put(tier, disk.namespace, SHRINKING[1])
        spoil(disk, at)
        around = bytearray(b"\xa5" * (disk.namespace.block_bytes + 128))
        into = memoryview(around)[64:]
        assert tier.get(disk.namespace, id, into) is Outcome.DAMAGED
        assert around[:64] == b"\xa5" * 64 and around[-64:] == b"\xa5" * 64
        counters = tier.status().counters
        assert (counters.checksum_failures, counters.evictions["damaged"]) == (1, 1)
        assert tier.leading(disk.namespace, [id]) == 0 and get(tier, disk.namespace, id)[0] is Outcome.MISS
        assert put(tier, disk.namespace, id) is Outcome.STORED
        assert verified(tier, disk.namespace, SHRINKING[:2]) == 2
        tier.check()


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "fields",
    [
        {"codec": Codec.RAW},
        {"codec": Codec.PLANES_32},
        {"codec": 9},
        {"stored_bytes": 100},
        {"stored_bytes": 20_000},
        {"payload_bytes": 64},
        {"checksum": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("rebuilt", [False, True], ids=["listed before", "listed by a rebuild"])
def test_a_sound_header_that_lies_is_never_believed(disk: Disks, fields: dict[str, int], rebuilt: bool) -> None:
    with closing(disk.open(codec="on")) as tier:
        put(tier, disk.namespace, SHRINKING[0])
    lie(disk, 0, **fields)
    if rebuilt:
        shutil.rmtree(disk.path / "catalog")
    with closing(disk.open(codec="on")) as tier:
        tier.rebuild()
        around = bytearray(b"\xa5" * (disk.namespace.block_bytes + 64))
        outcome = tier.get(disk.namespace, SHRINKING[0], memoryview(around))
        assert outcome is (Outcome.MISS if rebuilt and fields.get("codec") == 9 else Outcome.DAMAGED)
        assert around[-64:] == b"\xa5" * 64
        assert put(tier, disk.namespace, SHRINKING[0]) is Outcome.STORED
        assert verified(tier, disk.namespace, SHRINKING[:1]) == 1
        tier.check()


@pytest.mark.parametrize("id", [SHRINKING[0], name(1)], ids=["coded", "raw"])
def test_slots_are_read_and_written_with_no_copy_beside_the_coding(disk: Disks, id: bytes) -> None:
    size = 16 * PAGE - 100
    namespace = registered(disk.namespaces, 4, block_bytes=size)
    payload = payload_of(id, size=size)
    with closing(disk.open(codec="on")) as tier, tier._records._coder.scratch.lend(16 * PAGE, 0) as slot:
        if tier.status().mode != "direct":
            pytest.skip("this file system does not take direct I/O")
        assert slot is not None
        slot[:size] = payload
        assert tier.put(namespace, id, slot, checksum(payload)) is Outcome.STORED
        slot[:size] = bytes(size)
        assert tier.get(namespace, id, slot) is Outcome.HIT and slot[:size] == payload
        assert {record.codec for record in records(disk)} == {Codec.PLANES_16 if id in SHRINKING else Codec.RAW}
        assert not len(tier._files._staging.payload), "bytes went through memory of the segment files"


def test_nothing_of_another_block_is_written_as_padding(disk: Disks) -> None:
    with closing(disk.open(codec="on")) as tier:
        for id in SHRINKING[:9]:
            put(tier, disk.namespace, id)
        data = disk.files()[0].read_bytes()
        page = 0
        for record in records(disk):
            end = (page + 1) * PAGE + record.stored_bytes
            page += record.pages
            assert record.codec == Codec.PLANES_16 and not any(data[end : page * PAGE])


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("read", "write"):
        real = getattr(SegmentFiles, verb)

        def dawdle(*given: object, real: object = real) -> object:
            time.sleep(0.02)
            return real(*given)  # type: ignore[operator]

        monkeypatch.setattr(SegmentFiles, verb, dawdle)


def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        disk_record, "time", SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic, time_ns=time.time_ns)
    )


@pytest.mark.parametrize(("medium", "coded"), [(slow, 20), (instant, TRIES)], ids=["slow disk", "fast disk"])
def test_left_to_itself_it_codes_where_the_disk_is_slower_than_the_codec(
    disk: Disks, monkeypatch: pytest.MonkeyPatch, medium: object, coded: int
) -> None:
    medium(monkeypatch)  # type: ignore[operator]
    namespace = registered(disk.namespaces, 3, block_bytes=64 << 10, dtype="float16")
    with closing(disk.open(codec="auto")) as tier:
        for index in range(20):
            payload = like_numbers(payload_of(name(index), size=64 << 10))
            assert put(tier, namespace, name(index), payload) is Outcome.STORED
            assert get(tier, namespace, name(index)) == (Outcome.HIT, payload)
        details = tier.status().details
        assert (details["coded_blocks"], details["raw_blocks"]) == (coded, 20 - coded)
        assert details["codec_chosen_namespaces"] == int(coded == 20)
        assert details["codec_encode_bytes_per_s"] and details["codec_decode_bytes_per_s"]
        assert details["link_up_bytes_per_s"] and details["link_down_bytes_per_s"]


def test_without_memory_to_code_in_blocks_are_stored_raw_and_coded_ones_wait(
    disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(disk.open(codec="on")) as tier:
        put(tier, disk.namespace, SHRINKING[0])
        scratch = tier._records._coder.scratch
        monkeypatch.setattr(scratch, "limit_bytes", PAGE)
        assert put(tier, disk.namespace, SHRINKING[1]) is Outcome.STORED
        assert [record.codec for record in records(disk)] == [Codec.PLANES_16, Codec.RAW]
        assert get(tier, disk.namespace, SHRINKING[0])[0] is Outcome.FAILED
        assert "no memory to decode" in str(tier.status().last_error)
        monkeypatch.undo()
        assert verified(tier, disk.namespace, SHRINKING[:2]) == 2


@pytest.mark.fault(1)
@pytest.mark.parametrize("line", ["segment.write=errno:EIO", "segment.written=errno:ENOSPC", "disk.publish=errno:EIO"])
def test_a_coded_write_that_fails_leaves_the_block_absent_and_its_memory_free(disk: Disks, line: str) -> None:
    with closing(disk.open(codec="on")) as tier:
        failpoint.arm(line)
        try:
            assert put(tier, disk.namespace, SHRINKING[0]) is Outcome.FAILED
        finally:
            failpoint.disarm()
        assert tier.leading(disk.namespace, SHRINKING[:1]) == 0
        tier.check()
        assert put(tier, disk.namespace, SHRINKING[0]) is Outcome.STORED
        assert verified(tier, disk.namespace, SHRINKING[:1]) == 1


# Records as the first version wrote them.


def golden_payload(size: int) -> bytes:
    return bytes(index * index // 7 % 64 + 64 * (index % 2) for index in range(size))


def golden(folder: Path) -> tuple[Disks, list[tuple[Namespace, bytes, bytes]]]:
    """A folder with one segment of the records in the vectors, and what each should be read as."""
    disk = Disks(folder)
    disk.segments.mkdir(parents=True)
    data = b""
    wanted = []
    for vector in json.loads(VECTORS.read_text()):
        size = vector["payload_bytes"]
        space = Namespace(id=bytes.fromhex(vector["namespace_id"]), number=0, epoch=0, block_bytes=size)
        namespace = disk.namespaces.register(replace(space, dtype=vector["dtype"]))
        wanted.append((namespace, bytes.fromhex(vector["id"]), golden_payload(size)))
        for part in ("header", "stored"):
            piece = bytes.fromhex(vector[part])
            data += piece.ljust(-(-len(piece) // PAGE) * PAGE, b"\0")
    (disk.segments / "00000001.segment").write_bytes(data.ljust(SEGMENT, b"\0"))
    return disk, wanted


@pytest.mark.parametrize("codec", ["off", "on"])
def test_records_of_the_first_version_are_read(tmp_path: Path, codec: str) -> None:
    disk, wanted = golden(tmp_path)
    assert sorted(record.codec for record in records(disk)) == [0, 1, 2, 3]
    with closing(disk.open(codec=codec)) as tier:
        assert tier.rebuild() == len(wanted) == 4
        for namespace, id, payload in wanted:
            assert get(tier, namespace, id) == (Outcome.HIT, payload)
        tier.check()


def test_records_are_written_as_the_first_version_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of coded ones the header: zstandard may pack a byte more or less from one version to the next."""
    vectors = json.loads(VECTORS.read_text())
    moment = SimpleNamespace(
        time_ns=lambda: 1_700_000_000_000_000_000, perf_counter=time.perf_counter, monotonic=time.monotonic
    )
    monkeypatch.setattr(disk_record, "time", moment)
    (tmp_path / "old").mkdir()
    _, wanted = golden(tmp_path / "old")
    disk = Disks(tmp_path)
    with closing(disk.open(codec="on")) as tier:
        write_all(tier, disk.namespaces, wanted)
        (path,) = disk.files()
        data = path.read_bytes()
        page = 0
        for record, vector in zip(records(disk), vectors, strict=True):
            header, stored = bytes.fromhex(vector["header"]), bytes.fromhex(vector["stored"])
            before = decode(header.ljust(PAGE, b"\0"))
            assert before is not None and replace(record, stored_bytes=before.stored_bytes) == before
            if record.codec == Codec.RAW:
                assert data[page * PAGE :][: len(header)] == header
                assert data[(page + 1) * PAGE :][: len(stored)] == stored
            page += record.pages


def write_all(tier: DiskTier, namespaces: Namespaces, wanted: Sequence[tuple[Namespace, bytes, bytes]]) -> None:
    for space, id, payload in wanted:
        namespace = namespaces.register(replace(space, number=0, epoch=0))
        assert put(tier, namespace, id, payload) is Outcome.STORED

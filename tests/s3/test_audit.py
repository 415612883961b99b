"""Listing, checking and sweeping a bucket."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from terracekv.daemon.bucket_view import verified
from terracekv.tests.blocks import name, put, registered
from terracekv.tests.s3_stub import Kept, S3Stub
from terracekv.tests.s3_tiers import DAMAGED_EPOCHS, Node, Nodes
from terracekv.tiers import s3_audit
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import TierDown


@pytest.fixture
def a(nodes: Nodes) -> Iterator[Node]:
    with nodes(prefix="kv", codec="on") as opened:
        yield opened


@pytest.fixture
def bucket(a: Node) -> Iterator[Bucket]:
    opened = Bucket(a.tier.settings)
    yield opened
    opened.close()


def fill(at: Node, count: int) -> None:
    for index in range(count):
        put(at.tier, at.now, name(index), b"\1\2" * 10_000 if index % 2 else None)


def test_all_blocks_are_listed_over_many_pages_and_nothing_else(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    fill(a, 230)
    assert [stored.about.key for stored in s3_audit.ls(bucket)] == stub.blocks()
    assert {stored.place.id for stored in s3_audit.ls(bucket)} == {name(index) for index in range(230)}


def test_one_namespace_can_be_listed_alone(a: Node, bucket: Bucket) -> None:
    other = registered(a.namespaces, 2)
    fill(a, 3)
    put(a.tier, other, name(1))
    assert len(list(s3_audit.ls(bucket))) == 4
    (stored,) = s3_audit.ls(bucket, namespace_id=other.id)
    assert stored.place.namespace_id == other.id


def test_space_is_told_by_namespace_and_epoch(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    fill(a, 4)
    stub.age(a.key(0), 1000)
    old = a.now
    new = a.flush()
    put(a.tier, new, name(9))
    spaces = {space.epoch: space for space in s3_audit.stat(bucket)}
    assert (spaces[old.epoch].objects, spaces[new.epoch].objects) == (4, 1)
    assert (spaces[old.epoch].current, spaces[new.epoch].current) == (False, True)
    assert sum(space.bytes for space in spaces.values()) == sum(len(stub.objects[key].content) for key in stub.blocks())
    assert spaces[old.epoch].oldest_s > 900 > 100 > spaces[old.epoch].newest_s


@pytest.mark.fault(10)
def test_verifying_reads_every_block_and_names_the_damaged_ones(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    fill(a, 6)
    assert [why for _, why in s3_audit.verify(bucket)] == [None] * 6
    stub.objects[a.key(0)].content = b"junk"
    stub.objects[a.key(1)].content = stub.objects[a.key(3)].content
    good = stub.objects[a.key(2)].content
    stub.objects[a.key(2)].content = good[:9000] + bytes([good[9000] ^ 255]) + good[9001:]
    wrong = {stored.place.id: why for stored, why in s3_audit.verify(bucket) if why is not None}
    assert wrong.keys() == {name(0), name(1), name(2)}
    assert "less than a header" in wrong[name(0)] and "another block" in wrong[name(1)]


@pytest.mark.parametrize("trouble", ["stall", "stall_body", "cut_body", "gone"])
def test_what_cannot_be_read_is_not_called_damaged(a: Node, stub: S3Stub, trouble: str) -> None:
    fill(a, 3)
    bucket = Bucket(replace(a.tier.settings, read_timeout_s=0.5))
    seen = []
    with pytest.raises(TierDown):
        for _, problem in s3_audit.verify(bucket, 10.0):
            seen.append(problem)
            if trouble == "gone":
                stub.go()
            else:
                setattr(stub.switches, trouble, True)
    assert set(seen) == {None}
    if trouble == "gone":
        stub.come_back()
    stub.switches.stall = stub.switches.stall_body = stub.switches.cut_body = False
    rows, said = [], ""
    try:
        for row in verified(bucket, None):
            rows.append(row["problem"])
            if len(rows) == 2:
                stub.go()
    except TierDown as error:
        said = error.message
    stub.come_back()
    bucket.close()
    assert rows == [None, None] and "2 were whole, 0 damaged" in said


def test_a_server_that_asks_for_fewer_calls_is_looked_at_and_swept_to_the_end(
    a: Node, stub: S3Stub, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_audit, "PAUSES_S", (0.0,) * 4)
    fill(a, 12)
    stub.switches.slow_down = 0.5
    assert [problem for _, problem in s3_audit.verify(bucket)] == [None] * 12
    assert [space.objects for space in s3_audit.stat(bucket)] == [12]
    assert s3_audit.begun_by(bucket, a.now.id.hex()[:8]) == [a.now.id]
    for key in stub.blocks():
        stub.age(key, 100)
    assert s3_audit.gc(bucket, 10)[0] == 12 and not stub.blocks()
    stub.switches.slow_down = 1.0
    with pytest.raises(TierDown, match="SlowDown"):
        list(s3_audit.ls(bucket))


def test_a_slow_link_is_given_the_time_that_it_takes(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    fill(a, 1)
    stub.switches.bytes_per_s = 15_000
    assert [problem for _, problem in s3_audit.verify(bucket, 1.0)] == [None]


@pytest.mark.parametrize("content", DAMAGED_EPOCHS, ids=repr)
def test_by_an_epoch_that_no_daemon_believes_nothing_is_swept(
    a: Node, stub: S3Stub, bucket: Bucket, content: bytes
) -> None:
    fill(a, 3)
    stub.objects[a.key_of_epoch] = Kept(content, datetime.now(UTC))
    assert s3_audit.gc(bucket, 0) == s3_audit.gc(bucket, 3600) == (0, 0)
    assert len(stub.blocks()) == 3 and [space.current for space in s3_audit.stat(bucket)] == [True]


def test_sweeping_takes_what_is_old_or_flushed_and_nothing_else(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    fill(a, 3)
    new = a.flush()
    for index in range(10, 14):
        put(a.tier, new, name(index))
    stub.age(a.key(10), 5000)
    before = dict(stub.objects)
    dry = s3_audit.gc(bucket, 3600, dry=True)
    assert dry[0] == 4 and stub.objects == before
    assert s3_audit.gc(bucket, 3600) == dry
    assert stub.blocks() == sorted(a.key(index) for index in range(11, 14))
    assert s3_audit.gc(bucket, 0) == (0, 0)
    assert "kv/terracekv.probe" in stub.objects


def test_a_namespace_is_found_by_a_unique_prefix_of_its_id(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    for id in ("ab" * 32, "ab" * 31 + "ac", "cd" * 32):
        for key in (f"{id}/epoch", f"{id}/0/00/{'00' * 32}.0"):
            stub.objects[bucket.settings.root + key] = Kept(b"0", datetime.now(UTC))
    stub.objects[bucket.settings.root + "abab.txt"] = Kept(b"none of ours", datetime.now(UTC))
    assert s3_audit.begun_by(bucket, "cdcdcdcd") == [bytes.fromhex("cd" * 32)]
    assert len(s3_audit.begun_by(bucket, "abababab")) == 2
    assert s3_audit.begun_by(bucket, "ab" * 31 + "ac") == [bytes.fromhex("ab" * 31 + "ac")]
    assert s3_audit.begun_by(bucket, "00000000") == []


def test_a_sweep_of_one_namespace_leaves_the_others(a: Node, stub: S3Stub, bucket: Bucket) -> None:
    other = registered(a.namespaces, 2)
    put(a.tier, a.now, name(1))
    put(a.tier, other, name(2))
    for key in stub.blocks():
        stub.age(key, 100)
    assert s3_audit.gc(bucket, 10, namespace_id=other.id)[0] == 1
    assert [key for key in stub.blocks() if a.now.id.hex() in key] == stub.blocks() != []


def test_a_list_that_is_pages_of_nothing_ends(stub: S3Stub, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.tiers.bucket.EMPTY_PAGES_MAX", 5)
    stub.switches.unheeded = "end"
    with pytest.raises(TierDown, match="does not go on"):
        list(bucket.list("kv/", 5.0))


def test_a_server_that_lists_folder_by_folder_is_looked_at_and_swept_whatever_else_lies_there(
    a: Node, stub: S3Stub, bucket: Bucket
) -> None:
    fill(a, 130)
    stub.switches.by_folder = True
    space = a.now.id.hex()
    for foreign in ("a/x", "a-b/x", "a.b", f"{space}/0/zz/y", f"{space}/0-old/y", f"{space}-old/y"):
        stub.objects[f"kv/{foreign}"] = Kept(b"not ours", datetime.now(UTC))
    assert [stored.about.key for stored in s3_audit.ls(bucket)] == stub.blocks()
    assert [why for _, why in s3_audit.verify(bucket)] == [None] * 130
    assert s3_audit.gc(bucket, 0, dry=True) == (0, 0)
    assert a.tier.sweep(a.flush()) == (130, None)
    assert len(stub.objects) == 8 and not stub.blocks(), "what is not ours stays, and the epoch and the probe"


@pytest.mark.parametrize("unheeded", ["prefix", "start-after", "continuation-token"])
def test_a_list_of_what_was_not_asked_for_sweeps_nothing_of_it(
    a: Node, stub: S3Stub, bucket: Bucket, unheeded: str
) -> None:
    other = registered(a.namespaces, 2)
    for index in range(120):
        put(a.tier, a.now, name(index))
    put(a.tier, other, name(1))
    flushed = a.flush()
    stub.switches.unheeded = unheeded
    if unheeded == "prefix":
        assert a.tier.sweep(flushed)[1] is not None
        with pytest.raises(TierDown, match="not what was asked for"):
            s3_audit.gc(bucket, 0, namespace_id=a.now.id)
    elif unheeded == "start-after":
        with pytest.raises(TierDown, match="not what was asked for"):
            list(bucket.list("kv/", 5.0, after=stub.blocks()[5]))
    else:
        with pytest.raises(TierDown, match="not what was asked for"):
            list(s3_audit.ls(bucket))
    assert any(other.id.hex() in key for key in stub.blocks())

"""Flushes that hold on all nodes, and the lifetime of objects."""

from datetime import UTC, datetime
from typing import Any

import pytest

from terracekv.tests.blocks import get, in_threads, name, put
from terracekv.tests.s3_stub import Kept, S3Stub
from terracekv.tests.s3_tiers import DAMAGED_EPOCHS, Node, Nodes, soon, until
from terracekv.tiers.errors import TierDown
from terracekv.tiers.s3_record import EPOCH_BELIEVED_MAX
from terracekv.tiers.tier import Outcome


def test_a_flush_on_one_node_holds_on_all(a: Node, nodes: Nodes) -> None:
    with nodes("b", epoch_ttl_s=0) as b:
        put(a.tier, a.now, name(1))
        assert get(b.tier, b.now, name(1))[0] is Outcome.HIT
        a.flush()
        before = b.now
        assert get(b.tier, before, name(1))[0] is Outcome.MISS
        assert b.now.epoch == a.now.epoch == before.epoch + 1
        assert put(b.tier, before, name(2)) is Outcome.STALE
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0


def test_a_node_that_joins_later_learns_of_a_flush_before_it_reads(a: Node, nodes: Nodes) -> None:
    put(a.tier, a.now, name(1))
    a.flush()
    with nodes("late") as b:
        assert b.now.epoch == 0
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0
        assert b.now.epoch == 1


def test_two_flushes_at_once_both_cover_what_was_there_before(a: Node, nodes: Nodes) -> None:
    with nodes("b") as b:
        a.flush()
        put(a.tier, a.now, name(1))
        b.flush()
        assert b.now.epoch == 2, "b's flush came after a's block"
        assert get(b.tier, b.now, name(1))[0] is Outcome.MISS


def test_a_flush_that_comes_between_reading_and_writing_the_epoch_is_not_overwritten(
    a: Node, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes("b") as b:
        read = b.tier._epochs._read
        turns = iter([True])

        def read_then_others_flush(*arguments: Any) -> Any:
            found = read(*arguments)
            if next(turns, False):
                a.flush()
                put(a.tier, a.now, name(1))
            return found

        monkeypatch.setattr(b.tier._epochs, "_read", read_then_others_flush)
        b.flush()
        assert (a.now.epoch, b.now.epoch) == (1, 2)
        assert get(b.tier, b.now, name(1))[0] is Outcome.MISS


def test_flushes_that_race_leave_all_nodes_agreeing(nodes: Nodes) -> None:
    with nodes("a", epoch_ttl_s=0) as a, nodes("b", epoch_ttl_s=0) as b:
        in_threads(*[lambda n=n: [n.flush() for _ in range(5)] for n in (a, b)])
        for at in (a, b):
            at.tier.leading_remote(at.now, [name(1)], soon())
        assert a.now.epoch == b.now.epoch >= 5


def test_a_flush_that_the_bucket_missed_is_made_up_for(nodes: Nodes, stub: S3Stub) -> None:
    with nodes("a", timeout_s=3.0) as a, nodes("b", epoch_ttl_s=0) as b:
        put(a.tier, a.now, name(1))
        stub.go()
        with pytest.raises(TierDown):
            a.flush()
        assert a.tier.leading(a.now, [name(1)]) == 0
        assert a.tier.status().details["unheard_flushes"] == 1
        stub.come_back()
        until(lambda: a.tier.status().mode == "up", "it comes back")
        assert put(a.tier, a.now, name(2)) is Outcome.STORED
        assert a.tier.status().details["unheard_flushes"] == 0
        until(lambda: b.tier.status().mode == "up", "it comes back")
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0
        assert b.now.epoch == a.now.epoch == 1


def test_a_flush_that_the_bucket_missed_covers_what_others_stored_before_it_after_a_restart_too(
    nodes: Nodes, stub: S3Stub
) -> None:
    with nodes("b", epoch_ttl_s=0) as b:
        with nodes("a", timeout_s=3.0) as a:
            put(a.tier, a.now, name(1))
            b.flush()
            assert put(b.tier, b.now, name(1)) is Outcome.STORED
            stub.go()
            with pytest.raises(TierDown):
                a.flush()
        stub.come_back()
        with nodes("a") as a:
            assert a.tier.status().details["unheard_flushes"] == 1
            for _ in range(2):
                assert get(a.tier, a.now, name(1))[0] is Outcome.MISS
            assert a.tier.status().details["unheard_flushes"] == 0
        with nodes("a") as a:
            assert a.tier.status().details["unheard_flushes"] == 0 and a.now.epoch == 2
        until(lambda: b.tier.status().mode == "up", "it comes back")
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0 and b.now.epoch == 2


def test_flushed_objects_are_reclaimed_and_present_ones_are_not(a: Node, stub: S3Stub) -> None:
    for index in range(5):
        put(a.tier, a.now, name(index))
    flushed = a.flush()
    put(a.tier, flushed, name(9))
    assert a.tier.reclaim(flushed) == 5
    assert stub.blocks() == [a.key(9)]
    assert a.tier.status().counters.evictions["flush"] == 5


def test_a_damaged_epoch_is_not_guessed_at(a: Node, nodes: Nodes, stub: S3Stub) -> None:
    for content in DAMAGED_EPOCHS:
        stub.objects[a.key_of_epoch] = Kept(content, datetime.now(UTC))
        with nodes(f"b{content!r:.12}") as b:
            assert get(b.tier, b.now, name(1))[0] is Outcome.FAILED, content
            assert "epoch is damaged" in str(b.tier.status().last_error)
            raised = b.namespaces.raise_epoch(b.now.id)
            with pytest.raises(TierDown, match="epoch is damaged"):
                b.tier.flush(raised)
            assert b.now.epoch == 1, "what is not believed is not taken over"


def test_what_is_wrong_again_and_again_is_logged_once_and_counted_always(
    a: Node, stub: S3Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.objects[a.key_of_epoch] = Kept(b"one", datetime.now(UTC))
    for index in range(20):
        assert put(a.tier, a.now, name(index)) is Outcome.FAILED
    assert a.tier.status().counters.io_errors == 20
    assert len([record for record in caplog.records if "epoch is damaged" in record.getMessage()]) == 1


@pytest.mark.parametrize("there", [0, 7, 10**6, EPOCH_BELIEVED_MAX - 1, EPOCH_BELIEVED_MAX])
def test_whatever_epoch_is_believed_can_be_flushed_or_says_that_it_is_the_last(
    a: Node, nodes: Nodes, stub: S3Stub, there: int
) -> None:
    stub.objects[a.key_of_epoch] = Kept(b"%d" % there, datetime.now(UTC))
    assert put(a.tier, a.now, name(1)) is (Outcome.STORED if there == 0 else Outcome.STALE)
    assert put(a.tier, a.now, name(1)) is (Outcome.PRESENT if there == 0 else Outcome.STORED)
    if there == EPOCH_BELIEVED_MAX:
        with pytest.raises(TierDown, match="the last"):
            a.flush()
        return
    a.flush()
    with nodes("b") as b:
        assert get(b.tier, b.now, name(1))[0] is Outcome.MISS and b.now.epoch in (0, there + 1)
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0 and b.now.epoch == a.now.epoch == there + 1


def test_chains_that_are_read_are_dated_anew_before_half_their_life_is_over(nodes: Nodes, stub: S3Stub) -> None:
    ids = [name(index) for index in range(4)]
    with nodes("a", ttl_s=1000) as a, nodes("b", ttl_s=1000) as b:
        for id in ids:
            put(a.tier, a.now, id)
        for index in range(4):
            stub.age(a.key(index), 450 if index == 3 else 600)
        before = stub.asked.total()
        assert a.tier.redate(a.now, ids) == 0, "it stored them itself, so it takes them to be young"
        assert stub.asked.total() == before
        for id in ids[:2]:
            get(b.tier, b.now, id)
        assert b.tier.redate(b.now, ids) == 3
        ages = [(datetime.now(UTC) - stub.objects[a.key(index)].modified).total_seconds() for index in range(4)]
        assert [age > 400 for age in ages] == [False, False, False, True]
        copies = [key for method, key, headers in stub.requests if "x-amz-copy-source" in headers]
        assert copies == [a.key(index) for index in range(3)], "the head first"
        before = stub.asked.total()
        assert b.tier.redate(b.now, ids) == 0
        assert stub.asked.total() == before, "young objects are not asked about"
        assert get(b.tier, b.now, ids[0])[0] is Outcome.HIT


def test_a_chain_without_its_head_is_not_kept_alive(nodes: Nodes, stub: S3Stub) -> None:
    with nodes("a") as a, nodes("b", ttl_s=1000) as b:
        for index in range(3):
            put(a.tier, a.now, name(index))
            stub.age(a.key(index), 600)
        chain = [name(index) for index in range(3)]
        assert b.tier.leading_remote(b.now, chain, soon()) == 3
        del stub.objects[a.key(0)]
        assert b.tier.redate(b.now, chain) == 0
        assert b.tier.status().details["aged_out"] == 1
        assert b.tier.redate(b.now, [name(9)]) == 0
        assert b.tier.status().details["aged_out"] == 1, "what was never known to be there has not aged out"


def test_an_epoch_that_is_half_its_life_old_is_written_anew(nodes: Nodes, stub: S3Stub) -> None:
    with nodes("a", ttl_s=1000, epoch_ttl_s=0) as a:
        a.flush()
        (key,) = [key for key in stub.objects if key.endswith("/epoch")]
        for age, renewed in ((400, False), (200, True)):
            stub.age(key, age)
            before = stub.objects[key]
            get(a.tier, a.now, name(1))
            assert (stub.objects[key] is not before) == renewed
            assert stub.objects[key].content == b"1"


def test_without_conditional_writes_flushes_still_reach_other_nodes(a: Node, nodes: Nodes, stub: S3Stub) -> None:
    stub.switches.no_conditions = True
    put(a.tier, a.now, name(1))
    a.flush()
    with nodes("b") as b:
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0
        assert b.now.epoch == 1
    assert a.tier.status().mode == "up"

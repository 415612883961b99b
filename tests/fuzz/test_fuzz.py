"""A few seconds of each fuzzer; ``make fuzz`` does the rest. A failure names the seed that repeats it."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terracekv.daemon import protocol
from terracekv.tests.blocks import name
from terracekv.tests.fuzz.answers import fuzz_answers
from terracekv.tests.fuzz.door import fuzz_door
from terracekv.tests.fuzz.live import fuzz_live
from terracekv.tests.fuzz.mutants import EDGES, Mutants, corpus
from terracekv.tests.fuzz.owed import Owed
from terracekv.tests.fuzz.records import fuzz_records
from terracekv.tests.fuzz.states import fuzz_states
from terracekv.tiers import entry, segment

pytestmark = pytest.mark.long
SEED = int(os.environ.get("TERRACEKV_TEST_SEED", int.from_bytes(os.urandom(4))))


def test_frames_that_no_engine_sends_are_answered_and_cost_nobody_else_anything(shm_dir: Path, tmp_path: Path) -> None:
    figures = fuzz_door(shm_dir, tmp_path, count=12_000, seed=SEED)
    assert figures["frames"] == 12_000


def test_a_daemon_at_the_other_end_of_a_socket_lives_through_them_too(shm_dir: Path, tmp_path: Path) -> None:
    assert fuzz_live(shm_dir, tmp_path, count=6000, seed=SEED)["frames"] == 6000


@pytest.mark.breaks("damages what lies on disk")
@pytest.mark.fault(10)
def test_wrong_bytes_on_disk_are_a_miss_or_nothing_wrong(shm_dir: Path) -> None:
    fuzz_records(shm_dir, count=400, seed=SEED)


@pytest.mark.breaks("damages what lies on disk")
@pytest.mark.fault(10)
@pytest.mark.fault(50)
def test_a_start_on_damaged_files_forgets_rebuilds_or_says_what_to_do(shm_dir: Path, tmp_path: Path) -> None:
    fuzz_states(shm_dir, tmp_path, count=60, seed=SEED)


def test_whatever_an_s3_server_answers_is_a_block_or_none(tmp_path: Path) -> None:
    fuzz_answers(tmp_path, count=60, seed=SEED)


def test_the_people_s_door_does_what_its_document_says(shm_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    from terracekv.tests.fuzz.routes import fuzz_routes

    asked = fuzz_routes(shm_dir, tmp_path, count=150, seed=SEED)
    assert asked["routes"] > 15 and asked["requests"] > 2 * asked["routes"], asked


def test_the_same_seed_makes_the_same_bytes() -> None:
    one, two = Mutants(5), Mutants(5)
    made = [one.mutated(data, corpus("frames")) for data in corpus("frames")]
    assert made == [two.mutated(data, corpus("frames")) for data in corpus("frames")]
    assert sum(wrong != data for wrong, data in zip(made, corpus("frames"), strict=True)) > len(made) / 2


def test_an_answer_that_is_missing_or_comes_twice_is_noticed() -> None:
    """The fuzzers of the door would be worth nothing without this."""
    asked, answered = protocol.frame(protocol.Lookup(7, b"", 10)), protocol.Committed(7, [], [])
    owed = Owed()
    owed.sent(asked[:5])
    assert not owed.due
    owed.sent(asked[5:])
    assert owed.due and "not answered" in str(owed.wrong(closed=False))
    owed.came(answered)
    assert not owed.due and owed.wrong(closed=False) is None
    owed.came(answered)
    assert "too often" in str(owed.wrong(closed=False)) and "without a reason" in str(owed.wrong(closed=True))
    owed.sent(b"\1\0\0\0\xc1")
    assert owed.due
    owed.came(protocol.Error(0, "bad_request", "m", "h"))
    assert not owed.due and owed.wrong(closed=True) is None


@given(st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_bytes_are_taken_for_a_record_or_an_entry_by_chance(data: bytes) -> None:
    assert segment.decode(data) is None and entry.unpack(name(1), data) is None


@given(st.lists(st.sampled_from(EDGES), min_size=8, max_size=8))
def test_an_entry_of_any_numbers_comes_back_as_it_was(numbers: list[int]) -> None:
    limits = (2**64, 2**32, 2**32, 2**64, 2**64, 2**64, 2**16, 2**16)
    made = entry.Entry(*(number % limit for number, limit in zip(numbers, limits, strict=True)))
    assert entry.unpack(name(1), entry.pack(name(1), made)) == made
    assert entry.unpack(name(2), entry.pack(name(1), made)) is None

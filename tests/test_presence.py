"""Few questions about a chain, and the bounded memory of the answers."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.tests.blocks import name
from terracekv.tiers.presence import PresenceTable, gallop


class Chain:
    """``there`` blocks of a chain exist; ``late`` positions are never answered."""

    def __init__(self, there: int, late: Sequence[int] = ()) -> None:
        self.there = there
        self.late = late
        self.asked: list[int] = []
        self.rounds = 0

    def ask(self, positions: Sequence[int]) -> dict[int, bool]:
        self.asked += positions
        self.rounds += 1
        return {at: at < self.there for at in positions if at not in self.late}


@settings(max_examples=300, deadline=None)
@given(length=st.integers(0, 300), there=st.integers(0, 300), low=st.integers(0, 300))
def test_galloping_finds_the_end_of_any_chain(length: int, there: int, low: int) -> None:
    there = min(there, length)
    low = min(low, there)
    chain = Chain(there)
    assert gallop(low, length, chain.ask) == (there, True)
    assert len(set(chain.asked)) == len(chain.asked)
    assert not chain.asked or low <= min(chain.asked) <= max(chain.asked) < length


@pytest.mark.parametrize("there", range(129))
def test_a_chain_of_128_blocks_costs_at_most_14_questions(there: int) -> None:
    chain = Chain(there)
    assert gallop(0, 128, chain.ask) == (there, True)
    assert len(chain.asked) <= 2 * math.log2(128)


@pytest.mark.parametrize("there", [0, 128])
def test_all_or_nothing_costs_one_round_trip(there: int) -> None:
    chain = Chain(there)
    gallop(0, 128, chain.ask)
    assert chain.rounds == 1


@settings(max_examples=200, deadline=None)
@given(there=st.integers(0, 128), late=st.sets(st.integers(0, 127)))
def test_answers_that_do_not_come_make_the_count_unsure_and_never_too_high(there: int, late: set[int]) -> None:
    chain = Chain(there, sorted(late))
    count, sure = gallop(0, 128, chain.ask)
    assert count <= there
    assert count == there or not sure


def test_a_chain_that_lost_its_head_ends_there() -> None:
    count, _ = gallop(0, 8, lambda positions: {at: at != 0 for at in positions})
    assert count == 0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_answers_are_kept_for_their_time(clock: Clock) -> None:
    table = PresenceTable(1024, clock)
    assert table.get(1, name(1)) is None
    table.note(1, name(1), True, 10)
    table.note(1, name(2), False, 5)
    assert (table.get(1, name(1)), table.get(1, name(2))) == (True, False)
    clock.now += 6
    assert (table.get(1, name(1)), table.get(1, name(2))) == (True, None)
    clock.now += 5
    assert table.get(1, name(1)) is None
    table.check()


def test_answers_are_of_one_epoch_and_shard(clock: Clock) -> None:
    table = PresenceTable(1024, clock)
    table.note(1, name(1), True, 10)
    assert table.get(2, name(1)) is None
    assert table.get(1 << 32 | 1, name(1)) is None
    assert table.get(1, name(1, shard=1)) is None


def test_leading_ends_at_what_is_absent_or_unknown(clock: Clock) -> None:
    table = PresenceTable(1024, clock)
    ids = [name(index) for index in range(6)]
    for id in ids[:4]:
        table.note(1, id, True, 10)
    assert table.leading(1, ids) == 4
    table.note(1, ids[2], False, 10)
    assert table.leading(1, ids) == 2
    assert table.count() == 3
    table.note(1, ids[0], True, 20)
    clock.now += 11
    assert table.leading(1, ids) == 1, "what has ended is unknown"
    table.check()


def test_memory_is_bounded_and_what_ends_first_goes_first(clock: Clock) -> None:
    table = PresenceTable(256, clock)
    before = (len(table._marks), len(table._ends), len(table._present))
    for index in range(5000):
        table.note(1, name(index), True, 100)
        clock.now += 0.01
    assert (len(table._marks), len(table._ends), len(table._present)) == before
    assert table.count() <= 512
    assert sum(table.get(1, name(index)) is True for index in range(4900, 5000)) > 90
    table.check()


def test_what_fits_is_not_forgotten(clock: Clock) -> None:
    table = PresenceTable(4096, clock)
    for index in range(4000):
        table.note(1, name(index), True, 100)
    assert table.leading(1, [name(index) for index in range(4000)]) == 4000

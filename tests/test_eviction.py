"""Which block goes next: the least recently or least often used, tail before head; what may come in, and what is
remembered of those that went."""

import hashlib
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.tests.blocks import name
from terracekv.tiers.eviction import Admission, ByWeight, Ghosts, Order, TailFirst, Turnover

CHAIN = [name(index) for index in range(6)]


def filled(*chains: list[bytes]) -> TailFirst:
    order = TailFirst()
    place = 0
    for tick, chain in enumerate(chains):
        for id in chain:
            order.insert(id, place, tick)
            place += 1
        order.touch(chain, tick)
    return order


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    assert filled(CHAIN).ids() == CHAIN[::-1]


def test_the_chain_used_longest_ago_goes_first() -> None:
    first, second = CHAIN[:3], CHAIN[3:]
    order = filled(first, second)
    assert order.ids() == first[::-1] + second[::-1]
    order.touch(first, 2)
    assert order.ids() == second[::-1] + first[::-1]


def test_a_shared_prefix_goes_after_every_tail_that_hangs_on_it() -> None:
    shared, one, two = CHAIN[:2], CHAIN[2:4], CHAIN[4:]
    order = filled(shared, one, two)
    order.touch(shared + one, 3)
    order.touch(shared + two, 4)
    assert order.ids() == one[::-1] + two[::-1] + shared[::-1]


def test_the_oldest_tells_place_and_tick_of_its_last_use() -> None:
    order = TailFirst()
    assert order.oldest() is None
    order.insert(CHAIN[0], 2**32 - 1, 0)
    order.insert(CHAIN[1], 7, 1)
    order.touch([CHAIN[0]], 2**40)
    assert order.oldest() == (CHAIN[1], 7, 1)
    assert order.discard(CHAIN[1]) == 7 and order.discard(CHAIN[1]) is None
    assert order.oldest() == (CHAIN[0], 2**32 - 1, 2**40)


def test_one_that_cannot_go_now_goes_last() -> None:
    order = filled(CHAIN)
    order.spare(CHAIN[-1], 9)
    assert order.ids() == [*CHAIN[-2::-1], CHAIN[-1]]
    assert [rank for rank, _ in order.upcoming()][-1] == 9
    assert order.get(CHAIN[-1]) == len(CHAIN) - 1


def test_touching_what_is_not_here_brings_nothing_in() -> None:
    order = filled(CHAIN[:2])
    order.touch(CHAIN, 9)
    assert len(order) == 2 and CHAIN[2] not in order and order.get(CHAIN[2]) is None
    assert order.leading(CHAIN) == 2 and order.leading(CHAIN[2:]) == 0


@given(
    st.lists(st.tuples(st.sampled_from(["insert", "touch", "discard", "spare"]), st.integers(0, 5), st.integers(0, 5)))
)
def test_it_is_an_ordered_list_with_an_index(steps: list[tuple[str, int, int]]) -> None:
    """Beside a plain list, of which the first goes first."""
    order, model = TailFirst(), list[bytes]()
    for tick, (verb, start, end) in enumerate(steps):
        id = CHAIN[start]
        if verb == "insert" and id not in model:
            order.insert(id, start, tick)
            model.append(id)
        elif verb == "touch":
            order.touch(CHAIN[start:end], tick)
            moved = [each for each in reversed(CHAIN[start:end]) if each in model]
            model = [each for each in model if each not in moved] + moved
        elif verb == "discard":
            assert order.discard(id) == (start if id in model else None)
            model = [each for each in model if each != id]
        elif verb == "spare" and id in model:
            order.spare(id, tick)
            model = [each for each in model if each != id] + [id]
    assert order.ids() == model and order.ids(2) == model[:2]
    assert dict(order.places()) == {id: CHAIN.index(id) for id in model}


def test_ghosts_remember_what_was_added_until_it_is_forgotten() -> None:
    ghosts = Ghosts(1 << 10)
    assert not ghosts.has(7, name(1))
    ghosts.add(7, name(1))
    assert ghosts.has(7, name(1)) and not ghosts.has(7, name(2))
    ghosts.discard(7, name(2))
    assert ghosts.has(7, name(1))
    ghosts.discard(7, name(1))
    assert not ghosts.has(7, name(1))


@pytest.mark.parametrize("shard", [1, 2, 255, 256, 65_535])
def test_of_one_shard_nothing_follows_for_another(shard: int) -> None:
    ghosts = Ghosts(1 << 10)
    ghosts.add(7, name(1))
    assert not ghosts.has(7, name(1, shard))
    ghosts.add(7, name(1, shard))
    assert ghosts.has(7, name(1)) and ghosts.has(7, name(1, shard))
    ghosts.discard(7, name(1))
    assert not ghosts.has(7, name(1)) and ghosts.has(7, name(1, shard))


def test_what_is_remembered_of_one_namespaces_block_is_not_of_anothers_of_the_same_id() -> None:
    ghosts = Ghosts(1 << 10)
    ghosts.add(7, name(1))
    ghosts.discard(8, name(1))
    assert ghosts.has(7, name(1)) and not ghosts.has(8, name(1))


def test_ghosts_take_no_more_memory_the_more_they_see() -> None:
    """The newest are remembered nearly all, and of strangers hardly one is taken for known."""
    ghosts = Ghosts(1 << 10)
    dice = random.Random(1)
    seen = [name(dice.getrandbits(64)) for _ in range(20_000)]
    for id in seen:
        ghosts.add(7, id)
    assert ghosts._table.itemsize * len(ghosts._table) == 16 << 10
    assert sum(ghosts.has(7, id) for id in seen[-100:]) > 95
    assert sum(ghosts.has(7, id) for id in seen) <= 1 << 10
    assert not any(ghosts.has(7, name(dice.getrandbits(64))) for _ in range(2_000))


def test_ghosts_remember_no_longer_than_they_are_to() -> None:
    """What is older than so many others is a stranger again, though its entry may still stand there."""
    ghosts = Ghosts(64)
    ids = [hashlib.sha256(b"%d" % number).digest() for number in range(1000)]
    for id in ids:
        ghosts.add(7, id)
    assert not any(ghosts.has(7, id) for id in ids[:-64])
    ghosts.clear()
    assert not any(ghosts.has(7, id) for id in ids)


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    order = ByWeight(Turnover(1 << 20), 1)
    often, late = CHAIN[:2], CHAIN[2:4]
    for index, id in enumerate(often + late):
        order.insert(id, index, 0)
    for _ in range(3):
        order.touch(often, 0)
    order.touch(late, 0)
    assert order.ids() == late[::-1] + often[::-1]


def test_a_weight_fades_with_what_comes_in() -> None:
    """Ten turnovers later, a block that was used five times goes before one that was used once."""
    turnover = Turnover(8)
    order = ByWeight(turnover, 1)
    order.insert(CHAIN[0], 0, 0)
    for _ in range(5):
        order.touch(CHAIN[:1], 0)
    for number in range(80):
        order.insert(name(100 + number), 1, 0)
        order.discard(name(100 + number))
    order.insert(CHAIN[1], 1, 0)
    assert order.ids() == [CHAIN[0], CHAIN[1]]


def test_weights_of_two_orders_of_one_tier_compare() -> None:
    turnover = Turnover(100)
    small, large = ByWeight(turnover, 1), ByWeight(turnover, 50)
    small.insert(CHAIN[0], 0, 0)
    large.insert(CHAIN[1], 0, 0)
    small.insert(CHAIN[2], 0, 0)
    first, second = small.oldest(), large.oldest()
    assert first is not None and second is not None and first[2] < second[2]
    small.touch(CHAIN[:1], 0)
    again = small.oldest()
    assert again is not None and again[0] == CHAIN[2]


def test_frequency_that_counts_no_longer_keeps_nothing_alive() -> None:
    turnover = Turnover(4)
    order = ByWeight(turnover, 1)
    for id in CHAIN[:2]:
        order.insert(id, 0, 0)
    for _ in range(50):
        order.touch(CHAIN[:1], 0)
    turnover.frequency = False
    order.level()
    order.insert(CHAIN[2], 0, 0)
    assert order.ids() == [CHAIN[1], CHAIN[0], CHAIN[2]]


@given(
    st.lists(st.tuples(st.sampled_from(["insert", "touch", "discard", "spare"]), st.integers(0, 5), st.integers(0, 5)))
)
def test_by_weight_without_frequency_is_least_recently_used(steps: list[tuple[str, int, int]]) -> None:
    turnover = Turnover(3, frequency=False)
    orders: list[Order] = [ByWeight(turnover, 1), TailFirst()]
    for tick, (verb, start, end) in enumerate(steps):
        id = CHAIN[start]
        for order in orders:
            if verb == "insert" and id not in order:
                order.insert(id, start, tick)
            elif verb == "touch":
                order.touch(CHAIN[start:end], tick)
            elif verb == "discard":
                order.discard(id)
            elif verb == "spare" and id in order:
                order.spare(id, tick)
    ours, plain = orders
    assert ours.ids() == plain.ids() and len(ours) == len(plain)
    assert dict(ours.places()) == dict(plain.places()) and ours.leading(CHAIN) == plain.leading(CHAIN)


@given(
    st.lists(st.tuples(st.sampled_from(["insert", "touch", "discard"]), st.integers(0, 5), st.integers(0, 5))),
)
def test_an_order_by_weight_is_that_of_the_weights(steps: list[tuple[str, int, int]]) -> None:
    """Beside a dict of plain sums: no block goes before one that weighs clearly less."""
    order, uses, now = ByWeight(Turnover(4), 1), dict[bytes, list[float]](), 0.0
    for verb, start, end in steps:
        id = CHAIN[start]
        if verb == "insert" and id not in uses:
            now += 1 / 4
            order.insert(id, 0, 0)
            uses[id] = [now]
        elif verb == "touch":
            order.touch(CHAIN[start:end], 0)
            for each in CHAIN[start:end]:
                if each in uses:
                    uses[each].append(now)
        elif verb == "discard":
            assert (order.discard(id) is None) == (uses.pop(id, None) is None)
    weights = [math.log(sum(math.exp(at) for at in uses[id])) for id in order.ids()]
    assert len(weights) == len(uses)
    assert all(after > before - 0.02 for before, after in itertools.pairwise(weights))


def test_a_second_touch_admits_a_chain_up_to_the_last_block_that_was_met() -> None:
    """Even if the memory of one in between has faded: behind a hole nothing can be used."""
    gate = Admission("second_touch", 64)
    assert gate.admits(7, CHAIN[:4]) == []
    gate.seen.discard(7, CHAIN[1])
    assert gate.admits(7, CHAIN) == CHAIN[:4]
    gate.rule = "all"
    assert gate.admits(7, CHAIN) == CHAIN

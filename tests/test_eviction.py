"""Which block goes next: the least recently used, tail before head; and what is remembered of those that went."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.tests.blocks import name
from terracekv.tiers.eviction import Ghosts, TailFirst

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
    order.spare(CHAIN[-1])
    assert order.ids() == [*CHAIN[-2::-1], CHAIN[-1]]
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
            order.spare(id)
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
    assert ghosts._table.itemsize * len(ghosts._table) == 8 << 10
    assert sum(ghosts.has(7, id) for id in seen[-100:]) > 85
    assert sum(ghosts.has(7, id) for id in seen) <= 1 << 10
    assert not any(ghosts.has(7, name(dice.getrandbits(64))) for _ in range(2_000))

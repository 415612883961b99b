"""The pages that stores for vLLM hold: how many at a time, until when, and that each comes back."""

from collections import Counter

from terracekv.connector.vllm_plan import Results, Store
from terracekv.connector.vllm_scheduler import Shape
from terracekv.connector.vllm_stores import PAGES_HELD, Stores
from terracekv.tests.mock_pages import Pool

KEYS = [bytes([index]) * 32 for index in range(4)]


def stores_of(pool: Pool, share: float, ranks: int = 1) -> Stores:
    """A block is two pages."""
    stores = Stores(Shape((16,), 32, 16, ranks), share)
    stores.bind(pool)
    return stores


def planned(stores: Stores, pool: Pool, blocks: int) -> Store | str:
    pages = pool.take(2 * blocks)
    assert pages is not None
    return stores.plan("request", KEYS[:blocks], 0, [pages], 0.0)


def test_stores_hold_their_share_of_pages_and_no_more_until_one_is_done() -> None:
    pool = Pool(21)
    stores = stores_of(pool, share=0.2)
    for _ in range(3):
        first, second = planned(stores, pool, 1), planned(stores, pool, 1)
        assert isinstance(first, Store) and isinstance(second, Store)
        assert planned(stores, pool, 1) == PAGES_HELD
        for one in (first, second):
            assert len(list(stores.done(Results(Counter({one.job: 1}))))) == 1
    assert not stores.under_way


def test_a_store_that_is_larger_than_the_share_goes_when_it_is_alone() -> None:
    pool = Pool(21)
    stores = stores_of(pool, share=0.2)
    assert isinstance(planned(stores, pool, 4), Store)
    assert planned(stores, pool, 1) == PAGES_HELD


def test_pages_are_held_until_every_rank_is_done_and_what_one_says_against_it_counts() -> None:
    pool = Pool(9)
    stores = stores_of(pool, share=1.0, ranks=2)
    one = planned(stores, pool, 2)
    assert isinstance(one, Store)
    assert list(stores.done(Results(Counter({one.job: 1}), {one.job: "full"}))) == []
    assert [pool.blocks[number].ref_cnt for number in range(1, 5)] == [2] * 4
    (done,) = stores.done(Results(Counter({one.job: 1})))
    assert (done.keys, done.first, done.why) == (KEYS[:2], 0, "full")
    assert [pool.blocks[number].ref_cnt for number in range(1, 5)] == [1] * 4


def test_of_all_ranks_the_one_counts_that_loaded_least() -> None:
    one, other = Results(failed={"a": (2, "late"), "b": (1, "gone")}), Results(failed={"a": (3, "gone")})
    assert one.add(other).failed == other.add(one).failed == {"a": (2, "late"), "b": (1, "gone")}

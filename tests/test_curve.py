"""What more memory would buy: a small sample tells what an exact replay tells."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.tests.traces import FRACTIONS, conversations, key_of, published, zipf
from terracekv.tiers.curve import BLOCKS_MAX, Curve
from terracekv.tiers.eviction import Policy
from terracekv.tiers.replay import ModelTier
from terracekv.tiers.sieve import MARK_BYTES, Sieve


def exact(chains: list[list[bytes]], capacity: int) -> float:
    tier = ModelTier(capacity, Policy("lru", "all"))
    return sum(map(tier.use, chains)) / sum(map(len, chains))


def told(chains: list[list[bytes]], curve: Curve) -> Curve:
    for chain in chains:
        curve.asked(b"".join(chain))
    return curve


def capacities(chains: list[list[bytes]]) -> list[int]:
    unique = len({key for chain in chains for key in chain})
    return [max(1, int(unique * percent / 100)) for percent in FRACTIONS]


def test_followed_in_full_the_curve_is_the_exact_one() -> None:
    chains = conversations(1)
    sizes = capacities(chains)
    shares = told(chains, Curve()).shares(sizes)
    assert shares == pytest.approx([exact(chains, size) for size in sizes], abs=0.01)
    assert shares == sorted(shares) and shares[-1] > shares[0]


def test_a_sample_is_near_the_exact_curve_on_random_traces() -> None:
    """Of samples only their errors all together are sure to be small: one in a hundred is off by 9 points somewhere."""
    errors = []
    for seed in range(12):
        chains = zipf(seed, requests=3000, prompts=3000, skew=0.4 + 0.06 * seed)
        sizes = capacities(chains)
        shares = told(chains, Curve(1 / 2)).shares(sizes)
        errors += [abs(share - exact(chains, size)) for share, size in zip(shares, sizes, strict=True)]
    assert sum(errors) / len(errors) < 0.03 and max(errors) < 0.12


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_daemons_sample_is_within_two_points_on_the_published_traces(name: str) -> None:
    trace = published(name)
    sizes = [int(trace.unique * percent / 100) for percent in FRACTIONS]
    curve = told(trace.chains, Curve(1 / 8))
    known = {
        "conversation": [0.044, 0.052, 0.079, 0.196, 0.279, 0.345],
        "synthetic": [0.020, 0.038, 0.078, 0.157, 0.262, 0.393],
    }
    assert curve.shares(sizes) == pytest.approx(known[name], abs=0.02)
    assert len(curve) <= BLOCKS_MAX


def test_the_sample_is_bounded_whatever_comes() -> None:
    curve = Curve(blocks_max=256)
    for number in range(4000):
        curve.asked(b"".join(key_of(number, page) for page in range(4)))
        assert len(curve) <= 256
    assert curve.rate < 0.05
    assert len(curve._uses) == len(curve._last) and len(curve._first_last) <= 256


def test_all_of_it_takes_less_than_two_mebibytes() -> None:
    curve = Curve()
    for number in range(3 * BLOCKS_MAX):
        curve.asked(b"".join(key_of(number, page) for page in range(2)))
    parts = [curve._last, curve._first_last, curve._uses, curve._first._hits, curve._rest._hits]
    keys = [*curve._last, *curve._first_last]
    numbers = [*curve._uses, *curve._first_last.values()]
    size = sum(map(sys.getsizeof, parts)) + sum(map(sys.getsizeof, keys)) + sum(map(sys.getsizeof, numbers))
    assert size < 2 << 20


def test_blocks_that_nobody_asked_for_are_hits_once_they_were_stored() -> None:
    curve = Curve()
    chain = [key_of(page) for page in range(10)]
    curve.asked(b"".join(chain[:4]))
    curve.stored(b"".join(chain))
    curve.asked(b"".join(chain))
    assert curve.shares([100.0])[0] == pytest.approx(10 / 14, abs=0.01)


def test_nothing_asked_is_no_hits() -> None:
    assert Curve().shares([1, 100, 10**9]) == [0.0, 0.0, 0.0]


def test_the_past_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.tiers.curve.FADE_BLOCKS", 400)
    curve = Curve()
    chain = b"".join(key_of("old", page) for page in range(4))
    for _ in range(200):
        curve.asked(chain)
    assert curve.shares([100])[0] > 0.9
    for number in range(600):
        curve.asked(b"".join(key_of(number, page) for page in range(4)))
    assert curve.shares([100])[0] < 0.1 and curve.asked_blocks <= 400


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=300), st.floats(0.001, 1))
def test_a_sieve_lets_the_same_keys_through_one_by_one_and_together(keys: list[bytes], rate: float) -> None:
    sieve = Sieve(rate)
    one_by_one = [key[:MARK_BYTES] for key in keys if sieve.follows(key[:MARK_BYTES])]
    assert sieve.followed(b"".join(keys)) == one_by_one
    wanted = [key[:MARK_BYTES] for key in keys if int.from_bytes(key[:8]) < sieve.rate * 2**64]
    assert abs(len(wanted) - len(one_by_one)) <= 1


def test_a_sieve_follows_as_many_as_it_says() -> None:
    keys = b"".join(key_of(number) for number in range(20_000))
    for rate in (1 / 2, 1 / 8, 1 / 64, 1 / 300):
        assert len(Sieve(rate).followed(keys)) == pytest.approx(20_000 * rate, rel=0.35)

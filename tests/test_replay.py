"""Model tiers: they hold what a naive cache would hold, and the traces' known hit rates come out."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.daemon.simulate import replay
from terracekv.daemon.traces import Trace
from terracekv.tests.traces import FRACTIONS, conversations, key_of, published
from terracekv.tiers.contest import AutoTier
from terracekv.tiers.eviction import Policy
from terracekv.tiers.replay import ModelStack, ModelTier

TREE = [[key_of(branch, depth) for depth in range(length)] for branch, length in enumerate((1, 3, 5, 7))]
LRU = Policy("lru", "all")


class Naive:
    """A list of what was used, the latest last; second sightings from the whole past."""

    def __init__(self, capacity: int, admission: str) -> None:
        self.capacity = capacity
        self.admission = admission
        self.held: list[bytes] = []
        self.met = set[bytes]()

    def use(self, chain: list[bytes]) -> int:
        hits = 0
        while hits < len(chain) and chain[hits] in self.held:
            hits += 1
        wanted = [id for id in chain if id in self.held or self.admission == "all" or id in self.met]
        self.met |= set(chain)
        self.held = ([id for id in self.held if id not in wanted] + wanted[::-1])[-self.capacity :]
        return hits


chains = st.lists(
    st.tuples(st.integers(0, len(TREE) - 1), st.integers(1, 7)).map(lambda pick: TREE[pick[0]][: pick[1]]), max_size=60
)


@settings(deadline=None)
@given(chains, st.integers(1, 12), st.sampled_from(["all", "second_touch"]))
def test_a_model_tier_hits_what_a_naive_cache_hits(chains: list[list[bytes]], capacity: int, admission: str) -> None:
    """The ghosts of the naive one never fade: no trace here is long enough for ours to."""
    tier, naive = ModelTier(capacity, Policy("lru", admission)), Naive(capacity, admission)
    tier.admission.seen = type(tier.admission.seen)(4096)
    for chain in chains:
        assert tier.use(chain) == naive.use(chain)
        assert tier.order.ids() == naive.held


@settings(deadline=None)
@given(chains, st.integers(1, 12), st.sampled_from(["lru", "frequency"]), st.sampled_from(["all", "second_touch"]))
def test_no_tier_holds_more_than_it_may(
    chains: list[list[bytes]], capacity: int, eviction: str, admission: str
) -> None:
    tier = ModelTier(capacity, Policy(eviction, admission))
    for chain in chains:
        hits, before = tier.order.leading(chain), tier.writes
        assert tier.use(chain) == hits and len(tier.order) <= capacity
        assert 0 <= tier.writes - before <= len(chain) - hits


@settings(deadline=None)
@given(chains, st.integers(1, 6), st.integers(1, 12))
def test_a_stack_hits_what_either_of_its_tiers_has(chains: list[list[bytes]], host: int, disk: int) -> None:
    stack = ModelStack(ModelTier(host, LRU), ModelTier(disk, LRU))
    naive_host, naive_disk = Naive(host, "all"), Naive(disk, "all")
    for chain in chains:
        either = [id in naive_host.held or id in naive_disk.held for id in chain]
        lead = either.index(False) if False in either else len(chain)
        upper = sum(id in naive_host.held for id in chain[:lead])
        assert stack.use(chain) == (upper, lead - upper)
        naive_host.use(chain)
        naive_disk.use(chain)


@pytest.mark.fault(39)
def test_a_stream_of_five_times_the_capacity_leaves_the_last_blocks() -> None:
    tier = ModelTier(100, LRU)
    stream = [[key_of(number)] for number in range(500)]
    assert sum(tier.use(chain) for chain in stream) == 0
    assert [id for chain in stream[-100:] for id in chain] == tier.order.ids()


def test_a_larger_tier_never_hits_less_under_lru() -> None:
    trace = conversations(3)
    hits = []
    for capacity in (50, 100, 200, 400, 800):
        tier = ModelTier(capacity, LRU)
        hits.append(sum(map(tier.use, trace)))
    assert hits == sorted(hits) and hits[0] < hits[-1]


def rates(trace: Trace, policy: Policy, *percents: float) -> list[float]:
    return [round(replay(trace, policy, int(trace.unique * each / 100)).hit_rate, 3) for each in percents]


@pytest.mark.parametrize(
    ("name", "known"),
    [("conversation", [0.079, 0.196, 0.279, 0.345]), ("synthetic", [0.078, 0.157, 0.262, 0.393])],
)
def test_the_published_traces_give_the_known_hit_rates(name: str, known: list[float]) -> None:
    assert rates(published(name), LRU, 2, 5, 10, 20) == known


def fixed_and_auto(
    chains: list[list[bytes]], capacity: int
) -> tuple[dict[Policy, ModelTier], AutoTier, dict[Policy, int], int]:
    auto = AutoTier(capacity)
    fixed = {policy: ModelTier(capacity, policy) for policy in (LRU, Policy("lru", "second_touch"))}
    hits = dict.fromkeys(fixed, 0)
    own = 0
    for chain in chains:
        own += auto.use(chain)
        auto.heed(b"".join(chain))
        for policy, tier in fixed.items():
            hits[policy] += tier.use(chain)
    return fixed, auto, hits, own


def test_auto_turns_to_a_second_touch_where_most_comes_only_once() -> None:
    """One popular set that fits beside a stream of strangers that does not."""
    dice = random.Random(5)
    popular = [[key_of("popular", number, page) for page in range(4)] for number in range(40)]
    chains = [
        dice.choice(popular) if number % 4 == 0 else [key_of("once", number, page) for page in range(8)]
        for number in range(6000)
    ]
    fixed, auto, hits, own = fixed_and_auto(chains, 200)
    assert auto.contest.policy.admission == "second_touch" and auto.contest.switches < 6
    best = max(hits.values())
    assert best == hits[Policy("lru", "second_touch")] > 2 * hits[LRU]
    assert own > 0.9 * best and auto.writes < 0.25 * fixed[LRU].writes


def test_auto_admits_all_where_everything_comes_exactly_twice() -> None:
    """A second touch would write less and hit nothing."""
    chains = [[key_of(number // 2 * 2, number % 2, page) for page in range(4)] for number in range(2000)]
    twice = [chain for number in range(0, 2000, 10) for chain in chains[number : number + 10] * 2]
    _, auto, hits, own = fixed_and_auto(twice, 200)
    assert auto.contest.policy.admission == "all" and auto.contest.switches == 0
    assert own == hits[LRU] > 0.45 * sum(map(len, twice)) > 100 * hits[Policy("lru", "second_touch")]


def test_auto_stays_where_it_is_when_nothing_wins() -> None:
    """All fits: no policy hits more, and none writes less by much."""
    chains = [[key_of(number % 50, page) for page in range(4)] for number in range(3000)]
    _, auto, hits, own = fixed_and_auto(chains, 400)
    assert own == hits[LRU] and auto.contest.policy in (LRU, Policy("lru", "second_touch"))
    assert auto.contest.switches <= 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_auto_is_within_a_point_of_the_best_fixed_policy_on_the_published_traces(name: str) -> None:
    trace = published(name)
    for percent in FRACTIONS:
        capacity = int(trace.unique * percent / 100)
        rows = [
            replay(trace, Policy(eviction, admission), capacity)
            for eviction in ("lru", "frequency")
            for admission in ("all", "second_touch")
        ]
        auto = replay(trace, Policy("auto", "auto"), capacity)
        best = max(row.hit_rate for row in rows)
        assert auto.hit_rate >= best - 0.01, percent
        assert auto.written_blocks <= max(row.written_blocks for row in rows), percent

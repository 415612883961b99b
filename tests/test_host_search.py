"""How host looks for what goes: past blocks that cannot go for a while, and among many namespaces."""

from pathlib import Path

import pytest

from terracekv.tests.blocks import name, registered
from terracekv.tests.hosts import BLOCK, SLAB, SLOTS, host_in
from terracekv.tiers.eviction import Policy, TailFirst
from terracekv.tiers.replay import ModelTier
from terracekv.tiers.tier import Outcome

CHAIN = [name(index) for index in range(10)]
STORED = Outcome.STORED


def test_a_block_that_could_not_go_while_it_was_leased_weighs_no_more_for_it(shm_dir: Path) -> None:
    """What is on its way to a slow disk is leased, and the lightest: it must not outlive what is used all the time."""
    with host_in(shm_dir, eviction="frequency") as host:
        host.put_chain(host.namespace, CHAIN[:2])
        for _ in range(9):
            host.touch(host.namespace, CHAIN[:2])
        host.put_chain(host.namespace, [CHAIN[2]])
        leases = [slot for slot in host.acquire(host.namespace, [CHAIN[2]], touch=False) if slot is not None]
        for index in (3, 4):
            assert host.put_chain(host.namespace, [CHAIN[index]]) == [STORED]
        assert [at for at, id in enumerate(CHAIN) if host.has(host.namespace, id)] == [0, 1, 2, 4]
        host.release(leases)
        assert host.put_chain(host.namespace, [CHAIN[5]]) == [STORED]
        assert [at for at, id in enumerate(CHAIN) if host.has(host.namespace, id)] == [0, 1, 4, 5]


@pytest.mark.parametrize("mine", [True, False])
def test_the_tail_of_the_lightest_chain_takes_the_place_of_heavier_blocks(shm_dir: Path, mine: bool) -> None:
    """Or a conversation could not grow among blocks that were used often once, however long ago."""
    with host_in(shm_dir, eviction="frequency") as host:
        heavy = host.namespace if mine else registered(host.namespaces, 2, BLOCK)
        host.put_chain(heavy, CHAIN[4:7])
        for _ in range(9):
            host.touch(heavy, CHAIN[4:7])
        host.put_chain(host.namespace, CHAIN[:1])
        assert host.put_chain(host.namespace, CHAIN[:2]) == [Outcome.PRESENT, STORED]
        assert host.leading(heavy, CHAIN[4:7]) == 2
        assert host.put_chain(host.namespace, CHAIN[:4]) == [Outcome.PRESENT] * 2 + [STORED] * 2
        assert host.put_chain(host.namespace, [*CHAIN[:4], CHAIN[7]])[-1] is Outcome.FULL


def test_a_tier_without_bytes_lets_such_a_chain_grow_too() -> None:
    tier = ModelTier(4, Policy("frequency", "all"))
    for _ in range(9):
        tier.use(CHAIN[4:7])
    tier.use(CHAIN[:1])
    tier.use(CHAIN[:4])
    assert tier.use(CHAIN[:4]) == 4


def test_each_block_that_goes_is_not_looked_for_in_every_namespace(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands, and everybody waits meanwhile: a few looks a block, and one at each namespace."""
    looks = 0
    oldest = TailFirst.oldest

    def counted(order: TailFirst) -> tuple[bytes, int, int] | None:
        nonlocal looks
        looks += 1
        return oldest(order)

    with host_in(shm_dir, slabs=16) as host:
        many = [registered(host.namespaces, seed, BLOCK) for seed in range(2, 2 + 16 * SLOTS)]
        for number, namespace in enumerate(many):
            assert host.put_chain(namespace, [name(number)]) == [STORED]
        monkeypatch.setattr(TailFirst, "oldest", counted)
        assert host.put_chain(host.namespace, [name(index) for index in range(100, 100 + 8 * SLOTS)]) == [STORED] * (
            8 * SLOTS
        )
        assert looks <= len(many) + 1 + 3 * 8 * SLOTS
        assert [host.has(namespace, name(number)) for number, namespace in enumerate(many)] == [False] * (8 * SLOTS) + [
            True
        ] * (8 * SLOTS)


def test_a_few_blocks_in_each_slab_that_are_used_all_the_time_do_not_keep_another_size_out(shm_dir: Path) -> None:
    """What lay between them was flushed; by age the other size would only ever give way to itself."""
    with host_in(shm_dir, slabs=8) as host:
        hot, between = registered(host.namespaces, 2, BLOCK), registered(host.namespaces, 3, BLOCK)
        ids = [name(index) for index in range(8 * SLOTS)]
        for at, id in enumerate(ids):
            assert host.put_chain(between if at % SLOTS else hot, [id]) == [STORED]
        assert host.drop(between) == 8 * SLOTS - 8
        large = registered(host.namespaces, 4, SLAB)
        for index in range(100, 130):
            host.touch(hot, ids)
            assert host.put_chain(large, [name(index)]) == [STORED]
        assert host.absent(large, [name(index) for index in range(123, 130)]) == []
        assert len(host.absent(hot, ids)) == len(ids) - 1

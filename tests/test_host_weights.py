"""Host under ``frequency``: what cannot go for a while, because it is leased or its chain is being stored."""

from pathlib import Path

from terracekv.tests.blocks import name
from terracekv.tests.hosts import host_in
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

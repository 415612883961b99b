"""Flushes of a shared bucket: beside all else, few at a time, through the breaker; the answer names what is left."""

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from terracekv.tests.blocks import name
from terracekv.tests.s3_cluster import CHAIN, RETURN_S, Cluster, come, loaded, opened_cluster
from terracekv.tests.s3_stub import BUCKET, Kept
from terracekv.tests.s3_tiers import Node
from terracekv.tests.stores import World, ids_of
from terracekv.tiers import s3 as s3_tier
from terracekv.tiers.breaker import State
from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import TierDown
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot

cluster = pytest.fixture(opened_cluster)


class HeldSweeps:
    """Stands before a node's deletions: none is made until ``go``."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        assert world.far is not None
        self._go = threading.Event()
        self.begun = list[str]()
        bucket = world.far.tier._bucket
        delete = bucket.delete

        def held(key: str, deadline: float) -> None:
            self.begun.append(key)
            assert self._go.wait(30)
            delete(key, deadline)

        monkeypatch.setattr(bucket, "delete", held)

    def go(self) -> None:
        self._go.set()


def others(w: World, count: int) -> list[Namespace]:
    """More namespaces of a node."""
    made = (replace(w.host.namespace, id=bytes([200 + n]) * 32, model=f"model {n}", epoch=0) for n in range(count))
    return [w.host.namespaces.register(namespace) for namespace in made]


async def stored(w: World, namespace: Namespace, blocks: int) -> None:
    """Objects of a namespace, put straight into the bucket."""
    payload = bytes(namespace.block_bytes)
    for n in range(blocks):
        await w.mover.load(lambda n=n: w.far.tier.put(namespace, name(n), memoryview(payload), checksum(payload)))  # type: ignore[union-attr,misc]


def test_loads_and_stores_do_not_wait_for_sweeps_and_few_sweeps_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", is_workers=2) as a:
            await a.put(*CHAIN)
            await a.idle()
            a.host.delete(a.namespace, ids_of(*CHAIN))
            many = others(a, 6)
            for namespace in many:
                await stored(a, namespace, 2)
            sweeps = HeldSweeps(a, monkeypatch)
            flushes = [asyncio.create_task(a.store.flush(each)) for _ in range(5) for each in many]
            await come(lambda: sweeps.begun, "a sweep begins")
            assert all(isinstance(slot, Slot) for slot in await loaded(a, *CHAIN))
            await a.put(100, durable=True)
            assert a.far.has(a.namespace, ids_of(100)[0])
            await come(lambda: a.far.tells.turns == 0, "the bucket has heard of all flushes")
            assert a.far.sweeps.turns <= len(many) + 1, "one is under way, and of each namespace one waits"
            assert len(sweeps.begun) == 1
            sweeps.go()
            answers = await asyncio.gather(*flushes)
            assert all("s3_unswept" not in answer.skipped for answer in answers)
            await a.idle()
            assert len(c.stub.blocks()) == len(CHAIN) + 1

    cluster.run(story)


def test_sweeps_of_a_bucket_that_hangs_are_refused_by_the_breaker(cluster: Cluster) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a", is_workers=2) as a:
            many = others(a, 12)
            c.stub.switches.stall = True
            asked = c.stub.asked.total()
            answers = await asyncio.gather(*(a.store.flush(each) for each in many))
            assert c.stub.asked.total() - asked < len(many), "most were not even tried"
            assert all({"s3_unheard", "s3_unswept"} <= answer.skipped.keys() for answer in answers)
            assert a.far.tier.breaker.state is not State.CLOSED
            listed = [key for method, key, _ in c.stub.requests if method == "GET" and not key]
            assert len(listed) <= 2, "an open breaker keeps sweeps from asking too"
            c.stub.switches.stall = False
            await come(lambda: a.far.tier.breaker.state is State.CLOSED, "the breaker closes", RETURN_S)

    cluster.run(story)


@pytest.mark.fault(112)
@pytest.mark.parametrize("trouble", ["the breaker is open", "the bucket is gone", "the epoch's object is damaged"])
def test_a_flush_that_the_bucket_did_not_hear_says_so(cluster: Cluster, trouble: str) -> None:
    async def story(c: Cluster) -> None:
        async with c.node("a") as a:
            await a.put(*CHAIN)
            await a.idle()
            if trouble == "the breaker is open":
                a.far.tier.breaker.trip(TierDown("for a test"))
            elif trouble == "the bucket is gone":
                c.stub.buckets.clear()
            else:
                c.stub.objects[f"{a.namespace.id.hex()}/epoch"] = Kept(b"not a number", datetime.now(UTC))
            flushed = await a.store.flush(a.namespace)
            assert flushed.dropped["host"] == len(CHAIN) and flushed.skipped["s3_unheard"] == 1
            assert ("s3_unswept" in flushed.skipped) == (flushed.dropped["s3"] == 0)
            c.stub.buckets.add(BUCKET)
            c.stub.objects.clear()
            await come(lambda: a.far.tier.breaker.state is State.CLOSED, "the breaker closes", RETURN_S)
            again = await a.store.flush(a.namespace)
            assert again.skipped == {}

    cluster.run(story)


def test_a_sweep_lists_page_by_page(a: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "PAGE_KEYS", 3)
    payload = bytes(a.now.block_bytes)
    for n in range(8):
        a.tier.put(a.now, name(n), memoryview(payload), checksum(payload))
    assert a.tier.sweep(a.flush()) == (8, None)

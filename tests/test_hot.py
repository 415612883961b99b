"""Blocks that are used often go up into the GPU's memory, within a share of the bus; what nobody has comes down."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path

import pytest

from terracekv.daemon.hot import Hot, Moves
from terracekv.daemon.mover import Mover
from terracekv.tests.blocks import get, name
from terracekv.tests.gpu_tiers import gpu_tier
from terracekv.tests.hosts import BLOCK, Host, host_in
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.tier import PAGE, Outcome

GPU_SLOTS = 4


class Machine:
    """A host and a GPU with room for a few blocks, a mover, and a clock that a test sets."""

    def __init__(self, host: Host, gpu: GpuTier, fake: FakeCupy, share: float, queue_bytes: int) -> None:
        self.host, self.gpu, self.fake = host, gpu, fake
        self.now = 0.0
        self.mover = Mover(threads=2, queue_bytes=queue_bytes)
        self.below: set[bytes] = set()
        self.hot = Hot(
            namespaces=host.namespaces,
            host=host,
            gpu=gpu,
            mover=self.mover,
            held_below=lambda namespace, id: host.has(namespace, id) or id in self.below,
            heat=Heat(uses=2, window_s=60),
            share=BusShare(share),
            clock=lambda: self.now,
        )

    async def use(self, *ids: bytes) -> int:
        begun = self.hot.used(self.host.namespace, ids)
        await self.mover.drain()
        return begun

    def on_gpu(self, *ids: bytes) -> list[bool]:
        return [self.gpu.has(self.host.namespace, id) for id in ids]


@asynccontextmanager
async def machine(folder: Path, *, share: float = 1.0, queue_bytes: int = 1 << 20) -> AsyncIterator[Machine]:
    fake = FakeCupy(eager=True)
    (folder / "gpu").mkdir()
    with host_in(folder / "host", slabs=4) as host:
        size = GPU_SLOTS * PAGE
        with gpu_tier(folder / "gpu", fake, host.namespaces, size, slab_bytes=size) as gpu:
            made = Machine(host, gpu, fake, share, queue_bytes)
            try:
                yield made
                gpu.check()
                assert not host.leases() and not gpu.leases()
            finally:
                made.mover.close()
    assert not fake.left


def looped(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    @wraps(test)
    def run(shm_dir: Path) -> None:
        asyncio.run(test(shm_dir))  # type: ignore[arg-type]

    return run


@looped
async def test_a_block_goes_up_when_it_is_used_again_and_not_before(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        ids = [name(1), name(2)]
        it.host.put_chain(it.host.namespace, ids)
        assert await it.use(*ids) == 0 and it.on_gpu(*ids) == [False, False]
        assert await it.use(ids[0]) == 1 and it.on_gpu(*ids) == [True, False]
        assert await it.use(ids[0]) == 0
        assert it.hot.moves == Moves(promoted=1)
        assert get(it.gpu, it.host.namespace, ids[0]) == get(it.host, it.host.namespace, ids[0])


@looped
async def test_promotions_stop_at_their_share_of_the_bus_and_go_on_later(shm_dir: Path) -> None:
    async with machine(shm_dir, share=0.1) as it:
        ids = [name(n) for n in range(3)]
        it.host.put_chain(it.host.namespace, ids)
        await it.use(*ids)
        it.hot._share.spent(0.5)
        assert await it.use(*ids) == 0 and it.hot.moves == Moves(over_share=3)
        it.now = 4.5
        assert await it.use(*ids) == 3 and it.on_gpu(*ids) == [True] * 3


@looped
async def test_promotions_do_not_fill_the_queue(shm_dir: Path) -> None:
    async with machine(shm_dir, queue_bytes=2 * PAGE) as it:
        ids = [name(n) for n in range(3)]
        it.host.put_chain(it.host.namespace, ids)
        await it.use(*ids)
        assert await it.use(*ids) == 2
        assert it.hot.moves.over_queue == 1 and it.on_gpu(*ids) == [True, True, False]


@looped
async def test_what_leaves_the_gpu_and_is_nowhere_else_comes_back_to_host(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        ids = [name(n) for n in range(GPU_SLOTS + 2)]
        it.host.put_chain(it.host.namespace, ids)
        for id in ids[:GPU_SLOTS]:
            await it.use(id)
            await it.use(id)
        it.host.delete(it.host.namespace, ids[:2])
        it.below = {ids[0]}
        for id in ids[GPU_SLOTS:]:
            await it.use(id)
            await it.use(id)
        assert it.on_gpu(*ids) == [False, False, True, True, True, True]
        assert it.gpu.demoted == 1
        assert [it.host.has(it.host.namespace, id) for id in ids[:2]] == [False, True]
        assert get(it.host, it.host.namespace, ids[1])[0] is Outcome.HIT


@pytest.mark.fault(2)
@looped
async def test_a_promotion_that_fails_is_counted_and_tried_again(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        it.host.put_chain(it.host.namespace, [name(1)])
        await it.use(name(1))
        it.fake.fail_calls["memcpyAsync"] = 0
        assert await it.use(name(1)) == 1 and it.on_gpu(name(1)) == [False]
        assert it.hot.moves == Moves(failed=1)
        assert await it.use(name(1)) == 1 and it.on_gpu(name(1)) == [True]


@looped
async def test_a_flush_between_use_and_copy_promotes_nothing(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        it.host.put_chain(it.host.namespace, [name(1)])
        await it.use(name(1))
        old = it.host.namespace
        it.host.namespaces.raise_epoch(old.id)
        await it.use(name(1))
        assert it.gpu.status().blocks == 0 and it.hot.moves == Moves()


@looped
async def test_bytes_that_nobody_has_checked_since_a_restart_do_not_go_up(shm_dir: Path) -> None:
    """Engines copy from the GPU by themselves: what lies there is believed."""
    async with machine(shm_dir) as it:
        it.host.put_chain(it.host.namespace, [name(1)])
        await it.use(name(1))
        (slot,) = it.host.held(it.host.namespace, [name(1)])
        it.host._unverified.add(slot.record)
        assert await it.use(name(1)) == 0 and it.on_gpu(name(1)) == [False]
        assert it.host.verify(it.host.namespace, name(1), slot) is Outcome.HIT
        assert await it.use(name(1)) == 1 and it.on_gpu(name(1)) == [True]
        it.host.release([slot])
        assert not it.host.leases()


@looped
async def test_what_is_used_on_the_gpu_stays_there(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        ids = [name(n) for n in range(GPU_SLOTS + 1)]
        it.host.put_chain(it.host.namespace, ids)
        for id in [*ids[:GPU_SLOTS], ids[0], ids[GPU_SLOTS]]:
            await it.use(id)
            await it.use(id)
        assert it.on_gpu(*ids) == [True, False, True, True, True]


@looped
async def test_what_is_not_in_host_any_more_is_left_alone(shm_dir: Path) -> None:
    async with machine(shm_dir) as it:
        await it.use(name(1))
        assert await it.use(name(1)) == 0
        assert BLOCK < PAGE and it.hot.moves == Moves()

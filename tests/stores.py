"""A store on one event loop for tests: a tiny host tier over a real disk tier whose reads and writes can be held up.

Owns the folders that a test gives, and the loop while a story runs. Called by tests. Imports ``daemon`` and ``tiers``.
"""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.distant import Distant
from terracekv.daemon.mover import Mover
from terracekv.daemon.near import Near
from terracekv.daemon.sessions import Session, Sessions
from terracekv.daemon.store import Store
from terracekv.tests.blocks import name, payload_of
from terracekv.tests.harness import until
from terracekv.tests.hosts import Host
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import device_on
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.slots import Slot, SlotTable
from terracekv.tiers.tier import PAGE, Outcome

HELD_S = 30.0


def key(index: int) -> bytes:
    return name(index)[:32]


class HeldDisk(DiskTier):
    """A disk that is as slow as a test wants."""

    def __init__(self, folder: Path, host: Host) -> None:
        super().__init__(
            folder, capacity_bytes=12 << 20, segment_bytes=1 << 20, namespaces=host.namespaces, free_floor_bytes=0
        )
        self.reads: list[bytes] = []
        self.writes: list[bytes] = []
        self.reading = threading.Event()
        self.writing = threading.Event()
        self.held = set[bytes]()
        """Blocks whose reads wait until they are taken out of here."""
        self.reading.set()
        self.writing.set()

    def get(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        self.reads.append(id)
        assert self.reading.wait(HELD_S)
        until(lambda: id not in self.held, "the block is let go", HELD_S)
        return super().get(namespace, id, into)

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, checksum: int) -> Outcome:
        self.writes.append(id)
        assert self.writing.wait(HELD_S)
        return super().put(namespace, id, payload, checksum)


class World:
    """Everything below the doors."""

    def __init__(self, shm: Path, folder: Path, *, slabs: int, shards: int, **options: Any) -> None:
        self.host = Host(shm, slabs, options.get("eviction", "lru"))
        if shards > 1:
            many = replace(self.host.namespace, id=bytes([shards]) * 32, model="sharded", shards=shards)
            self.host.namespace = self.host.namespaces.register(many)
        self.disk = HeldDisk(folder / "disk", self.host) if options.get("disk", True) else None
        self.mover = Mover(threads=options.get("threads", 3), queue_bytes=options.get("queue_bytes", 1 << 20))
        self.stuck_s: float | None = options.get("stuck_s")
        """Given, each tier has a mover of its own, as in the daemon, whose calls may take so long."""
        self.movers = [self.mover]
        self.far = self._open_far(options["s3"], options) if "s3" in options else None
        self.near = self._open_near(folder, options["gpu"], options) if "gpu" in options else None
        self.store = Store(
            namespaces=self.host.namespaces,
            host=self.host,
            disk=self.disk,
            mover=self.mover,
            admission=options.get("admission", "all"),
            far=self.far,
            near=self.near,
            disk_mover=self._mover(options.get("queue_bytes", 1 << 20)),
            state_mover=self._mover(1),
        )
        self.sessions = Sessions(self.store)

    def _mover(self, queue_bytes: int) -> Mover:
        if self.stuck_s is None:
            return self.mover
        self.movers.append(Mover(threads=3, queue_bytes=queue_bytes, stuck_s=self.stuck_s))
        return self.movers[-1]

    def _open_near(self, folder: Path, fake: FakeCupy, options: dict[str, Any]) -> Near:
        """Memory of a fake GPU above host: blocks go up when they are used a second time."""
        size = options.get("gpu_slots", 4) * PAGE
        table = SlotTable(folder / "gpu-slots", arena_bytes=size, slab_bytes=size, adopt=False)
        gpu = GpuTier(device_on(fake), table, self.host.namespaces, size_bytes=size)
        return Near(
            gpu,
            namespaces=self.host.namespaces,
            host=self.host,
            mover=self._mover(1 << 20),
            heat=Heat(uses=2, window_s=60.0),
            share=BusShare(1.0, 60.0),
        )

    def _open_far(self, settings: S3Settings, options: dict[str, Any]) -> Distant:
        """The bucket below all else; tests that have none need none of its libraries."""
        from terracekv.tiers.s3 import S3Tier

        tier = S3Tier(settings, namespaces=self.host.namespaces)
        stuck_s = 10.0 if self.stuck_s is None else self.stuck_s
        mover = Mover(threads=settings.workers + 1, queue_bytes=options.get("s3_queue_bytes", 1 << 20), stuck_s=stuck_s)
        rate = options.get("prefill_tokens_per_s", 0.0)
        return Distant(tier, mover, admission=options.get("s3_admission", "all"), prefill_tokens_per_s=rate)

    @property
    def namespace(self) -> Namespace:
        present = self.host.namespaces.get(self.host.namespace.id)
        assert present is not None
        return present

    def session(self, shard: int | None = 0) -> Session:
        number = self.host.table.next_session()
        return self.sessions.start(number, self.namespace, shard, 0, "test")

    def session_on_gpu(self, shard: int | None = 0) -> Session:
        """Of an engine that has the gpu tier's memory open."""
        session = self.session(shard)
        session.near = True
        return session

    def fill(self, slots: Sequence[Slot | Outcome | None], ids: Sequence[bytes]) -> None:
        """Write what an engine would write."""
        size = self.namespace.block_bytes
        for slot, id in zip(slots, ids, strict=True):
            if isinstance(slot, Slot):
                self.host.payload(slot, size)[:] = payload_of(id, self.namespace.id, size)

    def right(self, slot: Slot | Outcome | None, id: bytes) -> bool:
        """Whether a leased slot holds the bytes of a block."""
        assert isinstance(slot, Slot), slot
        size = self.namespace.block_bytes
        return self.host.payload(slot, size) == payload_of(id, self.namespace.id, size)

    async def put(self, *indices: int, durable: bool = False, session: Session | None = None) -> list[int]:
        """Store blocks as a session does; the indices that are readable now."""
        mine = session or self.session()
        keys = [key(index) for index in indices]
        handle, slots = self.sessions.reserve(mine, keys)
        self.fill(slots, mine.ids_of(keys))
        wanted = [index for index, slot in enumerate(slots) if isinstance(slot, Slot)]
        stored: list[int] = []
        if wanted:
            stored, _ = await self.sessions.commit(mine, handle, wanted, durable)
        if session is None:
            self.sessions.close(mine)
        return [indices[index] for index in stored]

    async def only_on_disk(self, *indices: int) -> None:
        """Blocks that host has lost and disk has."""
        await self.put(*indices, durable=True)
        await self.idle()
        self.host.delete(self.namespace, [block_id(key(index), 0) for index in indices])

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        movers = [*self.movers, *([self.far.mover] if self.far else [])]
        while (
            self.store.promoter.coming
            or self.store.forgetting._tasks
            or any(mover.queue_bytes or not mover.idle for mover in movers)
            or (self.far and not (self.far.idle and self.far.tier._caller.throttle.running == 0))
        ):
            await asyncio.sleep(0.001)
        for mover in movers:
            await mover.load(lambda: None)
        for _ in range(5):
            await asyncio.sleep(0)

    async def balanced(self) -> None:
        """Idle, and all books balance."""
        await self.idle()
        self.store.check()
        self.sessions.check()

    def close(self) -> None:
        failpoint.disarm()
        if self.disk is not None:
            self.disk.reading.set()
            self.disk.writing.set()
            self.disk.held.clear()
        if self.far is not None:
            self.far.tier.close()
            self.far.close()
            self.far.mover.close()
        for mover in self.movers:
            mover.close()
        if self.disk is not None:
            self.disk.close()
        if self.near is not None:
            self.near.gpu.close()
        self.host.close()


class Worlds:
    """Runs stories, each in a world on the same folders, so that a second one finds what the first left."""

    def __init__(self, shm: Path, folder: Path) -> None:
        self._shm = shm
        self._folder = folder

    def run(
        self, story: Callable[[World], Awaitable[None]], *, slabs: int = 2, shards: int = 1, **options: Any
    ) -> None:
        async def told() -> None:
            world = World(self._shm, self._folder, slabs=slabs, shards=shards, **options)
            try:
                await asyncio.wait_for(story(world), 60)
                await asyncio.wait_for(world.balanced(), 60)
            finally:
                world.close()

        asyncio.run(told())


def opened_worlds(shm_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Worlds]:
    """A fixture, once a module has made it one."""
    yield Worlds(shm_dir, tmp_path)
    caplog.get_records("call").clear()  # a logged error keeps the frames that raised it, and their views of the arena


class Arrivals:
    """What came of the pending blocks of one ``acquire``."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.came: dict[int, Slot | Outcome] = {}
        self.calls = itertools.count()

    def __call__(self, index: int, result: Slot | Outcome) -> bool:
        assert index not in self.came, "told twice of one block"
        self.came[index] = result
        return self.wanted

    @property
    def slots(self) -> list[Slot]:
        return [slot for slot in self.came.values() if isinstance(slot, Slot)]


def ids_of(*indices: int) -> list[bytes]:
    return [block_id(key(index), 0) for index in indices]


SLOT = PAGE

"""The store of one process, taken apart so that a test decides when anything happens.

Owns the folders, the opened tiers, an event loop that runs only when told to, and a mover without threads whose jobs
run one by one, in an order that the test chooses; in some worlds a fake GPU, which does nothing before it must. Also
what goes wrong: a death at a named line, calls of the medium that fail, bytes that rot. Used by the machine of
``test_store.py`` in one thread. Imports ``daemon``, ``kernels`` and ``tiers``.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from terracekv.daemon.config import Config, Daemon, Disk, Host
from terracekv.daemon.config_gpu import Gpu
from terracekv.daemon.mover import Mover
from terracekv.daemon.near import Near
from terracekv.daemon.recovery import Tiers, open_tiers
from terracekv.daemon.sessions import Sessions
from terracekv.daemon.store import Store
from terracekv.kernels import cuda
from terracekv.tests.faults import DISK, FaultLayer
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import bytes_at
from terracekv.tests.promises import unwatched
from terracekv.tiers import failpoint
from terracekv.tiers.disk import DiskTier, least_capacity_bytes
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.slots import Slot

T = TypeVar("T")

SLAB_BYTES = 6 * 4096
SLABS = 3
SEGMENT_BYTES = 16 * 4096
LONG_S = 1e9
"""No copy is held back, however slow the machine."""


class Killed(KeyboardInterrupt):
    """The process died at a named line. Of this base, since an event loop lets nothing else out of a callback."""


class StepMover(Mover):
    """Keeps jobs until ``run`` is told which one is next."""

    def __init__(self, queue_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue_bytes_max = queue_bytes
        self.queue_bytes = 0
        self.failures = 0
        self._running = {}
        self.jobs: list[tuple[Callable[[], Any], asyncio.Future[Any], int]] = []

    def load(self, work: Callable[[], T], *, limit_s: float | None = None, shed: bool = False) -> "asyncio.Future[T]":
        """See ``Mover``."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.jobs.append((work, future, 0))
        return future

    def store(self, size_bytes: int, work: Callable[[], T]) -> "asyncio.Future[T] | None":
        """See ``Mover``."""
        if self.queue_bytes + size_bytes > self.queue_bytes_max:
            return None
        future: asyncio.Future[T] = self._loop.create_future()
        self.queue_bytes += size_bytes
        self.jobs.append((work, future, size_bytes))
        return future

    def run(self, number: int) -> None:
        """Do one job; who waits for it hears of it when the loop turns. The test wants to see what it raises."""
        work, future, store_bytes = self.jobs.pop(number)
        result = work()
        self.queue_bytes -= store_bytes
        if not future.cancelled():
            future.set_result(result)


READS = {
    "read EIO": "os.preadv*1-1=errno:EIO",
    "short read": "os.preadv*1-1=short",
    "flipped read": "os.preadv*1-1=flip",
}
WRITES = {
    "write EIO": "os.pwritev*1-1=errno:EIO",
    "write ENOSPC": "os.pwritev*1-1=errno:ENOSPC",
    "short write": "os.pwritev*1-1=short",
}
FILES = {
    "rename EIO": "os.rename*1-1=errno:EIO",
    "rename ENOSPC": "os.rename*1-1=errno:ENOSPC",
    "unlink EPERM": "os.unlink*1-1=errno:EPERM",
}
MEDIA = READS | WRITES | FILES
"""What one later call of the medium does: one that reads, one that writes, one that moves a file."""


class World:
    """One life after another of a daemon's store, in the same folders."""

    tiers: Tiers
    disk: DiskTier
    gpu: GpuTier | None
    mover: StepMover
    store: Store
    sessions: Sessions

    def __init__(
        self, folder: Path, *, segments: int, admission: str, queue_blocks: int, codec: str, gpu_slabs: int
    ) -> None:
        """Without ``gpu_slabs`` there is no GPU."""
        self.runtime = folder / "runtime"
        self.config = Config(
            daemon=Daemon(runtime_dir=self.runtime, state_dir=folder / "state", queue=queue_blocks * 12_288),
            host=Host(size=SLABS * SLAB_BYTES, slab=SLAB_BYTES),
            disk=Disk(
                path=str(folder / "state" / "disk"),
                size=least_capacity_bytes(SEGMENT_BYTES) + (segments - 2) * (SEGMENT_BYTES + 8192),
                segment=SEGMENT_BYTES,
                direct="off",
                admission="all" if admission == "all" else "second_touch",
                free_floor=0,
            ),
            gpu=Gpu(enabled=gpu_slabs > 0, size=gpu_slabs * SLAB_BYTES),
        )
        self.set_codec(codec)
        self.loop = asyncio.new_event_loop()
        self.surprises: list[str] = []
        """What was raised where nobody waits for it."""
        self.loop.set_exception_handler(self._surprised)
        self._patch = pytest.MonkeyPatch()
        self.media = FaultLayer(self._patch.setattr, DISK)
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while a job stands at a line that is armed with ``sleep``."""
        self._replace_failpoints()
        self.fake = FakeCupy()
        self._patch.setattr(cuda, "_cupy", lambda: self.fake)
        self.open()

    def set_codec(self, codec: str) -> None:
        """For lives that begin after this: what the disk tier does to blocks that get smaller."""
        disk = msgspec.structs.replace(self.config.disk, codec="on" if codec == "on" else "off")
        self.config = msgspec.structs.replace(self.config, disk=disk)

    def _replace_failpoints(self) -> None:
        def die(pid: int, number: int) -> None:
            self._give_nothing_back()
            raise Killed

        # The module's own names are replaced, not what is behind them: nobody else is killed or made to wait.
        self._patch.setattr(failpoint, "os", SimpleNamespace(kill=die, getpid=os.getpid))
        self._patch.setattr(failpoint, "time", SimpleNamespace(sleep=lambda seconds: self.meanwhile()))

    def _give_nothing_back(self) -> None:
        """What a process would do on its way out, a killed one does not."""
        for tier in (self.tiers.host, self.gpu):
            if tier is not None:
                tier.abort = tier.release = lambda slots: None  # type: ignore[method-assign]
        self.tiers.host.orphan = lambda slots: None  # type: ignore[method-assign]

    def _surprised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            self.surprises.append(repr(context))

    def open(self) -> None:
        """Begin a life."""
        failpoint.disarm()
        self.fake = FakeCupy()
        self.tiers = open_tiers(self.config)
        assert self.tiers.disk is not None
        self.disk = self.tiers.disk
        self.tiers.arena.prepare()
        self.gpu = self.tiers.gpus.tier
        assert (self.gpu is not None) == self.config.gpu.enabled, self.tiers.gpus.reason
        if self.gpu is not None:
            self.gpu.pin()
        self.loop.run_until_complete(self._start())
        self.sessions = Sessions(self.store)

    async def _start(self) -> None:
        assert self.config.daemon.queue is not None
        self.mover = StepMover(self.config.daemon.queue)
        self.store = Store(
            namespaces=self.tiers.namespaces,
            host=self.tiers.host,
            disk=self.disk,
            mover=self.mover,
            admission=self.config.disk.admission,
            near=self._near(),
        )

    def _near(self) -> Near | None:
        """The gpu tier as the daemon has it: every block goes up that an engine uses that has it open."""
        if self.gpu is None:
            return None
        heat, share = Heat(uses=1, window_s=LONG_S), BusShare(1.0, LONG_S)
        tiers = self.tiers
        return Near(self.gpu, namespaces=tiers.namespaces, host=tiers.host, mover=self.mover, heat=heat, share=share)

    def on_gpu(self, slot: Slot, size: int) -> bytes:
        """What an engine that has the gpu tier open finds in a slot of it."""
        assert self.gpu is not None
        return bytes(bytes_at(self.gpu._base + slot.offset, size))

    def go_wrong(self, what: str) -> None:
        """A later call of the medium fails, in one of the ways of ``MEDIA``."""
        failpoint.disarm(MEDIA[what].partition("*")[0])
        failpoint.arm(MEDIA[what])

    def calm(self) -> None:
        """The medium does what it should."""
        for fault in MEDIA.values():
            failpoint.disarm(fault.partition("*")[0])

    def turn(self) -> None:
        """Let the loop run until nothing is ready."""
        ready = self.loop._ready  # type: ignore[attr-defined]
        while True:
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if not ready:
                return

    def task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin what waits for jobs."""
        task = self.loop.create_task(work)
        self.turn()
        return task

    def on_loop(self, work: Callable[[], T]) -> T:
        """Do on the loop what wants to be there."""

        async def run() -> T:
            return work()

        result = self.loop.run_until_complete(run())
        self.turn()
        return result

    def close(self) -> None:
        """A clean end. Work that is still queued is dropped, as the mover drops it."""
        for _, future, _ in self.mover.jobs:
            future.cancel()
        self.mover.jobs.clear()
        self.turn()
        with unwatched():
            self.tiers.close()
        assert not self.fake.left

    def crash(self) -> None:
        """What the kernel does to a process that is killed: its descriptors and maps go, nothing else is done."""
        self._give_nothing_back()
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            task.get_coro().close()
        self.mover.jobs.clear()
        self.loop._ready.clear()  # type: ignore[attr-defined]
        self.disk._catalog._environment.close()
        self.disk._catalog._open = False
        self.disk._owned.release()
        os.close(self.tiers.state_lock)
        self.disk._closed = True
        arena, table = self.tiers.arena, self.tiers.table
        for fd in (arena._fd, arena._lock_fd, table._fd):
            os.close(fd)
        arena._lock_fd = table._fd = -1
        table._table.close()
        self.tiers.host._closed = True
        if self.gpu is not None:
            os.close(self.gpu._table._fd)
            self.gpu._table._table.close()
            self.gpu._closed = True

    def lose_host(self) -> None:
        """Between two lives: the runtime folder is empty, as after a start of the machine."""
        self.calm()
        shutil.rmtree(self.runtime)

    def lose_catalog(self) -> None:
        """Between two lives."""
        self.calm()
        shutil.rmtree(Path(self.config.disk.path) / "catalog")

    def end(self) -> None:
        """The last life is over."""
        failpoint.disarm()
        self._patch.undo()
        self.loop.close()

    def disk_bytes(self) -> int:
        """What the disk tier's folder takes."""
        total = 0
        for folder, _, names in os.walk(self.config.disk.path):
            for name in [".", *names]:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
        return total

    def flip_on_disk(self, segment: int, offset: int) -> None:
        """One bit of a segment rots."""
        _flip(Path(self.disk._files.path(segment)), offset)

    def flip_in_arena(self, slot_offset: int, offset: int, size: int) -> bytes:
        """Between two lives: one bit of a slot rots. What its payload of ``size`` bytes is now."""
        path = self.runtime / "arena"
        _flip(path, slot_offset + offset)
        with open(path, "rb") as file:
            file.seek(slot_offset)
            return file.read(size)


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))

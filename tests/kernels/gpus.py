"""A fake GPU with an engine on it: paged KV in its memory, a stream on which the engine works, slots of the host.

Owns what it allocates. Used by tests. Imports ``kernels``.
"""

import ctypes
import mmap
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from terracekv.kernels import host
from terracekv.kernels.cuda import Device, Stream
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.kernels.runs import Runs
from terracekv.tests.kernels.fake_cupy import FakeCupy, FakeError
from terracekv.tests.kernels.geometries import bases_of

PAGES = 24
PAGES_PER_BLOCK = 3


def device_on(fake: FakeCupy, ordinal: int = 0) -> Device:
    """A device over the fake, batch copies included."""
    device = Device(fake, ordinal)  # type: ignore[arg-type]
    device._batch = fake.batch
    return device


def bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


class Engine:
    """``pieces`` of a layout, or of several, in the GPU's memory; ``stream`` is the engine's own."""

    def __init__(self, fake: FakeCupy, layouts: Sequence[str] = ("NHD",), seed: int = 0) -> None:
        self.fake = fake
        self.device = device_on(fake)
        self.stream: Stream = self.device.stream()
        self.dice = random.Random(seed)
        self._memory: list[tuple[int, int]] = []
        pieces = []
        for number, layout in enumerate(layouts):
            starts, stride, run, size = bases_of(layout, 2, 2, PAGES, 4, 2, 8 + 4 * number)
            address = self.device.allocate(size)
            self._memory.append((address, size))
            pieces.append(Runs(tuple(address + start for start in starts), stride, PAGES, run))
        self.pieces = tuple(pieces)
        self.block_bytes = sum(len(p.bases) * p.run_bytes * PAGES_PER_BLOCK for p in pieces)

    def compute(self) -> None:
        """Fill the whole cache, on the engine's stream: so some time later."""
        contents = [self.dice.randbytes(size) for _, size in self._memory]

        def work() -> None:
            for (address, size), content in zip(self._memory, contents, strict=True):
                bytes_at(address, size)[:] = content

        self.fake.give(self.stream.ptr, work)

    def read(self, pages: Sequence[int], found: list[bytes]) -> None:
        """Append what the pages hold when the engine's stream comes to it."""
        self.fake.give(self.stream.ptr, lambda: found.append(self.payload(pages)))

    def payload(self, pages: Sequence[int]) -> bytes:
        """What the pages hold now, as a payload."""
        parts = []
        for piece in self.pieces:
            plan = piece.at(*pages)
            part = bytearray(plan.payload_bytes)
            host.gather_runs(plan, memoryview(part))
            parts.append(bytes(part))
        return b"".join(parts)

    def close(self) -> None:
        if not self.fake.broken:
            for address, _ in self._memory:
                self.device.free(address)


class Slots:
    """Slots of the host, in a mapping of its own; ``pinned`` as far as asked for."""

    def __init__(self, device: Device, count: int, size: int, *, pin: bool = True, chunk_bytes: int = 1 << 20) -> None:
        self.step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = size
        self._map = mmap.mmap(-1, count * self.step)
        self.view = memoryview(self._map)
        self.base = address_of(self.view)
        self.pinned = Pinned(device, self.base, count * self.step, chunk_bytes=chunk_bytes)
        if pin:
            self.pinned.pin()
        self.addresses = [self.base + index * self.step for index in range(count)]

    def fill(self, dice: random.Random) -> None:
        self.view[:] = dice.randbytes(len(self.view))

    def payload(self, index: int) -> bytes:
        return bytes(self.view[index * self.step : index * self.step + self.size])

    def close(self) -> None:
        with suppress(FakeError):
            self.pinned.close()
        self.view.release()
        self._map.close()


@contextmanager
def engine_on(fake: FakeCupy, layouts: Sequence[str] = ("NHD",), seed: int = 0) -> Iterator[Engine]:
    """Closed in the end, when nothing of the GPU may be left."""
    engine = Engine(fake, layouts, seed)
    yield engine
    engine.close()
    assert fake.broken or not fake.left


@contextmanager
def slots_for(engine: Engine, count: int, *, pin: bool = True, chunk_bytes: int = 1 << 20) -> Iterator[Slots]:
    slots = Slots(engine.device, count, engine.block_bytes, pin=pin, chunk_bytes=chunk_bytes)
    yield slots
    slots.close()

"""Blocks between an engine's paged GPU memory and slots of the host, in order with the engine's own work.

Owns two streams on one GPU and, in its ``Pool``, staging buffers, events, parameters and a copy of the bases. Made by a
connector (or the bench) once the engine's KV exists; called from any thread, one call at a time gets in. Imports
``batch``, ``cuda``, ``parts``, ``pool`` and ``runs``.

Who waits for whom. ``after`` is the engine's stream: nothing of a call touches its pages before what that stream was
given until then is done (the KV is written; what used to be in the pages is read). Where copies begin in another thread
than the engine's, that stream has been given more by then: it is an ``Event``, recorded when the pages were due.
``Batch.hold`` makes a stream wait until the pages are the engine's again. ``Batch.wait`` waits here until a block is
whole where it goes: only then may a slot be committed, checked or released. Between the streams:

=========  =====================================================  ==================================================
strategy   gather                                                 scatter
=========  =====================================================  ==================================================
staged     pages -kernel-> staging -DMA-> slot                    slot -DMA-> staging -kernel-> pages
mapped     pages -kernel-> slot, over the bus                     slot -kernel-> pages, over the bus
batched    pages -one DMA a run, one call for all-> slot          slot -> pages, likewise
=========  =====================================================  ==================================================

With three staging buffers the kernel of one part runs during the DMA of another. What fails raises, after everything
that had been started is over: a block that is not known to be whole is never called done.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, Protocol

from terracekv.kernels.batch import Batch
from terracekv.kernels.cuda import Device
from terracekv.kernels.parts import Cut, Part
from terracekv.kernels.pool import Pool
from terracekv.kernels.runs import Runs, no_page_twice

PART_BYTES = 32 << 20
"""Of a staging buffer: large enough that the bus does not notice the gaps between copies."""
DEPTH = 3
GRID_STAGED = 64
"""Blocks of a launch beside which the bus is the bottleneck; the engine keeps its other multiprocessors."""
GRID_MAPPED = 32
PER_MULTIPROCESSOR = 8
"""Blocks for each multiprocessor when memory speed is the bottleneck."""


class Strategy(StrEnum):
    STAGED = "staged"
    MAPPED = "mapped"
    BATCHED = "batched"


class HostMemory(Protocol):
    """What is known of the slots' memory: see ``Pinned``."""

    def covers(self, address: int, size: int) -> bool: ...
    def spans(self, address: int, size: int) -> list[tuple[int, int]]: ...


class Event(NamedTuple):
    """An event of CUDA, recorded by the engine in its own stream; the copies come after it."""

    handle: int


After = int | Event
"""What copies wait for: all that a stream was given until now, or an event."""


class Choice(NamedTuple):
    """The better strategy in each direction."""

    gather: Strategy = Strategy.STAGED
    scatter: Strategy = Strategy.STAGED


STAGED = Choice()
"""Right everywhere, until something better was measured."""


class _Staging:
    """A buffer between pages and bus. ``free`` happens when its last user is done."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.address = pool.memory(size)
        self.free = pool.event()


class Transfer:
    """``pieces`` say where the KV is; a block is ``pages_per_block`` pages. ``host`` knows what of the host is pinned.

    RuntimeError when the GPU has no room for ``depth`` staging buffers; then nothing is left allocated.
    """

    def __init__(
        self,
        device: Device,
        pieces: Sequence[Runs],
        pages_per_block: int,
        host: HostMemory,
        *,
        choice: Choice = STAGED,
        part_bytes: int = PART_BYTES,
        depth: int = DEPTH,
    ) -> None:
        self.device = device
        self.pieces = tuple(pieces)
        self.pages_per_block = pages_per_block
        self.choice = choice
        self._host = host
        self._cut = Cut(self.pieces, pages_per_block, part_bytes)
        self.block_bytes = self._cut.block_bytes
        self._constants = [
            (
                f"-DRUN_BYTES={piece.run_bytes}ULL",
                f"-DPAGE_STRIDE={piece.page_stride}ULL",
                f"-DPAGES_PER_BLOCK={pages_per_block}ULL",
            )
            for piece in self.pieces
        ]
        self._lock = threading.Lock()
        self._kernels = device.stream()
        self._bus = device.stream()
        self._pool = Pool(device)
        self._closed = False
        try:
            self._staging = [_Staging(self._pool, self._cut.part_bytes) for _ in range(depth)]
            self._bases = [self._pool.numbers(piece.bases, self._kernels.ptr) for piece in self.pieces]
        except BaseException:
            self.close()
            raise
        self._turn = 0

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[int], after: After, strategy: Strategy | None = None
    ) -> Batch:
        """Copy block i, which is in pages ``blocks[i]``, to address ``slots[i]``. Returns before it has happened."""
        return self._start(True, blocks, slots, after, strategy or self.choice.gather)

    def scatter(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[int], after: After, strategy: Strategy | None = None
    ) -> Batch:
        """Copy ``slots[i]`` out to pages ``blocks[i]``. Returns before it has happened."""
        return self._start(False, blocks, slots, after, strategy or self.choice.scatter)

    def scatter_from_device(self, blocks: Sequence[Sequence[int]], sources: Sequence[int], after: After) -> Batch:
        """The same where the payloads are in this GPU's memory already: at memory speed, the bus is not touched."""
        return self._start(False, blocks, sources, after, None)

    def prepare(self) -> None:
        """Have the kernels ready, so that no first copy waits for them."""
        for constants in self._constants:
            for kernel in ("gather_runs", "scatter_runs"):
                self.device.prepare(kernel, constants)

    def close(self) -> None:
        """Wait for all copies and let go of the GPU. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drain()
            self._pool.close()

    # One call.

    def _start(
        self,
        gather: bool,
        blocks: Sequence[Sequence[int]],
        slots: Sequence[int],
        after: After,
        strategy: Strategy | None,
    ) -> Batch:
        """``strategy`` None: slots are device memory."""
        assert len(blocks) == len(slots) and all(len(pages) == self.pages_per_block for pages in blocks)
        for pages in blocks:
            for piece in self.pieces:
                piece.at(*pages)  # raises for a page that is not there: this guards the engine's memory
        if not gather:
            no_page_twice(blocks)
        with self._lock:
            assert not self._closed
            batch = Batch(self.device, len(blocks), self._take_back)
            if not blocks:
                return batch
            if not self._fits(strategy, slots):
                strategy = Strategy.STAGED
            try:
                if strategy is Strategy.BATCHED:
                    self._batched(gather, batch, blocks, slots, after)
                elif strategy is Strategy.STAGED:
                    self._staged(gather, batch, blocks, slots, after)
                else:
                    if strategy is Strategy.MAPPED:
                        slots = [self.device.mapped(slot) for slot in slots]
                    self._direct(gather, batch, blocks, slots, after, over_bus=strategy is not None)
            except BaseException:
                self._drain()
                self._give_back(batch)
                raise
            return batch

    def _staged(
        self, gather: bool, batch: Batch, blocks: Sequence[Sequence[int]], slots: Sequence[int], after: After
    ) -> None:
        kernels, bus = self._kernels, self._bus
        parts = self._cut.parts(len(blocks))
        buffers = [self._staging[(self._turn + turn) % len(self._staging)] for turn in range(len(parts))]
        self._turn += len(parts)

        def address(number: int, block: int) -> int:
            return buffers[number].address + (block - parts[number].first_block) * parts[number].size

        words = self._give_words(batch, blocks, parts, address)
        self._order(after, kernels.ptr)
        for number, (part, staging) in enumerate(zip(parts, buffers, strict=True)):
            first, second = (kernels, bus) if gather else (bus, kernels)
            self.device.wait(first.ptr, staging.free)
            if gather:
                self._launch(gather, part, words[number], batch, GRID_STAGED)
                self._order(kernels.ptr, bus.ptr)
            for block in range(part.first_block, part.first_block + part.block_count):
                self._dma(gather, slots[block] + part.offset, address(number, block), part.size)
            if not gather:
                self._order(bus.ptr, kernels.ptr)
                self._launch(gather, part, words[number], batch, GRID_STAGED)
            self.device.record(staging.free, second.ptr)
            self._part_done(batch, part, second.ptr)
        batch.pages = self._pool.mark(kernels.ptr)

    def _direct(
        self,
        gather: bool,
        batch: Batch,
        blocks: Sequence[Sequence[int]],
        slots: Sequence[int],
        after: After,
        *,
        over_bus: bool,
    ) -> None:
        parts = self._cut.parts(len(blocks))
        words = self._give_words(batch, blocks, parts, lambda number, block: slots[block] + parts[number].offset)
        self._order(after, self._kernels.ptr)
        grid = GRID_MAPPED if over_bus else PER_MULTIPROCESSOR * self.device.multiprocessors
        for part, of_part in zip(parts, words, strict=True):
            self._launch(gather, part, of_part, batch, grid)
            self._part_done(batch, part, self._kernels.ptr)
        batch.pages = self._pool.mark(self._kernels.ptr)

    def _batched(
        self, gather: bool, batch: Batch, blocks: Sequence[Sequence[int]], slots: Sequence[int], after: After
    ) -> None:
        self._order(after, self._bus.ptr)
        for block, (pages, slot) in enumerate(zip(blocks, slots, strict=True)):
            copies: list[tuple[int, int, int]] = []
            offset = 0
            for piece in self.pieces:
                plan = piece.at(*pages)
                for address, start, size in plan.merged():
                    for part, length in self._host.spans(slot + offset + start, size):
                        paged = address + part - (slot + offset + start)
                        copies.append((part, paged, length) if gather else (paged, part, length))
                offset += plan.payload_bytes
            self.device.copy_batch(copies, self._bus.ptr)
            self._part_done(batch, Part(block, 1, 0, self.block_bytes, ()), self._bus.ptr)
        batch.pages = self._pool.mark(self._bus.ptr)

    # Its steps.

    def _fits(self, strategy: Strategy | None, slots: Sequence[int]) -> bool:
        """Whether a strategy can do with the host's memory: a kernel reaches one registration, and copies of a batch
        are known not to wait, and to come in order with the stream, for pinned memory only."""
        if strategy is Strategy.MAPPED:
            return all(self._host.covers(slot, self.block_bytes) for slot in slots)
        if strategy is Strategy.BATCHED:
            spans = (span for slot in slots for span in self._host.spans(slot, self.block_bytes))
            return all(self._host.covers(address, size) for address, size in spans)
        return True

    def _order(self, before: After, after: int) -> None:
        """What stream ``after`` is given from now on comes after all that ``before`` was given until now, or is."""
        if isinstance(before, Event):
            self.device.wait(after, before.handle)
            return
        event = self._pool.mark(before)
        try:
            self.device.wait(after, event)
        finally:
            self._pool.give_back(event)  # recorded anew it is another moment; who waits already waits for this one

    def _launch(self, gather: bool, part: Part, words: list[int], batch: Batch, grid: int) -> None:
        assert batch.buffer is not None
        pages = batch.buffer.device + 8 * part.first_block * self.pages_per_block
        for stripe, payloads in zip(part.stripes, words, strict=True):
            piece = self.pieces[stripe.piece]
            self.device.launch(
                "gather_runs" if gather else "scatter_runs",
                grid,
                self._kernels,
                self._bases[stripe.piece] + 8 * stripe.first_base,
                stripe.base_count,
                pages,
                self.pages_per_block,
                payloads,
                part.block_count,
                piece.page_stride,
                piece.run_bytes,
                constants=self._constants[stripe.piece],
            )

    def _dma(self, gather: bool, slot: int, staging: int, size: int) -> None:
        for address, length in self._host.spans(slot, size):
            inside = staging + address - slot
            to, source = (address, inside) if gather else (inside, address)
            self.device.copy(to, source, length, self._bus.ptr)

    def _part_done(self, batch: Batch, part: Part, stream: int) -> None:
        batch.events.append(self._pool.mark(stream))
        for block in range(part.first_block, part.first_block + part.block_count):
            batch.part_of[block] = len(batch.events) - 1

    def _give_words(
        self,
        batch: Batch,
        blocks: Sequence[Sequence[int]],
        parts: Sequence[Part],
        address: Callable[[int, int], int],
    ) -> list[list[int]]:
        """Put pages and payload addresses of the whole call on the GPU; for each part and stripe, where its addresses
        are. ``address(part, block)`` is where the part's share of a block begins."""
        words = array("Q", [page for pages in blocks for page in pages])
        where: list[list[int]] = []
        for number, part in enumerate(parts):
            where.append([])
            for stripe in part.stripes:
                where[-1].append(8 * len(words))
                first = part.first_block
                words.extend(address(number, block) + stripe.offset for block in range(first, first + part.block_count))
        size = 8 * len(words)
        buffer = batch.buffer = self._pool.buffer(size)
        ctypes.memmove(buffer.host, words.buffer_info()[0], size)
        self.device.copy(buffer.device, buffer.host, size, self._kernels.ptr)
        return [[buffer.device + offset for offset in offsets] for offsets in where]

    # The end.

    def _take_back(self, batch: Batch, drain: bool) -> None:
        with self._lock:
            if drain:
                self._drain()
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        """Under the lock: nothing of the batch is under way any more."""
        self._pool.give_back(*batch.events)
        if batch.pages is not None:
            self._pool.give_back(batch.pages)
        if batch.buffer is not None:
            self._pool.give_back_buffer(batch.buffer)
        batch.events, batch.pages, batch.buffer = [], None, None

    def _drain(self) -> None:
        """Wait for all that was started. What failed there is raised to whoever waits for it, not here."""
        for stream in (self._kernels, self._bus):
            with suppress(RuntimeError):
                self.device.synchronize(stream.ptr)

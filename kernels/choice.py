"""Which strategy moves blocks faster on this machine: measured on scratch memory of the same shape, once.

Owns its scratch memory, for the length of a call. Called by connectors and the bench when an engine's KV is
registered, from any thread; takes a few transfers' time. Imports ``cuda``, ``runs`` and ``transfer``.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from terracekv.kernels.cuda import Device
from terracekv.kernels.runs import Runs
from terracekv.kernels.transfer import DEPTH, PART_BYTES, STAGED, Choice, Strategy, Transfer

BATCHED_RUN_BYTES = 16 << 10
"""Shorter runs cost more to describe to the copy engine than to move."""
SCRATCH_BYTES = 256 << 20
ROUNDS = 3


class Measured(NamedTuple):
    """``rates`` are bytes a second, by direction and strategy; empty, with the ``reason``, where nothing could be
    measured."""

    choice: Choice
    rates: dict[str, dict[Strategy, float]]
    reason: str | None = None


class _Scratch:
    """Host memory that is pinned as a whole."""

    def covers(self, address: int, size: int) -> bool:
        return True

    def spans(self, address: int, size: int) -> list[tuple[int, int]]:
        return [(address, size)]


def measure(
    device: Device,
    pieces: Sequence[Runs],
    pages_per_block: int,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
    part_bytes: int = PART_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Move up to ``scratch_bytes`` each way with each strategy that fits. A GPU too full to measure on gets STAGED."""
    shapes = [(len(piece.bases), piece.page_stride, piece.run_bytes) for piece in pieces]
    paged_bytes = sum(bases * pages_per_block * stride for bases, stride, _ in shapes)
    free, _ = device.room()
    count = max(1, (min(scratch_bytes, free // 4) - DEPTH * part_bytes) // paged_bytes)
    block_bytes = sum(bases * pages_per_block * run for bases, _, run in shapes)
    paged = pinned = 0
    try:
        paged = device.allocate(count * paged_bytes)
        pinned = device.allocate_pinned(count * block_bytes)
        copies = _copies(paged, shapes, count * pages_per_block)
        transfer = Transfer(device, copies, pages_per_block, _Scratch(), part_bytes=part_bytes)
        try:
            return _measured(transfer, [pinned + block * block_bytes for block in range(count)], clock)
        finally:
            transfer.close()
    except RuntimeError as error:
        return Measured(STAGED, {}, f"not measured: {error}")
    finally:
        if paged:
            device.free(paged)
        if pinned:
            device.free_pinned(pinned)


def _copies(address: int, shapes: Sequence[tuple[int, int, int]], pages: int) -> list[Runs]:
    """The same pieces in scratch memory: as many bases, as far apart as they need to be, of ``pages`` pages."""
    made = []
    for bases, stride, run in shapes:
        starts = tuple(address + base * pages * stride for base in range(bases))
        made.append(Runs(starts, stride, pages, run))
        address += bases * pages * stride
    return made


def _measured(transfer: Transfer, slots: Sequence[int], clock: Callable[[], float]) -> Measured:
    strategies = [Strategy.STAGED, Strategy.MAPPED]
    if transfer.device.can_batch and min(piece.run_bytes for piece in transfer.pieces) >= BATCHED_RUN_BYTES:
        strategies.append(Strategy.BATCHED)
    each = transfer.pages_per_block
    blocks = [range(block * each, (block + 1) * each)[::-1] for block in range(len(slots))]
    stream = transfer.device.stream()
    rates: dict[str, dict[Strategy, float]] = {"gather": {}, "scatter": {}}
    for direction, move in (("gather", transfer.gather), ("scatter", transfer.scatter)):
        for strategy in strategies:
            move(blocks[:1], slots[:1], stream.ptr, strategy).finish()  # compiles, and maps what is not mapped yet
            best = 0.0
            for _ in range(ROUNDS):
                start = clock()
                move(blocks, slots, stream.ptr, strategy).finish()
                best = max(best, len(slots) * transfer.block_bytes / max(clock() - start, 1e-9))
            rates[direction][strategy] = best
    gather, scatter = (max(rates[way], key=lambda strategy: rates[way][strategy]) for way in ("gather", "scatter"))
    return Measured(Choice(gather, scatter), rates)

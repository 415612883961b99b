"""Paged KV as engines keep it, small: how each layout is a plan, and memory in which every byte is a canary.

Owns nothing. Imports ``kernels``; used by tests.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from terracekv.kernels.runs import Runs

LAYOUTS = ("NHD", "HND", "fused", "MLA", "odd")


class Heap:
    """Memory full of random bytes at an address of a given alignment, so that every byte around a buffer is a
    canary."""

    def __init__(self, size: int, seed: int, skew: int = 0) -> None:
        self._whole = bytearray(size + 64)
        start = ctypes.addressof((ctypes.c_char * len(self._whole)).from_buffer(self._whole))
        offset = -start % 32 + skew
        self.bytes = memoryview(self._whole)[offset : offset + size]
        self.bytes[:] = random.Random(seed).randbytes(size)
        self.address = start + offset


@dataclass(frozen=True)
class Paged:
    """A plan of offsets into a heap of ``size`` bytes, and the pages of each block."""

    layout: str
    plan: Runs
    size: int
    blocks: tuple[tuple[int, ...], ...]

    def at(self, address: int) -> Runs:
        """The plan in a heap that starts at ``address``."""
        bases = tuple(address + base for base in self.plan.bases)
        return Runs(bases, self.plan.page_stride, self.plan.page_count, self.plan.run_bytes, self.blocks[0])

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block."""
        return self.plan.at(*self.blocks[0]).payload_bytes


def bases_of(
    layout: str, layers: int, heads: int, pages: int, page_tokens: int, item: int, dim: int
) -> tuple[tuple[int, ...], int, int, int]:
    """Bases (offsets), page stride, run bytes and size of a cache of this layout: the table of ``runs.py``."""
    head = page_tokens * dim * item
    page = heads * head
    if layout == "NHD":
        return tuple(range(0, 2 * layers * pages * page, pages * page)), page, page, 2 * layers * pages * page
    if layout == "fused":
        starts = [layer * pages * 2 * page + plane * page for layer in range(layers) for plane in (0, 1)]
        return tuple(starts), 2 * page, page, 2 * layers * pages * page
    if layout == "HND":
        starts = [plane * pages * page + h * head for plane in range(2 * layers) for h in range(heads)]
        return tuple(starts), page, head, 2 * layers * pages * page
    assert layout == "MLA"
    return tuple(range(0, layers * pages * head, pages * head)), head, head, layers * pages * head


@st.composite
def paged(draw: st.DrawFn) -> Paged:
    """Layouts of engines and, as ``odd``, runs of any length at any distance; pages in any order."""
    layout = draw(st.sampled_from(LAYOUTS))
    page_count = draw(st.integers(2, 12))
    if layout == "odd":
        run = draw(st.one_of(st.integers(1, 80), st.integers(4000, 9000)))
        stride = run + draw(st.sampled_from((0, 1, 4, 8, 16, run)))
        extent = page_count * stride
        gaps = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        bases = [sum(gaps[: index + 1]) + index * extent for index in range(len(gaps))]
        size = bases[-1] + extent
        starts = tuple(draw(st.permutations(bases)))
    else:
        item = draw(st.sampled_from((1, 2)))  # fp8 and int8, or bf16
        shape = draw(st.integers(1, 3)), draw(st.integers(1, 3)), page_count, draw(st.sampled_from((1, 2, 16)))
        starts, stride, run, size = bases_of(layout, *shape, item, draw(st.sampled_from((3, 8, 36, 64))))
    order = draw(st.permutations(range(page_count)))
    each = draw(st.integers(1, page_count))
    blocks = tuple(tuple(order[at : at + each]) for at in range(0, page_count - each + 1, each))
    return Paged(layout, Runs(starts, stride, page_count, run), size, blocks)


def reference(
    copy: Callable[[Runs, memoryview], None],
    plan: Runs,
    blocks: Sequence[Sequence[int]],
    payloads: Sequence[memoryview],
) -> None:
    """The same with ``kernels/host.py``."""
    for pages, payload in zip(blocks, payloads, strict=True):
        copy(plan.at(*pages), payload)

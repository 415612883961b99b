"""The copy plan: a block is a list of equal runs. Pure arithmetic on addresses; nothing here touches memory.

Owns no state. Called by whoever copies (``host.py``, CUDA kernels) and by whoever knows where an engine keeps its KV
(``connector/layout.py``), from any thread. Imports the standard library only.

An engine keeps KV in *pages*. A *base* is the address of page 0 of one contiguous stripe of a page: one layer's K, say,
or one head of it. Page p of a base is ``run_bytes`` bytes at ``base + p * page_stride``: a *run*. A payload is dense:
base after base, and of each base page after page, in the order of ``pages``. So

====================================  ==========================================  ================  ==============
engine memory                         one base per                                page_stride       run
====================================  ==========================================  ================  ==============
NHD   ``[2, pages, tokens, H, D]``    layer, K/V                                  one page          whole page
fused ``[pages, 2, tokens, H, D]``    layer, K/V                                  two planes        one plane
HND   ``[2, pages, H, tokens, D]``    layer, K/V, head                            H heads           one head
MLA   ``[pages, tokens, latent]``     layer                                       one page          whole page
dense ``[1, H, room, D]`` (no pages)  layer, K/V, head                            a block of one    one head of a
                                                                                  head              block
====================================  ==========================================  ================  ==============

differ in numbers only, and dtype does not occur at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple


class Strip(NamedTuple):
    """Runs that lie on a grid, so that one strided copy moves them all. All numbers but the counts are bytes.

    Run (row, column) is ``run_bytes`` bytes at ``address + row * row_stride + column * column_stride`` of memory and
    at ``offset + row * row_step + column * run_bytes`` of the payload.
    """

    address: int
    offset: int
    rows: int
    row_stride: int
    row_step: int
    columns: int
    column_stride: int
    run_bytes: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Where one payload lies in an engine's memory. Addresses, strides and runs in bytes; ``page_count`` is the number
    of pages the memory has, and ``pages`` those of this payload, in its order.

    Raises ValueError for what would reach outside the memory or write a byte twice: it guards the engine's heap.
    """

    bases: tuple[int, ...]
    page_stride: int
    page_count: int
    run_bytes: int
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.run_bytes <= 0 or self.page_count <= 0 or not self.bases:
            raise ValueError(f"no memory: {len(self.bases)} bases, {self.page_count} pages, runs of {self.run_bytes}")
        if self.page_stride < self.run_bytes and self.page_count > 1:
            raise ValueError(f"pages overlap: stride {self.page_stride}, runs of {self.run_bytes} bytes")
        if self.pages and not 0 <= min(self.pages) <= max(self.pages) < self.page_count:
            raise ValueError(f"pages {min(self.pages)} to {max(self.pages)} asked of a memory of {self.page_count}")
        if len(set(self.pages)) != len(self.pages):
            raise ValueError(f"a page occurs twice in {self.pages}")

    def at(self, *pages: int) -> "Runs":
        """The same memory, other pages."""
        return replace(self, pages=pages)

    @property
    def base_bytes(self) -> int:
        """Bytes of the payload that come from one base."""
        return len(self.pages) * self.run_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return len(self.bases) * self.base_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(address, offset in the payload) of every run, in the payload's order: the plan spelled out."""
        offset = 0
        for base in self.bases:
            for page in self.pages:
                yield base + page * self.page_stride, offset
                offset += self.run_bytes

    def merged(self) -> Iterator[tuple[int, int, int]]:
        """(address, offset, bytes): the same copies with neighbours in memory joined, so as few as can be."""
        address, offset, size = 0, 0, 0
        for next_address, next_offset in self:
            if size and next_address == address + size:
                size += self.run_bytes
                continue
            if size:
                yield address, offset, size
            address, offset, size = next_address, next_offset, self.run_bytes
        if size:
            yield address, offset, size

    def strips(self) -> list[Strip]:
        """The same copies as grids. Costs a step per page and per irregularity of the bases, never one per run:
        a payload of 180 runs at even distances is a single strip."""
        strips = []
        columns = self._columns()
        for first, rows, row_stride in _progressions(self.bases):
            for start, count, column_stride, run in columns:
                offset = first * self.base_bytes + start[1]
                address = self.bases[first] + start[0]
                strips.append(
                    Strip(address, offset, rows, row_stride, self.base_bytes, count, column_stride, run)
                    if rows > 1
                    else Strip(address, offset, 1, 0, 0, count, column_stride, run)
                )
        return [_flat(strip) for strip in strips]

    def _columns(self) -> list[tuple[tuple[int, int], int, int, int]]:
        """What one base contributes: ((memory, payload) offset, count, stride, bytes) of evenly spaced equal runs,
        after neighbouring pages are joined."""
        starts: list[int] = []
        sizes: list[int] = []
        for page in self.pages:
            start = page * self.page_stride
            if starts and start == starts[-1] + sizes[-1]:
                sizes[-1] += self.run_bytes
            else:
                starts.append(start)
                sizes.append(self.run_bytes)
        columns = []
        offset = first = 0
        while first < len(starts):
            last = first
            stride = 0
            while last + 1 < len(starts) and sizes[last + 1] == sizes[first]:
                step = starts[last + 1] - starts[last]
                if stride not in (0, step):
                    break
                stride = step
                last += 1
            count = last - first + 1
            columns.append(((starts[first], offset), count, stride, sizes[first]))
            offset += count * sizes[first]
            first = last + 1
        return columns


def no_page_twice(blocks: Sequence[Sequence[int]]) -> None:
    """ValueError for a page of two blocks, which a copy of both at once would write in any order and in parts."""
    seen: set[int] = set()
    for pages in blocks:
        for page in pages:
            if page in seen:
                raise ValueError(f"page {page} is written twice by one call")
            seen.add(page)


def _flat(strip: Strip) -> Strip:
    """A grid without gaps is one run."""
    if strip.rows > 1 and strip.row_stride == strip.run_bytes == strip.row_step:
        return strip._replace(rows=1, row_stride=0, row_step=0, run_bytes=strip.rows * strip.run_bytes)
    return strip


@lru_cache(maxsize=64)
def _progressions(bases: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(index of the first, count, distance) of the evenly spaced stretches of ``bases``; an engine's bases are always
    the same, so this is worked out once."""
    found = []
    first = 0
    while first < len(bases):
        last = first
        distance = 0
        while last + 1 < len(bases):
            step = bases[last + 1] - bases[last]
            if last > first and step != distance:
                break
            distance = step
            last += 1
        found.append((first, last - first + 1, distance))
        first = last + 1
    return tuple(found)

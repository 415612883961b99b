"""Copy plans and the host copies that follow them, against loops over single bytes."""

import ctypes
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terracekv.kernels.host import gather_runs, scatter_runs
from terracekv.kernels.runs import Runs, Strip

Bytes = npt.NDArray[np.uint8]
STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Heap:
    """Memory full of random bytes, so that every byte around a buffer is a canary."""

    def __init__(self, size: int, seed: int) -> None:
        self.bytes = bytearray(random.Random(seed).randbytes(size))
        self._pinned = (ctypes.c_char * size).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._pinned)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Runs, int]:
    """A plan of offsets in a heap that starts at 0, and the heap's size: bases at odd places, pages in any order."""
    run_bytes = draw(st.integers(1, 67))
    page_count = draw(st.integers(1, 9))
    page_stride = run_bytes + draw(st.sampled_from((0, 0, 1, run_bytes, 13)))
    extent = (page_count - 1) * page_stride + run_bytes
    interleaved = draw(st.booleans()) and page_stride == 2 * run_bytes
    bases = []
    start = draw(st.integers(0, 5))
    even_gap = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 5))):
        bases.append(start)
        if interleaved:
            bases.append(start + run_bytes)
        start += extent + run_bytes * interleaved + draw(st.sampled_from((even_gap, even_gap, 3)))
    bases = draw(st.permutations(bases)) if draw(st.booleans()) else bases
    pages = draw(st.permutations(range(page_count)))[: draw(st.integers(1, page_count))]
    pages = sorted(pages) if draw(st.booleans()) else pages
    return Runs(tuple(bases), page_stride, page_count, run_bytes, tuple(pages)), start + extent + 16


def placed(plan: Runs, heap: Heap) -> Runs:
    bases = tuple(heap.address + base for base in plan.bases)
    return Runs(bases, plan.page_stride, plan.page_count, plan.run_bytes, plan.pages)


def grid(strip: Strip) -> Iterator[tuple[int, int]]:
    for row in range(strip.rows):
        for column in range(strip.columns):
            address = strip.address + row * strip.row_stride + column * strip.column_stride
            yield address, strip.offset + row * strip.row_step + column * strip.run_bytes


@given(plans(), st.integers(0, 2**32))
@STEADY
def test_a_gather_copies_every_run_in_order_and_nothing_else(planned: tuple[Runs, int], seed: int) -> None:
    plan, size = planned
    heap = Heap(size, seed)
    before = bytes(heap.bytes)
    payload = bytearray(b"\xa5" * (plan.payload_bytes + 32))
    gather_runs(placed(plan, heap), memoryview(payload)[16:-8])
    expected = b"".join(before[start : start + plan.run_bytes] for start, _ in plan)
    assert payload == b"\xa5" * 16 + expected + b"\xa5" * 16
    assert heap.bytes == before


@given(plans(), st.integers(0, 2**32))
@STEADY
def test_a_scatter_writes_every_run_and_no_byte_beside_it(planned: tuple[Runs, int], seed: int) -> None:
    plan, size = planned
    heap = Heap(size, seed)
    payload = random.Random(seed + 1).randbytes(plan.payload_bytes + 7)
    expected = bytearray(heap.bytes)
    for start, offset in plan:
        expected[start : start + plan.run_bytes] = payload[offset : offset + plan.run_bytes]
    scatter_runs(placed(plan, heap), memoryview(payload))
    assert heap.bytes == expected


@pytest.mark.fault(77)
@given(plans())
@STEADY
def test_neighbours_in_memory_are_merged_into_the_fewest_copies(planned: tuple[Runs, int]) -> None:
    plan, _ = planned
    merged = list(plan.merged())
    spelled = [(start + byte, offset + byte) for start, offset in plan for byte in range(plan.run_bytes)]
    assert [(start + byte, offset + byte) for start, offset, size in merged for byte in range(size)] == spelled
    breaks = sum(after[0] != before[0] + 1 for before, after in zip(spelled, spelled[1:], strict=False))
    assert len(merged) == breaks + 1


@pytest.mark.fault(77)
@given(plans())
@STEADY
def test_strips_are_the_same_copies_and_never_more_than_the_merged_runs(planned: tuple[Runs, int]) -> None:
    plan, _ = planned
    strips = plan.strips()
    by_strip = {
        (start + byte, offset + byte)
        for strip in strips
        for start, offset in grid(strip)
        for byte in range(strip.run_bytes)
    }
    assert by_strip == {(start + byte, offset + byte) for start, offset in plan for byte in range(plan.run_bytes)}
    assert sum(strip.rows * strip.columns * strip.run_bytes for strip in strips) == plan.payload_bytes
    per_base = sum(
        1 for _ in Runs(plan.bases[:1], plan.page_stride, plan.page_count, plan.run_bytes, plan.pages).merged()
    )
    assert len(strips) <= per_base * len(plan.bases)


@pytest.mark.fault(77)
def test_thousands_of_runs_at_even_distances_are_one_strip() -> None:
    heads = Runs(bases=tuple(range(4096, 4096 + 180 * 10_000, 10_000)), page_stride=64, page_count=8, run_bytes=64)
    assert len(heads.at(3).strips()) == 1
    whole_pages = Runs(bases=(0, 1 << 20), page_stride=512, page_count=2048, run_bytes=512)
    assert len(whole_pages.at(*range(2048)).strips()) == 1
    assert len(list(whole_pages.at(*range(2048)).merged())) == 1
    every_second = whole_pages.at(*range(0, 2048, 2))
    assert len(every_second.strips()) == 1
    assert len(list(every_second.merged())) == 2048


@dataclass(frozen=True)
class Shape:
    layers: int
    pages: int
    tokens: int
    heads: int
    dim: int


shapes = st.builds(Shape, *[st.integers(1, n) for n in (3, 6, 5, 4, 9)])


def engine_memory(kind: str, shape: Shape, item_bytes: int) -> tuple[Bytes, Runs, Callable[[], Bytes]]:
    """An engine's KV of random bytes in the given arrangement, the plan that describes it, and a function that reads
    it with NumPy's own indexing, as (base, page, run)."""
    layers, pages, tokens, heads, dim = shape.layers, shape.pages, shape.tokens, shape.heads, shape.dim * item_bytes
    extents, base_axes, page_axis = {
        "NHD": ((layers, 2, pages, tokens, heads, dim), (0, 1), 2),
        "fused": ((layers, pages, 2, tokens, heads, dim), (0, 2), 1),
        "HND": ((layers, 2, pages, heads, tokens, dim), (0, 1, 3), 2),
        "MLA": ((layers, pages, tokens, dim), (0,), 1),
        "dense": ((layers, 2, heads, pages, tokens, dim), (0, 1, 2), 3),
    }[kind]
    kv = np.frombuffer(random.Random(repr(shape)).randbytes(math.prod(extents)), np.uint8).reshape(extents).copy()
    run_axes = [axis for axis in range(kv.ndim) if axis not in (*base_axes, page_axis)]
    bases = [
        kv.ctypes.data + sum(at * kv.strides[axis] for at, axis in zip(index, base_axes, strict=True))
        for index in np.ndindex(*[extents[axis] for axis in base_axes])
    ]
    run_bytes = math.prod(extents[axis] for axis in run_axes)

    def by_base() -> Bytes:
        return kv.transpose(*base_axes, page_axis, *run_axes).reshape(len(bases), pages, run_bytes).copy()

    return kv, Runs(tuple(bases), kv.strides[page_axis], pages, run_bytes), by_base


@pytest.mark.fault(91)
@pytest.mark.parametrize("kind", ["NHD", "fused", "HND", "MLA", "dense"])
@given(shape=shapes, item_bytes=st.sampled_from((1, 2, 3, 4)), data=st.data())
@STEADY
def test_every_layout_is_a_list_of_equal_runs(kind: str, shape: Shape, item_bytes: int, data: st.DataObject) -> None:
    kv, plan, by_base = engine_memory(kind, shape, item_bytes)
    pages = data.draw(st.permutations(range(shape.pages)))[: data.draw(st.integers(1, shape.pages))]
    stored = by_base()
    payload = bytearray(plan.at(*pages).payload_bytes)
    gather_runs(plan.at(*pages), memoryview(payload))
    assert bytes(payload) == stored[:, pages].tobytes()

    kv ^= 0x5A
    expected = by_base()
    expected[:, pages] = stored[:, pages]
    scatter_runs(plan.at(*pages), memoryview(payload))
    assert np.array_equal(by_base(), expected)


def test_a_payload_that_is_too_small_or_read_only_is_refused_before_a_byte_moves() -> None:
    heap = Heap(64, 1)
    before = bytes(heap.bytes)
    plan = Runs((heap.address,), 16, 4, 16, (0, 2))
    small = bytearray(31)
    with pytest.raises(ValueError, match="31 bytes, the plan 32"):
        gather_runs(plan, memoryview(small))
    with pytest.raises(ValueError, match="31 bytes, the plan 32"):
        scatter_runs(plan, memoryview(small))
    with pytest.raises(ValueError, match="read-only"):
        gather_runs(plan, memoryview(bytes(32)))
    with pytest.raises(ValueError, match="contiguous"):
        gather_runs(plan, memoryview(bytearray(64))[::2])
    assert small == bytes(31)
    assert heap.bytes == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": (4,)}, "memory of 4"),
        ({"pages": (-1, 2)}, "memory of 4"),
        ({"pages": (1, 1)}, "twice"),
        ({"run_bytes": 17}, "overlap"),
        ({"run_bytes": 0}, "no memory"),
        ({"bases": ()}, "no memory"),
    ],
)
def test_a_plan_that_leaves_its_memory_cannot_be_made(changes: dict[str, object], message: str) -> None:
    sound = {"bases": (4096,), "page_stride": 16, "page_count": 4, "run_bytes": 16, "pages": (0, 3)}
    Runs(**sound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Runs(**(sound | changes))  # type: ignore[arg-type]

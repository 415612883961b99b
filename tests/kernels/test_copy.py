"""``copy.cu`` on the CPU against ``kernels/host.py`` and ``kernels/planes.py``: the same bytes, and no byte beside."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terracekv.kernels import host, planes
from terracekv.kernels.runs import Runs
from terracekv.tests.kernels.emulated import (
    COMPILER,
    WITHOUT,
    constants,
    move_planes,
    move_runs,
)
from terracekv.tests.kernels.geometries import Heap, Paged, bases_of, paged, reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(STEADY, max_examples=250)
GAP = 48
"""Bytes between payloads that must stay as they are."""


class Payloads:
    """One payload a block in a heap, at any distance of an aligned address."""

    def __init__(self, case: Paged, seed: int, skew: int) -> None:
        each = case.payload_bytes
        self.step = each + GAP + skew
        self.heap = Heap(GAP + len(case.blocks) * self.step, seed, skew)
        starts = [GAP + index * self.step for index in range(len(case.blocks))]
        self.addresses = [self.heap.address + start for start in starts]
        self.views = [self.heap.bytes[start : start + each] for start in starts]


@given(paged(), st.integers(0, 15), st.integers(0, 2**16), st.integers(1, 5))
@MANY
def test_a_gather_on_many_blocks_is_bit_for_bit_that_of_the_host(case: Paged, skew: int, seed: int, grid: int) -> None:
    memory, expected = Heap(case.size, seed, skew), Payloads(case, seed + 1, seed % 16)
    payloads = Payloads(case, seed + 1, seed % 16)
    before = bytes(memory.bytes)
    plan = case.at(memory.address)
    reference(host.gather_runs, plan, case.blocks, expected.views)
    move_runs("gather_runs", plan, case.blocks, payloads.addresses, grid=grid, seed=seed)
    assert payloads.heap.bytes == expected.heap.bytes
    assert memory.bytes == before


@given(paged(), st.integers(0, 15), st.integers(0, 2**16), st.integers(1, 5))
@MANY
def test_a_scatter_on_many_blocks_is_bit_for_bit_that_of_the_host(case: Paged, skew: int, seed: int, grid: int) -> None:
    memory, expected = Heap(case.size, seed, skew), Heap(case.size, seed, skew)
    payloads = Payloads(case, seed + 1, seed % 16)
    before = bytes(payloads.heap.bytes)
    reference(host.scatter_runs, case.at(expected.address), case.blocks, payloads.views)
    move_runs("scatter_runs", case.at(memory.address), case.blocks, payloads.addresses, grid=grid, seed=seed)
    assert memory.bytes == expected.bytes
    assert payloads.heap.bytes == before


@pytest.mark.parametrize("layout", ["NHD", "HND", "fused", "MLA"])
def test_kernels_built_for_one_geometry_do_the_same(layout: str) -> None:
    starts, stride, run, size = bases_of(layout, layers=2, heads=2, pages=6, page_tokens=4, item=2, dim=36)
    case = Paged(layout, Runs(starts, stride, 6, run), size, ((4, 1, 3), (0, 5, 2)))
    memory, general, built = Heap(size, 1), Payloads(case, 2, 0), Payloads(case, 2, 0)
    plan = case.at(memory.address)
    move_runs("gather_runs", plan, case.blocks, general.addresses)
    move_runs("gather_runs", plan, case.blocks, built.addresses, flags=constants(plan))
    assert general.heap.bytes == built.heap.bytes


def test_offsets_beyond_32_bits_are_kept(tmp_path: object) -> None:
    """Pages 5 GiB apart, in a mapping of which only the touched pages exist."""
    stride = 5 << 30
    whole = np.memmap(f"{tmp_path}/sparse", np.uint8, "w+", shape=(2 * stride + 4096,))
    whole[2 * stride : 2 * stride + 100] = np.arange(100)
    plan = Runs((whole.ctypes.data,), stride, 3, 100)
    out = Heap(200, 3)
    move_runs("gather_runs", plan, [(2, 1)], [out.address])
    assert out.bytes == bytes(range(100)) + bytes(100)


@given(st.integers(0, 700), st.integers(1, 3), st.sampled_from((0, 1, 2, 8)), st.integers(0, 2**16))
@STEADY
def test_planes_are_those_of_the_host_and_merge_to_what_was_split(
    count: int, blocks: int, skew: int, seed: int
) -> None:
    sources = [Heap(2 * count + 32, seed + n, skew) for n in range(blocks)]
    apart = [Heap(2 * count + 32, seed + 10 + n, skew) for n in range(blocks)]
    canaries = [bytes(heap.bytes[2 * count :]) for heap in apart]
    move_planes("split_planes", [heap.address for heap in sources], [heap.address for heap in apart], count)
    again = [Heap(2 * count + 32, seed + 20 + n, skew) for n in range(blocks)]
    move_planes("merge_planes", [heap.address for heap in again], [heap.address for heap in apart], count)
    for source, split, merged, canary in zip(sources, apart, again, canaries, strict=True):
        expected = bytearray(2 * count)
        planes.split(source.bytes[: 2 * count], 2, memoryview(expected))
        assert split.bytes[: 2 * count] == expected
        assert split.bytes[2 * count :] == canary
        assert merged.bytes[: 2 * count] == source.bytes[: 2 * count]


def test_no_access_leaves_its_buffer_or_is_misaligned() -> None:
    """Under sanitizers, with each stripe and each payload an allocation of exactly its size."""
    assert COMPILER is not None
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("the compiler came without its address sanitizer")
    environ = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "terracekv.tests.kernels.sanitized"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 200


def test_seeds_shuffle_threads_without_losing_one() -> None:
    """The emulation itself: with one thread a byte, every order copies all of them."""
    for seed in range(40):
        dice = random.Random(seed)
        grid = dice.randrange(1, 7)
        memory, out = Heap(3000, seed), Heap(3000, seed + 1)
        move_runs(
            "gather_runs", Runs((memory.address,), 1000, 3, 1000), [(0, 1, 2)], [out.address], grid=grid, seed=seed
        )
        assert out.bytes == memory.bytes

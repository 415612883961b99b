"""Whether what is moved on this GPU is, bit for bit, what the host's copies move: every layout, strategy and kernel.

Run by ``gpu_check.py``, by itself also under compute-sanitizer (``python -m terracekv.bench.gpu_kernels``). Imports
``kernels``. Outputs are poisoned before, and compared as a whole, so a byte too many shows too.
"""

import ctypes
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import closing

from terracekv.bench.gpu_paged import POISON, Geometry, Paged, Wholly, move
from terracekv.kernels import host, planes
from terracekv.kernels.cuda import Device, devices
from terracekv.kernels.runs import Runs
from terracekv.kernels.transfer import Strategy, Transfer

SMALL = (
    Geometry("NHD", "NHD", 3, 2, 64, block_tokens=64),
    Geometry("HND", "HND", 3, 2, 64, block_tokens=64),
    Geometry("fused", "fused", 3, 2, 64, block_tokens=64),
    Geometry("MLA", "MLA", 5, 1, 576, block_tokens=64),
    Geometry("fp8", "NHD", 3, 2, 64, 1, block_tokens=64),
    Geometry("odd", "NHD", 3, 1, 13, 1, block_tokens=48),
)
BLOCKS = 5


def check_layouts(device: Device) -> Iterator[str]:
    """Names of what was found equal; AssertionError at the first that is not."""
    for geometry in SMALL:
        with closing(Paged(device, geometry, BLOCKS)) as paged:
            host_bytes = max(paged.size, BLOCKS * paged.block_bytes)
            pinned = device.allocate_pinned(host_bytes)
            try:
                for part_bytes in (paged.block_bytes // 3, 2 * paged.block_bytes):
                    transfer = Transfer(
                        device, [paged.runs], paged.pages_per_block, Wholly(), part_bytes=part_bytes, depth=2
                    )
                    with closing(transfer):
                        for strategy in Strategy:
                            if strategy is Strategy.BATCHED and not device.can_batch:
                                continue
                            _round_trip(device, paged, transfer, pinned, strategy)
                            yield f"{geometry.name} {strategy} parts of {part_bytes}"
            finally:
                device.free_pinned(pinned)


def _round_trip(device: Device, paged: Paged, transfer: Transfer, pinned: int, strategy: Strategy) -> None:
    content = random.Random(paged.size).randbytes(paged.size)
    here = bytearray(content)
    start = ctypes.addressof((ctypes.c_char * len(here)).from_buffer(here))
    bases = tuple(start + base - paged.address for base in paged.runs.bases)
    plan = Runs(bases, paged.runs.page_stride, paged.runs.page_count, paged.runs.run_bytes)
    payloads = bytearray(len(paged.pages) * paged.block_bytes)
    for number, pages in enumerate(paged.pages):
        at = number * paged.block_bytes
        host.gather_runs(plan.at(*pages), memoryview(payloads)[at : at + paged.block_bytes])
    stream = device.stream()
    paged.put(content, pinned)
    ctypes.memset(pinned, POISON, len(payloads))
    slots = [pinned + number * paged.block_bytes for number in range(len(paged.pages))]
    transfer.gather(paged.pages, slots, stream.ptr, strategy).finish()
    assert ctypes.string_at(pinned, len(payloads)) == payloads, f"gather, {strategy}: other bytes than the host's"

    fresh = random.Random(1).randbytes(len(payloads))
    for number, pages in enumerate(paged.pages):
        at = number * paged.block_bytes
        host.scatter_runs(plan.at(*pages), memoryview(fresh)[at : at + paged.block_bytes])
    ctypes.memmove(pinned, fresh, len(fresh))
    transfer.scatter(paged.pages, slots, stream.ptr, strategy).finish()
    assert paged.get(pinned) == here, f"scatter, {strategy}: other bytes than the host's"


def check_planes(device: Device) -> Iterator[str]:
    """16-bit floats taken apart and put together again, aligned and not."""
    stream = device.stream()
    for count in (1, 15, 16, 4096, 100_001):
        content = random.Random(count).randbytes(2 * count)
        expected = bytearray(2 * count)
        planes.split(memoryview(content), 2, memoryview(expected))
        size = 2 * count
        pinned = device.allocate_pinned(max(size, 16))
        whole, apart, lists = device.allocate(size), device.allocate(size), device.allocate(16)
        try:
            ctypes.memmove(pinned, content, size)
            move(device, [(whole, pinned, size)])
            addresses = array("Q", [whole, apart])
            move(device, [(lists, addresses.buffer_info()[0], 16)])
            for kernel, result, wanted in (("split_planes", apart, bytes(expected)), ("merge_planes", whole, content)):
                if kernel == "merge_planes":
                    ctypes.memset(pinned, POISON, size)
                    move(device, [(whole, pinned, size)])
                device.launch(kernel, 16, stream, lists, lists + 8, 1, count)
                device.synchronize(stream.ptr)
                move(device, [(pinned, result, size)])
                assert ctypes.string_at(pinned, size) == wanted, f"{kernel} of {count} elements"
                yield f"{kernel} {count}"
        finally:
            for address in (whole, apart, lists):
                device.free(address)
            device.free_pinned(pinned)


def main() -> int:
    (device, *_) = devices()
    done = [*check_layouts(device), *check_planes(device)]
    print(f"{len(done)} comparisons on {device.name}: all equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())

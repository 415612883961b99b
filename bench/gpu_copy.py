"""How fast blocks move between a GPU's pages and pinned slots, against a plain copy of the same bytes in the same run.

Prints a line of JSON a figure; ``python -m terracekv.bench.gpu_copy``. Imports ``kernels``. Needs a GPU with some
gigabytes free and as much host memory as ``bytes_moved``, twice.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from terracekv.bench.figures import median, note
from terracekv.bench.gpu_paged import GEOMETRIES, Geometry, Paged, Wholly, move
from terracekv.kernels.cuda import Device, NoCuda, devices
from terracekv.kernels.transfer import Strategy, Transfer

BYTES_MOVED = 512 << 20
ROUNDS = 5


def figures(
    device: Device,
    geometry: Geometry,
    *,
    bytes_moved: int = BYTES_MOVED,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """All figures of one geometry: each direction and strategy, copies run by run, and within the GPU."""
    one = geometry.block_tokens * geometry.layers * geometry.heads * geometry.dim * geometry.item_bytes
    block_bytes = one if geometry.layout == "MLA" else 2 * one
    blocks = max(1, bytes_moved // block_bytes)
    with closing(Paged(device, geometry, blocks)) as paged:
        size = blocks * block_bytes
        assert block_bytes == paged.block_bytes
        pinned = device.allocate_pinned(size)
        arena = device.allocate(size)
        try:
            ctypes.memset(pinned, 1, size)

            def rate(work: Callable[[], object]) -> float:
                work()  # compiles, and warms what is cold
                times = []
                for _ in range(rounds):
                    start = clock()
                    work()
                    times.append(max(clock() - start, 1e-9))
                return size / median(times)

            slots = [pinned + number * block_bytes for number in range(blocks)]
            places = [arena + number * block_bytes for number in range(blocks)]
            ceilings = {
                "gather": rate(lambda: move(device, [(s, p, block_bytes) for s, p in zip(slots, places, strict=True)])),
                "scatter": rate(
                    lambda: move(device, [(p, s, block_bytes) for s, p in zip(slots, places, strict=True)])
                ),
            }
            with closing(Transfer(device, [paged.runs], paged.pages_per_block, Wholly())) as transfer:
                yield from _moved(device, geometry, paged, transfer, slots, ceilings, rate)
                yield from _within(device, geometry, paged, transfer, places, rate)
        finally:
            device.free(arena)
            device.free_pinned(pinned)


def _moved(
    device: Device,
    geometry: Geometry,
    paged: Paged,
    transfer: Transfer,
    slots: list[int],
    ceilings: dict[str, float],
    rate: Callable[[Callable[[], object]], float],
) -> Iterator[dict[str, Any]]:
    stream = device.stream()
    for direction, start in (("gather", transfer.gather), ("scatter", transfer.scatter)):
        for strategy in Strategy:
            if strategy is Strategy.BATCHED and not device.can_batch:
                continue

            def work(start: Any = start, strategy: Strategy = strategy) -> None:
                start(paged.pages, slots, stream.ptr, strategy).finish()

            yield _figure(geometry, f"{direction} {strategy}", rate(work), "pinned copy", ceilings[direction])
    runs = [
        (slot + offset, address, paged.runs.run_bytes)
        for pages, slot in zip(paged.pages, slots, strict=True)
        for address, offset in paged.runs.at(*pages)
    ]
    yield _figure(geometry, "gather run by run", rate(lambda: move(device, runs)), "pinned copy", ceilings["gather"])


def _within(
    device: Device,
    geometry: Geometry,
    paged: Paged,
    transfer: Transfer,
    places: list[int],
    rate: Callable[[Callable[[], object]], float],
) -> Iterator[dict[str, Any]]:
    """What a load from the gpu tier does, against a copy of as many bytes within the GPU."""
    stream = device.stream()
    size = paged.block_bytes
    ceiling = rate(lambda: move(device, [(paged.address + n * size, place, size) for n, place in enumerate(places)]))
    value = rate(lambda: transfer.scatter_from_device(paged.pages, places, stream.ptr).finish())
    yield _figure(geometry, "load from gpu tier", value, "device copy", ceiling)


def _figure(geometry: Geometry, name: str, value: float, reference: str, ceiling: float) -> dict[str, Any]:
    return {
        "name": name,
        "geometry": geometry.name,
        "value": round(value / 1e9, 2),
        "unit": "GB/s",
        "reference": reference,
        "reference_value": round(ceiling / 1e9, 2),
        "ratio": round(value / ceiling, 3),
    }


def main() -> int:
    try:
        (device, *_) = devices()
    except NoCuda as error:
        note(f"no figures: {error}")
        return 0
    for geometry in GEOMETRIES:
        for figure in figures(device, geometry):
            print(json.dumps(figure | {"device": device.name}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What do a store and a load through a session cost beside the copy alone?

Reference: copying the same bytes, block by block, between an ordinary buffer and a warm tmpfs mapping, in the same
process and interleaved with what is measured, since the machine's memory speed wanders.
Run: ``python -m terracekv.bench.session``.
"""

import argparse
import mmap
import os
import random
import tempfile

import numpy as np

from terracekv.bench.figures import median, report, seconds
from terracekv.bench.served import BLOCK_TOKENS, Served, served
from terracekv.kernels.pages import populate

MIB = 1 << 20
ARENA_BYTES = 1024 * MIB


def warm_mapping(size: int) -> memoryview:
    """Shared memory of the kind that the arena is, mapped and written before."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        view = memoryview(mmap.mmap(file.fileno(), size))
    populate(view)
    return view


def bench(daemon: Served, block_bytes: int, blocks: int, rounds: int) -> None:
    """Rounds of: store new blocks, copy the same; load them, copy the same."""
    client = daemon.client(block_bytes)
    source = np.random.default_rng(1).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    mapping = warm_mapping(blocks * block_bytes)
    tmpfs = np.frombuffer(mapping, np.uint8).reshape(blocks, block_bytes)
    ratios: dict[str, list[float]] = {"store": [], "load": []}
    times: dict[str, list[float]] = {"store": [], "store_copy": [], "load": [], "load_copy": []}

    def gather(index: int, payload: memoryview) -> None:
        np.copyto(np.frombuffer(payload, np.uint8), source[index])

    def scatter(index: int, payload: memoryview) -> None:
        np.copyto(target[index], np.frombuffer(payload, np.uint8))

    def copy_in() -> None:
        for index in range(blocks):
            np.copyto(tmpfs[index], source[index])

    def copy_out() -> None:
        for index in range(blocks):
            np.copyto(target[index], tmpfs[index])

    warming = ARENA_BYTES // (blocks * block_bytes) + 1  # once around the arena: every page mapped, every slot used
    for round in range(-warming, rounds):
        keys = client.keys([random.randrange(1 << 16) for _ in range(blocks * BLOCK_TOKENS)])
        work = {
            "store": lambda: check(client.store(keys, gather).stored, blocks),  # noqa: B023
            "store_copy": copy_in,
            "load": lambda: check(client.load(keys, scatter).blocks, blocks),  # noqa: B023
            "load_copy": copy_out,
        }
        order = list(work) if round % 2 else ["store_copy", "store", "load_copy", "load"]  # neither always comes first
        figures = {name: seconds(work[name]) for name in order}
        assert (target == source).all()
        if round >= 0:
            for name, value in figures.items():
                times[name].append(value)
            ratios["store"].append(figures["store_copy"] / figures["store"])
            ratios["load"].append(figures["load_copy"] / figures["load"])
    client.close()
    for name in ("store", "load"):
        size = blocks * block_bytes / 1e9
        report(
            f"session_{name}_{block_bytes // MIB}MiB",
            size / median(times[name]),
            "GB/s",
            "copy of the same bytes",
            size / median(times[f"{name}_copy"]),
            rounds,
            ratio=median(ratios[name]),
            blocks=blocks,
        )


def check(got: int, wanted: int) -> None:
    """A figure of work that was not done is no figure."""
    assert got == wanted, f"{got} of {wanted} blocks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with served(host__size=str(ARENA_BYTES), disk__enabled="false") as daemon:
        bench(daemon, 8 * MIB, 32, arguments.rounds)
        bench(daemon, 2 * MIB, 128, arguments.rounds)


if __name__ == "__main__":
    main()

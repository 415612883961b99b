"""How near does the disk tier come to what the disk itself can do?

Reference: threads that read and write a preallocated file with direct I/O, same block size, same depth, interleaved
with the tier's rounds in the same run. The tier's figures include its checksum on reading, its catalog and, since
every round evicts the one before, its eviction. Run: ``python -m terracekv.bench.disk [--folder ON_THE_DISK]``.
"""

import argparse
import mmap
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from terracekv.bench.figures import median, note, report, seconds
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier, least_capacity_bytes
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.tier import Outcome

MIB = 1 << 20
SEGMENT_BYTES = 256 * MIB
THREADS = 4


class Raw:
    """A preallocated file, read and written block by block with direct I/O."""

    def __init__(self, path: Path, block_bytes: int, blocks: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, block_bytes * blocks)
        self._block_bytes = block_bytes

    def write(self, index: int, slot: memoryview) -> None:
        assert os.pwritev(self._file, [slot], index * self._block_bytes) == self._block_bytes

    def read(self, index: int, slot: memoryview) -> None:
        assert os.preadv(self._file, [slot], index * self._block_bytes) == self._block_bytes

    def close(self) -> None:
        os.close(self._file)


class Tiered:
    """The same through the disk tier; each round stores blocks of new names."""

    def __init__(self, tier: DiskTier, namespace: Namespace, digests: dict[int, int]) -> None:
        self._tier = tier
        self._namespace = namespace
        self._digests = digests
        self._names: dict[int, bytes] = {}

    def write(self, index: int, slot: memoryview) -> None:
        name = self._names[index] = block_id(random.randbytes(32), 0)
        outcome = self._tier.put(self._namespace, name, slot, self._digests[id(slot)])
        assert outcome is Outcome.STORED, (outcome, self._tier.status().last_error)

    def read(self, index: int, slot: memoryview) -> None:
        outcome = self._tier.get(self._namespace, self._names[index], slot)
        assert outcome is Outcome.HIT, outcome

    def forget(self) -> None:
        """Delete the round's blocks: having been hit they would be saved from eviction, by further writes."""
        self._tier.delete(self._namespace, list(self._names.values()))


def in_threads(
    pool: ThreadPoolExecutor, slots: list[memoryview], blocks: int, work: Callable[[int, memoryview], None]
) -> None:
    """Each thread does its share of the blocks with a slot of its own."""

    def share(first: int) -> None:
        for index in range(first, blocks, THREADS):
            work(index, slots[first])

    list(pool.map(share, range(THREADS)))


def bench(folder: Path, block_bytes: int, round_bytes: int, rounds: int) -> None:
    blocks = round_bytes // block_bytes
    slots = []
    for _ in range(THREADS):
        slot = memoryview(mmap.mmap(-1, block_bytes))
        slot[:] = random.randbytes(block_bytes)
        slots.append(slot)
    namespaces = Namespaces(folder / "namespaces.json")
    namespace = namespaces.register(
        Namespace(id=bytes(32), number=0, epoch=0, block_tokens=256, shards=1, block_bytes=block_bytes)
    )
    tier = DiskTier(
        folder / "disk",
        capacity_bytes=least_capacity_bytes(SEGMENT_BYTES) + 2 * round_bytes,
        segment_bytes=SEGMENT_BYTES,
        namespaces=namespaces,
    )
    raw = Raw(folder / "raw", block_bytes, blocks)
    speeds: dict[str, list[float]] = {}
    with closing(tier), closing(raw), ThreadPoolExecutor(THREADS) as pool:
        tiered = Tiered(tier, namespace, {id(slot): checksum(slot) for slot in slots})
        subjects = {"tier": tiered, "raw": raw}
        note(f"{block_bytes // MIB} MiB blocks, {tier.status().mode} I/O")
        warming = 3  # once around the tier's segments: extents written, evictions under way
        for round_ in range(-warming, rounds):
            order = ["tier", "raw"] if round_ % 2 else ["raw", "tier"]
            for action in ("write", "read"):
                for label in order:
                    took = seconds(partial(in_threads, pool, slots, blocks, getattr(subjects[label], action)))
                    if round_ >= 0:
                        speeds.setdefault(f"{label}.{action}", []).append(round_bytes / took / 1e9)
            tiered.forget()
    for action in ("write", "read"):
        ours, reference = speeds[f"tier.{action}"], speeds[f"raw.{action}"]
        report(
            f"disk.{action}.{block_bytes // MIB}MiB",
            median(ours),
            "GB/s",
            "direct I/O on a preallocated file, 4 threads",
            median(reference),
            rounds,
            ratio=median([a / b for a, b in zip(ours, reference, strict=True)]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to make the files; a temporary folder by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-mib", type=int, default=512, help="bytes moved in each direction each round")
    asked = parser.parse_args()
    for block_mib in (8, 2):
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="terracekv-bench-") as folder:
            bench(Path(folder), block_mib * MIB, asked.round_mib * MIB, asked.rounds)


if __name__ == "__main__":
    main()

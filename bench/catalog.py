"""What does the disk tier's index cost: memory and bytes for each block, time of a lookup, time to open?

Each count of blocks has a process of its own, so that one's memory is not the next one's. Entries go into the tier's
catalog in batches, as from a rebuild, for segments that are sparse files; no payload is written.
Run: ``python -m terracekv.bench.catalog``.
"""

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from terracekv.bench.figures import median, report, seconds
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.entry import Entry, id_of, name_of
from terracekv.tiers.namespace import Namespace, Namespaces

COUNTS = (10_000, 100_000, 1_000_000)
SEGMENT_BYTES = 256 << 20
RECORD_PAGES = 2
PER_SEGMENT = SEGMENT_BYTES // 4096 // RECORD_PAGES
BATCH = 4096
LOOKUP_KEYS = (128, 512)
GOAL = "the promise: 50 MB for a million blocks"


def anonymous_bytes() -> int:
    """This process's memory that no file backs."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


class Index:
    """A disk tier with nothing but entries."""

    def __init__(self, folder: Path, blocks: int) -> None:
        self._folder = folder
        self._namespaces = Namespaces(folder / "namespaces.json")
        self.namespace = self._namespaces.register(
            Namespace(id=bytes(32), number=0, epoch=0, block_tokens=16, shards=1, block_bytes=4096)
        )
        self._capacity_bytes = (blocks // PER_SEGMENT + 8) * SEGMENT_BYTES + (1 << 30)

    def open(self) -> DiskTier:
        return DiskTier(
            self._folder / "disk",
            capacity_bytes=self._capacity_bytes,
            segment_bytes=SEGMENT_BYTES,
            namespaces=self._namespaces,
            free_floor_bytes=0,
        )

    def fill(self, tier: DiskTier, blocks: int) -> list[list[bytes]]:
        """Publish entries; some runs of ids to look up."""
        runs = []
        for first in range(0, blocks, BATCH):
            rows = [
                (
                    name_of(self.namespace.stamp, random.randbytes(34)),
                    Entry(
                        self.namespace.stamp,
                        1 + index // PER_SEGMENT,
                        index % PER_SEGMENT * RECORD_PAGES,
                        4096,
                        4096,
                        0,
                    ),
                )
                for index in range(first, min(first + BATCH, blocks))
            ]
            assert all(tier._catalog.publish(rows))
            if random.random() < 64 * BATCH / blocks:
                runs.append([id_of(name) for name, _ in rows])
        for number in tier._catalog.segments():
            with open(tier._files.path(number), "wb") as file:
                file.truncate(SEGMENT_BYTES)
        return runs


def bench(blocks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="terracekv-bench-") as folder:
        index = Index(Path(folder), blocks)
        tier = index.open()
        before = anonymous_bytes()
        runs = index.fill(tier, blocks)
        figures: dict[int, list[float]] = {}
        for keys in LOOKUP_KEYS:
            for _ in range(300):
                run = random.choice(runs)
                start = random.randrange(max(1, len(run) - keys))
                ids = run[start : start + keys]
                figures.setdefault(keys, []).append(seconds(partial(tier.leading, index.namespace, ids)))
        kept = sum(len(run) for run in runs) * (34 + 33 + 8)
        grown = anonymous_bytes() - before - kept
        report(f"catalog.memory.{blocks}", grown / 1e6, "MB RssAnon", GOAL, 50.0)
        used = tier._catalog.used_bytes()
        report(f"catalog.bytes.{blocks}", used / blocks, "bytes on disk a block", bytes_total=used)
        for keys, times in figures.items():
            report(f"catalog.lookup.{blocks}.{keys}_keys", median(times) * 1e6, "us", runs=len(times))
        tier.close()
        opened: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            tier = index.open()
            opened.append(time.perf_counter() - began)
            assert not tier.rebuilding and tier.status().blocks == blocks
            tier.close()
        report(f"catalog.open.{blocks}", median(opened) * 1e3, "ms", runs=len(opened))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, help="measure this count only, in this process")
    asked = parser.parse_args()
    if asked.blocks:
        bench(asked.blocks)
        return
    for blocks in COUNTS:
        subprocess.run([sys.executable, "-m", "terracekv.bench.catalog", "--blocks", str(blocks)], check=True)


if __name__ == "__main__":
    main()

"""What the codec makes of the disk tier: how many blocks more the same capacity holds, and what that costs in speed.

Blocks are real KV in bfloat16 (see ``bench.codec``), stored under ever new names until the tier has evicted a lot,
by a tier that codes and one that does not, in turns. Reads are of what is left. Run:
``python -m terracekv.bench.disk_codec [--folder ON_THE_DISK]``. Needs torch and the model.
"""

import argparse
import importlib.util
import mmap
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from terracekv.bench.figures import median, note, report, seconds
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.tier import PAGE, Outcome

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
CAPACITY_BYTES = 8 * SEGMENT_BYTES
FILLS = 2
THREADS = 4
ROUNDS = 3


@dataclass
class Measured:
    """Of one setting; rates in GB of payload per second, by all threads."""

    blocks: int = 0
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    details: dict[str, int | float | str | None] = field(default_factory=dict)


def slot_of(payload: bytes) -> memoryview:
    """A payload as it lies in the arena."""
    slot = memoryview(mmap.mmap(-1, -(-len(payload) // PAGE) * PAGE))
    slot[: len(payload)] = payload
    return slot


def measure(folder: Path, codec: str, payloads: list[bytes], measured: Measured) -> None:
    size = len(payloads[0])
    namespaces = Namespaces(folder / "namespaces.json")
    namespace = namespaces.register(
        Namespace(id=bytes(32), number=0, epoch=0, block_tokens=256, dtype="bfloat16", shards=1, block_bytes=size)
    )
    slots = [(slot_of(payload), checksum(payload)) for payload in payloads]
    names = [block_id(random.randbytes(32), 0) for _ in range(FILLS * CAPACITY_BYTES // size)]
    tier = DiskTier(
        folder / "disk",
        capacity_bytes=CAPACITY_BYTES,
        segment_bytes=SEGMENT_BYTES,
        codec=codec,
        namespaces=namespaces,
        free_floor_bytes=0,
    )

    def put(first: int) -> None:
        for index in range(first, len(names), THREADS):
            slot, digest = slots[index % len(slots)]
            assert tier.put(namespace, names[index], slot, digest) is Outcome.STORED

    def get(kept: list[bytes], first: int) -> None:
        into = slot_of(bytes(size))
        for id in kept[first::THREADS]:
            assert tier.get(namespace, id, into) is Outcome.HIT

    with closing(tier), ThreadPoolExecutor(THREADS) as pool:
        took = seconds(lambda: list(pool.map(put, range(THREADS))))
        measured.write.append(len(names) * size / took / 1e9)
        kept = [id for id in names if tier.leading(namespace, [id])]
        took = seconds(lambda: list(pool.map(partial(get, kept), range(THREADS))))
        measured.read.append(len(kept) * size / took / 1e9)
        measured.blocks = len(kept)
        measured.details = tier.status().details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to make the files; a temporary folder by default")
    asked = parser.parse_args()
    if not all(importlib.util.find_spec(library) for library in ("torch", "transformers", "gguf")):
        note("disk codec: torch, transformers and gguf are not installed, real KV is not measured")
        return
    from terracekv.bench.codec import blocks

    payloads = blocks()["bfloat16"]
    results = {"off": Measured(), "on": Measured()}
    for number in range(ROUNDS):
        for codec in sorted(results, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(dir=asked.folder, prefix="terracekv-bench-") as folder:
                measure(Path(folder), codec, payloads, results[codec])
    off, on = results["off"], results["on"]
    reference = "disk.codec off"
    report(
        f"disk.codec.blocks in {CAPACITY_BYTES // MIB} MiB",
        on.blocks,
        "blocks",
        reference,
        off.blocks,
        ROUNDS,
        block_bytes=len(payloads[0]),
        codec_ratio=on.details["codec_ratio"] or 0,
    )
    for verb, ours, theirs in (("write", on.write, off.write), ("read", on.read, off.read)):
        report(f"disk.codec.{verb}, {THREADS} threads", median(ours), "GB/s", reference, median(theirs), ROUNDS)


if __name__ == "__main__":
    main()

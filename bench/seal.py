"""Sealing of records: how fast a core seals and opens blocks, beside a checksum of the same bytes.

In one thread, by processor time, so that neighbours do not count.
"""

import os
import time
from collections.abc import Callable

from terracekv.bench.figures import median, note, report
from terracekv.tiers.checksum import checksum

SIZES = (2 << 20, 8 << 20)
ROUNDS = 15


def rate(work: Callable[[], object], size: int) -> float:
    """GB per second of a core."""
    spent = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        spent.append(time.thread_time() - started)
    return size / median(spent) / 1e9


def measure(size: int) -> None:
    from terracekv.tiers.seal import Keys

    keys = Keys([os.urandom(32)])
    plain, back = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))
    room = memoryview(bytearray(size + 4096))
    namespace, about = bytes(32), bytes(100)
    count = keys.seal(namespace, about, plain, room)
    keys.open(namespace, about, room[:count], back)
    assert back == plain
    hashed = rate(lambda: checksum(plain), size)
    report(
        f"seal blocks of {size >> 20} MiB",
        rate(lambda: keys.seal(namespace, about, plain, room), size),
        "GB/s of a core",
        "checksum of the same bytes",
        hashed,
        ROUNDS,
        open_gb_per_s=round(rate(lambda: keys.open(namespace, about, room[:count], back), size), 2),
    )


def main() -> None:
    try:
        for size in SIZES:
            measure(size)
    except ModuleNotFoundError as missing:
        note(f"seal: {missing.name} is not installed, nothing is measured")


if __name__ == "__main__":
    main()

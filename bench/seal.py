"""Sealing of records: how fast a core seals and opens blocks, beside a checksum of the same bytes.

In one thread, by processor time, so that neighbours do not count.
"""

import os

from terracekv.bench.figures import core_rate, note, report
from terracekv.tiers.checksum import checksum

SIZES = (2 << 20, 8 << 20)
ROUNDS = 15


def measure(size: int) -> None:
    from terracekv.tiers.seal import Keys

    keys = Keys([os.urandom(32)])
    plain, back = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))
    room = memoryview(bytearray(size + 4096))
    namespace, about = bytes(32), bytes(100)
    count = keys.seal(namespace, about, plain, room)
    keys.open(namespace, about, room[:count], back)
    assert back == plain
    hashed = core_rate(lambda: checksum(plain), size, ROUNDS)
    report(
        f"seal blocks of {size >> 20} MiB",
        core_rate(lambda: keys.seal(namespace, about, plain, room), size, ROUNDS),
        "GB/s of a core",
        "checksum of the same bytes",
        hashed,
        ROUNDS,
        open_gb_per_s=round(core_rate(lambda: keys.open(namespace, about, room[:count], back), size, ROUNDS), 2),
    )


def main() -> None:
    try:
        for size in SIZES:
            measure(size)
    except ModuleNotFoundError as missing:
        note(f"seal: {missing.name} is not installed, nothing is measured")


if __name__ == "__main__":
    main()

"""The run whose calls are recorded: a small disk tier is filled, read, synced, closed, opened and evicted from.

Owns the folder that it is given. Run by ``power.recorded`` as a process of its own. After each step it says in a file
of that folder which blocks are listed, and whether all of them have just been synced. Imports ``tests``.
"""

import json
import os
import random
import sys
from pathlib import Path

from terracekv.tests.blocks import get, name, put
from terracekv.tests.crash.power import CAPACITY_BYTES, MARKS, SEGMENT_BYTES
from terracekv.tests.disks import Disks
from terracekv.tiers.disk import DiskTier

BLOCKS = 160
STEP = 8


def main() -> None:
    """FOLDER SEED DIRECT."""
    root, dice = Path(sys.argv[1]), random.Random(sys.argv[2])
    marks = os.open(root / MARKS, os.O_WRONLY | os.O_CREAT, 0o600)
    disk = Disks(root)

    def say(tier: DiskTier, synced: bool) -> None:
        listed = [index for index in range(BLOCKS) if tier.leading(disk.namespace, [name(index)])]
        os.write(marks, json.dumps({"listed": listed, "synced": synced}).encode())

    tier = disk.open(CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, direct=sys.argv[3])
    for first in range(0, BLOCKS, STEP):
        for index in range(first, first + STEP):
            put(tier, disk.namespace, name(index))
            get(tier, disk.namespace, name(dice.randrange(index + 1)))
        say(tier, False)
        what = dice.choice(("sync", "close", "nothing", "nothing"))
        if what == "sync":
            tier.sync()
            say(tier, True)
        elif what == "close":
            tier.close()
            tier = disk.open(CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, direct=sys.argv[3])
            say(tier, True)
    say(tier, False)
    os._exit(0)  # nothing is closed


if __name__ == "__main__":
    main()

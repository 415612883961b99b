"""All fuzzers, each in a process of its own, two at a time: a line of JSON for each and one for the whole.

Run by ``make fuzz``. A failure prints the seed and what was last done; the same seed does it again. Imports them.
"""

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from terracekv.tests.fuzz.answers import fuzz_answers
from terracekv.tests.fuzz.door import fuzz_door
from terracekv.tests.fuzz.live import fuzz_live
from terracekv.tests.fuzz.records import fuzz_records
from terracekv.tests.fuzz.states import fuzz_states


def fuzz_routes(shm: Path, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """See ``routes``, which needs a library that the others do not."""
    from terracekv.tests.fuzz import routes

    return routes.fuzz_routes(shm, folder, count=count, seed=seed)


FUZZERS: dict[str, tuple[Callable[[Path, Path, int, int], dict[str, Any]], int]] = {
    "door": (lambda shm, folder, count, seed: fuzz_door(shm, folder, count=count, seed=seed), 1_000_000),
    "live": (lambda shm, folder, count, seed: fuzz_live(shm, folder, count=count, seed=seed), 200_000),
    "records": (lambda shm, folder, count, seed: fuzz_records(shm, count=count, seed=seed), 100_000),
    "states": (lambda shm, folder, count, seed: fuzz_states(shm, folder, count=count, seed=seed), 3000),
    "answers": (lambda shm, folder, count, seed: fuzz_answers(folder, count=count, seed=seed), 1500),
    "routes": (fuzz_routes, 3000),
}
"""Each with how often it does it: together above a million frames and a hundred thousand records."""


def main() -> int:
    """Run what was asked for; 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--only", choices=FUZZERS, help="one of them, in this process")
    parser.add_argument("--count", type=int, help="how often, instead of its usual number")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    asked = parser.parse_args()
    if asked.only:
        return alone(asked.only, asked.count or FUZZERS[asked.only][1], asked.seed)
    return together(asked.seed, asked.jobs)


def alone(label: str, count: int, seed: int) -> int:
    """One fuzzer here, in folders of its own."""
    logging.getLogger().addHandler(logging.NullHandler())  # a fuzzed daemon warns without end
    shm = Path(tempfile.mkdtemp(prefix="terracekv-fuzz-", dir="/dev/shm"))
    folder = Path(tempfile.mkdtemp())
    fuzz, _ = FUZZERS[label]
    try:
        print(json.dumps({"fuzzer": label, "seed": seed} | fuzz(shm, folder, count, seed)), flush=True)
    finally:
        shutil.rmtree(shm)
        shutil.rmtree(folder)
    return 0


def together(seed: int, jobs: int) -> int:
    """All of them; the longest first."""
    begun = time.monotonic()

    def run(label: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "terracekv.tests.fuzz", "--only", label, "--seed", str(seed)]
        return subprocess.run(command, capture_output=True, text=True)

    failed, frames, records = [], 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        for label, done in zip(FUZZERS, pool.map(run, FUZZERS), strict=True):
            print(done.stdout, end="", flush=True)
            if done.returncode:
                failed.append(f"{label} ({done.returncode})")
                print(done.stderr[-4000:], file=sys.stderr)
                continue
            figures = json.loads(done.stdout)
            frames += figures.get("frames", 0)
            records += figures.get("records", 0)
    took_s = round(time.monotonic() - begun, 1)
    print(json.dumps({"seed": seed, "frames": frames, "records": records, "failed": failed, "s": took_s}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

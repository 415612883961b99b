"""Kill the daemon again and again, at each named line and at random, while engines work; then see what it still knows.

Owns the engines' threads and the list of blocks that were answered as durable. Run by ``test_crash.py``, or for longer:

    python -m terracekv.tests.crash.rounds --rounds 50

A round is some lives that end at a named line under load, then one without such a line, in which every durable block is
read back, and which ends by SIGKILL at a random moment under load. Imports ``tests.harness``.
"""

import argparse
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon.http_client import Door
from terracekv.tests.harness import MIB, Blocks, Daemon, until
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.tier import PAGE

ROOT = Path(__file__).resolve().parents[2]
LINES_A_ROUND = 3
LINE_S_MAX = 15.0
"""Time for a line to be reached under load."""
RARE = re.compile(
    r"namespaces\.|folder\.|arena\.|slots\.assign|segment\.(create|reuse|sync)|disk\.evicted|catalog\.sync"
)
"""Lines that are not passed many times in a life."""
EVICTING = {"disk.evicted", "segment.reuse", "segment.reused"}
"""Lines that are passed only when the disk is too small for what is stored."""
ENDING = {"catalog.sync", "segment.remove", "segment.removed"}
"""Lines that are passed when a tier closes or gets smaller: see ``test_disk_restart``."""
RUNTIME_FILES = {"arena", "slots", "owner.lock"}
SOCKETS = {"engine.sock", "http.sock"}
BLOCK_BYTES = 16_384
OTHER_BYTES = 40_960
"""A second size of slots, so that slabs change hands."""
CHAIN = 6
SAMPLE = 300
"""Older chains that are read back in a round."""
STEP_BYTES = 16 * MIB
"""What engines may store from one start of the daemon to the next, however long that takes."""
WRITERS = 3
READERS = 2


def named_lines() -> list[str]:
    """Every name that a failpoint of the sources bears and that a daemon under load passes."""
    sources = [path for room in ("tiers", "daemon") for path in (ROOT / room).glob("*.py")]
    found = {name for path in sources for name in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text())}
    return sorted(found - ENDING)


@dataclass
class Summary:
    """What a run of rounds came to. Times in seconds from the start of the process until its door answers."""

    seed: int
    rounds: int = 0
    kills_at_lines: int = 0
    kills_at_random: int = 0
    reached: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)
    verified: int = 0
    durable: int = 0
    starts_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"crash: seed {self.seed}, {self.rounds} rounds, {self.kills_at_lines} kills at {len(self.reached)} lines,"
            f" {self.kills_at_random} at random, {self.durable} durable blocks, {self.verified} blocks read back,"
            f" start p50 {statistics.median(self.starts_s):.3f} s max {max(self.starts_s):.3f} s"
            + (f", not reached: {', '.join(sorted(self.missed))}" if self.missed else "")
        )


class Load:
    """Engines that store and load for as long as ``running``; whatever becomes of the daemon, they go on."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._seed = seed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._made = 0
        self._left = 0
        self.durable: list[list[bytes]] = []
        """Chains of which every block was answered as durable."""
        self.failures: list[BaseException] = []
        self.clients: list[Blocks] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        works = [self._write] * WRITERS + [self._read] * READERS
        threads = [threading.Thread(target=self._guard, args=(work, n)) for n, work in enumerate(works)]
        threads.append(threading.Thread(target=self._guard, args=(self._come_and_go, len(works))))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def allow(self) -> None:
        """A new start: engines may store again."""
        with self._lock:
            self._left = STEP_BYTES

    def _put(self, client: Blocks, keys: list[bytes], durable: bool = False) -> Stored:
        """Unless so much has been stored that the disk might have to evict what is durable."""
        wanted = len(keys) * (client.block_bytes + PAGE)
        with self._lock:
            if self._left < wanted:
                return Stored()
            self._left -= wanted
        stored = client.put(keys, durable)
        if not stored.stored:  # as when no daemon runs
            with self._lock:
                self._left += wanted
        return stored

    def check(self) -> None:
        """AssertionError when an engine saw wrong bytes, or ended."""
        assert not self.failures, f"an engine failed: {self.failures[0]!r}"

    def _guard(self, work: Callable[[random.Random], None], number: int) -> None:
        try:
            work(random.Random(f"{self._seed} {number}"))
        except BaseException as error:
            self.failures.append(error)

    def _client(self, **changes: object) -> Blocks:
        client = self._daemon.client(BLOCK_BYTES, store_deadline_ms=5_000, load_deadline_ms=5_000, **changes)
        with self._lock:
            self.clients.append(client)
        return client

    def _next(self) -> int:
        with self._lock:
            self._made += 1
            return self._made

    def _write(self, dice: random.Random) -> None:
        with self._client() as client:
            while not self._stop.wait(dice.uniform(0.001, 0.01)):
                keys = client.chain(self._next(), dice.randint(1, CHAIN))
                wants_durable = dice.random() < 0.6
                stored = self._put(client, keys, wants_durable)
                if keys and stored.durable == len(keys):
                    with self._lock:
                        self.durable.append(keys)

    def _read(self, dice: random.Random) -> None:
        with self._client() as client:
            while not self._stop.wait(dice.uniform(0.001, 0.01)):
                with self._lock:
                    keys = dice.choice(self.durable) if self.durable else []
                client.lookup(keys)
                client.get(keys)

    def _come_and_go(self, dice: random.Random) -> None:
        """Engines of new namespaces, and of another size of blocks."""
        while not self._stop.wait(dice.uniform(0.01, 0.05)):
            number = self._next()
            size = dice.choice((BLOCK_BYTES, OTHER_BYTES))
            with self._daemon.client(size, model=f"guest {number % 400}", store_deadline_ms=5_000) as client:
                keys = client.chain(number, CHAIN)
                self._put(client, keys)
                client.get(keys)
            with suppress(TerraceError):
                Door(self._daemon.runtime).ask("POST", "/v1/sync")


def census(runtime: Path) -> None:
    """One arena and its table, the lock, sockets: nothing else lies in shared memory. Who was killed early on has not
    made all of them."""
    names = {path.name for path in runtime.iterdir()}
    assert names <= RUNTIME_FILES | SOCKETS, f"in the runtime folder: {sorted(names)}"


class Rounds:
    """Rounds on one pair of folders."""

    def __init__(self, runtime: Path, state: Path, *, seed: int, disk_bytes: int, keeps_all: bool = True) -> None:
        """``keeps_all``: the disk is large enough for everything, so that no durable block may be missing."""
        self.daemon = Daemon(
            runtime, state, disk__size=str(disk_bytes), host__size=str(4 * MIB), daemon__queue=str(2 * MIB)
        )
        self.dice = random.Random(seed)
        self.load = Load(self.daemon, seed)
        self.summary = Summary(seed)
        self.keeps_all = keeps_all
        self.looked = 0

    def run(self, rounds: int, lines: list[str]) -> Summary:
        """Kill, look, repeat; AssertionError at the first promise that is broken."""
        try:
            with self.load.running():
                for number in range(rounds):
                    for step in range(LINES_A_ROUND):
                        self.die_at(lines[(number * LINES_A_ROUND + step) % len(lines)])
                    self.live()
                    self.verify()
                    self.die_at_random()
                    self.summary.rounds += 1
                self.live()
                self.verify(all_of_them=True)
                until(lambda: all(client.joined for client in self.load.clients), "all engines join again")
            self.load.check()
            assert self.daemon.term() == 0
            census(self.daemon.runtime)
            assert not self.daemon.errors(), self.daemon.errors()[:3]
        except AssertionError as error:
            error.add_note(
                f"seed {self.summary.seed}, {self.summary.rounds} rounds; the log ends:\n{self.daemon.tail(300)}"
            )
            raise
        finally:
            self.daemon.kill()
        self.summary.durable = sum(map(len, self.load.durable))
        return self.summary

    def die_at(self, line: str) -> None:
        nth = 1 if RARE.match(line) else self.dice.choice((1, 2, 7, 23))
        self.daemon.failpoints = f"{line}*{nth}=kill"
        self.load.allow()
        self.daemon.launch()
        try:
            assert self.daemon.wait(LINE_S_MAX) == -9, f"the daemon ended by itself:\n{self.daemon.tail()}"
            self.summary.kills_at_lines += 1
            self.summary.reached.add(line)
        except subprocess.TimeoutExpired:
            self.summary.missed.add(line)
            self.daemon.kill()
        self.load.check()
        census(self.daemon.runtime)

    def live(self) -> None:
        """Start, and note how long it took."""
        self.daemon.failpoints = ""
        self.load.allow()
        begun = time.monotonic()
        self.daemon.start()
        self.summary.starts_s.append(time.monotonic() - begun)

    def verify(self, all_of_them: bool = False) -> None:
        """Every block that was answered as durable is served, with its bytes: of older ones, a sample and at the end
        all, since a run of many rounds would do little else."""
        durable = list(self.load.durable)
        older, fresh = durable[: self.looked], durable[self.looked :]
        self.looked = len(durable)
        chosen = older if all_of_them else self.dice.sample(older, min(len(older), SAMPLE))
        with self.daemon.client(BLOCK_BYTES) as client:
            for keys in fresh + chosen:
                loaded = self.get(client, keys)
                self.summary.verified += loaded.blocks
                whole = loaded.blocks == len(keys)
                assert whole or not self.keeps_all, (
                    f"of {len(keys)} durable blocks {loaded.blocks} came: {loaded.why};"
                    f" the next is {keys[loaded.blocks].hex()}, looked up again: {client.lookup(keys)}"
                )

    def get(self, client: Blocks, keys: list[bytes]) -> Loaded:
        """A get that has patience with a host tier of which every slot is in use at this moment."""
        patience_until = time.monotonic() + 10.0
        while (loaded := client.get(keys)).why == "full" and time.monotonic() < patience_until:
            time.sleep(0.02)
        return loaded

    def die_at_random(self) -> None:
        time.sleep(self.dice.uniform(0.0, 0.4))
        self.daemon.kill()
        self.summary.kills_at_random += 1
        self.load.check()
        census(self.daemon.runtime)


def disk_bytes_for(rounds: int) -> int:
    """Room for all that engines may store in so many rounds, and for what is left over at the ends of segments."""
    starts = rounds * (LINES_A_ROUND + 1) + 1
    return 256 * MIB + starts * STEP_BYTES * 5 // 4


def main() -> int:
    """``--rounds N --seed N``: prints a summary line; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    wanted = parser.parse_args()
    logging.getLogger("terracekv.connector").setLevel(logging.ERROR)  # engines without a daemon say so each time
    lines = [line for line in named_lines() if line not in EVICTING]
    with tempfile.TemporaryDirectory(prefix="terracekv-crash-", dir="/dev/shm") as runtime:
        with tempfile.TemporaryDirectory(prefix="terracekv-crash-") as state:
            rounds = Rounds(Path(runtime), Path(state), seed=wanted.seed, disk_bytes=disk_bytes_for(wanted.rounds))
            try:
                print(rounds.run(wanted.rounds, lines))
            except AssertionError as error:
                print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

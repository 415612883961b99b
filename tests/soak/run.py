"""A daemon at the limits of every tier, with engines, outages, kills and faults; then a census.

    python -m terracekv.tests.soak.run --minutes 10

Owns the daemon, the S3 server and the engine processes. Most of the time is *trouble*: the daemon is killed every few
seconds, sometimes frozen before that, and in every second of its lives calls of its media fail (``tests.faults``);
the S3 server is killed and frozen; engines are killed. The rest is *quiet*: one life of the daemon without faults,
with outages of the server in its first half only; how its memory grows is measured over the second. Prints one line of
JSON; the exit status is 1 when a promise was broken. Imports ``tests``.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terracekv.tests.crash.rounds import census
from terracekv.tests.harness import Daemon, until
from terracekv.tests.seaweed import Seaweed, seaweed
from terracekv.tests.soak.census import books_faults, counts, idle_faults, reader_faults, slope_per_min
from terracekv.tests.soak.engines import CHAINS, IDENTITIES, chain_of

PROCESSES = 3
TROUBLE_SHARE = 0.6
"""Of the whole time."""
LIFE_S = (1.0, 5.0)
FREEZE_S = (0.2, 1.0)
OUTAGE_S = (0.5, 3.0)
BETWEEN_OUTAGES_S = (4.0, 12.0)
SETTLE_S = 20.0
"""After an outage or a faulty life, in which a block may still be listed wrongly: hints about the bucket grow old."""
ENGINE_S = (10.0, 30.0)
CONNECTIONS_MAX = 9
"""To the bucket: as many as ``s3.threads`` read and write, as many ask, and one more."""
SLOPE_MAX = 1 << 20
"""Bytes a minute."""
SETTINGS = {
    "host__size": "4MiB",
    "host__slab": "512KiB",
    "disk__size": "16MiB",
    "disk__segment": "1MiB",
    "daemon__queue": "1MiB",
    "s3__enabled": "true",
    "s3__queue": "2MiB",
    "s3__threads": "4",
    "s3__read_timeout": "0.5",
    "s3__timeout": "3",
    "s3__absent_ttl": "2",
    "s3__present_ttl": "10",
    "s3__codec": "off",
}
FAULTS = (
    *(f"os.pwritev%0.02={what}" for what in ("errno:EIO", "errno:ENOSPC", "errno:EINVAL", "short", "flip")),
    *(f"os.preadv%0.02={what}" for what in ("errno:EIO", "errno:EPERM", "short", "flip", "sleep:0.1")),
    "os.pwritev%0.02=sleep:0.1",
    "os.open%0.01=errno:EPERM",
    "os.rename%0.2=errno:EIO",
    "os.posix_fallocate%0.2=errno:ENOSPC",
    "os.unlink%0.2=errno:EPERM",
    "lmdb.commit%0.02=errno:ENOSPC",
    "lmdb.read%0.005=errno:EIO",
    "s3.connect%0.1=errno:ECONNREFUSED",
    *(f"s3.send%0.02={what}" for what in ("errno:ECONNRESET", "short")),
    *(f"s3.receive%0.02={what}" for what in ("errno:ECONNRESET", "short", "flip", "sleep:0.3")),
)


@dataclass
class Summary:
    """What came of it. ``violations`` is empty when all promises were kept."""

    seed: int
    minutes: float
    read: int = 0
    stored: int = 0
    durable_chains: int = 0
    durable_blocks: int = 0
    daemon_kills: int = 0
    daemon_freezes: int = 0
    daemon_refused_starts: int = 0
    faulty_lives: int = 0
    s3_outages: int = 0
    engine_kills: int = 0
    listed_and_evicted: int = 0
    rss_slope_bytes_per_min: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class Soak:
    """One run on folders that are given."""

    def __init__(self, runtime: Path, state: Path, server: Seaweed, *, minutes: float, seed: int) -> None:
        bucket = {
            "s3__endpoint": server.endpoint,
            "s3__bucket": "blocks",
            "s3__credentials_file": str(server.credentials),
        }
        self.daemon = Daemon(runtime, state, **(SETTINGS | bucket))
        self.daemon.program = ["-m", "terracekv.tests.faulty_daemon"]
        self.server = server
        self.seconds = minutes * 60
        self.dice = random.Random(seed)
        self.summary = Summary(seed, minutes)
        self.troubles: list[tuple[float, float]] = []
        """When something was made to go wrong."""
        self.journals: list[Path] = []
        self._numbers = itertools.count(1)
        self._calm = threading.Event()
        self._outage_failures: list[BaseException] = []

    def run(self) -> Summary:
        """Trouble, quiet, census."""
        begun = time.monotonic()
        outages = threading.Thread(target=self._outages, args=(random.Random(self.dice.random()),))
        outages.start()
        try:
            with self._engines() as engines:
                self._trouble(begun + self.seconds * TROUBLE_SHARE, engines)
                self._quiet(begun + self.seconds)
            self._calm.set()
            outages.join()
            self._settle()
            self._read_journals()
            self._verify_durable()
            self._census()
        except BaseException as error:
            error.add_note(f"failpoints: {self.daemon.failpoints!r}; the daemon's log ends:\n{self.daemon.tail(60)}")
            raise
        finally:
            self._calm.set()
            outages.join()
            self.daemon.kill()
        if self._outage_failures:
            self.summary.violations.append(f"the S3 server: {self._outage_failures[0]!r}")
        return self.summary

    def _trouble(self, end: float, engines: list[subprocess.Popen[bytes]]) -> None:
        next_engine = time.monotonic() + self.dice.uniform(*ENGINE_S)
        while time.monotonic() < end:
            faulty = self.dice.random() < 0.5
            faults = ",".join(self.dice.sample(FAULTS, self.dice.randint(1, 3))) if faulty else ""
            since = time.time()
            if not self._live(faults):
                continue
            lasts_s = self.dice.uniform(*LIFE_S)
            time.sleep(lasts_s / 2)
            if self.dice.random() < 0.3:
                self.daemon.stop()
                time.sleep(self.dice.uniform(*FREEZE_S))
                self.daemon.cont()
                self.summary.daemon_freezes += 1
            time.sleep(lasts_s / 2)
            self.daemon.kill()
            self.summary.daemon_kills += 1
            self.summary.faulty_lives += faulty
            self.troubles.append((since if faulty else time.time() - 1, time.time() + 2))
            if time.monotonic() > next_engine:
                next_engine = time.monotonic() + self.dice.uniform(*ENGINE_S)
                self._replace(engines, self.dice.randrange(len(engines)))

    def _live(self, faults: str) -> bool:
        """Begin a life; False when a fault kept it from beginning."""
        self.daemon.failpoints = faults
        try:
            self.daemon.start()
            return True
        except AssertionError:
            if not faults or self.daemon.alive or self.daemon.wait() != 1:
                raise
            self.summary.daemon_refused_starts += 1
            return False

    def _quiet(self, end: float) -> None:
        """One life; its memory over the second half of it. Every prompt is asked for at its start: tables of what is
        known of blocks have a fixed size, of which the kernel gives a page when something is first noted there."""
        self._live("")
        for who in IDENTITIES:
            for shard, client in enumerate(who.clients(self.daemon)):
                with client:
                    for seed in range(CHAINS):
                        client.get(chain_of(client, seed), shard)
        half = (time.monotonic() + end) / 2
        samples = []
        while time.monotonic() < end:
            time.sleep(0.5)
            assert self.daemon.alive, f"the daemon ended by itself:\n{self.daemon.tail()}"
            if time.monotonic() > half:
                self._calm.set()
                samples.append((time.monotonic(), float(self.daemon.memory_bytes()["anonymous"])))
        self.summary.rss_slope_bytes_per_min = round(slope_per_min(samples))
        if self.seconds >= 300 and self.summary.rss_slope_bytes_per_min > SLOPE_MAX:
            self.summary.violations.append(f"memory grows {self.summary.rss_slope_bytes_per_min} bytes a minute")

    def _outages(self, dice: random.Random) -> None:
        """In a thread: the S3 server is killed or frozen, and comes back."""
        try:
            while not self._calm.wait(dice.uniform(*BETWEEN_OUTAGES_S)):
                since = time.time()
                if dice.random() < 0.5:
                    self.server.kill()
                    self._calm.wait(dice.uniform(*OUTAGE_S))
                    self.server.start()
                else:
                    self.server.stop()
                    self._calm.wait(dice.uniform(*OUTAGE_S))
                    self.server.go_on()
                self.summary.s3_outages += 1
                self.troubles.append((since, time.time() + SETTLE_S))
        except BaseException as error:
            self._outage_failures.append(error)

    @contextmanager
    def _engines(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(PROCESSES):
                processes.append(self._engine())
            yield processes
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    self.summary.violations.append("an engine did not end within 30 s")

    def _engine(self) -> subprocess.Popen[bytes]:
        number = next(self._numbers)
        journal = self.daemon.state / f"engine-{number}.jsonl"
        self.journals.append(journal)
        command = [sys.executable, "-m", "terracekv.tests.soak.engines", str(self.daemon.runtime), str(journal)]
        self.daemon.state.mkdir(exist_ok=True)
        return subprocess.Popen([*command, "--seed", str(number)], stdin=subprocess.DEVNULL)

    def _replace(self, engines: list[subprocess.Popen[bytes]], index: int) -> None:
        """An engine is killed in whatever it was doing."""
        engines[index].kill()
        engines[index].wait()
        engines[index] = self._engine()
        self.summary.engine_kills += 1

    def _settle(self) -> None:
        """Wait until the daemon is idle."""
        until(lambda: not idle_faults(self.daemon.http("/v1/status")[1]), "the daemon is idle", 60)

    def _read_journals(self) -> None:
        totals: Counter[str] = Counter()
        durable = set[tuple[int, int]]()
        for journal in self.journals:
            last: dict[str, int] = {}
            for line in journal.read_text().splitlines() if journal.exists() else ():
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # cut off by a kill
                last = told.get("counts", last)
                if "durable" in told:
                    durable.add(tuple(told["durable"]))
                self._judge(told)
            totals.update(last)
        self.summary.read, self.summary.stored = totals.pop("read", 0), totals.pop("stored", 0)
        self.summary.counts = dict(sorted(totals.items()))
        self.durable = sorted(durable)

    def _judge(self, told: dict[str, Any]) -> None:
        if "wrong" in told or "failed" in told:
            self.summary.violations.append(json.dumps(told))
        if "phantom" in told:
            if any(begun < told["until"] and end > told["t"] for begun, end in self.troubles):
                self.summary.listed_and_evicted += 1
            else:
                self.summary.violations.append("listed again and again, and not to be had: " + json.dumps(told))

    def _verify_durable(self) -> None:
        """Everything that was answered as durable is served, with its bytes."""
        self.summary.durable_chains = len(self.durable)
        for index, who in enumerate(IDENTITIES):
            for shard, client in enumerate(who.clients(self.daemon, load_deadline_ms=20_000)):
                with client:
                    for seed in [seed for at, seed in self.durable if at == index]:
                        keys = chain_of(client, seed)
                        loaded = client.get(keys, shard)
                        for _ in range(10):
                            if loaded.blocks == len(keys):
                                break
                            time.sleep(0.5)  # an earlier answer of the bucket may be believed for a while
                            loaded = client.get(keys, shard)
                        self.summary.durable_blocks += loaded.blocks
                        if loaded.blocks < len(keys):
                            lost = f"of {len(keys)} durable blocks of {who.model} {who.tenant} {loaded.blocks} came"
                            self.summary.violations.append(f"{lost}: {loaded.why} ({keys[loaded.blocks].hex()})")

    def _census(self) -> None:
        """Idle twice, with work in between: what grew has leaked. Then the daemon ends, and its books are read."""
        violations = self.summary.violations
        self._settle()
        first = counts(self.daemon)
        with self._engines():
            time.sleep(min(10.0, self.seconds / 6))
        self._settle()
        self.summary.idle = counts(self.daemon)
        limits = first | {"connections": CONNECTIONS_MAX}
        for what, count in self.summary.idle.items():
            if count > limits[what]:
                violations.append(f"{what}: {first[what]} and then {count}")
        violations += reader_faults(self.daemon.state / "state" / "disk" / "catalog", self.daemon.pid)
        if self.daemon.term() != 0:
            violations.append("the daemon did not end well")
        census(self.daemon.runtime)
        violations += books_faults(self.daemon)
        violations += [f"in the log: {line}" for line in self.daemon.errors()[:5]]


def soak(runtime: Path, state: Path, *, minutes: float, seed: int) -> Summary:
    """Run it on two empty folders."""
    folder = state / "weed"
    folder.mkdir(parents=True)
    with seaweed(folder) as server:
        return Soak(runtime, state, server, minutes=minutes, seed=seed).run()


def main() -> int:
    """``--minutes N --seed N``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terracekv-soak-", dir="/dev/shm") as runtime:
        with tempfile.TemporaryDirectory(prefix="terracekv-soak-") as state:
            summary = soak(Path(runtime), Path(state), minutes=wanted.minutes, seed=wanted.seed)
    print(json.dumps(vars(summary)))
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())

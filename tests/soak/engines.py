"""One engine process of the soak: threads of several namespaces that store and load, and check all that they are given.

Owns its clients and a journal, a line of JSON for each thing that the soak wants to know. Started by ``run.py``, ended
by SIGTERM, or by SIGKILL at any time: what is in the journal by then counts. Imports ``tests.harness``.
"""

import argparse
import json
import logging
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terracekv.tests.harness import Blocks, Daemon

CHAINS = 250
"""Prompts of each namespace; their blocks outnumber what host and disk can hold."""
CHAIN_BLOCKS_MAX = 6
DURABLE_SHARE = 0.6
STORE_SHARE = 0.15
LOOKS = 8
"""Times that a listed block is asked for which cannot be had."""
LOOK_S = 0.25
NO_DAEMON_S = 0.02
TELL_S = 1.0
GONE = {"no_daemon", "deadline", "fenced", "protocol"}
"""The daemon's trouble or the client's: they say nothing about a block."""


@dataclass(frozen=True)
class Identity:
    """An engine's namespace. Tenants have the same model and tokens as others, and other keys."""

    model: str
    block_bytes: int
    shards: int = 1
    tenant: str = ""

    def clients(self, daemon: Daemon, **changes: Any) -> list[Blocks]:
        """One for each rank."""
        usual: dict[str, Any] = {"lookup_budget_ms": 2_000, "load_deadline_ms": 5_000, "store_deadline_ms": 5_000}
        usual |= {"model": self.model, "shards": self.shards, "credential": self.tenant.encode()}
        return [daemon.client(self.block_bytes, shard=shard, **(usual | changes)) for shard in range(self.shards)]


IDENTITIES = (
    Identity("narrow", 8_192),
    Identity("narrow", 8_192, tenant="alice"),
    Identity("narrow", 8_192, tenant="bob"),
    Identity("two ranks", 12_288, shards=2),
    Identity("wide", 40_960),
)


def chain_of(client: Blocks, seed: int) -> list[bytes]:
    """The keys of a numbered prompt; none while no daemon was ever joined."""
    return client.chain(seed, 1 + seed % CHAIN_BLOCKS_MAX)


class Engine:
    """Threads of one process."""

    def __init__(self, daemon: Daemon, journal: Path, seed: int) -> None:
        self._daemon = daemon
        self._journal = open(journal, "a", buffering=1)
        self._seed = seed
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self, threads: int) -> None:
        """Until ``stop``."""
        works = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]
        for thread in works:
            thread.start()
        while not self.stop.wait(TELL_S):
            self._tell_counts()
        for thread in works:
            thread.join()
        self._tell_counts()
        self._journal.close()

    def _tell(self, **what: Any) -> None:
        with self._lock:
            self._journal.write(json.dumps(what) + "\n")

    def _tell_counts(self) -> None:
        with self._lock:
            counts = dict(self.counts)
        self._tell(counts=counts)

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)

    def _work(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        identity = IDENTITIES[(self._seed + number) % len(IDENTITIES)]
        try:
            with ExitStack() as stack:
                clients = [stack.enter_context(client) for client in identity.clients(self._daemon)]
                while not self.stop.is_set():
                    seed = min(int(dice.expovariate(6 / CHAINS)), CHAINS - 1)
                    keys = chain_of(clients[0], seed)
                    if not keys:
                        self.stop.wait(0.1)
                    elif dice.random() < STORE_SHARE:
                        self._store(identity, clients, seed, keys, dice.random() < DURABLE_SHARE)
                    else:
                        self._load(clients, keys)
        except AssertionError as error:
            self._tell(wrong=str(error), model=identity.model, tenant=identity.tenant, t=time.time())
        except Exception as error:
            self._tell(failed=repr(error), model=identity.model, t=time.time())

    def _store(self, who: Identity, clients: Sequence[Blocks], seed: int, keys: list[bytes], durable: bool) -> None:
        stored = [client.put(keys, durable, shard) for shard, client in enumerate(clients)]
        self._count(stored=sum(each.stored for each in stored), stores=1)
        self._count(**{f"store {each.why}": 1 for each in stored if each.why})
        self._rest_of(each.why for each in stored)
        if all(each.durable == len(keys) for each in stored):
            self._tell(durable=[IDENTITIES.index(who), seed], t=time.time())

    def _load(self, clients: Sequence[Blocks], keys: list[bytes]) -> None:
        for shard, client in enumerate(clients):
            found = client.lookup(keys)
            loaded = client.get(keys, shard)
            self._count(lookups=1, loads=1, read=loaded.blocks, listed=found.blocks)
            if loaded.why:
                self._count(**{f"load {loaded.why}": 1})
                self._rest_of([loaded.why])
            if loaded.blocks < found.blocks:
                self._look_again(client, shard, keys, loaded.blocks)

    def _rest_of(self, whys: Iterable[str | None]) -> None:
        """Who has no daemon asks it less often."""
        if "no_daemon" in whys:
            self.stop.wait(NO_DAEMON_S)

    def _look_again(self, client: Blocks, shard: int, keys: list[bytes], index: int) -> None:
        """A block was listed and did not come. Evictions explain that once; but then it is not listed any more, or can
        be had again. Listed and not to be had time after time it is a phantom."""
        begun = time.time()
        whys = []
        for _ in range(LOOKS):
            if self.stop.wait(LOOK_S):
                return
            if client.lookup(keys[: index + 1]).blocks <= index:
                return
            loaded = client.get(keys[: index + 1], shard)
            self._count(read=loaded.blocks)
            if loaded.blocks > index or loaded.why in GONE:
                return
            if loaded.blocks < index:  # an earlier one is in question now
                return
            whys.append(loaded.why)
        if set(whys) != {"full"}:
            self._tell(phantom=keys[index].hex(), whys=whys, t=begun, until=time.time())


def main() -> int:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runtime", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=5)
    wanted = parser.parse_args()
    logging.getLogger("terracekv.connector").setLevel(logging.ERROR)  # engines without a daemon say so each time
    engine = Engine(Daemon(wanted.runtime, wanted.journal.parent), wanted.journal, wanted.seed)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop.set())
    engine.run(wanted.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())

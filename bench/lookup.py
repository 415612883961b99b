"""What does a lookup cost, hashing and round trip apart, idle and while the disk is busy?

Host and disk tiers are on. References are the bars of ``docs/performance.md``; for the busy case the idle figure of
the same run. Run: ``python -m terracekv.bench.lookup``.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from terracekv.bench.figures import median, percentile, report
from terracekv.bench.served import BLOCK_TOKENS, Served, client_of, served
from terracekv.connector.client import Client

BLOCK = 16 << 10
BUSY_BLOCK = 2 << 20
LOADERS = 8
BUSY_BLOCKS = 512


def nothing(index: int, payload: memoryview) -> None:
    """Copies nothing: presence is what counts here."""


def lookups(client: Client, tokens: list[int], rounds: int, wanted: int) -> tuple[list[float], list[float]]:
    """Seconds of hashing and of the round trip, for each of ``rounds`` lookups."""
    hashing, asking = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        keys = client.keys(tokens)
        hashed = time.perf_counter()
        found = client.lookup(keys)
        asking.append(time.perf_counter() - hashed)
        hashing.append(hashed - start)
        assert found.blocks == wanted, found
    return hashing, asking


def tell(name: str, hashing: list[float], asking: list[float]) -> tuple[float, float]:
    """Report a series; p50 and p99 of the whole, in ms."""
    whole = [a + b for a, b in zip(hashing, asking, strict=True)]
    report(f"{name}_hashing_p50", median(hashing) * 1e3, "ms", runs=len(whole))
    report(f"{name}_round_trip_p50", median(asking) * 1e3, "ms", runs=len(whole))
    p50, p99 = median(whole) * 1e3, percentile(whole, 99) * 1e3
    report(f"{name}_p50", p50, "ms", runs=len(whole))
    report(f"{name}_p99", p99, "ms", runs=len(whole))
    return p50, p99


class Busy:
    """Engines in a process of their own that keep ``LOADERS`` I/O jobs going: chains that together are larger than
    host, loaded from disk again and again."""

    def __init__(self, daemon: Served) -> None:
        command = [sys.executable, "-m", "terracekv.bench.lookup", "--load", str(daemon.socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "loading\n"
        self._started = time.perf_counter()

    def end(self) -> float:
        """Stop; bytes loaded in a second."""
        passed = time.perf_counter() - self._started
        answer, _ = self._process.communicate("\n")
        return int(answer) * BUSY_BLOCK / passed


def load(path: Path) -> None:
    """The busy engines: until a line comes in, then print the blocks loaded."""
    clients = [client_of(path, BUSY_BLOCK, strict=False) for _ in range(LOADERS)]
    chains = [
        clients[0].keys([random.randrange(1 << 16) for _ in range(16 * BLOCK_TOKENS)]) for _ in range(BUSY_BLOCKS // 16)
    ]
    for chain in chains:
        stored = clients[0].store(chain, nothing, durable=True)
        assert stored.durable + stored.present == len(chain), stored
    stop, loads = threading.Event(), [0] * LOADERS

    def loader(number: int) -> None:
        while not stop.is_set():
            loads[number] += clients[number].load(random.choice(chains), nothing).blocks

    threads = [threading.Thread(target=loader, args=(number,)) for number in range(LOADERS)]
    for thread in threads:
        thread.start()
    print("loading", flush=True)
    sys.stdin.readline()
    stop.set()
    for thread in threads:
        thread.join()
    print(sum(loads))
    for client in clients:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    with served(
        host__size="512MiB", host__slab="16MiB", disk__size="4GiB", disk__segment="64MiB", daemon__io_threads="8"
    ) as daemon:
        client = daemon.client(BLOCK)
        prompts = {size: [random.randrange(1 << 16) for _ in range(size << 10)] for size in (32, 128)}
        for tokens in prompts.values():
            assert client.store(client.keys(tokens), nothing).refused == 0
        idle = {}
        for size, tokens in prompts.items():
            blocks = len(tokens) // BLOCK_TOKENS
            lookups(client, tokens, 50, blocks)
            idle[size] = tell(f"lookup_{size}k", *lookups(client, tokens, arguments.rounds, blocks))
        absent = client.keys([random.randrange(1 << 16) for _ in range(32 << 10)])
        assert client.lookup(absent).blocks == 0
        busy = Busy(daemon)
        hashing: list[float] = []
        asking: list[float] = []
        for _ in range(arguments.rounds // 20):
            # Touched now and then as an engine would, or the load below would evict what is asked for.
            client.load(client.keys(prompts[32]), nothing)
            more = lookups(client, prompts[32], 20, 128)
            hashing += more[0]
            asking += more[1]
        rate = busy.end() / 1e9
        name = f"lookup_32k_busy_{LOADERS}"
        report(f"{name}_load", rate, "GB/s")
        p50, p99 = tell(name, hashing, asking)
        report(f"{name}_p99_over_idle", p99, "ms", "idle p99", idle[32][1], len(asking))
        client.close()


if __name__ == "__main__":
    main()

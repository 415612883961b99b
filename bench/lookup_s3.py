"""What does a bucket below cost a lookup that does not need it: configured, and while its endpoint is stopped?

Two daemons with host and disk, one of them with s3 (a real server, SeaweedFS) below; rounds take turns, so both see
the same machine. Also how long a second node takes to find a prompt in the bucket, and to load it. Run:
``python -m terracekv.bench.lookup_s3``.
"""

import argparse
import random
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from terracekv.bench.figures import median, note, report
from terracekv.bench.lookup import BLOCK, lookups, nothing
from terracekv.bench.served import BLOCK_TOKENS, client_of, served
from terracekv.connector.client import Client
from terracekv.tests.seaweed import program, seaweed

BLOCKS = 128
BIG_BLOCK = 8 << 20
BIG_BLOCKS = 8
"""A prompt of 2,048 tokens."""


def paired(name: str, plain: Client, shared: Client, tokens: list[int], rounds: int) -> None:
    """p50 of both, and their ratio over rounds that took turns."""
    alone, below = list[float](), list[float]()
    for _ in range(rounds // 10):
        for client, times in ((plain, alone), (shared, below)):
            hashing, asking = lookups(client, tokens, 10, BLOCKS)
            times += [a + b for a, b in zip(hashing, asking, strict=True)]
    report(name, median(below) * 1e3, "ms", "no s3, same run", median(alone) * 1e3, len(below))


def second_node(settings: dict[str, str], filler: Client) -> None:
    """A prompt that another node stored: found, and loaded, by one that never saw it."""
    found_s, loaded_s = list[float](), list[float]()
    with served(**settings) as daemon, closing(daemon.client(BIG_BLOCK)) as other:
        for _ in range(5):
            keys = filler.keys([random.randrange(1 << 16) for _ in range(BIG_BLOCKS * BLOCK_TOKENS)])
            stored = filler.store(keys, nothing, durable=True)
            assert stored.durable == BIG_BLOCKS, stored
            start = time.perf_counter()
            found = other.lookup(keys)
            between = time.perf_counter()
            assert found.blocks == BIG_BLOCKS, found
            assert other.load(keys, nothing).blocks == BIG_BLOCKS
            found_s.append(between - start)
            loaded_s.append(time.perf_counter() - between)
    report("s3_lookup_unknown_prompt", median(found_s) * 1e3, "ms", runs=len(found_s), blocks=BIG_BLOCKS)
    rate = BIG_BLOCKS * BIG_BLOCK / median(loaded_s) / 1e9
    report("s3_load_by_second_node", rate, "GB/s", runs=len(loaded_s), seconds=median(loaded_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    if program() is None:
        note("SeaweedFS is not installed: nothing is measured")
        return
    usual = {"host__size": "256MiB", "host__slab": "16MiB", "disk__size": "1GiB", "disk__segment": "64MiB"}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as stack:
        server = stack.enter_context(seaweed(Path(folder), "kv-cache"))
        bucket = {
            "s3__enabled": "true",
            "s3__endpoint": server.endpoint,
            "s3__bucket": "kv-cache",
            "s3__queue": "128MiB",
        }
        bucket |= {"s3__credentials_file": str(server.credentials)}
        plain = stack.enter_context(closing(stack.enter_context(served(**usual)).client(BLOCK)))
        daemon = stack.enter_context(served(**usual, **bucket))
        shared = stack.enter_context(closing(daemon.client(BLOCK)))
        tokens = [random.randrange(1 << 16) for _ in range(BLOCKS * BLOCK_TOKENS)]
        for client in (plain, shared):
            assert client.store(client.keys(tokens), nothing, durable=True).durable == BLOCKS
            lookups(client, tokens, 50, BLOCKS)
        paired("lookup_32k_s3_configured_p50", plain, shared, tokens, arguments.rounds)
        with closing(daemon.client(BIG_BLOCK)) as filler:
            second_node(usual | bucket, filler)
        shared.load(shared.keys(tokens), nothing)  # the fillers have pushed it down to disk
        server.stop()
        with closing(
            client_of(daemon.socket, BLOCK, strict=False)
        ) as asker:  # somebody waits for the bucket all the while
            asker.lookup(asker.keys([random.randrange(1 << 16) for _ in range(BLOCKS * BLOCK_TOKENS)]))
            paired("lookup_32k_s3_stopped_p50", plain, shared, tokens, arguments.rounds)
        server.go_on()


if __name__ == "__main__":
    main()

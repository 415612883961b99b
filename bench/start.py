"""How long until the daemon serves, and how much memory is it beside the arena?

Start to the first answered Hello, measured from outside: with nothing, with a host tier to adopt after kill -9, with
100,000 blocks on disk. Run: ``python -m terracekv.bench.start``.
"""

import argparse
import random

from terracekv.bench.figures import median, note, report
from terracekv.bench.served import BLOCK_TOKENS, Served, served
from terracekv.connector.client import Client

SMALL = 4096
CHAIN = 500
BAR_S = 1.0


def nothing(index: int, payload: memoryview) -> None:
    """Payloads do not matter here."""


def fill(client: Client, blocks: int, *, durable: bool) -> None:
    """Store ``blocks`` blocks in chains."""
    for start in range(0, blocks, CHAIN):
        count = min(CHAIN, blocks - start)
        keys = client.keys([random.randrange(1 << 16) for _ in range(count * BLOCK_TOKENS)])
        stored = client.store(keys, nothing, durable=durable)
        assert stored.stored == count and (not durable or stored.durable == count), stored


def restarts(daemon: Served, name: str, runs: int, **more: int) -> None:
    """Kill and start again, ``runs`` times."""
    times = []
    for _ in range(runs):
        daemon.stop(kill=True)
        times.append(daemon.start())
    report(name, median(times), "s", "bar", BAR_S, runs, slowest_s=round(max(times), 3), **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--disk-blocks", type=int, default=100_000)
    arguments = parser.parse_args()
    with served(host__size="1GiB", disk__size="2GiB", disk__segment="64MiB") as daemon:
        restarts(daemon, "start_empty", arguments.runs)
        report("daemon_idle_rss_anon", daemon.rss_anon() / 1e6, "MB", "bar", 100.0)
        client = daemon.client(SMALL)
        fill(client, 50_000, durable=False)
        client.close()
        restarts(daemon, "start_adopting_host", arguments.runs, blocks=50_000)
        note("filling the disk")
        client = daemon.client(SMALL)
        before = daemon.rss_anon()
        fill(client, arguments.disk_blocks, durable=True)
        report("daemon_rss_anon_growth", (daemon.rss_anon() - before) / 1e6, "MB", blocks=arguments.disk_blocks)
        client.close()
        restarts(daemon, "start_with_disk_blocks", arguments.runs, blocks=arguments.disk_blocks)


if __name__ == "__main__":
    main()

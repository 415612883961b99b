"""The demo of a cluster: two nodes that share nothing but a bucket, and what the one has computed the other loads.

Run as ``make demo-cluster`` or ``python -m terracekv.bench.demo_cluster``. Starts a real S3 server (SeaweedFS), two
daemons with folders of their own and an engine beside each, prints one table, and leaves nothing behind. The exit
status is 0 when every answer is, word for word, the one without a store, every row is what it says, and on the node
that never saw the document the first token comes ``--times`` times sooner.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terracekv.bench.demo import COLD, MIB, NAMESPACE, PERSIST_S, QUESTIONS, Answer, Engine, Table, engine, main
from terracekv.bench.served import Served, served
from terracekv.daemon.http_client import Door
from terracekv.tests.seaweed import Seaweed, seaweed

TIMES = 5.0
NODE_A = "node A, while the bucket is empty"
NODE_B = "node B, which never saw it"


@contextmanager
def node(bucket: Seaweed) -> Iterator[Served]:
    """A daemon with memory of its own, no disk, and the bucket."""
    s3 = {
        "s3__enabled": "true",
        "s3__endpoint": bucket.endpoint,
        "s3__bucket": "blocks",
        "s3__credentials_file": str(bucket.credentials),
    }
    with served(host__size="1GiB", disk__enabled="false", **s3) as daemon:
        yield daemon


def demo(times: float) -> int:
    """All rows; the exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="terracekv-bench-") as folder,
        seaweed(Path(folder)) as bucket,
        node(bucket) as a,
        node(bucket) as b,
        engine(a) as first,
        engine(b) as second,
    ):
        threads = first.ready()["threads"]
        second.ready()
        plain = [(question, first.ask("plain", question)) for question in QUESTIONS]
        print(
            f"Two nodes, one bucket. {len(QUESTIONS)} questions about one document, {plain[0][1]['prompt']:,} tokens "
            f"with the first of them; {NAMESPACE} in float32, {threads} threads for each node's engine.\n"
        )
        table = Table(
            {question: answer["text"] for question, answer in plain},
            tiers=("host", "s3"),
            token_bytes=token_bytes(Door(a.runtime)),
        )
        one, two, three = QUESTIONS
        table.row(COLD, plain, None)
        table.row(NODE_A, [asked(first, one)], None)
        wrote = persisted(Door(a.runtime))
        table.row(NODE_B, [asked(second, two)], "s3")
        table.row("node B, another question", [asked(second, three)], "host")
        a.stop(kill=True)
        a.wipe()
        a.start()
        first.ask("join")
        table.row("node A, wiped and back", [asked(first, three)], "s3")
        table.row("node A, another question", [asked(first, two)], "host")
        read = Door(b.runtime).ask("GET", "/v1/status")["tiers"]["s3"]["counters"]["get_bytes"]

    print(f"\nNode A wrote {wrote / MIB:,.0f} MiB into the bucket, node B read {read / MIB:,.0f} MiB from it.")
    gain = min(table.gain(NODE_B, times, cold) for cold in (COLD, NODE_A))
    return table.verdict(f"on a node that never saw the document the first token comes {gain:.0f} times sooner")


def asked(of: Engine, question: str) -> tuple[str, Answer]:
    """A question and its answer with the store."""
    return question, of.ask("cached", question)


def token_bytes(door: Door) -> int:
    """Bytes of KV that a token has."""
    (namespace,) = door.ask("GET", "/v1/namespaces")["namespaces"]
    return int(namespace["block_bytes"]) // int(namespace["block_tokens"])


def persisted(door: Door) -> int:
    """Wait until the bucket has every block that host has; the bytes that were written."""
    until = time.monotonic() + PERSIST_S
    while True:
        status: dict[str, Any] = door.ask("GET", "/v1/status")
        s3, host = status["tiers"]["s3"], status["tiers"]["host"]
        if s3["in_flight_bytes"] == 0 and s3["counters"]["puts"] >= host["blocks"] > 0:
            return int(s3["counters"]["put_bytes"])
        if time.monotonic() > until:
            raise TimeoutError(f"blocks are not in the bucket after {PERSIST_S} s: {status['tiers']}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(demo, __doc__, TIMES))

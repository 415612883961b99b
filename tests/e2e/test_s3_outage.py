"""The bucket's server is killed while an engine stores to it and loads from it: answers never change, nobody waits.

The environment variable OUTAGE_S says for how many seconds it is gone.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.bench.served import Served, served
from terracekv.connector.report import Report
from terracekv.connector.transformers import TerraceCache
from terracekv.daemon.http_client import Door
from terracekv.tests.seaweed import Seaweed, program, seaweed
from terracekv.tests.tiny_engine import BLOCK, MODEL, answer, answer_with, prompt

OUTAGE_S = float(os.environ.get("OUTAGE_S", "3"))
RETURN_S = 30.0
"""In which the breaker closes after the server's return."""
LOOKUP_MS, LOAD_MS, STORE_MS = 500, 2_000, 2_000
LATE_MS = 2_000
"""What a machine that is busy with other things may add."""
BUCKET = "kv-cache"
SHARED = 60
"""Prompts that another node stored."""
IDS = prompt(4 * BLOCK + 3)

pytestmark = [pytest.mark.s3, pytest.mark.skipif(program() is None, reason="SeaweedFS is not installed")]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Seaweed]:
    (tmp_path / "weed").mkdir()
    with seaweed(tmp_path / "weed", BUCKET) as server:
        yield server


def node(server: Seaweed) -> Any:
    return served(
        host__size="64MiB", disk__enabled="false", s3__enabled="true", s3__endpoint=server.endpoint, s3__bucket=BUCKET,
        s3__credentials_file=str(server.credentials), s3__read_timeout="0.5", s3__timeout="2", s3__queue="1MiB",
    )  # fmt: skip


def engine(daemon: Served) -> TerraceCache:
    return TerraceCache(
        MODEL, socket=daemon.socket, block_tokens=BLOCK,
        lookup_budget_ms=LOOKUP_MS, load_deadline_ms=LOAD_MS, store_deadline_ms=STORE_MS,
    )  # fmt: skip


def s3_of(daemon: Served) -> Any:
    return Door(daemon.runtime).ask("GET", "/v1/status")["tiers"]["s3"]


def come(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"did not come: {what}"
        time.sleep(0.05)


class Traffic:
    """Prompts one after another, by turns one that another node stored and one that nobody knows."""

    def __init__(self, cache: TerraceCache, daemon: Served) -> None:
        self._cache = cache
        self._daemon = daemon
        self.asked = 0

    def one(self) -> Report:
        """The next prompt's report; its answer is that of the model alone, and came in time."""
        seed = self.asked // 2 % SHARED if self.asked % 2 == 0 else 10_000 + self.asked
        self.asked += 1
        ids = prompt(4 * BLOCK + 3, seed)
        report: Report
        text, report = answer_with(self._cache, ids)
        assert text == answer(MODEL, ids), f"prompt {seed} was answered differently"
        assert report.lookup_ms < LOOKUP_MS + LATE_MS and report.load_ms < LOAD_MS + LATE_MS
        assert report.store_ms < STORE_MS + LATE_MS
        status = s3_of(self._daemon)
        assert status["in_flight_bytes"] <= status["in_flight_bytes_max"]
        return report

    def for_s(self, seconds: float) -> list[Report]:
        until = time.monotonic() + seconds
        reports = []
        while time.monotonic() < until:
            reports.append(self.one())
        return reports


def test_the_server_is_gone_for_a_while_and_no_answer_changes(bucket: Seaweed) -> None:
    with node(bucket) as first, node(bucket) as second:
        filling = engine(first)
        for seed in range(SHARED):
            answer_with(filling, prompt(4 * BLOCK + 3, seed))
        filling.close()
        come(lambda: s3_of(first)["flow"]["written"] == 4 * SHARED, "the bucket has what the first node stored")
        cache = engine(second)
        traffic = Traffic(cache, second)
        before = traffic.for_s(1.5)
        assert any(report.loaded_tokens.get("s3") for report in before), "blocks of the other node are loaded"
        bucket.kill()
        during = traffic.for_s(OUTAGE_S)
        assert s3_of(second)["mode"] == "down"
        assert not any(report.loaded_tokens.get("s3") for report in during[-3:])
        bucket.start()
        come(lambda: s3_of(second)["mode"] == "up", "the breaker closes by itself", RETURN_S)
        flow = s3_of(second)["flow"]
        assert flow["writes_dropped"] + flow["writes_failed"] > 0, "what was not stored is counted"
        door = Door(second.runtime)
        (namespace,) = door.ask("GET", "/v1/namespaces")["namespaces"]
        door.ask("POST", "/v1/flush", {"namespace": namespace["namespace_id"], "tier": "host"})
        after = traffic.for_s(1.5)
        assert any(report.loaded_tokens.get("s3") for report in after), "the bucket is of use again"
        cache.close()

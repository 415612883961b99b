"""The s3 tier beside a real server: signatures, conditions, copies and ages as they are, and a process that dies."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, in_threads, name, payload_of, put
from terracekv.tests.s3_tiers import Node, node, soon, until
from terracekv.tests.seaweed import Seaweed, program, seaweed
from terracekv.tiers import s3_audit
from terracekv.tiers.breaker import State
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.tier import Outcome

pytestmark = [pytest.mark.s3, pytest.mark.skipif(program() is None, reason="SeaweedFS is not installed")]

RETURN_S = 30.0
"""In which the breaker closes after the server's return."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seaweed]:
    with seaweed(tmp_path) as running:
        yield running


@pytest.fixture
def a(tmp_path: Path, server: Seaweed) -> Iterator[Node]:
    with node(tmp_path / "a", server.endpoint, server.credentials, ttl_s=6, epoch_ttl_s=0) as opened:
        yield opened


@pytest.fixture
def b(tmp_path: Path, server: Seaweed) -> Iterator[Node]:
    with node(tmp_path / "b", server.endpoint, server.credentials, ttl_s=6, epoch_ttl_s=0) as opened:
        yield opened


def test_one_node_fills_the_bucket_and_another_reads_it(a: Node, b: Node) -> None:
    payload = (b"\1\2\3\4" * BLOCK_BYTES)[:BLOCK_BYTES]
    for index in range(128):
        assert put(a.tier, a.now, name(index), payload if index % 2 else None) is Outcome.STORED
    ids = [name(index) for index in range(200)]
    assert b.tier.leading_remote(b.now, ids, soon()) == 128
    assert b.tier.status().details["heads"] <= 2 * math.ceil(math.log2(200))  # type: ignore[operator]
    assert get(b.tier, b.now, name(2)) == (Outcome.HIT, payload_of(name(2), b.now.id))
    assert get(b.tier, b.now, name(3)) == (Outcome.HIT, payload)
    assert get(b.tier, b.now, name(130))[0] is Outcome.MISS
    assert b.tier.delete(b.now, [name(2), name(150)]) == 1
    assert get(a.tier, a.now, name(2))[0] is Outcome.MISS


def test_a_wrong_secret_is_refused_at_start(tmp_path: Path, server: Seaweed) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(server.credentials.read_text().replace("only for tests", "a guess"))
    with pytest.raises(ConfigError, match="SignatureDoesNotMatch"), node(tmp_path / "c", server.endpoint, wrong):
        pass


def test_a_missing_bucket_is_named_or_created(tmp_path: Path, server: Seaweed) -> None:
    with pytest.raises(ConfigError, match="no bucket"):
        with node(tmp_path / "c", server.endpoint, server.credentials, bucket="another"):
            pass
    with node(tmp_path / "d", server.endpoint, server.credentials, bucket="another", create_bucket=True) as d:
        assert put(d.tier, d.now, name(1)) is Outcome.STORED


def test_flushes_of_two_nodes_race_and_both_hold(a: Node, b: Node) -> None:
    put(a.tier, a.now, name(1))
    in_threads(*[lambda n=n: [n.flush() for _ in range(5)] for n in (a, b)])
    for at in (a, b):
        assert at.tier.leading_remote(at.now, [name(1)], soon()) == 0
    assert a.now.epoch == b.now.epoch >= 5
    assert a.tier.reclaim(a.now) == 1


def test_dates_are_renewed_by_a_copy_and_the_bucket_can_be_checked_and_swept(a: Node, b: Node) -> None:
    for index in range(3):
        put(a.tier, a.now, name(index))
    bucket = Bucket(a.tier.settings)
    until(lambda: min(stored.about.age_s for stored in s3_audit.ls(bucket)) >= 4, "the objects are old")
    assert b.tier.redate(b.now, [name(0), name(1)]) == 2
    assert [why for _, why in s3_audit.verify(bucket)] == [None] * 3
    assert get(b.tier, b.now, name(0))[0] is Outcome.HIT
    (space,) = s3_audit.stat(bucket)
    assert (space.objects, space.current) == (3, True) and space.oldest_s >= 4
    assert s3_audit.gc(bucket, ttl_s=3)[0] == 1
    assert {stored.place.id for stored in s3_audit.ls(bucket)} == {name(0), name(1)}
    bucket.close()


def test_a_frozen_server_delays_nobody_and_thaws(tmp_path: Path, server: Seaweed) -> None:
    with node(tmp_path / "c", server.endpoint, server.credentials, timeout_s=2.0, read_timeout_s=1.0) as c:
        put(c.tier, c.now, name(1))
        server.stop()
        assert c.tier.leading(c.now, [name(1)]) == 1
        started = time.monotonic()
        assert c.tier.leading_remote(c.now, [name(1), name(2)], soon(0.2)) == 1
        while c.tier.breaker.state is State.CLOSED:
            assert get(c.tier, c.now, name(1))[0] is Outcome.FAILED
        assert time.monotonic() - started < 10
        server.go_on()
        back = time.monotonic()
        until(lambda: c.tier.breaker.state is State.CLOSED, "the breaker closes")
        assert time.monotonic() - back < RETURN_S
        assert get(c.tier, c.now, name(1))[0] is Outcome.HIT


def test_a_server_that_is_killed_during_puts_and_gets_costs_nothing_but_misses(tmp_path: Path, server: Seaweed) -> None:
    with node(tmp_path / "c", server.endpoint, server.credentials, timeout_s=3.0, read_timeout_s=1.0) as c:
        over = threading.Event()
        seen: set[Outcome] = set()
        wrong: list[str] = []
        slowest_s = [0.0]

        def work(first: int) -> None:
            index = first
            while not over.is_set():
                id = name(index % 400)
                started = time.monotonic()
                outcome = put(c.tier, c.now, id)
                seen.add(outcome)
                outcome, found = get(c.tier, c.now, id)
                seen.add(outcome)
                if outcome is Outcome.HIT and found != payload_of(id, c.now.id):
                    wrong.append(id.hex())
                slowest_s[0] = max(slowest_s[0], time.monotonic() - started)
                index += 1
                time.sleep(0.005)

        def kill() -> None:
            time.sleep(1.0)
            server.kill()
            time.sleep(2.0)
            server.start()
            back = time.monotonic()
            try:
                until(lambda: c.tier.breaker.state is State.CLOSED, "the breaker closes")
                assert time.monotonic() - back < RETURN_S
                time.sleep(0.5)
            finally:
                over.set()

        in_threads(kill, *[lambda first=first: work(first) for first in (0, 100, 200, 300)])
        assert not wrong and {Outcome.STORED, Outcome.HIT, Outcome.FAILED} <= seen
        assert slowest_s[0] < 2 * (c.tier.settings.timeout_s + c.tier.settings.read_timeout_s)
        assert c.tier.status().details["breaker_opened"] >= 1  # type: ignore[operator]
        # PRESENT where an earlier try was answered too late and stored all the same.
        until(lambda: put(c.tier, c.now, name(999)) in (Outcome.STORED, Outcome.PRESENT), "it stores again")

"""What servers and SDKs disagree about, credentials, and servers that are slow, hang or die."""

import logging
import threading
import time
from functools import partial

import pytest

from terracekv.tests.blocks import get, in_threads, name, put
from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.s3_tiers import Node, Nodes, soon, until
from terracekv.tiers import s3
from terracekv.tiers.breaker import State
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.tier import Outcome

# What servers and SDKs disagree about.


@pytest.mark.fault(97)
def test_requests_carry_no_checksum_that_nobody_requires(a: Node, nodes: Nodes, stub: S3Stub) -> None:
    stub.switches.reject_checksums = True
    with nodes("b") as b:
        assert put(b.tier, b.now, name(1)) is Outcome.STORED
        assert get(b.tier, b.now, name(1))[0] is Outcome.HIT
    config = a.tier._bucket._client.meta.config
    assert config.request_checksum_calculation == config.response_checksum_validation == "when_required"
    sent = {header for _, _, headers in stub.requests for header in headers}
    assert not [header for header in sent if "checksum" in header or "trailer" in header or header == "expect"]


@pytest.mark.fault(98)
def test_a_body_that_comes_back_with_its_framing_is_noticed_at_start_and_never_believed(
    nodes: Nodes, a: Node, stub: S3Stub
) -> None:
    stub.switches.store_framing = True
    with pytest.raises(ConfigError, match="comes back changed"), nodes("b"):
        pass
    put(a.tier, a.now, name(1))
    assert get(a.tier, a.now, name(1))[0] is Outcome.DAMAGED


@pytest.mark.fault(98)
def test_default_requests_are_not_framed(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    (headers,) = [headers for method, key, headers in stub.requests if method == "PUT" and key == a.key(1)]
    assert "content-encoding" not in headers and "transfer-encoding" not in headers
    assert headers["x-amz-content-sha256"] not in ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")


def test_the_payload_is_left_out_of_the_signature_only_by_setting_or_over_tls(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(unsigned_payload=True) as a:
        put(a.tier, a.now, name(1))
    (headers,) = [headers for method, key, headers in stub.requests if method == "PUT" and key == a.key(1)]
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    with nodes("b", endpoint="https" + "://localhost:1", probe=False) as b:
        assert b.tier._bucket._client.meta.config.s3["payload_signing_enabled"] is False


def test_an_endpoint_of_ones_own_is_spoken_to_in_path_style(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    assert {headers["host"] for _, _, headers in stub.requests} == {stub.endpoint.partition("//")[2]}


@pytest.mark.fault(100)
def test_sixty_four_calls_at_once_never_overflow_the_pool(
    nodes: Nodes, stub: S3Stub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "urllib3")
    with nodes(workers=56, head_workers=8) as a:
        client = a.tier._bucket._client
        stub.switches.delay_s = 0.1
        in_threads(*(partial(put, a.tier, a.now, name(index)) for index in range(64)))
        in_threads(*(partial(get, a.tier, a.now, name(index)) for index in range(64)))
        assert a.tier.status().counters.hits == 64 and stub.at_once_max > 32
        assert a.tier._bucket._client is client
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in caplog.records if "pool is full" in record.getMessage()]


# Credentials.


@pytest.mark.fault(101)
def test_expired_credentials_are_read_anew_and_the_call_is_made_again(a: Node, stub: S3Stub) -> None:
    stub.switches.expired = {"first"}
    stub.login("second")
    assert put(a.tier, a.now, name(1)) is Outcome.STORED
    assert get(a.tier, a.now, name(1))[0] is Outcome.HIT
    assert a.tier.leading_remote(a.now, [name(1), name(2)], soon()) == 1
    assert a.tier.status().mode == "up" and a.tier._bucket.generation == 1


@pytest.mark.fault(101)
def test_without_fresh_credentials_the_tier_is_down_with_a_reason_until_there_are_some(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    stub.switches.expired = {"first"}
    assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
    status = a.tier.status()
    assert status.mode == "down" and "ExpiredToken" in str(status.last_error)
    assert a.tier.leading(a.now, [name(1)]) == 0
    stub.login("second")
    until(lambda: a.tier.status().mode == "up", "fresh credentials are found")
    assert get(a.tier, a.now, name(1))[0] is Outcome.HIT


@pytest.mark.fault(101)
def test_a_head_that_is_refused_without_a_reason_finds_it(a: Node, stub: S3Stub) -> None:
    """The answer to a HEAD has no body: an expired token looks like a bad request."""
    stub.switches.expired = {"first"}
    stub.login("second")
    assert a.tier.leading_remote(a.now, [name(1)], soon()) == 0
    assert a.tier._bucket.generation == 1 and a.tier.status().mode == "up"


@pytest.mark.fault(102)
def test_a_403_for_what_is_missing_is_a_miss_with_one_warning(
    nodes: Nodes, stub: S3Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.switches.forbid_missing = True
    with nodes() as a:
        assert get(a.tier, a.now, name(1))[0] is Outcome.MISS
        assert a.tier.leading_remote(a.now, [name(2)], soon()) == 0
        assert put(a.tier, a.now, name(1)) is Outcome.STORED
        assert get(a.tier, a.now, name(1))[0] is Outcome.HIT
        assert a.tier.status().mode == "up"
    warnings = [record for record in caplog.records if "s3:ListBucket" in record.getMessage()]
    assert len(warnings) == 1
    assert sum("range" in headers for _, _, headers in stub.requests) == 1, "why is asked once, not for each miss"


@pytest.mark.fault(102)
def test_real_refusal_is_told_from_missing_permission_at_start(nodes: Nodes, stub: S3Stub) -> None:
    stub.switches.unknown = {"first"}
    stub.switches.forbid_missing = True
    with pytest.raises(ConfigError, match="InvalidAccessKeyId"), nodes():
        pass


def test_a_bucket_is_created_only_when_asked(nodes: Nodes, stub: S3Stub) -> None:
    stub.buckets.clear()
    with pytest.raises(ConfigError, match="no bucket"), nodes():
        pass
    assert not stub.buckets
    with nodes("b", create_bucket=True):
        assert stub.buckets == {BUCKET}


def test_without_the_right_to_write_the_tier_reads(nodes: Nodes, a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    stub.switches.forbid_writes = True
    with nodes("b") as b:
        assert b.tier.status().mode == "read-only"
        assert get(b.tier, b.now, name(1))[0] is Outcome.HIT
        assert put(b.tier, b.now, name(2)) is Outcome.FAILED
        assert "s3:PutObject" in str(b.tier.status().last_error)
        assert b.tier.status().mode == "read-only"


def test_a_tier_that_may_not_write_says_so_and_writes_once_it_may(
    nodes: Nodes, stub: S3Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RIGHTS_S", 0.02)
    stub.switches.forbid_writes = True
    with nodes() as a:
        status = a.tier.status()
        assert status.mode == "read-only" and status.last_event == "TKV-S3-FORBIDDEN"
        assert "s3:PutObject" in str(status.advice)
        stub.switches.forbid_writes = False
        until(lambda: a.tier.status().mode == "up", "it writes")
        assert put(a.tier, a.now, name(1)) is Outcome.STORED


def test_an_unknown_profile_is_named_at_start(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match="nobody"), nodes(profile="nobody"):
        pass


# Slow and dead servers.


def test_slow_down_is_answered_with_fewer_calls_and_nothing_fails(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(workers=16, head_workers=1) as a:
        stub.switches.slow_above = 3
        stub.switches.delay_s = 0.01
        in_threads(*(partial(put, a.tier, a.now, name(index)) for index in range(16)))
        assert a.tier.status().counters.puts == 16
        details = a.tier.status().details
        assert details["busy_answers"] > 0 and details["calls_at_once"] < 16  # type: ignore[operator]
        assert a.tier.status().mode == "up"


def test_a_server_that_always_wants_less_fails_within_the_deadline(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(timeout_s=2.0) as a:
        assert put(a.tier, a.now, name(1)) is Outcome.STORED
        stub.switches.slow_down = 1.0
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
        stub.switches.slow_down = 0.0
        assert get(a.tier, a.now, name(1))[0] is Outcome.HIT


def test_a_dead_server_is_refused_at_once_and_the_breaker_closes_by_itself(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    stub.go()
    while a.tier.breaker.state is State.CLOSED:
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
    assert a.tier.status().mode == "down" and a.tier.leading(a.now, [name(1)]) == 0
    errors = a.tier.status().counters.io_errors
    for _ in range(100):
        assert put(a.tier, a.now, name(2)) is Outcome.FAILED
    assert a.tier.status().counters.io_errors == errors, "what is not tried is counted apart"
    assert a.tier.status().details["refused_calls"] >= 100  # type: ignore[operator]
    stub.come_back()
    until(lambda: a.tier.breaker.state is State.CLOSED, "the breaker closes")
    assert get(a.tier, a.now, name(1))[0] is Outcome.HIT
    assert put(a.tier, a.now, name(2)) is Outcome.STORED


def test_whoever_opens_the_breaker_says_why(a: Node, stub: S3Stub) -> None:
    for _ in range(2):
        a.tier.breaker.failed(TierDown("others had no answer either"))
    stub.go()
    assert put(a.tier, a.now, name(1)) is Outcome.FAILED
    status = a.tier.status()
    assert status.mode == "down" and status.last_event == "TKV-S3-UNREACHABLE" and status.advice
    assert status.counters.io_errors == 1
    stub.come_back()


def test_a_question_that_fails_after_nobody_waits_for_it_is_told_all_the_same(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    stub.switches.stall = True
    assert a.tier.leading_remote(a.now, [name(2)], time.monotonic() + 0.1) == 0
    until(lambda: a.tier.status().last_event == "TKV-S3-UNREACHABLE", "it is told")
    stub.switches.stall = False


def test_a_server_that_hangs_keeps_nobody_past_the_deadline(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(timeout_s=1.0, read_timeout_s=0.3) as a:
        put(a.tier, a.now, name(1))
        stub.switches.stall = True
        started = time.monotonic()
        outcomes = []
        in_threads(*[lambda: outcomes.append(get(a.tier, a.now, name(1))[0])] * 6)
        assert outcomes == [Outcome.FAILED] * 6
        assert time.monotonic() - started < 4.0
        assert a.tier.status().mode == "down"
        stub.switches.stall = False
        until(lambda: a.tier.status().mode == "up", "it comes back")


def test_a_server_that_is_away_at_start_is_waited_for_in_the_background(nodes: Nodes, stub: S3Stub) -> None:
    stub.go()
    with nodes(probe=False) as a:
        assert not a.tier.probe()
        assert a.tier.status().mode == "down"
        stub.come_back()
        until(lambda: a.tier.status().mode == "up", "it is found")
        assert put(a.tier, a.now, name(1)) is Outcome.STORED


def test_a_connection_that_the_server_closed_meanwhile_is_replaced_unseen(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    stub.go()
    stub.come_back()
    assert get(a.tier, a.now, name(1))[0] is Outcome.HIT
    assert a.tier.status().counters.io_errors == 0


def test_after_close_nothing_is_asked_and_nothing_hangs(nodes: Nodes, stub: S3Stub) -> None:
    with nodes() as a:
        put(a.tier, a.now, name(1))
        a.tier.close()
        before = stub.asked.total()
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
        assert put(a.tier, a.now, name(2)) is Outcome.FAILED
        assert a.tier.leading(a.now, [name(1)]) == 0
        assert stub.asked.total() == before


def test_an_error_has_an_age_once_it_is_over(a: Node, stub: S3Stub) -> None:
    assert (a.tier.status().last_error, a.tier.status().last_error_at) == (None, None)
    stub.go()
    assert put(a.tier, a.now, name(1)) is Outcome.FAILED
    until(lambda: put(a.tier, a.now, name(1)) is Outcome.FAILED and a.tier.status().mode == "down", "it is down")
    assert a.tier.status().last_error and a.tier.status().last_error_at is None, "it is so now"
    stub.come_back()
    until(lambda: a.tier.status().mode == "up", "it comes back")
    status = a.tier.status()
    assert status.last_error and status.last_error_at is not None and 0 <= time.monotonic() - status.last_error_at < 60


@pytest.mark.fault(123)
def test_a_slow_link_is_measured(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(block_bytes=100_000, codec="off") as a:
        stub.switches.bytes_per_s = 1e6
        put(a.tier, a.now, name(1))
        get(a.tier, a.now, name(1))
        details = a.tier.status().details
        assert 1e4 < details["link_up_bytes_per_s"] < 1.5e6  # type: ignore[operator]
        assert 1e4 < details["link_down_bytes_per_s"] < 1.5e6  # type: ignore[operator]


def test_close_ends_a_recovery_that_is_under_way(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(read_timeout_s=0.5) as a:
        stub.switches.stall = True
        a.tier.breaker.trip(TierDown("for the test"))
        until(lambda: a.tier.breaker.state is State.HALF_OPEN, "a trial begins")
        a.tier.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(("s3-", "head-s3"))]
        stub.switches.stall = False

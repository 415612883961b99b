"""The s3 tier beside a server with switches for faults: what is believed, what is a miss, what comes back by itself."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, in_threads, name, payload_of, put
from terracekv.tests.s3_stub import BUCKET, Kept, S3Stub, s3_stub
from terracekv.tests.s3_tiers import Node, node, soon, until
from terracekv.tiers.breaker import State
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.s3_record import key_of, place_of
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.tier import PAGE, Outcome

Nodes = Callable[..., AbstractContextManager[Node]]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[S3Stub]:
    with s3_stub(tmp_path) as running:
        yield running


@pytest.fixture
def nodes(tmp_path: Path, stub: S3Stub) -> Nodes:
    def made(label: str = "a", **more: Any) -> AbstractContextManager[Node]:
        return node(tmp_path / label, **{"endpoint": stub.endpoint, "credentials": stub.credentials} | more)

    return made


@pytest.fixture
def a(nodes: Nodes) -> Iterator[Node]:
    with nodes() as opened:
        yield opened


def key_at(at: Node, index: int) -> str:
    return key_of(at.tier.settings.root, at.now.id, at.now.epoch, name(index))


# Nodes share a bucket.


def test_a_block_put_by_one_node_is_read_by_another(a: Node, nodes: Nodes) -> None:
    assert put(a.tier, a.now, name(1)) is Outcome.STORED
    with nodes("b") as b:
        assert b.tier.leading(b.now, [name(1)]) == 0
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 1
        assert b.tier.leading(b.now, [name(1)]) == 1
        assert get(b.tier, b.now, name(1)) == (Outcome.HIT, payload_of(name(1), b.now.id))
        assert put(b.tier, b.now, name(1)) is Outcome.PRESENT


def test_a_block_that_another_node_stored_is_not_sent_again(a: Node, nodes: Nodes, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    with nodes("b") as b:
        before = stub.asked["PUT"]
        assert put(b.tier, b.now, name(1)) is Outcome.PRESENT
        assert stub.asked["PUT"] == before


@pytest.mark.fault(99)
def test_objects_are_named_by_content_with_safe_characters_under_the_prefix(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(prefix="team-1/kv") as a:
        put(a.tier, a.now, name(7, shard=3))
        (key,) = stub.blocks()
        id = name(7, shard=3)
        head = id[:1].hex()
        assert key == f"team-1/kv/{a.now.id.hex()}/{a.now.epoch}/{head}/{id[:32].hex()}.3"
        found = place_of("team-1/kv/", key)
        assert found is not None and (found.namespace_id, found.epoch, found.id) == (a.now.id, a.now.epoch, id)
        assert all(method_key[1] == "" or method_key[1].startswith("team-1/kv/") for method_key in stub.requests)


@pytest.mark.parametrize(
    "key", ["epoch", "x/0/ab/y.0", "0" * 64 + "/0/ab/" + "0" * 64 + ".0", "0" * 64 + "/0/00/" + "0" * 64 + ".99999"]
)
def test_other_names_are_not_taken_for_blocks(key: str) -> None:
    assert place_of("", key) is None


@pytest.mark.parametrize(
    "wrong",
    [{"prefix": "a b"}, {"prefix": "/a"}, {"prefix": "ä"}, {"endpoint": "localhost:1"}, {"codec": "maybe"}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        S3Settings(**{"bucket": BUCKET} | wrong)
    with pytest.raises(ConfigError):
        S3Settings(bucket="A_b")


# Presence.


def chain(stub: S3Stub, at: Node, there: int) -> list[bytes]:
    """A chain of 128 blocks, of which the first ``there`` are in a bucket that has 10,000 objects."""
    content = Kept(bytes(2 * PAGE), datetime.now(UTC))
    for index in range(there):
        stub.objects[key_at(at, index)] = content
    for index in range(10_000 - there):
        stub.objects[key_of("", bytes(32), 0, name(index))] = content
    return [name(index) for index in range(128)]


@pytest.mark.parametrize("there", [0, 1, 63, 64, 100, 127, 128])
def test_presence_of_128_blocks_among_10000_objects_costs_14_heads_and_no_listing(
    a: Node, stub: S3Stub, there: int
) -> None:
    ids = chain(stub, a, there)
    stub.asked.clear()
    assert a.tier.leading_remote(a.now, ids, soon()) == there
    assert stub.asked["HEAD"] <= 2 * math.log2(128)
    assert not [key for method, key, _ in stub.requests if method == "GET" and not key]
    asked = stub.asked["HEAD"]
    assert a.tier.leading_remote(a.now, ids, soon()) == a.tier.leading(a.now, ids) == there
    assert stub.asked["HEAD"] == asked, "what is known is not asked again"


def test_presence_answers_with_what_is_known_when_the_deadline_comes(a: Node, stub: S3Stub) -> None:
    ids = chain(stub, a, 128)
    for id in ids[:2]:
        get(a.tier, a.now, id)
    a.tier._scout.presence.note(a.now.stamp, ids[0], True, 60)
    stub.switches.stall = True
    started = time.monotonic()
    assert a.tier.leading_remote(a.now, ids, soon(0.3)) == 1
    assert time.monotonic() - started < a.tier.settings.read_timeout_s
    stub.switches.stall = False
    until(lambda: a.tier._caller.throttle.running == 0, "questions under way end")


def test_leading_never_asks_the_network(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    before = stub.asked.total()
    stub.switches.stall = True
    assert a.tier.leading(a.now, [name(1), name(2)]) == 1
    a.tier.status()
    stub.switches.stall = False
    assert stub.asked.total() == before


def test_an_object_that_went_away_ends_the_prefix_and_is_remembered(a: Node, stub: S3Stub) -> None:
    for index in range(3):
        put(a.tier, a.now, name(index))
    ids = [name(index) for index in range(3)]
    del stub.objects[key_at(a, 0)]
    assert a.tier.leading(a.now, ids) == 3
    assert get(a.tier, a.now, ids[0])[0] is Outcome.MISS
    assert a.tier.leading(a.now, ids) == 0
    assert put(a.tier, a.now, ids[0]) is Outcome.STORED
    assert a.tier.leading(a.now, ids) == 3


# What is believed.


def damage(kind: str, stub: S3Stub, at: Node) -> None:
    """Alter the object of block 1."""
    kept = stub.objects[key_at(at, 1)]
    content = kept.content
    match kind:
        case "a byte of the payload":
            content = content[: PAGE + 30] + bytes([content[PAGE + 30] ^ 1]) + content[PAGE + 31 :]
        case "a byte of the header":
            content = content[:50] + bytes([content[50] ^ 1]) + content[51:]
        case "cut":
            content = content[:-PAGE]
        case "cut to a header":
            content = content[:PAGE]
        case "cut to nothing":
            content = b""
        case "longer":
            content = content + bytes(PAGE)
        case "longer by a byte":
            content = content + b"\0"
        case "another block":
            content = stub.objects[key_at(at, 2)].content
        case "something else":
            content = random.Random(1).randbytes(len(content))
    kept.content = content


@pytest.mark.fault(10)
@pytest.mark.parametrize("codec", ["off", "on"])
@pytest.mark.parametrize(
    "kind",
    [
        "a byte of the payload",
        "a byte of the header",
        "cut",
        "cut to a header",
        "cut to nothing",
        "longer",
        "longer by a byte",
        "another block",
        "something else",
    ],
)
def test_a_damaged_object_is_a_counted_miss_until_the_next_put_heals_it(
    nodes: Nodes, stub: S3Stub, kind: str, codec: str
) -> None:
    payloads = {index: (b"\1\2\3\4" * BLOCK_BYTES)[index : BLOCK_BYTES + index] for index in (1, 2)}
    with nodes(codec=codec) as a:
        for index, payload in payloads.items():
            put(a.tier, a.now, name(index), payload)
        damage(kind, stub, a)
        around = memoryview(bytearray(b"\xa5" * (BLOCK_BYTES + 64)))
        assert a.tier.get(a.now, name(1), around[:BLOCK_BYTES]) is Outcome.DAMAGED
        assert bytes(around[BLOCK_BYTES:]) == b"\xa5" * 64
        assert a.tier.status().counters.checksum_failures == 1
        assert a.tier.leading(a.now, [name(1)]) == 0
        assert a.tier.leading_remote(a.now, [name(1)], soon()) == 0
        assert put(a.tier, a.now, name(1), payloads[1]) is Outcome.STORED
        assert get(a.tier, a.now, name(1)) == (Outcome.HIT, payloads[1])
        assert get(a.tier, a.now, name(2)) == (Outcome.HIT, payloads[2])


@pytest.mark.parametrize(("switch", "value"), [("longer_by", 1), ("longer_by", 1 << 20), ("shorter_by", 1)])
def test_a_server_that_sends_other_lengths_writes_no_byte_beside_the_slot(
    a: Node, stub: S3Stub, switch: str, value: int
) -> None:
    put(a.tier, a.now, name(1))
    setattr(stub.switches, switch, value)
    around = memoryview(bytearray(b"\xa5" * (BLOCK_BYTES + 64)))
    assert a.tier.get(a.now, name(1), around) is Outcome.DAMAGED
    assert bytes(around[BLOCK_BYTES:]) == b"\xa5" * 64


@pytest.mark.parametrize("switch", ["cut_body", "stall_body", "trickle"])
def test_a_body_that_does_not_come_whole_and_in_time_is_a_failure_and_no_hit(
    nodes: Nodes, stub: S3Stub, switch: str
) -> None:
    with nodes(timeout_s=1.0, read_timeout_s=0.4) as a:
        put(a.tier, a.now, name(1))
        setattr(stub.switches, switch, True)
        started = time.monotonic()
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
        assert time.monotonic() - started < 3.0
        assert a.tier.status().counters.io_errors == 1
        setattr(stub.switches, switch, False)
        assert get(a.tier, a.now, name(1)) == (Outcome.HIT, payload_of(name(1), a.now.id))


def test_compressed_and_raw_objects_are_read_side_by_side(nodes: Nodes, stub: S3Stub) -> None:
    payload = (b"\1\2\3\4" * BLOCK_BYTES)[:BLOCK_BYTES]
    with nodes("a", codec="on") as a, nodes("b", codec="off") as b:
        assert put(a.tier, a.now, name(1), payload) is Outcome.STORED
        assert put(b.tier, b.now, name(2), payload) is Outcome.STORED
        assert len(stub.objects[key_at(a, 1)].content) < len(stub.objects[key_at(b, 2)].content) // 2
        assert get(b.tier, b.now, name(1)) == get(a.tier, a.now, name(2)) == (Outcome.HIT, payload)
        details = a.tier.status().details
        assert (details["coded_blocks"], b.tier.status().details["raw_blocks"]) == (1, 1)
        assert details["codec_ratio"] > 2 and details["codec_encode_bytes_per_s"] > 0  # type: ignore[operator]


def test_what_does_not_shrink_is_stored_raw(nodes: Nodes) -> None:
    with nodes(codec="on") as a:
        put(a.tier, a.now, name(1))
        assert a.tier.status().details["raw_blocks"] == 1
        assert get(a.tier, a.now, name(1))[0] is Outcome.HIT


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
    (headers,) = [headers for method, key, headers in stub.requests if method == "PUT" and key == key_at(a, 1)]
    assert "content-encoding" not in headers and "transfer-encoding" not in headers
    assert headers["x-amz-content-sha256"] not in ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")


def test_the_payload_is_left_out_of_the_signature_only_by_setting_or_over_tls(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(unsigned_payload=True) as a:
        put(a.tier, a.now, name(1))
    (headers,) = [headers for method, key, headers in stub.requests if method == "PUT" and key == key_at(a, 1)]
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    with nodes("b", endpoint="https" + "://localhost:1", probe=False) as b:
        assert b.tier._bucket._client.meta.config.s3["payload_signing_enabled"] is False


@pytest.mark.fault(99)
def test_an_endpoint_of_ones_own_is_spoken_to_in_path_style(a: Node, stub: S3Stub) -> None:
    put(a.tier, a.now, name(1))
    assert {headers["host"] for _, _, headers in stub.requests} == {stub.endpoint.partition("//")[2]}


@pytest.mark.fault(100)
def test_sixty_four_calls_at_once_never_overflow_the_pool(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "urllib3")
    with nodes(workers=56, head_workers=8) as a:
        client = a.tier._bucket._client
        in_threads(*(partial(put, a.tier, a.now, name(index)) for index in range(64)))
        in_threads(*(partial(get, a.tier, a.now, name(index)) for index in range(64)))
        assert a.tier.status().counters.hits == 64
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
    with nodes(timeout_s=0.5) as a:
        put(a.tier, a.now, name(1))
        stub.switches.slow_down = 1.0
        started = time.monotonic()
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
        assert time.monotonic() - started < 5.0
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


@pytest.mark.fault(123)
def test_a_slow_link_is_measured(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(block_bytes=100_000, codec="off") as a:
        stub.switches.bytes_per_s = 1e6
        put(a.tier, a.now, name(1))
        get(a.tier, a.now, name(1))
        details = a.tier.status().details
        assert 1e4 < details["link_up_bytes_per_s"] < 1.5e6  # type: ignore[operator]
        assert 1e4 < details["link_down_bytes_per_s"] < 1.5e6  # type: ignore[operator]


# Flushes and lifetimes.


def test_a_flush_on_one_node_holds_on_all(a: Node, nodes: Nodes) -> None:
    with nodes("b", epoch_ttl_s=0) as b:
        put(a.tier, a.now, name(1))
        assert get(b.tier, b.now, name(1))[0] is Outcome.HIT
        a.flush()
        before = b.now
        assert get(b.tier, before, name(1))[0] is Outcome.MISS
        assert b.now.epoch == a.now.epoch == before.epoch + 1
        assert put(b.tier, before, name(2)) is Outcome.STALE
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0


def test_a_node_that_joins_later_learns_of_a_flush_before_it_reads(a: Node, nodes: Nodes) -> None:
    put(a.tier, a.now, name(1))
    a.flush()
    with nodes("late") as b:
        assert b.now.epoch == 0
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0
        assert b.now.epoch == 1


def test_two_flushes_at_once_both_cover_what_was_there_before(a: Node, nodes: Nodes) -> None:
    with nodes("b") as b:
        a.flush()
        put(a.tier, a.now, name(1))
        b.flush()
        assert b.now.epoch == 2, "b's flush came after a's block"
        assert get(b.tier, b.now, name(1))[0] is Outcome.MISS


def test_flushes_that_race_leave_all_nodes_agreeing(nodes: Nodes) -> None:
    with nodes("a", epoch_ttl_s=0) as a, nodes("b", epoch_ttl_s=0) as b:
        in_threads(*[lambda n=n: [n.flush() for _ in range(5)] for n in (a, b)])  # type: ignore[misc]
        for at in (a, b):
            at.tier.leading_remote(at.now, [name(1)], soon())
        assert a.now.epoch == b.now.epoch >= 5


def test_a_flush_that_the_bucket_missed_is_made_up_for(nodes: Nodes, stub: S3Stub) -> None:
    with nodes("a", timeout_s=0.5) as a, nodes("b", epoch_ttl_s=0) as b:
        put(a.tier, a.now, name(1))
        stub.go()
        with pytest.raises(TierDown):
            a.flush()
        assert a.tier.leading(a.now, [name(1)]) == 0
        assert a.tier.status().details["unheard_flushes"] == 1
        stub.come_back()
        until(lambda: a.tier.status().mode == "up", "it comes back")
        assert put(a.tier, a.now, name(2)) is Outcome.STORED
        assert a.tier.status().details["unheard_flushes"] == 0
        until(lambda: b.tier.status().mode == "up", "it comes back")
        assert b.tier.leading_remote(b.now, [name(1)], soon()) == 0
        assert b.now.epoch == a.now.epoch == 1


def test_flushed_objects_are_reclaimed_and_present_ones_are_not(a: Node, stub: S3Stub) -> None:
    for index in range(5):
        put(a.tier, a.now, name(index))
    flushed = a.flush()
    put(a.tier, flushed, name(9))
    assert a.tier.reclaim(flushed) == 5
    assert stub.blocks() == [key_at(a, 9)]
    assert a.tier.status().counters.evictions["flush"] == 5


def test_a_damaged_epoch_is_not_guessed_at(a: Node, nodes: Nodes, stub: S3Stub) -> None:
    a.flush()
    (key,) = [key for key in stub.objects if key.endswith("/epoch")]
    stub.objects[key].content = b"one"
    with nodes("b") as b:
        assert get(b.tier, b.now, name(1))[0] is Outcome.FAILED
        assert "epoch is damaged" in str(b.tier.status().last_error)


def test_chains_that_are_read_are_dated_anew_before_half_their_life_is_over(nodes: Nodes, stub: S3Stub) -> None:
    ids = [name(index) for index in range(4)]
    with nodes("a", ttl_s=1000) as a, nodes("b", ttl_s=1000) as b:
        for id in ids:
            put(a.tier, a.now, id)
        for index in range(4):
            stub.age(key_at(a, index), 499 if index == 3 else 600)
        before = stub.asked.total()
        assert a.tier.redate(a.now, ids) == 0, "it stored them itself, so it takes them to be young"
        assert stub.asked.total() == before
        for id in ids[:2]:
            get(b.tier, b.now, id)
        assert b.tier.redate(b.now, ids) == 3
        ages = [(datetime.now(UTC) - stub.objects[key_at(a, index)].modified).total_seconds() for index in range(4)]
        assert [age > 400 for age in ages] == [False, False, False, True]
        copies = [key for method, key, headers in stub.requests if "x-amz-copy-source" in headers]
        assert copies == [key_at(a, index) for index in range(3)], "the head first"
        before = stub.asked.total()
        assert b.tier.redate(b.now, ids) == 0
        assert stub.asked.total() == before, "young objects are not asked about"
        assert get(b.tier, b.now, ids[0])[0] is Outcome.HIT


def test_a_chain_without_its_head_is_not_kept_alive(nodes: Nodes, stub: S3Stub) -> None:
    with nodes("a") as a, nodes("b", ttl_s=1000) as b:
        for index in range(3):
            put(a.tier, a.now, name(index))
            stub.age(key_at(a, index), 600)
        del stub.objects[key_at(a, 0)]
        assert b.tier.redate(b.now, [name(index) for index in range(3)]) == 0
        assert b.tier.status().details["aged_out"] == 1


def test_close_ends_a_recovery_that_is_under_way(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(read_timeout_s=0.5) as a:
        stub.switches.stall = True
        a.tier.breaker.trip(TierDown("for the test"))
        until(lambda: a.tier.breaker.state is State.HALF_OPEN, "a trial begins")
        a.tier.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("terracekv-s3")]
        stub.switches.stall = False

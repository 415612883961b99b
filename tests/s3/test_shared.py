"""Nodes that share a bucket: names, presence, and what of an object is believed."""

import math
import random
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, name, payload_of, put
from terracekv.tests.s3_stub import Kept, S3Stub
from terracekv.tests.s3_tiers import Node, Nodes, soon, until
from terracekv.tiers.s3_record import key_of, place_of
from terracekv.tiers.tier import PAGE, Outcome

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


# Presence.


def chain(stub: S3Stub, at: Node, there: int) -> list[bytes]:
    """A chain of 128 blocks, of which the first ``there`` are in a bucket that has 10,000 objects."""
    content = Kept(bytes(2 * PAGE), datetime.now(UTC))
    for index in range(there):
        stub.objects[at.key(index)] = content
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
    del stub.objects[a.key(0)]
    assert a.tier.leading(a.now, ids) == 3
    assert get(a.tier, a.now, ids[0])[0] is Outcome.MISS
    assert a.tier.leading(a.now, ids) == 0
    assert put(a.tier, a.now, ids[0]) is Outcome.STORED
    assert a.tier.leading(a.now, ids) == 3


def test_an_answer_that_was_overtaken_by_a_put_is_not_noted(a: Node) -> None:
    scout = a.tier._scout
    writes = scout.stripe(name(1)).writes
    put(a.tier, a.now, name(1))
    scout.learned(a.now, name(1), False, 60, writes)
    assert a.tier.leading(a.now, [name(1)]) == 1
    scout.learned(a.now, name(1), False, 60, scout.stripe(name(1)).writes)
    assert a.tier.leading(a.now, [name(1)]) == 0


# What is believed.


def damage(kind: str, stub: S3Stub, at: Node) -> None:
    """Alter the object of block 1."""
    kept = stub.objects[at.key(1)]
    content = kept.content
    match kind:
        case "a byte of the payload":
            content = content[: PAGE + 30] + bytes([content[PAGE + 30] ^ 1]) + content[PAGE + 31 :]
        case "a byte of the header":
            content = content[:50] + bytes([content[50] ^ 1]) + content[51:]
        case "the size of a plane":
            content = content[:PAGE] + bytes(4) + content[PAGE + 4 :]
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
            content = stub.objects[at.key(2)].content
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
        "the size of a plane",
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
        assert a.key(1) in str(a.tier.status().last_error), "the object is named"
        assert a.tier.leading(a.now, [name(1)]) == 0
        assert a.tier.leading_remote(a.now, [name(1)], soon()) == 0
        assert put(a.tier, a.now, name(1), payloads[1]) is Outcome.STORED
        assert get(a.tier, a.now, name(1)) == (Outcome.HIT, payloads[1])
        assert get(a.tier, a.now, name(2)) == (Outcome.HIT, payloads[2])


@pytest.mark.parametrize("known", [True, False])
def test_damage_is_believed_though_a_put_found_the_object_while_it_was_read_and_not_once_it_was_sent_anew(
    a: Node, stub: S3Stub, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    put(a.tier, a.now, name(1))
    damage("a byte of the payload", stub, a)
    real, outcomes = a.tier._fetch, list[Outcome]()

    def fetch(*about: Any) -> bool:
        try:
            return real(*about)
        finally:
            if not known:
                a.tier._scout.presence.note(a.now.stamp, name(1), False, 60)
            outcomes.append(put(a.tier, a.now, name(1)))

    with monkeypatch.context() as patched:
        patched.setattr(a.tier, "_fetch", fetch)
        assert get(a.tier, a.now, name(1))[0] is Outcome.DAMAGED
    assert outcomes == [Outcome.PRESENT if known else Outcome.STORED]
    assert a.tier.leading(a.now, [name(1)]) == int(not known)
    assert put(a.tier, a.now, name(1)) is (Outcome.STORED if known else Outcome.PRESENT)
    assert get(a.tier, a.now, name(1))[0] is Outcome.HIT


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
    with nodes(timeout_s=3.0, read_timeout_s=1.0) as a:
        assert put(a.tier, a.now, name(1)) is Outcome.STORED
        setattr(stub.switches, switch, True)
        assert get(a.tier, a.now, name(1))[0] is Outcome.FAILED
        assert a.tier.status().counters.io_errors == 1
        setattr(stub.switches, switch, False)
        assert get(a.tier, a.now, name(1)) == (Outcome.HIT, payload_of(name(1), a.now.id))


def test_compressed_and_raw_objects_are_read_side_by_side(nodes: Nodes, stub: S3Stub) -> None:
    payload = (b"\1\2\3\4" * BLOCK_BYTES)[:BLOCK_BYTES]
    with nodes("a", codec="on") as a, nodes("b", codec="off") as b:
        assert put(a.tier, a.now, name(1), payload) is Outcome.STORED
        assert put(b.tier, b.now, name(2), payload) is Outcome.STORED
        assert len(stub.objects[a.key(1)].content) < len(stub.objects[b.key(2)].content) // 2
        assert get(b.tier, b.now, name(1)) == get(a.tier, a.now, name(2)) == (Outcome.HIT, payload)
        details = a.tier.status().details
        assert (details["coded_blocks"], b.tier.status().details["raw_blocks"]) == (1, 1)
        assert details["codec_ratio"] > 2 and details["codec_encode_bytes_per_s"] > 0  # type: ignore[operator]


def test_what_does_not_shrink_is_stored_raw(nodes: Nodes) -> None:
    with nodes(codec="on") as a:
        put(a.tier, a.now, name(1))
        assert a.tier.status().details["raw_blocks"] == 1
        assert get(a.tier, a.now, name(1))[0] is Outcome.HIT

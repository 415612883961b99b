"""The lookup: how much of a prompt is here, in which tier, and why not more."""

import json
from array import array

import msgspec
import pytest

from terracekv.daemon import http_messages, http_queries
from terracekv.daemon.http_messages import parse_tokens
from terracekv.tests.people import BLOCK_BYTES, BLOCK_TOKENS, MODEL, People, hexed, keys_of, lookup, served
from terracekv.tiers.block import block_id, block_keys
from terracekv.tiers.errors import BadRequest


@pytest.mark.fault(113)
@pytest.mark.fault(117)
@served()
async def test_four_of_ten_is_four_of_ten_and_the_answer_says_why_not_more(people: People) -> None:
    namespace, keys = people.register(), keys_of(10)
    await people.put(namespace, *keys[:4], durable="1")
    assert await lookup(people, namespace=MODEL, keys=hexed(keys)) == {
        "namespace_id": namespace.id.hex(),
        "block_tokens": BLOCK_TOKENS,
        "asked_blocks": 10,
        "matched_blocks": 4,
        "matched_tokens": 4 * BLOCK_TOKENS,
        "tiers": {
            "host": {"blocks": 4, "tokens": 4 * BLOCK_TOKENS},
            "disk": {"blocks": 4, "tokens": 4 * BLOCK_TOKENS},
        },
        "bytes": 4 * BLOCK_BYTES,
        "load_ms": pytest.approx(4 * BLOCK_BYTES / 5e9 * 1e3, abs=0.001),
        "first_miss": {"index": 4, "reason": "absent"},
    }
    stats = people.store.stats
    assert (stats.asked_blocks, stats.matched_blocks, sum(stats.matched.values())) == (10, 4, 4)


@pytest.mark.fault(135)
@served()
async def test_each_tier_has_its_own_contiguous_length(people: People) -> None:
    namespace, keys = people.register(), keys_of(6)
    await people.put(namespace, *keys, durable="1")
    people.store.host.delete(namespace, [block_id(key, 0) for key in keys[2:4]])
    found = await lookup(people, namespace=MODEL, keys=hexed(keys))
    assert {tier: reach["blocks"] for tier, reach in found["tiers"].items()} == {"host": 2, "disk": 6}
    assert (found["matched_blocks"], found["first_miss"]) == (6, None)
    assert sum(people.store.stats.matched.values()) == 6


@served(disk_bytes=0)
async def test_only_configured_tiers_are_named(people: People) -> None:
    people.register()
    assert list((await lookup(people, namespace=MODEL, keys=hexed(keys_of(1))))["tiers"]) == ["host"]


@served()
async def test_tokens_and_their_keys_have_the_same_answer(people: People) -> None:
    namespace, tokens = people.register(), list(range(5 * BLOCK_TOKENS + 3))
    keys = block_keys(namespace.id, tokens, BLOCK_TOKENS)
    await people.put(namespace, *keys[:3])
    by_tokens = await lookup(people, namespace=MODEL, tokens=tokens)
    assert by_tokens == await lookup(people, namespace=MODEL, keys=hexed(keys))
    assert (by_tokens["asked_blocks"], by_tokens["matched_blocks"]) == (5, 3)


@served(host_bytes=16 << 20, slab_bytes=1 << 20)
async def test_a_prompt_of_a_hundred_thousand_tokens_is_worked_out_beside_the_loop(people: People) -> None:
    """Past the size that is done inline; the numbers are of all lengths, so that pieces end in all places."""
    namespace = people.register()
    tokens = [(n * 2654435761) % 10 ** (1 + n % 9) for n in range(131_072)]
    keys = block_keys(namespace.id, tokens, BLOCK_TOKENS)
    await people.put(namespace, keys[0], keys[1])
    for body in ({"tokens": tokens}, {"keys": hexed(keys)}):
        assert len(json.dumps(body)) > 10 * http_queries.INLINE_BYTES
        found = await lookup(people, namespace=MODEL, **body)
        assert (found["asked_blocks"], found["matched_blocks"]) == (len(keys), 2)


def test_tokens_parsed_in_pieces_are_those_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [0, 7, 4294967295, 12, 345678] * 7
    spaced = json.dumps(tokens, indent=1).encode()
    for piece_bytes in range(1, 40):
        monkeypatch.setattr(http_messages, "PIECE_BYTES", piece_bytes)
        for raw in (json.dumps(tokens, separators=(",", ":")).encode(), spaced):
            assert parse_tokens(raw) == array("I", tokens)
    assert parse_tokens(msgspec.msgpack.encode(tokens)) == array("I", tokens)
    assert parse_tokens(b"[]") == parse_tokens(msgspec.msgpack.encode([])) == array("I")


@pytest.mark.parametrize("piece_bytes", [1, 1 << 15])
@pytest.mark.parametrize(
    "raw",
    [b"[-1]", b"[4294967296]", b"[1.5]", b'["1,2"]', b"[[1,2],[3]]", b"[true]", b"[null]", b"5", b'{"a":1}', b"\x5b"],
)
def test_what_is_no_list_of_tokens_is_refused(raw: bytes, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_messages, "PIECE_BYTES", piece_bytes)
    with pytest.raises(BadRequest, match="tokens"):
        parse_tokens(raw)


@pytest.mark.fault(117)
@served()
async def test_an_unknown_namespace_is_an_answer_with_its_reason(people: People) -> None:
    people.register()
    for body in ({"tokens": [1] * 100}, {"keys": hexed(keys_of(3))}):
        found = await lookup(people, namespace="no such model", **body)
        assert (found["matched_blocks"], found["namespace_id"]) == (0, None)
        assert found["first_miss"] == {"index": 0, "reason": "unknown_namespace"}
    assert people.store.stats.misses["unknown_namespace"] == 2
    assert people.store.stats.lookups == 2


@served()
async def test_a_namespace_known_from_its_blocks_only_cannot_be_served_and_is_not_promised(people: People) -> None:
    known = people.store.namespaces.adopt(bytes([7]) * 32, 0)
    found = await lookup(people, namespace=known.id.hex(), tokens=[1, 2, 3])
    assert found["first_miss"]["reason"] == "unknown_namespace"


@pytest.mark.fault(115)
@served()
async def test_a_prompt_shorter_than_a_block_is_told_so_with_the_block_size(people: People) -> None:
    people.register()
    found = await lookup(people, namespace=MODEL, tokens=[1] * (BLOCK_TOKENS - 1))
    assert found["first_miss"] == {"index": 0, "reason": "shorter_than_block"}
    assert (found["block_tokens"], found["asked_blocks"]) == (BLOCK_TOKENS, 0)
    assert people.store.stats.misses["shorter_than_block"] == 1


@served()
async def test_a_namespace_may_be_named_by_its_id_by_a_prefix_or_by_its_model(people: People) -> None:
    namespace = people.register()
    for name in (namespace.id.hex(), namespace.id.hex()[:8], MODEL):
        assert (await lookup(people, namespace=name, keys=hexed(keys_of(1))))["namespace_id"] == namespace.id.hex()


@served()
async def test_a_name_that_two_namespaces_bear_is_refused_with_their_ids(people: People) -> None:
    one, two = people.register(1), people.register(2)
    status, answer = await people.ask("POST", "/v1/lookup", {"namespace": MODEL, "tokens": []})
    assert (status, answer["error"]["kind"]) == (400, "bad_request")
    assert one.id.hex()[:16] in answer["error"]["hint"] and two.id.hex()[:16] in answer["error"]["hint"]

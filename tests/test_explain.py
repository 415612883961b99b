"""Why a prompt misses, block by block, as far as the daemon can know."""

from dataclasses import replace
from typing import Any

import pytest

from terracekv.tests.people import BLOCK_TOKENS, MODEL, People, keys_of, served
from terracekv.tiers.block import block_id, block_keys
from terracekv.tiers.namespace import Namespace

PROMPT = list(range(5 * BLOCK_TOKENS + 3))


async def explain(people: People, **body: Any) -> dict[str, Any]:
    status, answer = await people.ask("POST", "/v1/explain", {"namespace": MODEL} | body)
    assert status == 200, answer
    return dict(answer)


def keys_in(namespace: Namespace, tokens: list[int] = PROMPT) -> list[bytes]:
    return block_keys(namespace.id, tokens, namespace.block_tokens)


@pytest.mark.fault(117)
@served()
async def test_each_block_says_where_it_is_and_the_first_that_is_nowhere_why(people: People) -> None:
    namespace = people.register()
    keys = keys_in(namespace)
    await people.put(namespace, *keys[:2], durable="1")
    await people.put(namespace, keys[3])
    people.store.host.delete(namespace, [block_id(keys[1], 0)])
    told = await explain(people, tokens=PROMPT)
    assert (told["asked_blocks"], told["matched_blocks"], told["matched_tokens"]) == (5, 2, 2 * BLOCK_TOKENS)
    assert (told["asked_tokens"], told["rest_tokens"], told["block_tokens"]) == (len(PROMPT), 3, BLOCK_TOKENS)
    assert told["first_miss"] == {"index": 2, "reason": "absent"}
    assert told["namespace_id"] == namespace.id.hex() and (told["model"], told["dtype"]) == (MODEL, "bf16")
    rows = told["blocks"]
    assert [list(row["tiers"])[:1] for row in rows] == [["host"], ["disk"], [], ["host"], []]
    assert [row["reason"] for row in rows] == [None, None, "absent", None, "absent"]
    assert [row["first_token"] for row in rows] == [index * BLOCK_TOKENS for index in range(5)]
    assert [row["key"] for row in rows] == [key.hex() for key in keys]
    assert people.store.stats.lookups == 0, "a question of a person must not change the hit rate"


@pytest.mark.fault(115)
@served()
async def test_a_prompt_shorter_than_a_block_is_told_so_with_the_blocks_size_and_counted(people: People) -> None:
    people.register()
    short = list(range(BLOCK_TOKENS - 1))
    told = await explain(people, tokens=short)
    assert told["first_miss"] == {"index": 0, "reason": "shorter_than_block"}
    assert (told["block_tokens"], told["rest_tokens"], told["blocks"]) == (BLOCK_TOKENS, len(short), [])
    status, found = await people.ask("POST", "/v1/lookup", {"namespace": MODEL, "tokens": short})
    assert (status, found["first_miss"]["reason"], found["block_tokens"]) == (200, "shorter_than_block", BLOCK_TOKENS)
    async with people.client.get("/metrics") as answer:
        assert 'terracekv_lookup_misses_total{reason="shorter_than_block"} 1.0' in await answer.text()


@pytest.mark.fault(117)
@served(disk_bytes=0, host_bytes=6 * 20_480, slab_bytes=20_480)
async def test_a_block_that_made_room_for_others_was_evicted(people: People) -> None:
    namespace = people.register()
    keys = keys_in(namespace)
    await people.put(namespace, *keys)
    await people.put(namespace, *keys_of(4))
    told = await explain(people, tokens=PROMPT)
    gone = [row["index"] for row in told["blocks"] if row["reason"] == "evicted"]
    assert gone and told["first_miss"] == {"index": gone[0], "reason": "evicted"}
    assert all(row["reason"] in (None, "evicted") for row in told["blocks"])


@pytest.mark.fault(117)
@served()
async def test_a_block_whose_bytes_rotted_was_damaged_until_it_is_stored_again(people: People) -> None:
    namespace = people.register()
    keys = keys_in(namespace)
    await people.put(namespace, *keys[:2], durable="1")
    people.store.host.delete(namespace, [block_id(key, 0) for key in keys])
    with open(min((people.folder / "disk" / "segments").iterdir()), "r+b") as segment:
        segment.seek(5000)  # behind the first record's header
        segment.write(b"rotten")
    async with people.client.get(f"/v1/namespaces/{namespace.id.hex()}/blocks/{keys[0].hex()}") as answer:
        assert answer.status == 404
    told = await explain(people, tokens=PROMPT)
    assert told["first_miss"] == {"index": 0, "reason": "damaged"} and told["blocks"][0]["reason"] == "damaged"
    _, found = await people.ask("POST", "/v1/lookup", {"namespace": MODEL, "tokens": PROMPT})
    assert found["first_miss"] == {"index": 0, "reason": "damaged"} and people.store.stats.misses["damaged"] == 1
    await people.put(namespace, keys[0])
    assert (await explain(people, tokens=PROMPT))["blocks"][0]["tiers"]["host"] == 1
    people.store.host.delete(namespace, [block_id(keys[0], 0)])
    await people.store.delete(namespace, [block_id(keys[0], 0)])
    assert (await explain(people, tokens=PROMPT))["blocks"][0]["reason"] == "absent"


@pytest.mark.fault(117)
@served()
async def test_the_same_tokens_under_another_namespace_are_named_with_what_differs(people: People) -> None:
    asked, there = people.register(1), people.register(2, model="other")
    half = people.store.namespaces.register(replace(asked, id=bytes([3]) * 32, dtype="fp8", block_tokens=8))
    await people.put(there, *keys_in(there)[:4])
    await people.put(half, keys_in(half)[0])
    told = await explain(people, namespace=asked.id.hex(), tokens=PROMPT)
    assert [(e["namespace_id"], e["matched_blocks"], e["matched_tokens"]) for e in told["elsewhere"]] == [
        (there.id.hex(), 4, 4 * BLOCK_TOKENS),
        (half.id.hex(), 1, 8),
    ]
    assert told["elsewhere"][0]["differs"] == {"model": {"asked": MODEL, "there": "other"}}
    assert told["elsewhere"][1]["differs"] == {
        "dtype": {"asked": "bf16", "there": "fp8"},
        "block_tokens": {"asked": BLOCK_TOKENS, "there": 8},
    }
    nobody = await explain(people, namespace="nobody", tokens=PROMPT)
    assert nobody["first_miss"] == {"index": 0, "reason": "unknown_namespace"} and nobody["namespace_id"] is None
    assert nobody["elsewhere"][0]["differs"]["model"] == {"asked": None, "there": "other"}
    by_keys = await explain(people, namespace=asked.id.hex(), keys=[key.hex() for key in keys_in(asked)])
    assert by_keys["elsewhere"] == [] and by_keys["asked_tokens"] is None


@served()
async def test_a_block_of_which_one_shard_was_never_stored_names_that_shard(people: People) -> None:
    namespace = people.register(shards=2)
    keys = keys_in(namespace)
    await people.put(namespace, *keys[:2], shard=0)
    await people.put(namespace, keys[0], shard=1)
    told = await explain(people, tokens=PROMPT)
    assert told["first_miss"] == {"index": 1, "reason": "absent"}
    assert [(row["tiers"].get("host"), row["missing"]) for row in told["blocks"][:3]] == [
        (2, []),
        (1, [1]),
        (None, [0, 1]),
    ]

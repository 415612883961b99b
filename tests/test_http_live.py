"""The live status: one document about every second for all who listen, and nothing made when nobody does."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from terracekv.daemon import http_listeners, http_live
from terracekv.tests.people import MODEL, People, keys_of, served, until
from terracekv.tests.test_http_tenants import BLUE, KEY, RED, guarded, of_tenant

QUICK_S = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_live, "EVERY_S", QUICK_S)


async def heard(answer: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """The next event's name and document."""
    text = (await answer.content.readuntil(b"\n\n")).decode()
    name, data = text.removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def heard_now(answer: aiohttp.ClientResponse, wanted: Any = lambda document: True) -> dict[str, Any]:
    """The next document of now that is as wanted."""
    while True:
        name, document = await heard(answer)
        if name == "now" and wanted(document):
            return document


@pytest.mark.fault(117)
@served()
async def test_a_stream_begins_with_the_past_and_goes_on_with_what_is_new(people: People) -> None:
    namespace, keys = people.register(), keys_of(4)
    await people.put(namespace, *keys[:3])
    assert await people.lookup(namespace, keys) == 3
    async with people.client.get("/v1/live") as answer:
        assert answer.content_type == "text/event-stream" and answer.headers["Cache-Control"] == "no-store"
        name, past = await heard(answer)
        assert name == "past"
        (row,) = past["lookups"]
        assert (row["model"], row["namespace_id"]) == (MODEL, namespace.id.hex())
        assert (row["asked_blocks"], row["matched_blocks"], row["split"]["host"]) == (4, 3, 3)
        assert row["first_miss"] == {"index": 3, "reason": "absent"} and row["load_ms"] > 0
        assert not any(key.hex() in json.dumps(past) for key in keys), "no key is told"
        (period,) = past["history"]
        assert (period["lookups"], period["asked_blocks"], period["matched_blocks"]) == (1, 4, {"host": 3})
        assert period["matched_tokens"] == {"host": 3 * namespace.block_tokens}
        now = await heard_now(answer)
        assert now["status"]["tiers"]["host"]["blocks"] == 3 and "config" not in now["status"]
        (used,) = now["status"]["namespaces"]
        assert (used["lookups"], used["matched_tokens"]) == (1, 3 * namespace.block_tokens)
        assert used["used_bytes"]["host"] == now["status"]["tiers"]["host"]["used_bytes"]
        assert await people.lookup(namespace, keys[:2]) == 2
        fresh = await heard_now(answer, lambda document: document["lookups"])
        assert [each["number"] for each in fresh["lookups"]] == [row["number"] + 1]
        assert fresh["lookups"][0]["first_miss"] is None
        assert (await heard_now(answer))["lookups"] == [], "told once"


@served()
async def test_a_clock_that_is_set_leaves_the_last_hour_where_it_was(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    await people.lookup(people.register(), keys_of(4))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    async with people.client.get("/v1/live") as answer:
        now = await heard_now(answer)
    assert all(0 <= now["at"] - row["at"] < 3600 for row in now["history"]) and now["history"]


@pytest.mark.fault(115)
@pytest.mark.fault(117)
@served()
async def test_it_says_of_a_short_prompt_and_an_unknown_model_why_they_missed(people: People) -> None:
    people.register()
    async with people.client.get("/v1/live") as answer:
        for name, tokens in ((MODEL, [1, 2, 3]), ("no/such model", [1, 2, 3])):
            await people.ask("POST", "/v1/lookup", {"namespace": name, "tokens": tokens})
        rows = list[dict[str, Any]]()
        while len(rows) < 2:
            rows += (await heard(answer))[1]["lookups"]
    assert [row["first_miss"]["reason"] for row in rows] == ["shorter_than_block", "unknown_namespace"]
    assert rows[0]["block_tokens"] == 16 and rows[0]["namespace_id"] is not None
    assert (rows[1]["model"], rows[1]["namespace_id"]) == ("no/such model", None)


@served()
async def test_a_document_is_made_once_for_all_and_never_when_nobody_listens(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()
    about = people.door._about

    def counted(tenant: str) -> dict[str, Any]:
        made.append(tenant)
        return about(tenant)

    monkeypatch.setattr(people.door._live, "_about", counted)
    async with people.client.get("/v1/live") as one, people.client.get("/v1/live") as other:
        heard_by = dict[int, Any](), dict[int, Any]()  # by number: the second may be told of a later one first
        while len(both := heard_by[0].keys() & heard_by[1].keys()) < 5:
            for answer, documents in zip((one, other), heard_by, strict=True):
                now = await heard_now(answer)
                documents[now["number"]] = now
        assert all(heard_by[0][number] == heard_by[1][number] for number in both)
        assert len(made) <= people.door._live._number + 2
    await until(lambda: not people.door._busy)
    count = len(made)
    await asyncio.sleep(5 * QUICK_S)
    assert len(made) == count and not people.door._live._documents
    assert "live" not in {task.get_name() for task in asyncio.all_tasks()}


@served()
async def test_a_listener_that_does_not_read_is_let_go(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listeners, "LISTENER_IDLE_S", 0.2)
    monkeypatch.setattr(http_live, "EVERY_S", 0.0)
    _, writer = await people.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /v1/live HTTP/1.1\r\nHost: h\r\n\r\n")
    await until(lambda: bool(people.door._live._listening))
    await until(lambda: not people.door._live._listening)
    writer.close()


@served()
async def test_one_who_reads_too_slowly_is_told_the_past_again(people: People) -> None:
    async with people.client.get("/v1/live") as answer:
        assert [(await heard(answer))[0] for _ in range(3)] == ["past", "now", "now"]
        people.door._live._number += 1  # a document that this one did not get in time
        names = [(await heard(answer))[0] for _ in range(4)]
    assert names.count("past") == 1


@served()
async def test_listeners_of_all_streams_together_are_limited(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listeners, "LISTENERS_MAX", 2)
    async with people.client.get("/v1/live"), people.client.get("/v1/events"):
        status, refused = await people.ask("GET", "/v1/live")
        assert (status, refused["error"]["kind"]) == (503, "busy")


@pytest.mark.fault(55)
@served()
async def test_a_daemon_that_stops_ends_streams_at_once_even_of_one_that_does_not_read(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_live, "EVERY_S", 0.0)
    _, writer = await people.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /v1/live HTTP/1.1\r\nHost: h\r\n\r\n")
    await until(lambda: any(each.writing for each in people.door._live._listening))
    async with people.client.get("/v1/live") as answer:
        await heard(answer)
        async with asyncio.timeout(30):
            await people.door.close(3600)
            with contextlib.suppress(aiohttp.ClientError):  # one that is being written to is cut off
                await answer.read()
    writer.close()


@pytest.mark.fault(28)
def test_a_tenant_sees_its_own_and_of_others_nothing(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        reds, blues = of_tenant(p, 1, "red"), of_tenant(p, 2, "blue", "blue/model")
        for namespace, secret in ((blues, BLUE), (blues, BLUE), (reds, RED)):
            body = {"namespace": namespace.id.hex(), "keys": [KEY.hex()]}
            async with p.client.post("/v1/lookup", json=body, headers={"Authorization": f"Bearer {secret}"}) as asked:
                assert asked.status == 200
        async with p.client.get("/v1/live", headers={"Authorization": f"Bearer {RED}"}) as answer:
            _, past = await heard(answer)
            _, now = await heard(answer)
            assert [row["model"] for row in past["lookups"]] == [reds.model] and past["history"][0]["lookups"] == 1
            assert now["tenant"] == "red" and now["totals"] == {"sessions": 0, "namespaces": 1}
            assert [row["number"] for row in past["lookups"]] == [1], "nor how much others ask"
            assert "blue" not in json.dumps([past, now]) and "access" not in now["status"]
        async with p.client.get("/v1/live", headers={"Authorization": "Bearer nobody-000000001"}) as answer:
            assert answer.status == 401

    guarded(scenario, shm_dir)


@pytest.mark.fault(28)
def test_what_a_tenant_asked_is_counted_over_all_its_namespaces_not_those_that_are_listed(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        for seed in range(1, http_live.ROWS_MAX + 11):
            p.store.lookup(of_tenant(p, seed, "red"), [KEY])
        async with p.client.get("/v1/live") as answer:
            now = await heard_now(answer)
        red, blue = ({row["tenant"]: row for row in now["status"]["tenants"]}[tenant] for tenant in ("red", "blue"))
        assert len(now["status"]["namespaces"]) == http_live.ROWS_MAX
        assert red["namespaces"] == red["lookups"] == http_live.ROWS_MAX + 10 and red["asked_tokens"] > 0
        assert blue["namespaces"] == blue["lookups"] == 0

    guarded(scenario, shm_dir)


@served()
async def test_the_past_is_of_a_size_that_no_traffic_changes(people: People) -> None:
    namespace = people.register()
    for key in keys_of(130):
        people.store.lookup(namespace, [key])
    async with people.client.get("/v1/live") as answer:
        _, past = await heard(answer)
    assert [row["number"] for row in past["lookups"]] == list(range(31, 131))

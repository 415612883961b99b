"""The stream of events: who listens hears of every block, or of how many it missed."""

import pytest

from terracekv.daemon import http_listeners, http_queries
from terracekv.tests.people import MODEL, Listener, People, keys_of, served, until, url
from terracekv.tiers.block import block_id


@pytest.mark.fault(133)
@served()
async def test_events_tell_of_blocks_that_come_and_go(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    async with people.client.get("/v1/events") as answer:
        assert answer.content_type == "text/event-stream"
        listener = Listener(answer)
        assert await listener.block() == ": connected"
        await people.put(namespace, *keys)
        stored = [await listener.event() for _ in keys]
        assert [(e["event"], e["block"], e["tier"]) for e in stored] == [
            ("stored", block_id(key, 0).hex(), "host") for key in keys
        ]
        await people.ask("DELETE", url(namespace, keys[0]))
        removed = await listener.event()
        assert (removed["event"], removed["block"]) == ("removed", block_id(keys[0], 0).hex())
        await people.ask("POST", "/v1/flush", {"namespace": MODEL})
        assert (await listener.event())["event"] == "flushed"
    # Who comes back with the last number that it saw misses nothing.
    async with people.client.get("/v1/events", headers={"Last-Event-ID": str(stored[1]["seq"])}) as answer:
        assert await Listener(answer).event() == removed
    async with people.client.get(f"/v1/events?after={stored[0]['seq']}") as answer:
        assert await Listener(answer).event() == stored[1]
    for query in ("after=x", "after=-1", "after=9999999999999999999999"):
        status, _ = await people.ask("GET", f"/v1/events?{query}")
        assert status == 400


@pytest.mark.fault(132)
@served()
async def test_who_asks_for_events_that_nobody_kept_is_told_of_the_gap(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys)
    async with people.client.get("/v1/events?after=0") as answer:
        gap = await Listener(answer).event()
        assert gap["event"] == "gap" and gap["missed"] >= 3


@served()
async def test_who_comes_back_is_told_of_a_gap_between_events_that_were_kept(people: People) -> None:
    namespace, keys = people.register(), keys_of(9)
    for piece in (keys[:3], keys[3:6], keys[6:]):  # nobody listens to the second
        if piece == keys[3:6]:
            await until(lambda: people.store.events.listeners == 0)
            await people.put(namespace, *piece)
            continue
        async with people.client.get("/v1/events") as answer:
            listener = Listener(answer)
            assert await listener.block() == ": connected"
            await people.put(namespace, *piece)
            stored = [await listener.event() for _ in piece]
    last = stored[-1]["seq"]
    async with people.client.get("/v1/events?after=1") as answer:
        listener, heard = Listener(answer), 1
        told: list[str] = []
        while heard < last:
            event = await listener.event()
            assert event["seq"] == heard + event.get("missed", 1)
            heard, told = event["seq"], [*told, event["event"]]
    assert "gap" in told and told[0] == told[-1] == "stored"


@served()
async def test_who_comes_back_with_a_number_of_an_earlier_daemon_is_told_so_and_hears_what_is_new(
    people: People,
) -> None:
    namespace, keys = people.register(), keys_of(3)
    async with people.client.get("/v1/events?after=5000") as answer:
        listener = Listener(answer)
        gap = await listener.event()
        assert (gap["event"], gap["missed"]) == ("gap", None)
        await people.put(namespace, *keys)
        assert [(await listener.event())["block"] for _ in keys] == [block_id(key, 0).hex() for key in keys]


@served()
async def test_a_quiet_stream_shows_that_it_lives_and_forgets_who_has_gone(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_queries, "HEARTBEAT_S", 0.02)
    async with people.client.get("/v1/events") as answer:
        listener = Listener(answer)
        assert [await listener.block() for _ in range(3)] == [": connected", ": still here", ": still here"]
        assert people.store.events.listeners == 1
    await until(lambda: people.store.events.listeners == 0 and not people.door._busy)


@served()
async def test_listeners_are_limited(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listeners, "LISTENERS_MAX", 1)
    monkeypatch.setattr(http_queries, "HEARTBEAT_S", 3600.0)
    async with people.client.get("/v1/events") as answer:
        await Listener(answer).block()
        status, refused = await people.ask("GET", "/v1/events")
        assert (status, refused["error"]["kind"]) == (503, "busy")
    # The one that has gone leaves its place at once: nothing is written and no heartbeat is due.
    await until(lambda: not people.door._busy)
    async with people.client.get("/v1/events") as answer:
        assert await Listener(answer).block() == ": connected"

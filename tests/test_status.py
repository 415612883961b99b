"""The status document: what is in it, and that it is true."""

import json
import os
import time

import pytest

from terracekv.daemon.config import TYPES, version
from terracekv.tests.people import BLOCK_BYTES, BLOCK_TOKENS, MODEL, People, keys_of, served, until
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id


@served()
async def test_a_clock_that_is_set_makes_nothing_older_or_younger(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert people.store.disk is not None
    people.store.disk._ledger.failed(OSError("no"))
    session = people.sessions.start(7, people.register(), 0, 4321, "engine x")
    real = time.time
    for seconds in (-86_400, 86_400):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: real() + seconds)
        _, document = await people.ask("GET", "/v1/status")
        ages = document["sessions"][0]["age_s"], document["tiers"]["disk"]["last_error_age_s"]
        assert all(0 <= age < 3600 for age in ages)
    people.sessions.close(session)


@pytest.mark.fault(118)
@served(host_bytes=4 << 20)
async def test_the_document_has_what_an_operator_asks_for(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys, durable="1")
    await people.lookup(namespace, keys)
    status, document = await people.ask("GET", "/v1/status")
    assert (status, document["version"], document["pid"]) == (200, version(), os.getpid())
    assert document["ready"] and document["uptime_s"] > 0 and document["loop_lag_ms"] >= 0
    host, disk = document["tiers"]["host"], document["tiers"]["disk"]
    assert host["capacity_bytes"] == 4 << 20
    assert host["used_bytes"] == 3 * 20_480
    assert host["blocks"] == disk["blocks"] == 3
    assert (host["mode"], host["last_error"]) == ("tmpfs", None)
    assert host["counters"]["put_bytes"] == disk["counters"]["put_bytes"] == 3 * BLOCK_BYTES
    assert disk["mode"] in ("direct", "buffered")
    assert disk["bandwidth"]["write"]["measured"] and not disk["bandwidth"]["read"]["measured"]
    assert document["queue"]["bytes"] == 0 < document["queue"]["bytes_max"]
    assert document["lookups"]["matched_blocks"] == 3
    assert document["config"].keys() == TYPES.keys()
    assert document["config"]["daemon.http"] == {"value": "", "source": "flag --set"}


@served()
async def test_leases_and_reservations_are_shown_by_tier_and_by_session(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys[:2])
    await people.store.mover.drain()
    session = people.sessions.start(7, namespace, 0, 4321, "engine x")
    people.sessions.acquire(session, keys[:2], lambda *_: None)
    handle, _ = people.sessions.reserve(session, keys[2:])
    await until(lambda: people.store.host.status().details["leased_blocks"] == 2)
    _, document = await people.ask("GET", "/v1/status")
    assert document["tiers"]["host"]["leased_blocks"] == 2
    assert document["tiers"]["host"]["reserved_blocks"] == 1
    (shown,) = document["sessions"]
    assert shown.pop("age_s") >= 0
    assert shown == {
        "session": 7,
        "engine": "engine x",
        "pid": 4321,
        "namespace_id": namespace.id.hex(),
        "model": MODEL,
        "shard": 0,
        "peer": None,
        "caller": None,
        "tenant": None,
        "access": "write",
        "gpu": None,
        "transport": "arena",
        "transport_reason": None,
        "leases": 1,
        "leased_blocks": 2,
        "pending_blocks": 0,
        "reservations": 1,
        "reserved_blocks": 1,
    }
    people.sessions.abort(session, handle)
    people.sessions.close(session)
    _, document = await people.ask("GET", "/v1/status")
    assert document["sessions"] == [] and document["tiers"]["host"]["leased_blocks"] == 0


@served()
async def test_what_is_on_its_way_between_tiers_is_shown(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    await people.put(namespace, *keys, durable="1")
    people.store.host.delete(namespace, [block_id(key, 0) for key in keys])
    failpoint.arm("segment.read=sleep:0.2,segment.write=sleep:0.2")
    try:
        await people.ask("POST", "/v1/prefetch", {"namespace": MODEL, "keys": [key.hex() for key in keys]})
        _, reading = await people.ask("GET", "/v1/status")
        await until(lambda: people.store.promoter.coming == 0)
        await people.put(namespace, *keys_of(1, first=9))
        _, writing = await people.ask("GET", "/v1/status")
        await people.store.mover.drain()
    finally:
        failpoint.disarm()
    assert reading["tiers"]["host"]["in_flight_blocks"] == 2
    assert writing["tiers"]["host"]["in_flight_blocks"] == 0
    assert (reading["tiers"]["disk"]["in_flight_blocks"], writing["tiers"]["disk"]["in_flight_blocks"]) == (0, 1)
    assert writing["tiers"]["disk"]["in_flight_bytes"] == writing["queue"]["bytes"] == 20_480


@served()
async def test_namespaces_are_listed_alone_too(people: People) -> None:
    namespace = people.register(shards=2)
    people.store.namespaces.adopt(bytes([7]) * 32, 3)
    status, answer = await people.ask("GET", "/v1/namespaces")
    assert status == 200
    first, second = answer["namespaces"]
    assert first == {
        "namespace_id": namespace.id.hex(),
        "epoch": 0,
        "registered": True,
        "model": MODEL,
        "revision": "r1",
        "dtype": "bf16",
        "layout": bytes(32).hex(),
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": BLOCK_BYTES,
        "shards": 2,
        "tenant": None,
    }
    assert (second["registered"], second["epoch"]) == (False, 3)
    _, document = await people.ask("GET", "/v1/status")
    assert document["namespaces"] == answer["namespaces"]


@served()
async def test_what_is_not_ready_is_named(people: People) -> None:
    people.door.not_ready["arena"] = "is being zeroed"
    _, document = await people.ask("GET", "/v1/status")
    assert (document["ready"], document["not_ready"]) == (False, ["arena: is being zeroed"])


@served()
async def test_pins_are_shown_with_their_bound(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    await people.put(namespace, *keys)
    await people.ask("POST", "/v1/pin", {"namespace": MODEL, "keys": [key.hex() for key in keys]})
    _, document = await people.ask("GET", "/v1/status")
    assert document["pins"] == {"blocks": 2, "bytes": 2 * 20_480, "bytes_max": people.store.pins.bytes_max}


@pytest.mark.fault(109)
@served()
async def test_the_document_names_no_block(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    await people.put(namespace, *keys)
    _, document = await people.ask("GET", "/v1/status")
    for key in keys:
        assert key.hex() not in json.dumps(document) and block_id(key, 0).hex() not in json.dumps(document)


@served(disk_bytes=0)
async def test_only_configured_tiers_are_shown(people: People) -> None:
    _, document = await people.ask("GET", "/v1/status")
    assert list(document["tiers"]) == ["host"]

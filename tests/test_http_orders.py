"""Orders over HTTP: prefetch, pin and flush say what they did, and what they skipped and why."""

import errno
import os

import pytest

from terracekv.tests.faults import FaultLayer
from terracekv.tests.people import MODEL, People, hexed, keys_of, lookup, served, until, url, whole
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id


@pytest.mark.fault(112)
@served(host_bytes=1 << 20, slab_bytes=1 << 20)
async def test_pin_says_what_it_held_and_what_it_skipped_and_why(people: People) -> None:
    """Half of the arena may be pinned: 25 blocks of 20 kB in 1 MiB."""
    namespace, keys = people.register(), keys_of(40)
    await people.put(namespace, *keys, durable="1")
    body = {"namespace": MODEL, "keys": hexed(keys), "ttl_s": 60}
    status, done = await people.ask("POST", "/v1/pin", body)
    assert (status, done["asked_shards"]) == (200, 40)
    pinned = done["done"]["host"]["pinned"]
    assert pinned == people.store.pins.bytes_max // 20_480 == len(people.store.pins)
    assert done["skipped"] == {"pin_limit": 40 - pinned}
    status, done = await people.ask("POST", "/v1/pin", body)
    assert done["done"]["host"] == {"pinned": 0, "renewed": pinned}
    status, done = await people.ask("POST", "/v1/unpin", {"namespace": MODEL, "keys": hexed(keys)})
    assert (done["done"], done["skipped"]) == ({"host": {"unpinned": pinned}}, {"not_pinned": 40 - pinned})


@pytest.mark.fault(112)
@served()
async def test_a_pin_of_what_is_not_here_is_a_count_of_misses(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, keys[0])
    _, done = await people.ask("POST", "/v1/pin", {"namespace": MODEL, "keys": hexed(keys)})
    assert done["done"]["host"]["pinned"] == 1
    assert done["skipped"] == {"pin_limit": 0, "miss": 2}
    for ttl in (0, -1, 1e9, "x"):
        status, _ = await people.ask("POST", "/v1/pin", {"namespace": MODEL, "keys": hexed(keys), "ttl_s": ttl})
        assert status == 400


@pytest.mark.fault(112)
@served()
async def test_prefetch_brings_a_chain_up_and_keeps_no_lease(people: People) -> None:
    namespace, keys = people.register(), keys_of(5)
    await people.put(namespace, *keys[:4], durable="1")
    people.store.host.delete(namespace, [block_id(key, 0) for key in keys[1:]])
    _, done = await people.ask("POST", "/v1/prefetch", {"namespace": MODEL, "keys": hexed(keys)})
    assert done["done"] == {"host": {"present": 1}, "disk": {"coming": 3}}
    assert done["skipped"] == {"absent": 1}
    await until(lambda: people.store.promoter.coming == 0)
    found = await lookup(people, namespace=MODEL, keys=hexed(keys))
    assert found["tiers"]["host"]["blocks"] == 4


@served()
async def test_orders_for_all_shards_of_a_block_count_them(people: People) -> None:
    namespace, keys = people.register(shards=2), keys_of(2)
    for shard in (0, 1):
        await people.put(namespace, *keys, shard=shard)
    _, done = await people.ask("POST", "/v1/pin", {"namespace": MODEL, "keys": hexed(keys)})
    assert (done["asked_shards"], done["done"]["host"]["pinned"]) == (4, 4)


@pytest.mark.fault(15)
@pytest.mark.fault(112)
@served()
async def test_flush_says_how_many_blocks_each_tier_dropped(people: People) -> None:
    namespace, keys = people.register(), keys_of(5)
    await people.put(namespace, *keys, durable="1")
    people.store.host.delete(namespace, [block_id(keys[4], 0)])
    held = people.store.host.acquire(namespace, [block_id(keys[0], 0)])
    status, done = await people.ask("POST", "/v1/flush", {"namespace": MODEL})
    assert (status, done["done"]) == (200, {"host": {"dropped": 4}, "disk": {"dropped": 5}})
    assert done["skipped"] == {"leased": 1}
    people.store.host.release([slot for slot in held if slot is not None])
    assert (await lookup(people, namespace=MODEL, keys=hexed(keys)))["matched_blocks"] == 0


@served()
async def test_flush_of_one_tier_leaves_the_others(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys, durable="1")
    _, done = await people.ask("POST", "/v1/flush", {"namespace": MODEL, "tier": "host"})
    assert done["done"] == {"host": {"dropped": 3}}
    assert (await lookup(people, namespace=MODEL, keys=hexed(keys)))["matched_blocks"] == 3
    async with people.client.get(url(namespace, keys[2])) as answer:
        assert await answer.read() == whole(namespace, keys[2])
    status, answer_ = await people.ask("POST", "/v1/flush", {"namespace": MODEL, "tier": "tape"})
    assert (status, answer_["error"]["kind"]) == (404, "not_found")


@served()
async def test_orders_for_an_unknown_namespace_are_404(people: People) -> None:
    for route in ("prefetch", "pin", "unpin", "flush"):
        body = {"namespace": "no such model"} | ({} if route == "flush" else {"keys": hexed(keys_of(1))})
        status, answer = await people.ask("POST", f"/v1/{route}", body)
        assert (status, answer["error"]["kind"]) == (404, "not_found")
        assert "/v1/namespaces" in answer["error"]["hint"]


@served()
async def test_a_full_or_read_only_disk_is_507_and_names_where(
    people: People, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    people.register()
    for number, path in ((errno.ENOSPC, None), (errno.EROFS, "/state/namespaces.new")):
        error = OSError(number, os.strerror(number), path)

        def fail(id: bytes, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(people.store.namespaces, "raise_epoch", fail)
        status, answer = await people.ask("POST", "/v1/flush", {"namespace": MODEL})
        assert (status, answer["error"]["kind"]) == (507, "no_room")
        assert (path or str(people.folder / "state")) in answer["error"]["message"]
        assert os.strerror(number) in answer["error"]["message"] and answer["error"]["hint"]
    said = [(getattr(record, "event", ""), record.exc_info) for record in caplog.records]
    assert said == [("TKV-NO-ROOM", None)] * 2 and people.door.errors == 0, "it is no fault of ours"
    caplog.clear()


@served()
async def test_sync_answers_when_all_that_was_stored_is_on_the_medium(people: People) -> None:
    namespace, keys = people.register(), keys_of(8)
    await people.put(namespace, *keys)
    assert people.store.disk is not None
    status, done = await people.ask("POST", "/v1/sync")
    assert (status, done["synced"]) == (200, ["disk"]) and done["waited"].keys() == {"disk"}
    assert people.store.disk.leading(namespace, [block_id(key, 0) for key in keys]) == 8
    assert not [segment for segment in people.store.disk._shelf.segments() if segment.unsynced]


@served(disk_bytes=0)
async def test_without_a_disk_nothing_is_said_to_be_synced(people: People) -> None:
    status, done = await people.ask("POST", "/v1/sync")
    assert (status, done) == (200, {"waited": {}, "synced": []})


@served()
async def test_what_once_could_not_be_synced_is_never_said_to_be(people: People) -> None:
    """The kernel drops what it could not write, and does not say so again."""
    namespace = people.register()
    await people.put(namespace, *keys_of(3), durable="1")
    with pytest.MonkeyPatch.context() as patch:
        FaultLayer(patch.setattr, ["os.fdatasync"])
        failpoint.arm("os.fdatasync*1-1=errno:EIO")
        for _ in range(2):
            status, failed = await people.ask("POST", "/v1/sync")
            assert (status, failed["error"]["kind"]) == (503, "not_synced")
    failpoint.disarm()

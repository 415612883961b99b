"""Block bytes over HTTP: what is stored comes back, and what fails leaves nothing behind."""

import asyncio
import json
import logging
import socket
from collections.abc import Iterator

import pytest

from terracekv.daemon import http_blocks
from terracekv.tests.people import (
    BLOCK_BYTES,
    MODEL,
    People,
    fetch,
    head_of,
    keys_of,
    nothing_is_held,
    said,
    served,
    until,
    url,
    whole,
)
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.tier import Outcome

BOTH = ("uvloop", "asyncio")
(KEY, OTHER) = keys_of(2)


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Whatever a test arms is disarmed after it. No log meanwhile: a record keeps the error, and that the arena."""
    logging.disable()
    yield
    failpoint.disarm()
    logging.disable(logging.NOTSET)


@served(BOTH)
async def test_a_block_comes_back_as_it_was_put(people: People) -> None:
    namespace = people.register()
    body = whole(namespace, KEY)
    async with people.client.put(
        url(namespace, KEY), data=body, headers={"X-TerraceKV-Checksum": said(body)}
    ) as answer:
        assert answer.status == 201
        assert await answer.json() == {"outcome": "stored", "checksum": said(body), "durable": False}
    status, read, headers = await fetch(people, url(namespace, KEY))
    assert (status, read) == (200, body)
    assert headers["X-TerraceKV-Checksum"] == said(body)
    assert headers["ETag"] == f'"{checksum(body):016x}"'
    assert headers["Content-Type"] == "application/octet-stream"
    await nothing_is_held(people)


@served()
async def test_the_namespace_in_a_path_may_be_a_model_name_with_a_slash(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    quoted = MODEL.replace("/", "%2F").replace(" ", "%20")
    status, read, _ = await fetch(people, f"/v1/namespaces/{quoted}/blocks/{KEY.hex()}/0")
    assert (status, read) == (200, whole(namespace, KEY))


@served()
async def test_each_shard_of_a_block_has_its_own_bytes(people: People) -> None:
    namespace = people.register(shards=2)
    await people.put(namespace, KEY, shard=0)
    assert await people.lookup(namespace, [KEY]) == 0
    await people.put(namespace, KEY, shard=1)
    assert await people.lookup(namespace, [KEY]) == 1
    for shard in (0, 1):
        assert (await fetch(people, url(namespace, KEY, shard)))[1] == whole(namespace, KEY, shard)
    status, _, _ = await fetch(people, url(namespace, KEY, 2))
    assert status == 400


@served(host_bytes=1 << 20, slab_bytes=1 << 20)
async def test_a_block_that_only_disk_has_is_promoted_and_served(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY, durable="1")
    people.store.host.delete(namespace, [block_id(KEY, 0)])
    async with people.client.head(url(namespace, KEY)) as answer:
        assert (answer.status, answer.headers["X-TerraceKV-Tier"]) == (200, "disk")
    status, read, headers = await fetch(people, url(namespace, KEY))
    assert (status, read, headers["X-TerraceKV-Tier"]) == (200, whole(namespace, KEY), "disk")
    async with people.client.head(url(namespace, KEY)) as answer:
        assert answer.headers["X-TerraceKV-Tier"] == "host"
    await nothing_is_held(people)


@served()
async def test_head_says_how_large_a_block_is_and_sends_no_byte_of_it(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    async with people.client.head(url(namespace, KEY)) as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(BLOCK_BYTES))
        assert await answer.read() == b""
    async with people.client.head(url(namespace, OTHER)) as answer:
        assert answer.status == 404


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-0", 0, 1), ("bytes=5-99", 5, 100), ("bytes=19990-", 19990, 20000), ("bytes=-10", 19990, 20000)]
    + [("bytes=100-999999", 100, 20000)],
)
@served(BOTH)
async def test_a_range_is_served_as_that_part(people: People, asked: str, first: int, last: int) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    status, read, headers = await fetch(people, url(namespace, KEY), Range=asked)
    assert (status, read) == (206, whole(namespace, KEY)[first:last])
    assert headers["Content-Range"] == f"bytes {first}-{last - 1}/{BLOCK_BYTES}"


@pytest.mark.parametrize(
    "asked", ["bytes=20000-", "bytes=9-5", "bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=-0", "bytes=-00"]
)
@served()
async def test_a_range_that_cannot_be_meant_is_416_with_the_size(people: People, asked: str) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    status, read, headers = await fetch(people, url(namespace, KEY), Range=asked)
    error = json.loads(read)["error"]
    assert (status, error["kind"], error["size_bytes"]) == (416, "range_not_satisfiable", BLOCK_BYTES)
    assert headers["Content-Range"] == f"bytes */{BLOCK_BYTES}"
    await nothing_is_held(people)


@served()
async def test_a_range_of_other_bytes_than_these_is_answered_with_the_whole(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    status, read, headers = await fetch(people, url(namespace, KEY), **{"Range": "bytes=0-9", "If-Range": '"0"'})
    assert (status, read) == (200, whole(namespace, KEY))
    status, _, _ = await fetch(people, url(namespace, KEY), **{"Range": "bytes=0-9", "If-Range": headers["ETag"]})
    assert status == 206


@served()
async def test_delete_says_how_many_each_tier_had_and_may_be_repeated(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY, durable="1")
    status, done = await people.ask("DELETE", url(namespace, KEY))
    assert (status, done["done"]) == (200, {"host": {"deleted": 1}, "disk": {"deleted": 1}})
    assert (await fetch(people, url(namespace, KEY)))[0] == 404
    status, done = await people.ask("DELETE", url(namespace, KEY))
    assert (status, done["skipped"]) == (200, {"absent": 1})
    assert done["done"] == {"host": {"deleted": 0}, "disk": {"deleted": 0}}


@pytest.mark.parametrize("key", ["00", "zz" * 32, "0" * 63, " " + "0" * 63, "00 " * 32])
@served()
async def test_a_key_that_is_no_digest_is_refused(people: People, key: str) -> None:
    namespace = people.register()
    where = f"/v1/namespaces/{namespace.id.hex()}/blocks/{key}"
    for method in ("GET", "PUT", "DELETE"):
        status, answer = await people.ask(method, where)
        assert (status, answer["error"]["kind"]) == (400, "bad_request")


@served(BOTH)
async def test_a_reader_that_stalls_loses_its_connection_and_its_lease(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_blocks, "DOWNLOAD_IDLE_S", 0.5)
    namespace = people.register(block_bytes=1 << 20)
    await people.put(namespace, KEY)
    reader, writer = await people.connect()
    writer.write(f"GET {url(namespace, KEY)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await head_of(reader)
    await until(lambda: people.store.host.status().details["leased_blocks"] == 1)
    await until(lambda: people.store.host.status().details["leased_blocks"] == 0)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1 << 20)
    writer.close()


@pytest.mark.fault(12)
@served(BOTH, host_bytes=4 << 20, slab_bytes=4 << 20, disk_bytes=0)
async def test_a_slow_reader_never_sees_bytes_of_the_block_that_came_after(people: People) -> None:
    """The tail fits a transport's buffer and not the kernel's: a lease that ended with the last write is too short."""
    size = http_blocks.CHUNK_BYTES + 60_000
    namespace = people.register(block_bytes=size)
    await people.put(namespace, KEY)
    host, id = people.store.host, block_id(KEY, 0)
    reader, writer = await people.connect()
    writer.write(f"GET {url(namespace, KEY)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    _, headers = await head_of(reader)
    read, overwritten = b"", False
    await until(lambda: host.leases() != {})
    for connection in people.door._busy.values():
        assert connection.transport is not None
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    assert host.delete(namespace, [id]) == 1
    while len(read) < size:
        read += await reader.read(min(4096, size - len(read)))
        await asyncio.sleep(0.0005)
        if not overwritten and not host.leases():
            overwritten = True
            other = memoryview(b"\xff" * size)
            for key in keys_of(3, first=100):
                assert host.put(namespace, block_id(key, 0), other, checksum(other)) is Outcome.STORED
    assert overwritten and headers["content-length"] == str(size)
    assert read == whole(namespace, KEY)
    writer.close()


@served(BOTH, disk_bytes=0)
async def test_a_download_cut_off_at_shutdown_is_never_completed_from_a_slot_that_was_let_go(people: People) -> None:
    namespace = people.register(block_bytes=1 << 20)
    await people.put(namespace, KEY)
    host = people.store.host
    reader, writer = await people.connect()
    writer.write(f"GET {url(namespace, KEY)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await head_of(reader)
    await until(lambda: host.leases() != {})
    await people.door.close(0)
    assert host.leases() == {}
    host.delete(namespace, [block_id(KEY, 0)])
    other = memoryview(b"\xff" * (1 << 20))
    for key in keys_of(4, first=100):
        host.put(namespace, block_id(key, 0), other, checksum(other))
    read = b""
    try:
        while piece := await reader.read(1 << 16):
            read += piece
    except ConnectionError:
        pass
    assert len(read) < 1 << 20 and whole(namespace, KEY).startswith(read)
    writer.close()


@pytest.mark.fault(2)
@served()
async def test_a_disk_that_cannot_be_read_is_503_and_holds_nothing(people: People, disarmed: None) -> None:
    namespace = people.register()
    await people.put(namespace, KEY, durable="1")
    people.store.host.delete(namespace, [block_id(KEY, 0)])
    failpoint.arm("segment.read=errno:EIO")
    status, read, _ = await fetch(people, url(namespace, KEY))
    error = json.loads(read)["error"]
    assert (status, error["kind"]) == (503, "tier_down")
    assert "segment.read" in error["message"]
    await nothing_is_held(people)


@served()
async def test_a_namespace_known_from_its_blocks_only_has_no_size_to_serve(people: People) -> None:
    unknown = people.store.namespaces.adopt(bytes([7]) * 32, 0)
    assert not unknown.registered
    for method in ("GET", "PUT", "DELETE"):
        status, answer = await people.ask(method, url(unknown, KEY))
        assert (status, answer["error"]["kind"]) == (404, "not_found")

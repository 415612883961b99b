"""Blocks sent over HTTP: whole, checked and streamed, and nothing is left of an upload that failed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from terracekv.daemon import http_blocks
from terracekv.tests.people import (
    BLOCK_BYTES,
    MODEL,
    People,
    answer_of,
    fetch,
    keys_of,
    nothing_is_held,
    put_head,
    said,
    served,
    until,
    url,
    whole,
)
from terracekv.tiers import failpoint
from terracekv.tiers.block import block_id
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slot_tier import DAEMON

BOTH = ("uvloop", "asyncio")
(KEY, OTHER, THIRD) = keys_of(3)


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Whatever a test arms is disarmed after it. No log meanwhile: a record keeps the error, and that the arena."""
    logging.disable()
    yield
    failpoint.disarm()
    logging.disable(logging.NOTSET)


@served()
async def test_a_block_that_is_there_is_present_and_keeps_its_bytes(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    async with people.client.put(url(namespace, KEY), data=bytes(BLOCK_BYTES)) as answer:
        assert (answer.status, (await answer.json())["outcome"]) == (200, "present")
    assert (await fetch(people, url(namespace, KEY)))[1] == whole(namespace, KEY)


@served()
async def test_a_body_that_is_not_needed_is_read_to_its_end_unless_the_client_asked_first(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, KEY)
    reader, writer = await people.connect()
    for _ in range(2):  # the connection can be used again
        writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + bytes(10))
        await until(lambda: len(people.door._busy) == 1)
        await asyncio.sleep(0.02)
        assert len(people.door._busy) == 1
        writer.write(bytes(BLOCK_BYTES - 10))
        assert (await answer_of(reader))[1]["outcome"] == "present"
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES, "Expect: 100-continue"))
    assert (await answer_of(reader))[1]["outcome"] == "present"
    writer.close()


@pytest.mark.fault(13)
@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1])
@pytest.mark.parametrize("chunked", [False, True])
@served()
async def test_a_short_body_is_refused_with_both_lengths(people: People, size: int, chunked: bool) -> None:
    namespace = people.register()

    async def body() -> AsyncIterator[bytes]:
        yield bytes(size)

    async with people.client.put(url(namespace, KEY), data=body() if chunked else bytes(size)) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["size_bytes"], error["needed_bytes"]) == (400, size, BLOCK_BYTES)
    assert await people.lookup(namespace, [KEY]) == 0
    await nothing_is_held(people)


@pytest.mark.fault(104)
@served()
async def test_a_body_said_to_be_too_long_is_refused_before_it_is_sent(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES + 1, "Expect: 100-continue"))
    status, answer = await answer_of(reader)
    assert (status, answer["error"]["kind"]) == (413, "too_large")
    assert (answer["error"]["size_bytes"], answer["error"]["limit_bytes"]) == (BLOCK_BYTES + 1, BLOCK_BYTES)
    writer.close()
    await nothing_is_held(people)


@pytest.mark.fault(105)
@served(BOTH)
async def test_a_body_that_grows_too_long_is_refused_in_the_middle(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), None))
    chunk = b"1000\r\n" + bytes(0x1000) + b"\r\n"
    writer.write(chunk * (BLOCK_BYTES // 0x1000 + 1))
    status, answer = await answer_of(reader)  # the body has not ended
    assert (status, answer["error"]["kind"], answer["error"]["limit_bytes"]) == (413, "too_large", BLOCK_BYTES)
    writer.close()
    assert await people.lookup(namespace, [KEY]) == 0
    await nothing_is_held(people)


@served()
async def test_a_client_that_asks_for_leave_to_send_gets_it(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES, "Expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(whole(namespace, KEY))
    assert (await answer_of(reader))[0] == 201
    writer.close()


@served()
async def test_a_wrong_checksum_is_refused_and_nothing_is_stored(people: People) -> None:
    namespace = people.register()
    headers = {"X-TerraceKV-Checksum": said(b"other")}
    async with people.client.put(url(namespace, KEY), data=bytes(BLOCK_BYTES), headers=headers) as answer:
        assert answer.status == 400
        assert said(bytes(BLOCK_BYTES)) in (await answer.json())["error"]["message"]
    async with people.client.put(url(namespace, KEY), data=b"", headers={"X-TerraceKV-Checksum": "md5:00"}) as answer:
        assert answer.status == 400
    assert await people.lookup(namespace, [KEY]) == 0
    await nothing_is_held(people)


@pytest.mark.fault(105)
@served(BOTH)
async def test_an_upload_that_breaks_off_leaves_no_block_and_no_slot(people: People) -> None:
    namespace = people.register()
    _, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + whole(namespace, KEY)[:-1])
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 1)
    writer.transport.abort()
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 0)
    assert await people.lookup(namespace, [KEY]) == 0
    await people.put(namespace, KEY)
    assert await people.lookup(namespace, [KEY]) == 1


@served()
async def test_a_body_in_broken_chunks_is_refused(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), None) + b"10\r\n" + bytes(16) + b"\r\nnot hex\r\n")
    status, answer = await answer_of(reader)
    assert (status, answer["error"]["kind"]) == (400, "bad_request")
    writer.close()
    await nothing_is_held(people)


@served()
async def test_an_upload_that_stalls_gives_its_slot_back(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_blocks, "UPLOAD_IDLE_S", 0.05)
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + bytes(100))
    status, answer = await answer_of(reader)
    assert (status, answer["error"]["kind"]) == (408, "timeout")
    writer.close()
    await nothing_is_held(people)


@pytest.mark.fault(48)
@served(host_bytes=1 << 20, slab_bytes=1 << 20, disk_bytes=0)
async def test_a_full_host_is_507_with_tier_and_figures(people: People) -> None:
    namespace = people.register(block_bytes=300_000)
    keys = keys_of(4)
    await people.put(namespace, *keys[:3])
    held = people.store.host.acquire(namespace, [block_id(key, 0) for key in keys[:3]])
    async with people.client.put(url(namespace, keys[3]), data=bytes(300_000)) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["kind"], error["tier"]) == (507, "tier_full", "host")
        assert error["needed_bytes"] > 300_000 > error["free_bytes"] and error["hint"]
    people.store.host.release([slot for slot in held if slot is not None])
    await people.put(namespace, keys[3])


@pytest.mark.fault(15)
@served()
async def test_an_upload_that_a_flush_overtakes_is_stale(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + whole(namespace, KEY)[:-1])
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 1)
    status, _ = await people.ask("POST", "/v1/flush", {"namespace": MODEL})
    assert status == 200
    writer.write(whole(namespace, KEY)[-1:])
    status, answer = await answer_of(reader)
    assert (status, answer["error"]["kind"]) == (409, "stale")
    assert await people.lookup(namespace, [KEY]) == 0
    writer.close()
    await nothing_is_held(people)


@served(admission="second_touch")
async def test_durable_waits_for_disk_whatever_admission_says_and_whether_or_not_it_was_there(people: People) -> None:
    namespace, disk = people.register(), people.store.disk
    assert disk is not None
    await people.put(namespace, KEY, OTHER)
    await people.store.mover.drain()
    assert not disk.leading(namespace, [block_id(KEY, 0)])
    for key, expected in ((KEY, 200), (THIRD, 201)):
        async with people.client.put(url(namespace, key) + "?durable=1", data=whole(namespace, key)) as answer:
            assert (answer.status, (await answer.json())["durable"]) == (expected, True)
        assert disk.leading(namespace, [block_id(key, 0)])


@served()
async def test_durable_that_does_not_get_to_disk_is_an_error_and_the_block_stays(
    people: People, disarmed: None
) -> None:
    namespace = people.register()
    failpoint.arm("segment.write=errno:ENOSPC")
    async with people.client.put(url(namespace, KEY) + "?durable=1", data=whole(namespace, KEY)) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["kind"], error["tier"]) == (503, "tier_down", "disk")
        assert "segment.write" in error["message"]
    assert await people.lookup(namespace, [KEY]) == 1
    failpoint.disarm()
    await people.put(namespace, KEY, durable="1")


@served(disk_bytes=0)
async def test_durable_without_a_disk_tier_is_refused(people: People) -> None:
    namespace = people.register()
    for query in ("durable=1", "durable=maybe", "durabel=1"):
        async with people.client.put(f"{url(namespace, KEY)}?{query}", data=bytes(BLOCK_BYTES)) as answer:
            assert answer.status == 400
    assert await people.lookup(namespace, [KEY]) == 0


@served()
async def test_two_uploads_of_the_same_block_end_with_one_of_them(people: People) -> None:
    namespace = people.register()
    connections = [await people.connect() for _ in range(2)]
    for _, writer in connections:
        writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + whole(namespace, KEY)[:-1])
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 2)
    for _, writer in connections:
        writer.write(whole(namespace, KEY)[-1:])
    outcomes = sorted([(await answer_of(reader))[1]["outcome"] for reader, _ in connections])
    assert outcomes == ["present", "stored"]
    for _, writer in connections:
        writer.close()
    assert (await fetch(people, url(namespace, KEY)))[1] == whole(namespace, KEY)
    await nothing_is_held(people)


def anonymous_bytes() -> int:
    """Memory of this process that is not shared: the arena is not in it, the client is."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def shared_parts(size: int) -> list[memoryview]:
    part = memoryview(bytes(1 << 20))
    return [part] * (size // len(part))


async def transfer(people: People, namespace: Namespace, key: bytes, size: int) -> int:
    """Up and down again; the most memory taken meanwhile, above that of before."""

    async def body() -> AsyncIterator[memoryview]:
        for part in shared_parts(size):
            yield part

    before = most = anonymous_bytes()
    timeout = aiohttp.ClientTimeout(total=None)
    async with people.client.put(
        url(namespace, key), data=body(), headers={"Content-Length": str(size)}, timeout=timeout
    ) as answer:
        assert answer.status == 201, await answer.text()
    most = max(most, anonymous_bytes())
    read = 0
    async with people.client.get(url(namespace, key), timeout=timeout) as answer:
        async for piece in answer.content.iter_any():
            read += len(piece)
            if read % (64 << 20) < len(piece):
                most = max(most, anonymous_bytes())
    assert read == size
    return most - before


@pytest.mark.fault(104)
@served(host_bytes=64 << 20, slab_bytes=64 << 20, disk_bytes=0)
async def test_a_block_of_64_mib_can_be_put(people: People) -> None:
    namespace = people.register(block_bytes=64 << 20)
    await transfer(people, namespace, KEY, 64 << 20)


@pytest.mark.fault(105)
@served(BOTH, host_bytes=512 << 20, slab_bytes=512 << 20, disk_bytes=0)
async def test_half_a_gibibyte_is_streamed_and_not_collected(people: People) -> None:
    namespace = people.register(block_bytes=512 << 20)
    assert await transfer(people, namespace, KEY, 512 << 20) < 32 << 20


@served()
async def test_the_daemon_writes_slots_under_its_own_number(people: People) -> None:
    """Such slots are freed at the next start, where nobody holds a lock that says that the writer lives."""
    namespace = people.register()
    _, writer = await people.connect()
    writer.write(put_head(url(namespace, KEY), BLOCK_BYTES) + bytes(10))
    host = people.store.host
    await until(lambda: host.status().details["reserved_blocks"] == 1)
    assert set(host._writing.values()) == {DAEMON}
    writer.transport.abort()
    await until(lambda: host.status().details["reserved_blocks"] == 0)

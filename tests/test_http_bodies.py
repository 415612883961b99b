"""Bodies of requests: what they may be, how large, and how many at one time."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from terracekv.daemon import http_bodies
from terracekv.daemon.http_bodies import BODIES_BYTES_MAX
from terracekv.daemon.http_messages import BODY_BYTES_MAX, KEYS_MAX
from terracekv.tests.people import BLOCK_BYTES, MODEL, People, hexed, keys_of, lookup, served, until, url, whole

HEAD = "POST /v1/lookup HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
PACKED = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"namespace": MODEL, "tokns": [1]}, "tokns"),
        ({"tokens": [1]}, "namespace"),
        ({"namespace": 7, "tokens": [1]}, "namespace"),
        ({"namespace": MODEL}, "neither tokens nor keys"),
        ({"namespace": MODEL, "tokens": None}, "neither tokens nor keys"),
        ({"namespace": MODEL, "tokens": [1], "keys": []}, "both tokens and keys"),
        ({"namespace": MODEL, "keys": ["00"]}, "keys[0]"),
        ({"namespace": MODEL, "keys": ["00" * 32, "g" * 64]}, "keys[1]"),
        ({"namespace": MODEL, "keys": ["00" * 32, "00" * 32]}, "twice"),
        ({"namespace": MODEL, "keys": ["00" * 32] * (KEYS_MAX + 1)}, str(KEYS_MAX)),
        ({"namespace": MODEL, "tokens": [-1]}, "tokens"),
        ({"namespace": MODEL, "tokens": [-1] * 50_000}, "tokens"),
        ([], "array"),
    ],
)
@served()
async def test_what_cannot_be_meant_is_named(people: People, body: Any, said: str) -> None:
    people.register()
    for options in (
        {"json": body},
        {"data": msgspec.msgpack.encode(body), "headers": {"Content-Type": PACKED["Accept"]}},
    ):
        async with people.client.post("/v1/lookup", **options) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["kind"]) == (400, "bad_request")
            assert said in error["message"] + error["hint"]
    assert people.store.mover.failures == 0 and people.door.errors == 0


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"namespace": "x", "tokens": [1,]}'])
@served()
async def test_what_is_no_json_is_refused(people: People, body: bytes) -> None:
    async with people.client.post("/v1/lookup", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b'{"namespace": "x", "tokens": %b%b}' % (b"[" * 100_000, b"]" * 100_000)),
        ("application/msgpack", b"\x81\xa6tokens" + b"\x91" * 100_000 + b"\xc0"),
    ],
)
@served()
async def test_what_is_nested_without_end_is_refused_and_no_fault_of_the_daemon(
    people: People, kind: str, body: bytes
) -> None:
    async with people.client.post("/v1/explain", data=body, headers={"Content-Type": kind}) as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (400, "bad_request")
    assert people.door.errors == 0


@served()
async def test_msgpack_is_read_and_written_where_it_is_asked_for(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    await people.put(namespace, keys[0])
    body = {"namespace": MODEL, "keys": hexed(keys)}
    async with people.client.post("/v1/lookup", data=msgspec.msgpack.encode(body), headers=PACKED) as answer:
        assert answer.content_type == "application/msgpack"
        assert msgspec.msgpack.decode(await answer.read()) == await lookup(people, **body)
    tokens = msgspec.msgpack.encode({"namespace": MODEL, "tokens": list(range(64))})
    async with people.client.post("/v1/lookup", data=tokens, headers=PACKED) as answer:
        assert msgspec.msgpack.decode(await answer.read())["asked_blocks"] == 4
    async with people.client.get("/nowhere", headers=PACKED) as answer:
        assert msgspec.msgpack.decode(await answer.read())["error"]["kind"] == "not_found"


@pytest.mark.fault(108)
@served()
async def test_a_body_must_say_what_it_is_so_that_no_web_page_can_send_one(people: People) -> None:
    """A browser sends these types to any address without asking; JSON and msgpack it asks about first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        async with people.client.post(
            "/v1/flush", data=b'{"namespace": "x"}', headers={"Content-Type": kind}
        ) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["kind"]) == (415, "unsupported_media_type")
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with people.client.post("/v1/flush", data=b"x", headers=headers) as answer:
        assert answer.status == 415


@pytest.mark.fault(104)
@served()
async def test_an_encoded_block_is_refused_and_not_stored_as_it_came(people: People) -> None:
    namespace, (key,) = people.register(), keys_of(1)
    async with people.client.put(
        url(namespace, key), data=bytes(BLOCK_BYTES), headers={"Content-Encoding": "gzip"}
    ) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["kind"]) == (415, "unsupported_media_type") and "gzip" in error["message"]
    assert await people.lookup(namespace, [key]) == 0
    headers = {"Content-Encoding": "Identity"}
    async with people.client.put(url(namespace, key), data=whole(namespace, key), headers=headers) as answer:
        assert answer.status == 201


@served()
async def test_tokens_that_are_no_list_are_told_what_a_list_is(people: People) -> None:
    people.register()
    for tokens in ("abc", {"a": 1}, 5, "\u0900"):
        status, answer = await people.ask("POST", "/v1/lookup", {"namespace": MODEL, "tokens": tokens})
        assert status == 400
        assert answer["error"]["message"] == "tokens: not a list of integers between 0 and 4294967295"
        assert "[1, " in answer["error"]["hint"]


@pytest.mark.fault(104)
@served()
async def test_a_body_above_the_limit_is_413_with_both_numbers(people: People) -> None:
    reader, writer = await people.connect()
    head = HEAD.format(BODY_BYTES_MAX + 1)
    writer.write(head.encode())
    status = int((await reader.readline()).split()[1])
    fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(fields.partition("content-length: ")[2].partition("\r")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    assert (status, error["kind"]) == (413, "too_large")
    assert (error["size_bytes"], error["limit_bytes"]) == (BODY_BYTES_MAX + 1, BODY_BYTES_MAX)
    writer.close()


@served()
async def test_a_body_that_grows_above_the_limit_is_413(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "BODY_BYTES_MAX", 1 << 17)

    async def parts() -> Any:
        for _ in range(3):
            yield bytes(1 << 16)

    headers = {"Content-Type": "application/json"}
    async with people.client.post("/v1/lookup", data=parts(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["limit_bytes"]) == (413, 1 << 17)


@served()
async def test_large_bodies_wait_for_one_another(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies under way are bounded in bytes together, or many clients could take all memory."""
    people.register()
    monkeypatch.setattr(http_bodies, "BODIES_BYTES_MAX", 300_000)
    assert BODIES_BYTES_MAX >= BODY_BYTES_MAX
    body = json.dumps({"namespace": MODEL, "tokens": [123456] * 25_000}).encode()
    assert 150_000 < len(body) < 300_000
    bodies = people.door._queries._bodies
    most = 0

    async def one() -> int:
        nonlocal most
        reader, writer = await people.connect()
        head = HEAD.format(len(body))
        writer.write(head.encode() + body[:10])
        await until(lambda: bodies._reading_bytes > 0)
        most = max(most, bodies._reading_bytes)
        writer.write(body[10:])
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    assert await asyncio.gather(*(one() for _ in range(5))) == [200] * 5
    assert (most, bodies._reading_bytes) == (len(body), 0)


@served()
async def test_a_slow_body_gives_up_its_place(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "BODY_S_MAX", 0.05)
    reader, writer = await people.connect()
    writer.write(
        b"POST /v1/lookup HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n\r\n{"
    )
    assert int((await reader.readline()).split()[1]) == 408
    writer.close()
    assert people.door._queries._bodies._reading_bytes == 0


@pytest.mark.fault(107)
@served()
async def test_two_hundred_lookups_are_under_way_at_the_same_time(people: People) -> None:
    people.register()
    body = json.dumps({"namespace": MODEL, "tokens": [1] * 20}).encode()
    head = HEAD.format(len(body))
    connections = [await people.connect() for _ in range(200)]
    for _, writer in connections:
        writer.write(head.encode() + body[:-1])
    await until(lambda: len(people.door._busy) == 200)
    for _, writer in connections:
        writer.write(body[-1:])
    for reader, writer in connections:
        assert int((await reader.readline()).split()[1]) == 200
        writer.close()

"""The people's door itself: who may come in, how errors look, and how it opens and shuts."""

import asyncio
import json
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from terracekv.daemon import http_door
from terracekv.daemon.config import Config
from terracekv.tests.people import BLOCK_BYTES, MODEL, People, answer_of, keys_of, people, served, until, url, whole
from terracekv.tiers.errors import ConfigError, InUse

LOOPBACK = "127.0.0.1:0"
TOKEN = "a secret of more than sixteen letters"
(KEY,) = keys_of(1)
ROUTES = {
    "/": {"GET"},
    "/healthz": {"GET"},
    "/metrics": {"GET"},
    "/openapi.json": {"GET"},
    "/page/{file}": {"GET"},
    "/readyz": {"GET"},
    "/v1/events": {"GET"},
    "/v1/explain": {"POST"},
    "/v1/flush": {"POST"},
    "/v1/live": {"GET"},
    "/v1/lookup": {"POST"},
    "/v1/namespaces": {"GET"},
    "/v1/namespaces/{ns}/blocks/{key}": {"DELETE", "GET", "HEAD", "PUT"},
    "/v1/namespaces/{ns}/blocks/{key}/{shard}": {"DELETE", "GET", "HEAD", "PUT"},
    "/v1/pin": {"POST"},
    "/v1/prefetch": {"POST"},
    "/v1/verify": {"POST"},
    "/v1/status": {"GET"},
    "/v1/unpin": {"POST"},
    "/v1/sync": {"POST"},
    "/v1/whatif": {"GET"},
}


async def over_tcp(people: People, method: str, route: str, **options: Any) -> tuple[int, dict[str, Any], Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, f"http://127.0.0.1:{people.door.port}{route}", **options) as answer,
    ):
        return answer.status, await answer.json(), answer.headers


async def raw(people: People, request: bytes) -> tuple[int, Any]:
    """Status and decoded body of an answer to what no client would send."""
    reader, writer = await people.connect()
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.fault(108)
@served()
async def test_these_are_all_routes_and_the_document_names_each_of_them(people: People) -> None:
    """A route that runs code, or any other new one, is a visible change here."""
    table: dict[str, set[str]] = {}
    for route in people.door.routes.all:
        table.setdefault(route.path, set()).add(route.method)
    assert table == ROUTES
    status, document = await people.ask("GET", "/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    assert {path: {verb.upper() for verb in verbs} for path, verbs in document["paths"].items()} == ROUTES
    text = json.dumps(document)
    for name in set(part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]):
        assert name in document["components"]["schemas"]
    lookup = document["components"]["schemas"]["Lookup"]
    assert set(lookup["properties"]) == {"namespace", "tokens", "keys", "deadline_ms"}
    assert not lookup["additionalProperties"]


@served()
async def test_every_route_of_the_table_answers_and_no_answer_is_our_own_fault(people: People) -> None:
    people.register()
    for path, methods in ROUTES.items():
        for method in methods - {"HEAD"}:
            route = path.replace("{ns}", "x" * 9).replace("{key}", KEY.hex()).replace("{shard}", "0")
            async with people.client.request(method, route, json={}) as answer:
                asks_nothing = "{" not in path and (method == "GET" or path == "/v1/sync")
                assert answer.status in ((200,) if asks_nothing else (400, 404)), route
    assert people.door.errors == 0


@pytest.mark.parametrize(
    ("method", "route", "expected", "kind"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/namespaces/x/blocks", 404, "not_found"),
        ("GET", "/v1/status/", 404, "not_found"),
        ("POST", "/v1/status", 405, "method_not_allowed"),
        ("PATCH", "/v1/lookup", 405, "method_not_allowed"),
        ("GET", "/v1/exec", 404, "not_found"),
    ],
)
@served()
async def test_errors_of_routing_look_like_all_others(
    people: People, method: str, route: str, expected: int, kind: str
) -> None:
    async with people.client.request(method, route) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["kind"]) == (expected, kind)
        assert error["message"] and error["hint"]
        assert ("Allow" in answer.headers) == (expected == 405)


@pytest.mark.parametrize(
    "request_",
    [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n"]
    + [b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls hello\r\n\r\n"],
)
@served(("uvloop", "asyncio"))
async def test_what_is_not_http_is_answered_in_the_same_form(people: People, request_: bytes) -> None:
    status, answer = await raw(people, request_)
    assert (status, answer["error"]["kind"]) == (400, "bad_request")
    assert set(answer["error"]) == {"kind", "message", "hint"}


@served()
async def test_what_cannot_be_read_is_answered_with_what_would_be(people: People) -> None:
    head, long = b"POST /v1/lookup HTTP/1.1\r\nHost: h\r\n", b"x" * 9000
    for request, hint in (
        (b"GET /%b HTTP/1.1\r\nHost: h\r\n\r\n" % long, "8190 bytes"),
        (head + b"X-Long: %b\r\n\r\n" % long, "8190 bytes"),
        (head + b"Content-Length: ten\r\n\r\n", "decimal number"),
        (head + b"Content-Length: -1\r\n\r\n", "decimal number"),
        (head + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "not both"),
        (head + b"B ad: x\r\n\r\n", "NAME: VALUE"),
        (b"hello\r\n\r\n", "HTTP/1.1"),
    ):
        reader, writer = await people.connect()
        writer.write(request)
        status, body = await answer_of(reader)
        assert status == 400 and hint in body["error"]["hint"], (request[:80], body)
        writer.close()


@served()
async def test_a_bug_of_ours_is_answered_logged_and_counted(
    people: People, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("broken for the test")

    monkeypatch.setattr(people.door._metrics, "text", broken)
    status, answer = await people.ask("GET", "/metrics")
    assert (status, answer["error"]["kind"], people.door.errors) == (500, "internal", 1)
    assert "broken for the test" in answer["error"]["message"]
    assert caplog.records[-1].exc_info is not None
    caplog.clear()


@pytest.mark.fault(56)
@served()
async def test_health_needs_no_tier_and_readiness_says_what_is_missing(people: People) -> None:
    assert await people.ask("GET", "/readyz") == (200, {"ready": True, "reasons": [], "degraded": []})
    people.door.not_ready["self-test"] = "is running"
    told = {"ready": False, "reasons": ["self-test: is running"], "degraded": []}
    assert await people.ask("GET", "/readyz") == (503, told)
    people.store.host.status = None  # type: ignore[assignment, method-assign]
    assert await people.ask("GET", "/healthz") == (200, {"alive": True})
    del people.store.host.status


@pytest.mark.fault(108)
def test_tcp_without_a_token_is_for_this_machine_only() -> None:
    assert Config().daemon.http.startswith("127.0.0.1:")


@pytest.mark.fault(108)
@pytest.mark.parametrize("users", ["", "7"])
def test_with_a_token_file_tcp_asks_for_the_token_and_the_socket_and_probes_do_not(shm_dir: Path, users: str) -> None:
    (shm_dir / "token").write_text(TOKEN + "\n")

    async def run() -> None:
        token = str(shm_dir / "token")
        async with people(shm_dir, daemon_http=LOOPBACK, daemon_token_file=token, access_uids=users) as opened:
            for header in (
                {},
                {"Authorization": TOKEN},
                {"Authorization": f"Basic {TOKEN}"},
                {"Authorization": f"Bearer {TOKEN}x"},
                {"Authorization": "Bearer ü"},
            ):
                for route in ("/v1/status", "/v1/live", "/metrics", "/openapi.json"):
                    status, answer, headers = await over_tcp(opened, "GET", route, headers=header)
                    assert (status, answer["error"]["kind"]) == (401, "unauthorized")
                    assert headers["WWW-Authenticate"] == "Bearer"
                    assert TOKEN not in json.dumps(answer)
            for scheme in ("Bearer", "bearer"):
                header = {"Authorization": f"{scheme} {TOKEN}"}
                assert (await over_tcp(opened, "GET", "/v1/status", headers=header))[0] == 200
            header["Host"] = "kv.example:7411"  # who has the token may call the daemon by any name
            assert (await over_tcp(opened, "GET", "/v1/status", headers=header))[0] == 200
            for probe in ("/healthz", "/readyz"):  # whoever probes has no secret to send
                assert (await over_tcp(opened, "GET", probe))[0] == 200
            status, document = await opened.ask("GET", "/v1/status")
            assert status == 200
            assert TOKEN not in json.dumps(document)

    uvloop.run(run())


def test_a_token_that_cannot_be_read_keeps_the_door_shut(shm_dir: Path) -> None:
    async def run() -> None:
        async with people(shm_dir, daemon_http=LOOPBACK, daemon_token_file=str(shm_dir / "none")):
            pass

    with pytest.raises(ConfigError, match="token_file"):
        uvloop.run(run())


@pytest.mark.fault(108)
@served(daemon_http=LOOPBACK)
async def test_without_a_token_no_foreign_name_is_answered_for(people: People) -> None:
    """A page whose own name was made to point here would otherwise be let read the answers by its browser."""
    for host, expected in {
        "evil.example": 403,
        "evil.example:7411": 403,
        "127.0.0.1.evil.example": 403,
        "localhost": 200,
        "localhost:7411": 200,
        "127.0.0.1": 200,
        "127.0.0.1:7411": 200,
        "[::1]": 200,
        "[::1]:7411": 200,
    }.items():
        status, answer, _ = await over_tcp(people, "GET", "/v1/status", headers={"Host": host})
        assert status == expected, host
        assert status == 200 or answer["error"]["kind"] == "forbidden"


@served()
async def test_the_socket_is_for_its_owner_only_and_no_tcp_port_is_open_unless_asked(people: People) -> None:
    mode = people.door.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert people.door.port is None and len(people.door._open) == 1


def test_a_socket_that_a_dead_daemon_left_is_taken_over_and_one_that_lives_is_not(shm_dir: Path) -> None:
    (shm_dir / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(shm_dir / "run" / "http.sock"))

    async def run() -> None:
        async with people(shm_dir) as opened:
            assert (await opened.ask("GET", "/healthz"))[0] == 200
            with pytest.raises(InUse, match="http.sock"):
                await opened.door.__class__(
                    store=opened.store, sessions=opened.sessions, config=opened.door._config, started=0.0
                ).listen()
            assert (await opened.ask("GET", "/healthz"))[0] == 200
        assert not opened.door.path.exists()

    uvloop.run(run())


def test_a_tcp_port_that_is_taken_is_said_so_and_leaves_no_socket(shm_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def run() -> None:
            async with people(shm_dir, daemon_http=address):
                pass

        with pytest.raises(InUse, match=address):
            uvloop.run(run())
    assert not (shm_dir / "run" / "http.sock").exists()


@served()
async def test_requests_under_way_are_limited(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_door, "REQUESTS_MAX", 1)
    async with people.client.get("/v1/events"):
        status, answer = await people.ask("GET", "/v1/status")
        assert (status, answer["error"]["kind"]) == (503, "busy")
        assert (await people.ask("GET", "/healthz"))[0] == 200


@pytest.mark.fault(55)
@served(("uvloop", "asyncio"))
async def test_shutdown_ends_idle_connections_and_streams_and_lets_an_upload_finish(people: People) -> None:
    namespace = people.register()
    idle = await people.connect()
    idle[1].write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle[0].readuntil(b'{"alive":true}')
    listening = await people.connect()
    listening[1].write(b"GET /v1/events HTTP/1.1\r\nHost: h\r\n\r\n")
    await listening[0].readuntil(b": connected")
    reader, writer = await people.connect()
    head = f"PUT {url(namespace, KEY)}?durable=1 HTTP/1.1\r\nHost: h\r\nContent-Length: {BLOCK_BYTES}\r\n\r\n"
    body = whole(namespace, KEY)
    writer.write(head.encode() + body[:100])
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 1)

    closing = asyncio.ensure_future(people.door.close(3600))
    assert await idle[0].read() == b""
    assert (await listening[0].read()).endswith(b"0\r\n\r\n")
    with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
        await people.connect()
    assert not closing.done()
    for start in range(100, BLOCK_BYTES, 5000):
        writer.write(body[start : start + 5000])
        await asyncio.sleep(0.005)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 201") and b'"durable":true' in answer and b"Connection: close" in answer
    await closing
    assert people.store.lookup(namespace, [KEY]).blocks == 1
    for connection in (idle, listening, (reader, writer)):
        connection[1].close()


@pytest.mark.fault(55)
@served(("uvloop", "asyncio"))
async def test_shutdown_cuts_off_what_does_not_finish_within_the_grace(people: People) -> None:
    namespace = people.register()
    reader, writer = await people.connect()
    head = f"PUT {url(namespace, KEY)} HTTP/1.1\r\nHost: h\r\nContent-Length: {BLOCK_BYTES}\r\n\r\n"
    writer.write(head.encode() + bytes(100))
    await until(lambda: people.store.host.status().details["reserved_blocks"] == 1)
    await people.door.close(0.01)
    assert await reader.read() == b""
    assert people.store.host.status().details["reserved_blocks"] == 0
    assert people.store.lookup(namespace, [KEY]).blocks == 0
    writer.close()


@served()
async def test_close_may_be_called_twice(people: People) -> None:
    await people.door.close(0)
    await people.door.close(0)


_watching: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        address = args[1] if event == "socket.connect" else args[0]
        if not isinstance(address, (str, bytes)) or event != "socket.connect":
            _watching[-1].append(f"{event} {address}")


@pytest.mark.fault(110)
def test_nothing_is_ever_connected_to(shm_dir: Path) -> None:
    """On asyncio's own loop, whose sockets the interpreter lets us watch. The client comes over the Unix socket."""
    sys.addaudithook(_audit)
    seen: list[str] = []
    _watching.append(seen)

    async def run() -> None:
        async with people(shm_dir, daemon_http=LOOPBACK) as opened:
            namespace = opened.register()
            await opened.put(namespace, KEY, durable="1")
            keys = {"namespace": MODEL, "keys": [KEY.hex()]}
            for method, route, body in [
                ("POST", "/v1/lookup", keys),
                ("POST", "/v1/prefetch", keys),
                ("POST", "/v1/pin", keys),
                ("POST", "/v1/unpin", keys),
                ("GET", "/v1/status", None),
                ("GET", "/v1/namespaces", None),
                ("GET", "/openapi.json", None),
                ("POST", "/v1/flush", {"namespace": MODEL}),
            ]:
                assert (await opened.ask(method, route, body))[0] == 200
            async with opened.client.get("/metrics") as answer:
                assert answer.status == 200

    try:
        asyncio.run(run())
        with socket.socket() as probe, pytest.raises(OSError):
            probe.connect(("127.0.0.1", 1))  # the watch works
    finally:
        _watching.clear()
    assert [entry for entry in seen if "127.0.0.1" not in entry] == []
    assert len([entry for entry in seen if entry.startswith("socket.connect")]) == 1

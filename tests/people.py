"""A people's door for tests: real tiers in a temporary folder, the real door on a Unix socket, a client beside it.

Owns what it opens. Called by tests on their event loop. Imports aiohttp's client, ``daemon`` and ``tiers``.
"""

import asyncio
import contextlib
import hashlib
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from terracekv.daemon.config import Config, load_config
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.http_door import HttpDoor
from terracekv.daemon.mover import Mover
from terracekv.daemon.sessions import Sessions
from terracekv.daemon.store import Store
from terracekv.tests.blocks import payload_of
from terracekv.tiers.arena import Arena
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier, least_capacity_bytes
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import SlotTable

BLOCK_BYTES = 20_000
BLOCK_TOKENS = 16
SEGMENT_BYTES = 1 << 20
MODEL = "org/some model"

uvloop.new_event_loop().close()  # the first one of a process opens a pipe for signals that stays


@dataclass
class People:
    """``client`` talks to ``door`` over the Unix socket."""

    store: Store
    sessions: Sessions
    door: HttpDoor
    client: aiohttp.ClientSession
    folder: Path

    def register(
        self, seed: int = 1, *, model: str = MODEL, shards: int = 1, block_bytes: int = BLOCK_BYTES
    ) -> Namespace:
        wanted = Namespace(bytes([seed]) * 32, 0, 0, model, "r1", "bf16", bytes(32), BLOCK_TOKENS, shards, block_bytes)
        return self.store.namespaces.register(wanted)

    async def put(self, namespace: Namespace, *keys: bytes, shard: int = 0, **query: str) -> None:
        """Put blocks whose bytes say whose they are."""
        for key in keys:
            body = payload_of(block_id(key, shard), namespace.id, namespace.block_bytes)
            async with self.client.put(url(namespace, key, shard), data=body, params=query) as answer:
                assert answer.status in (200, 201), await answer.text()

    async def lookup(self, namespace: Namespace, keys: list[bytes]) -> int:
        """Matched blocks, as the door says."""
        body = {"namespace": namespace.id.hex(), "keys": [key.hex() for key in keys]}
        status, found = await self.ask("POST", "/v1/lookup", body)
        assert status == 200, found
        return int(found["matched_blocks"])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection without a client, to send what no client would."""
        return await asyncio.open_unix_connection(str(self.door.path))

    async def ask(self, method: str, route: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.client.request(method, route, json=body, **options) as answer:
            return answer.status, await answer.json()


class Listener:
    """Reads a stream of server-sent events."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def block(self) -> str:
        """The next comment or event, as text."""
        lines = []
        while (line := await self._answer.content.readline()) not in (b"\n", b""):
            lines.append(line.decode().rstrip("\n"))
        return "\n".join(lines)

    async def event(self) -> dict[str, Any]:
        """The next event; its id and name are those of its data."""
        while (text := await self.block()).startswith(":"):
            pass
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        data = json.loads(fields["data"])
        assert (fields["id"], fields["event"]) == (str(data["seq"]), data["event"])
        return dict(data)


def url(namespace: Namespace, key: bytes, shard: int | None = None) -> str:
    tail = "" if shard is None else f"/{shard}"
    return f"/v1/namespaces/{namespace.id.hex()}/blocks/{key.hex()}{tail}"


def settings(folder: Path, **values: str) -> Config:
    """A configuration whose folders are in ``folder`` and whose TCP door is shut unless ``daemon_http`` is given."""
    flags = {"daemon.runtime_dir": str(folder / "run"), "daemon.state_dir": str(folder / "state"), "daemon.http": ""}
    return load_config(None, flags | {name.replace("_", ".", 1): value for name, value in values.items()}, {})


@contextlib.asynccontextmanager
async def people(
    folder: Path,
    *,
    host_bytes: int = 4 << 20,
    slab_bytes: int = 1 << 20,
    disk_bytes: int | None = None,
    admission: str = "all",
    gpus: Gpus | None = None,
    **values: str,
) -> AsyncIterator[People]:
    """``disk_bytes`` 0 is no disk tier; ``values`` are settings, as ``daemon_http="127.0.0.1:0"``."""
    config = settings(folder, **values)
    (folder / "state").mkdir(exist_ok=True)
    arena = Arena(config.daemon.runtime_dir, size_bytes=host_bytes, slab_bytes=slab_bytes)
    arena.prepare()
    namespaces = Namespaces(folder / "state" / "namespaces.json")
    table = SlotTable(folder / "run" / "slots", arena_bytes=host_bytes, slab_bytes=slab_bytes, adopt=arena.adopted)
    host = HostTier(arena, table, namespaces)
    disk = None
    if disk_bytes != 0:
        disk = DiskTier(
            folder / "disk",
            capacity_bytes=disk_bytes or 64 * SEGMENT_BYTES + least_capacity_bytes(SEGMENT_BYTES),
            segment_bytes=SEGMENT_BYTES,
            codec=config.disk.codec,
            namespaces=namespaces,
            free_floor_bytes=0,
        )
    mover = Mover(threads=2, queue_bytes=64 << 20)
    store = Store(namespaces=namespaces, host=host, disk=disk, mover=mover, admission=admission)
    sessions = Sessions(store)
    door = None
    try:
        door = HttpDoor(store=store, sessions=sessions, config=config, started=time.monotonic(), gpus=gpus)
        await door.listen()
        connector = aiohttp.UnixConnector(str(door.path), limit=0)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as client:
            yield People(store, sessions, door, client, folder)
            await mover.drain()
            await let_go(sessions)
            store.check()
    finally:
        if door is not None:
            await door.close(1.0)
        mover.close()
        if disk is not None:
            disk.close()
        host.close()


def whole(namespace: Namespace, key: bytes, shard: int = 0) -> bytes:
    """The bytes that ``People.put`` stored."""
    return payload_of(block_id(key, shard), namespace.id, namespace.block_bytes)


def said(body: bytes) -> str:
    """A checksum header."""
    return f"xxh3-64:{checksum(body):016x}"


def keys_of(count: int, first: int = 0) -> list[bytes]:
    """Keys that are digests of numbers."""
    return [hashlib.sha256(b"key %d" % number).digest() for number in range(first, first + count)]


def hexed(keys: list[bytes]) -> list[str]:
    """As bodies have them."""
    return [key.hex() for key in keys]


async def lookup(people: People, **body: Any) -> dict[str, Any]:
    """An answered lookup by its body."""
    status, found = await people.ask("POST", "/v1/lookup", body)
    assert status == 200, found
    return dict(found)


def served(loops: tuple[str, ...] = ("uvloop",), **options: Any) -> Callable[..., Callable[..., None]]:
    """Makes a test of ``async def scenario(people, other fixtures)``, run on each of ``loops``; see ``people``."""

    def decorate(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(shm_dir: Path, loop: str, **fixtures: Any) -> None:
            async def run() -> None:
                async with people(shm_dir, **options) as opened:
                    await scenario(opened, **fixtures)

            uvloop.run(run()) if loop == "uvloop" else asyncio.run(run())

        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("shm_dir", "loop")]
        theirs = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in [*inspect.signature(scenario).parameters.values()][1:]
        ]
        test.__signature__ = inspect.Signature(ours + theirs)  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        decorated: Callable[..., None] = pytest.mark.parametrize("loop", loops)(test)
        return decorated

    return decorate


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is sure to come; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.002)


async def let_go(sessions: Sessions) -> None:
    """Wait until nothing is leased but by sessions and pins: what was answered is let go of a little later."""
    for _ in range(3000):
        with contextlib.suppress(AssertionError):
            return sessions.check()
        await asyncio.sleep(0.01)
    sessions.check()


async def nothing_is_held(people: People) -> None:
    """No lease and no reservation, once the daemon's own work is done and what it answered is let go of."""
    await people.store.mover.drain()  # a write to disk holds a lease of its own
    async with asyncio.timeout(30):
        while any(people.store.host.status().details[kind] for kind in ("reserved_blocks", "leased_blocks")):
            await asyncio.sleep(0.01)


async def fetch(people: People, where: str, **headers: str) -> tuple[int, bytes, Any]:
    """Status, body and headers."""
    async with people.client.get(where, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), fields


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and decoded body of an answer."""
    status, fields = await head_of(reader)
    return status, json.loads(await reader.readexactly(int(fields["content-length"])))


def put_head(where: str, length: int | None, *more: str) -> bytes:
    """The head of an upload; without a length it is chunked."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return "\r\n".join([f"PUT {where} HTTP/1.1", "Host: localhost", size, *more, "", ""]).encode()

"""A people's door for tests: real tiers in a temporary folder, the real door on a Unix socket, a client beside it.

Owns what it opens. Called by tests on their event loop. Imports aiohttp's client, ``daemon`` and ``tiers``.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from terracekv.daemon.config import Config, load_config
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

    async def ask(self, method: str, route: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.client.request(method, route, json=body, **options) as answer:
            return answer.status, await answer.json()


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
            namespaces=namespaces,
            free_floor_bytes=0,
        )
    mover = Mover(threads=2, queue_bytes=64 << 20)
    store = Store(namespaces=namespaces, host=host, disk=disk, mover=mover, admission=admission)
    sessions = Sessions(store)
    door = HttpDoor(store=store, sessions=sessions, config=config, started=time.monotonic())
    try:
        await door.listen()
        connector = aiohttp.UnixConnector(str(door.path), limit=0)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as client:
            yield People(store, sessions, door, client, folder)
            await mover.drain()
            store.check()
            sessions.check()
    finally:
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

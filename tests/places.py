"""A world with both its doors, everything that can be asked there, and ways to bring a tier into trouble.

Owns what it opens. Called by tests. Imports aiohttp's client, ``daemon``, ``tiers`` and ``stores``.
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from terracekv.daemon import protocol
from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.http_door import HttpDoor
from terracekv.tests.blocks import payload_of
from terracekv.tests.harness import hello
from terracekv.tests.hosts import BLOCK
from terracekv.tests.people import settings
from terracekv.tests.s3_stub import S3Stub
from terracekv.tests.stores import World, ids_of, key
from terracekv.tests.test_engine_door_waits import Doors, Peer, open_door
from terracekv.tiers import failpoint
from terracekv.tiers.tier import Miss

ANSWER_S = 20.0
"""Far beyond every deadline below: what has not come by then does not come."""
STUCK_S = 0.1
DEADLINE_MS = 200
QUICK = {
    "engine_door.ASK_S_MAX": 0.2,
    "forgetting.DISTANT_S": 0.2,
    "forgetting.LOCAL_S": 0.2,
    "http_blocks.LEARN_S_MAX": 0.2,
    "http_blocks.PROMOTE_S_MAX": 0.3,
    "http_queries.PIN_S_MAX": 0.3,
    "engine_door.PIN_S_MAX": 0.3,
    "http_queries.AUDIT_S_MAX": 0.3,
    "reception.NOTE_S_MAX": 5.0,
    "write_through.DURABLE_S": 0.3,
}
"""Deadlines that no caller chooses, made short."""
LOW, HIGH, FRESH = [key(index) for index in range(3)], [key(index) for index in (3, 4)], 100
"""Blocks that only a lower tier has; blocks of host; the number of the first block that nobody has."""


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make those deadlines short."""
    for where, seconds in QUICK.items():
        monkeypatch.setattr(f"terracekv.daemon.{where}", seconds)


@dataclass
class Place:
    """A world with both its doors and its heartbeat, and somebody at each door."""

    w: World
    doors: Doors
    engine: Peer
    people: aiohttp.ClientSession
    heart: Heartbeat
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(FRESH, 10_000)))
    answered: list[str] = field(default_factory=list)

    async def wire(self, name: str, message: Any, *wanted: type) -> Any:
        """What an engine is answered, on a connection of its own."""
        peer = await self.doors.engine()
        answer = await peer.ask(message)
        assert isinstance(answer, (*wanted, protocol.Error)), f"{name}: {answer}"
        return peer, answer

    async def http(self, name: str, method: str, route: str, body: Any = None, data: bytes | None = None) -> Any:
        """What a person is answered: done, or an error that says what to do."""
        async with self.people.request(method, route, json=body, data=data) as answer:
            assert answer.status != 500, f"{name}: {await answer.text()}"
            if answer.status >= 400 and method != "HEAD":
                error = (await answer.json())["error"]
                assert error["message"] and error["hint"], f"{name}: {error}"
            return answer.status, await answer.read()


async def engine_hello(p: Place) -> None:
    peer = await p.doors.connect()
    answer = await peer.ask(hello(BLOCK, model=f"model {next(p.numbers)}"))
    assert isinstance(answer, (protocol.Welcome, protocol.Refused)), answer


async def engine_lookup(p: Place) -> None:
    await p.wire("Lookup", protocol.Lookup(1, b"".join(LOW + HIGH), DEADLINE_MS), protocol.Found)


async def engine_acquire(p: Place) -> None:
    """Leased, and then of each block that is on its way that it has come or that it has not."""
    peer, leased = await p.wire("Acquire", protocol.Acquire(1, b"".join(LOW + HIGH), DEADLINE_MS), protocol.Leased)
    if isinstance(leased, protocol.Leased):
        waiting = set(leased.pending)
        while waiting:
            answer = await peer.read()
            assert isinstance(answer, (protocol.Ready, protocol.Failed)), answer
            waiting -= set(answer.indices)
        peer.tell(protocol.Release(leased.lease))
        assert isinstance(await peer.ask(protocol.Lookup(2, b"", DEADLINE_MS)), protocol.Found)


async def engine_store(p: Place, durable: bool) -> None:
    fresh = key(next(p.numbers))
    peer, reserved = await p.wire("Reserve", protocol.Reserve(1, fresh), protocol.Reserved)
    if isinstance(reserved, protocol.Reserved) and reserved.slots[0] is not None:
        answer = await peer.ask(protocol.Commit(2, reserved.reservation, [0], durable))
        assert isinstance(answer, (protocol.Committed, protocol.Error)), answer


async def engine_abort(p: Place) -> None:
    peer, reserved = await p.wire("Reserve", protocol.Reserve(1, key(next(p.numbers))), protocol.Reserved)
    if isinstance(reserved, protocol.Reserved):
        peer.tell(protocol.Abort(reserved.reservation))
    assert isinstance(await peer.ask(protocol.Lookup(2, b"", DEADLINE_MS)), protocol.Found)


async def engine_moves(p: Place, message: Any) -> None:
    """Prefetch and Pin have no answer: the next message has."""
    peer = await p.doors.engine()
    peer.tell(message)
    answer = await peer.ask(protocol.Lookup(2, b"".join(HIGH), DEADLINE_MS))
    assert isinstance(answer, protocol.Found) and answer.blocks == 2, "host is as quick as ever"


def chain(keys: list[bytes], w: World, **more: Any) -> dict[str, Any]:
    return {"namespace": w.namespace.id.hex(), "keys": [each.hex() for each in keys], **more}


def block(w: World, each: bytes) -> str:
    return f"/v1/namespaces/{w.namespace.id.hex()}/blocks/{each.hex()}/0"


async def http_put(p: Place, query: str = "") -> None:
    each = next(p.numbers)
    body = payload_of(ids_of(each)[0], p.w.namespace.id, BLOCK)
    await p.http("PUT", "PUT", block(p.w, key(each)) + query, data=body)


async def http_events(p: Place) -> None:
    async with p.people.get("/v1/events") as answer:
        assert answer.status == 200 and await answer.content.readline() == b": connected\n"


async def http_live(p: Place) -> None:
    async with p.people.get("/v1/live") as answer:
        assert answer.status == 200 and await answer.content.readline() == b"event: past\n"


def route(method: str, path: str, body: Callable[[World], Any] = lambda w: None) -> Callable[[Place], Awaitable[Any]]:
    async def asked(p: Place) -> None:
        await p.http(f"{method} {path}", method, path, body(p.w))

    return asked


def of_block(method: str, each: bytes) -> Callable[[Place], Awaitable[Any]]:
    async def asked(p: Place) -> None:
        await p.http(f"{method} of a block", method, block(p.w, each))

    return asked


async def many(p: Place) -> None:
    """An order for all that the lower tier has, from many at once."""
    orders = [p.http("prefetch", "POST", "/v1/prefetch", chain(LOW, p.w)) for _ in range(8)]
    await asyncio.gather(*orders)


OPERATIONS: dict[str, Callable[[Place], Awaitable[Any]]] = {
    "Hello": engine_hello,
    "Lookup": engine_lookup,
    "Acquire and Release": engine_acquire,
    "Reserve and Commit": functools.partial(engine_store, durable=False),
    "Reserve and Commit, durable": functools.partial(engine_store, durable=True),
    "Reserve and Abort": engine_abort,
    "Prefetch": functools.partial(engine_moves, message=protocol.Prefetch(b"".join(LOW))),
    "Pin": functools.partial(engine_moves, message=protocol.Pin(b"".join(LOW), 1000)),
    "POST /v1/lookup": route("POST", "/v1/lookup", lambda w: chain(LOW + HIGH, w, deadline_ms=DEADLINE_MS)),
    "POST /v1/explain": route("POST", "/v1/explain", lambda w: chain(LOW + HIGH, w, deadline_ms=DEADLINE_MS)),
    "GET of a block of host": of_block("GET", HIGH[0]),
    "GET of a block below": of_block("GET", LOW[1]),
    "HEAD of a block below": of_block("HEAD", LOW[1]),
    "PUT": http_put,
    "PUT, durable": functools.partial(http_put, query="?durable=1"),
    "POST /v1/prefetch": route("POST", "/v1/prefetch", lambda w: chain(LOW, w)),
    "POST /v1/prefetch from many": many,
    "POST /v1/pin": route("POST", "/v1/pin", lambda w: chain(LOW, w, ttl_s=1)),
    "POST /v1/unpin": route("POST", "/v1/unpin", lambda w: chain(LOW, w)),
    "GET /v1/status": route("GET", "/v1/status"),
    "GET /v1/namespaces": route("GET", "/v1/namespaces"),
    "GET /v1/events": http_events,
    "GET /v1/live": http_live,
    "POST /v1/verify of host": route("POST", "/v1/verify", lambda w: {"tier": "host"}),
    "POST /v1/verify of disk": route("POST", "/v1/verify", lambda w: {"tier": "disk"}),
    "GET /metrics": route("GET", "/metrics"),
    "GET /healthz": route("GET", "/healthz"),
    "GET /readyz": route("GET", "/readyz"),
    "GET /openapi.json": route("GET", "/openapi.json"),
    "GET /": route("GET", "/"),
}
ORDERS: dict[str, Callable[[Place], Awaitable[Any]]] = {
    "DELETE of a block": of_block("DELETE", LOW[2]),
    "POST /v1/flush of one tier": route(
        "POST", "/v1/flush", lambda w: {"namespace": w.namespace.id.hex(), "tier": "host"}
    ),
    "POST /v1/flush": route("POST", "/v1/flush", lambda w: {"namespace": w.namespace.id.hex()}),
}
"""What takes blocks away goes last, one after the other."""


@contextlib.asynccontextmanager
async def opened(w: World, folder: Path) -> AsyncIterator[Place]:
    async with open_door(w) as doors:
        heart = Heartbeat(w.store)
        config = settings(folder)
        config.daemon.runtime_dir.mkdir(exist_ok=True)
        http = HttpDoor(
            store=w.store, sessions=doors.door.sessions, config=config, started=time.monotonic(), heart=heart
        )
        await http.listen()
        connector = aiohttp.UnixConnector(str(http.path), limit=0)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as people:
            try:
                yield Place(w, doors, await doors.engine(), people, heart)
            finally:
                await http.close(0.1)


async def settle(p: Place, *, lowest: str) -> None:
    """Blocks LOW are below host, or above it, only; blocks HIGH are in host."""
    await p.engine.store(b"".join(LOW + HIGH))
    await p.w.idle()
    if lowest == "gpu":
        for _ in range(3):
            near = p.w.near
            assert near is not None
            slots, _, on_gpu = near.acquire(p.w.namespace, ids_of(0, 1, 2), lambda *_: False, p.w.store.acquire)
            near.release([*on_gpu.values()])
            p.w.host.release([slot for slot in slots if slot is not None])
            await p.w.idle()
    p.w.host.delete(p.w.namespace, ids_of(0, 1, 2))


async def all_answered(p: Place, operations: dict[str, Callable[[Place], Awaitable[Any]]]) -> None:
    async def one(name: str, operation: Callable[[Place], Awaitable[Any]]) -> None:
        try:
            await asyncio.wait_for(operation(p), ANSWER_S)
        except TimeoutError:
            raise AssertionError(f"{name} was not answered") from None

    await asyncio.gather(*(one(name, operation) for name, operation in operations.items()))


async def seen(p: Place, name: str) -> None:
    """Wait until the heartbeat has seen that a tier is stuck."""
    while not any(told.startswith(f"{name}:") for told in p.heart.degraded):
        await asyncio.sleep(0.01)


async def orders_answered(p: Place) -> None:
    for name, order in ORDERS.items():
        await all_answered(p, {name: order})


async def tell_of_stuck(p: Place, name: str) -> None:
    """It is left out, reported, and all else goes on."""
    status, body = await p.http("readyz", "GET", "/readyz")
    assert status == 200 and f'"{name}: a call has not come back'.encode() in body
    async with p.people.get("/v1/status") as answer:
        tier = (await answer.json())["tiers"][name]
    assert (tier["mode"], tier["last_event"]) == ("stuck", "TKV-TIER-STUCK") and tier["advice"] and tier["stalled_s"]
    found = p.w.store.lookup(p.w.namespace, LOW + HIGH)
    assert found.blocks == 0 and (found.reason is Miss.TIER_DOWN or name == "gpu")
    assert p.w.store.lookup(p.w.namespace, HIGH).blocks == 2
    before = {lower.name: lower.mover.queue_bytes for lower in p.w.store.sources}
    await all_answered(p, {"another store": functools.partial(engine_store, durable=False)})
    lower = next(lower for lower in p.w.store.sources if lower.name == name)
    assert lower.mover.queue_bytes <= before[name], "nothing more is queued for it"


Trouble = Callable[[World], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def armed(points: str) -> Iterator[None]:
    failpoint.arm(points)
    try:
        yield
    finally:
        failpoint.disarm()


@contextlib.contextmanager
def held_disk(w: World) -> Iterator[None]:
    assert w.disk
    w.disk.reading.clear()
    w.disk.writing.clear()
    try:
        yield
    finally:
        w.disk.reading.set()
        w.disk.writing.set()


@contextlib.contextmanager
def held(tier: Any, *methods: str) -> Iterator[None]:
    """Calls of the tier that do not come back before the end."""
    gate = threading.Event()

    def stand(method: Callable[..., Any]) -> Callable[..., Any]:
        def standing(*args: Any, **more: Any) -> Any:
            assert gate.wait(60)
            return method(*args, **more)

        return standing

    for each in methods:
        setattr(tier, each, stand(getattr(tier, each)))
    try:
        yield
    finally:
        for each in methods:
            delattr(tier, each)
        gate.set()


@contextlib.contextmanager
def switched(stub: S3Stub, **switches: Any) -> Iterator[None]:
    before = {name: getattr(stub.switches, name) for name in switches}
    for name, value in switches.items():
        setattr(stub.switches, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(stub.switches, name, value)


async def tried(p: Place, name: str, trouble: contextlib.AbstractContextManager[None], stuck: bool) -> None:
    await settle(p, lowest=name)
    with trouble:
        await all_answered(p, OPERATIONS)
        if stuck:
            await seen(p, name)
            await tell_of_stuck(p, name)
            await all_answered(p, OPERATIONS)
            await seen(p, name)
        await orders_answered(p)
    while p.heart.degraded:
        await asyncio.sleep(0.01)
    await all_answered(p, {name: OPERATIONS[name] for name in ("Reserve and Commit", "Lookup", "PUT, durable")})

"""Questions and orders over HTTP that carry no block bytes: lookup, prefetch, pin, flush, sync, events.

Owns no state but that of bodies being read. Called by ``http_door`` on the event loop. Imports aiohttp, msgspec,
``explaining``, ``http_bodies``, ``http_gate``, ``http_listeners``, ``http_messages``, ``naming``, ``stats``, ``store``,
``tasks`` and ``tiers``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from terracekv.daemon import stats, tasks
from terracekv.daemon.explaining import explained
from terracekv.daemon.http_bodies import Bodies
from terracekv.daemon.http_gate import refuse_tenants, tenant_of
from terracekv.daemon.http_listeners import Listeners, stream
from terracekv.daemon.http_messages import (
    DEADLINE_MS,
    Chain,
    Done,
    Explain,
    FirstMiss,
    Flush,
    Found,
    Lookup,
    Pin,
    Prefetch,
    Problem,
    Reach,
    Synced,
    Unpin,
    Verified,
    Verify,
    parse_key,
    parse_tokens,
    reply,
    tokens_of,
)
from terracekv.daemon.naming import find_namespace
from terracekv.daemon.store import Store
from terracekv.tiers.audit import Audit
from terracekv.tiers.block import block_id, block_keys
from terracekv.tiers.errors import BadRequest, NotFound, TierDown
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import Miss

INLINE_BYTES = 16 << 10
"""Tokens and keys of a request up to this size are worked out on the event loop, more of them in a worker."""
WORK_S_MAX = 30.0
AUDIT_S_MAX = 60.0
PIN_S_MAX = 60.0
SYNC_S_MAX = 60.0
HEARTBEAT_S = 15.0
NAME_MAX = 120
"""Of the name of a namespace that nobody knows, this much is remembered."""


class Queries:
    """One method for each route."""

    def __init__(self, store: Store, listeners: Listeners) -> None:
        self._store = store
        self._bodies = Bodies()
        self._listeners = listeners

    async def lookup(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """How much of a chain is here. An unknown namespace is an answer, not an error: nothing of it is here."""
        wanted = await self._bodies.read(request, Lookup)
        _check_form(wanted)
        try:
            namespace = find_namespace(self._store.namespaces, wanted.namespace, tenant_of(request))
        except NotFound:
            namespace = None
        if namespace is None or not namespace.registered:
            await self._keys(None, wanted)  # what cannot be meant is an error in every namespace
            return reply(request, self._unknown(wanted, tenant_of(request)))
        keys = await self._keys(namespace, wanted)
        found = await self._store.find(namespace, keys, wanted.deadline_ms / 1e3)
        tokens = namespace.block_tokens
        miss = None if found.first_miss is None else FirstMiss(found.first_miss, str(found.reason))
        answer = Found(
            namespace_id=namespace.id.hex(),
            block_tokens=tokens,
            asked_blocks=len(keys),
            matched_blocks=found.blocks,
            matched_tokens=found.blocks * tokens,
            tiers={tier: Reach(blocks, blocks * tokens) for tier, blocks in found.per_tier.items()},
            bytes=found.bytes,
            load_ms=round(found.load_ms, 3),
            first_miss=miss,
        )
        return reply(request, answer)

    async def explain(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Where each block of a chain is, and why it is not. Counts as no lookup; an unknown namespace is an answer."""
        wanted = await self._bodies.read(request, Explain)
        _check_form(wanted)
        tenant = tenant_of(request)
        try:
            namespace = find_namespace(self._store.namespaces, wanted.namespace, tenant)
        except NotFound:
            namespace = None
        known = namespace if namespace is not None and namespace.registered else None
        keys = await self._keys(known, wanted)
        spaces = [space for space in self._store.namespaces if tenant in ("", space.tenant)]
        wait_s = wanted.deadline_ms / 1e3
        answer = await explained(self._store, known, keys, raw=tokens_of(wanted), spaces=spaces, wait_s=wait_s)
        return reply(request, answer)

    async def prefetch(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Start to bring a chain up; the answer does not wait for it."""
        namespace, ids = await self._chain(request, Prefetch)
        namespace = await self._store.learn(namespace, ids, DEADLINE_MS / 1e3)
        here, coming = self._store.promoter.prefetch(namespace, ids)
        sources = self._store.promoter.sources(namespace, set(ids))
        done = {"host": {"present": here}}
        done |= {lower.name: {"coming": sources[lower.name]} for lower in self._store.sources}
        return reply(request, Done(namespace.id.hex(), len(ids), done, {"absent": len(ids) - here - coming}))

    async def pin(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Hold a chain in host. What cannot be held is counted under why not."""
        wanted = await self._bodies.read(request, Pin)
        namespace, ids = await self._named(request, wanted)
        try:
            async with asyncio.timeout(PIN_S_MAX):
                namespace = await self._store.learn(namespace, ids, PIN_S_MAX)
                counts = await self._store.pins.pin(namespace, ids, wanted.ttl_s)
        except TimeoutError:
            raise Problem(
                504, "deadline", f"the blocks did not come up to host within {PIN_S_MAX:g} s", "pin fewer, or again"
            ) from None
        done = {"host": {verb: counts[verb] for verb in ("pinned", "renewed")}}
        skipped = {name.removeprefix("skipped_"): n for name, n in counts.items() if name.startswith("skipped_")}
        return reply(request, Done(namespace.id.hex(), len(ids), done, skipped))

    async def unpin(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Let go of a chain."""
        namespace, ids = await self._chain(request, Unpin)
        ended = self._store.pins.unpin(namespace, ids)
        skipped = {"not_pinned": len(ids) - ended}
        return reply(request, Done(namespace.id.hex(), len(ids), {"host": {"unpinned": ended}}, skipped))

    async def flush(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Forget a namespace's blocks. ``skipped.leased``: gone for lookups, but their room only comes back when
        their readers let go. For the rest of ``skipped`` see ``Flushed``."""
        wanted = await self._bodies.read(request, Flush)
        namespace = find_namespace(self._store.namespaces, wanted.namespace, tenant_of(request))
        flushed = await self._store.flush(namespace, wanted.tier)
        skipped = {}
        if "host" in flushed.dropped:
            skipped["leased"] = self._store.host.doomed(namespace)
        done = {tier: {"dropped": blocks} for tier, blocks in flushed.dropped.items()}
        return reply(request, Done(namespace.id.hex(), None, done, skipped | flushed.skipped))

    async def verify(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Check a bounded number of blocks of one tier, in its own workers; the caller asks again for the next."""
        refuse_tenants(request)
        wanted = await self._bodies.read(request, Verify)
        store = self._store
        audits: dict[str, Callable[[str | None], Audit]] = {"host": store.host.audit}
        movers = {"host": store.mover} | {lower.name: lower.mover for lower in store.sources}
        if store.near is not None:
            audits["gpu"] = store.near.gpu.audit
        if store.disk is not None:
            audits["disk"] = store.disk.audit
        if wanted.tier not in audits:
            hint = f"tiers that the daemon checks: {', '.join(audits)}; a bucket is checked by terracekv s3 verify"
            raise NotFound(f"no tier {wanted.tier!r} to check", hint)
        if (stuck := next((lower.stuck for lower in store.sources if lower.name == wanted.tier), None)) is not None:
            raise stuck
        work = partial(audits[wanted.tier], wanted.after)
        found = await movers[wanted.tier].ask(work, AUDIT_S_MAX, f"the {wanted.tier} tier")
        return reply(request, Verified(wanted.tier, **asdict(found)))

    async def sync(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Answers when all that is on its way to the disk tier, or in it, outlives a loss of power."""
        refuse_tenants(request)
        waited = {through.lower.name: through.writes for through in self._store.through}
        writes = [write for of_tier in waited.values() for write in of_tier]
        synced = []
        try:
            async with asyncio.timeout(SYNC_S_MAX):
                if writes:
                    await asyncio.wait(writes)
                if self._store.disk is not None:
                    await self._store.disk_mover.load(self._store.disk.sync, limit_s=SYNC_S_MAX)
                    synced.append(self._store.disk.name)
        except TimeoutError:
            raise Problem(
                504, "deadline", f"not done within {SYNC_S_MAX:g} s", "see what the tiers' queues hold"
            ) from None
        except (OSError, TierDown) as error:
            raise Problem(
                503, "not_synced", f"the disk tier: {error}", "see the log of the machine's kernel"
            ) from error
        return reply(request, Synced({name: len(writes) for name, writes in waited.items()}, synced))

    async def events(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Server-sent events until the client, or the daemon, goes away."""
        after, tenant = _after(request), tenant_of(request)
        with self._listeners.join(request) as listener:
            response = stream()
            events = self._store.events.listen(after)
            closing = tasks.begin(_wait(listener.news), "events-end")
            coming = tasks.begin(_next(events), "events-next")
            try:
                await response.prepare(request)
                await listener.send(response, b": connected\n\n")
                while not listener.ended:
                    await asyncio.wait((coming, closing), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        event = coming.result()
                        coming = tasks.begin(_next(events), "events-next")
                        if self._is_for(tenant, event):
                            await listener.send(response, _written(event))
                    elif not listener.ended:
                        await listener.send(response, b": still here\n\n")
                await response.write_eof()
            finally:
                closing.cancel()
                coming.cancel()
                await asyncio.wait((coming, closing))
                await events.aclose()  # type: ignore[attr-defined]
        return response

    def _is_for(self, tenant: str, event: Mapping[str, Any]) -> bool:
        """Whether an event is of a namespace that a tenant may see. That some were missed is for everybody."""
        if not tenant or "namespace" not in event:
            return True
        namespace = self._store.namespaces.get(bytes.fromhex(event["namespace"]))
        return namespace is not None and namespace.tenant == tenant

    def _unknown(self, wanted: Chain, tenant: str) -> Found:
        asked = len(wanted.keys or ())
        counts, reason = self._store.stats, Miss.UNKNOWN_NAMESPACE
        counts.lookups += 1
        counts.asked_blocks += asked
        counts.misses[reason] += 1
        nobody = Namespace(b"", 0, 0, model=wanted.namespace[:NAME_MAX], tenant=tenant)
        self._store.recent.add(nobody, asked, stats.Found(0, {}, {}, 0, 0.0, 0, reason))
        nothing = {tier: Reach(0, 0) for tier in self._store.tiers}
        return Found(None, 0, asked, 0, 0, nothing, 0, 0.0, FirstMiss(0, reason.value))

    async def _chain(self, request: web.BaseRequest, kind: type[Chain]) -> tuple[Namespace, list[bytes]]:
        return await self._named(request, await self._bodies.read(request, kind))

    async def _named(self, request: web.BaseRequest, wanted: Chain) -> tuple[Namespace, list[bytes]]:
        """The namespace, and the ids of all shards of the chain's blocks. NotFound when not known."""
        namespace = find_namespace(self._store.namespaces, wanted.namespace, tenant_of(request))
        if not namespace.registered:
            raise NotFound(
                f"namespace {namespace.id.hex()[:16]} is known from stored blocks only, not what its blocks are",
                "an engine that connects with it makes it known again",
            )
        keys = await self._keys(namespace, wanted)
        return namespace, [block_id(key, shard) for key in keys for shard in range(namespace.shards)]

    async def _keys(self, namespace: Namespace | None, wanted: Chain) -> list[bytes]:
        """Keys of a chain; none of tokens in a namespace that nobody knows. BadRequest when they cannot be meant."""
        tokens, listed = _check_form(wanted)

        def work() -> list[bytes] | BadRequest:
            try:
                if tokens is not None:
                    parsed = parse_tokens(tokens)
                    return block_keys(namespace.id, parsed, namespace.block_tokens) if namespace is not None else []
                keys = [parse_key(key, f"keys[{index}]") for index, key in enumerate(listed)]
                if len(set(keys)) != len(keys):
                    raise BadRequest("the same key twice in one request", "send each block of a chain once")
                return keys
            except BadRequest as error:
                return error  # raised where it is answered: a worker that raises has failed

        size = 64 * len(listed) if tokens is None else len(tokens)
        keys = work() if size <= INLINE_BYTES else await self._store.mover.ask(work, WORK_S_MAX, "host")
        if isinstance(keys, BadRequest):
            raise keys
        return keys


def _check_form(wanted: Chain) -> tuple[bytes | None, list[str]]:
    """Tokens as they were sent, or None and the keys."""
    tokens = tokens_of(wanted)
    if (tokens is None) == (wanted.keys is None):
        given = "neither tokens nor keys" if tokens is None else "both tokens and keys"
        raise BadRequest(f"{given} are given", "give one of them: tokens or keys")
    return tokens, wanted.keys or []


def _after(request: web.BaseRequest) -> int | None:
    text = request.headers.get("Last-Event-ID") or request.query.get("after")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadRequest(f"after: {text[:40]!r} is not the number of an event", "leave it out to hear of what is new")
    return int(text)


async def _wait(news: asyncio.Event) -> None:
    await news.wait()


async def _next(stream: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await anext(stream)


def _written(event: Mapping[str, Any]) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event["seq"], event["event"].encode(), msgspec.json.encode(event))

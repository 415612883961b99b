"""Block bytes over HTTP: streamed between a connection and the arena, never collected on the way.

Owns no state: a download holds a lease, an upload a reserved slot, both for as long as the request lasts. Called by
``http_door`` on the event loop. Imports aiohttp, ``below``, ``http_bodies``, ``http_gate``, ``http_messages``,
``naming``, ``store`` and ``tiers``.

A block is uploaded into its slot piece by piece and becomes findable at its commit; whatever ends the upload before
that gives the slot back.
"""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from terracekv.daemon.below import Lower
from terracekv.daemon.http_bodies import go_ahead, next_piece, refuse_encoded, waits_for_leave
from terracekv.daemon.http_gate import tenant_of
from terracekv.daemon.http_messages import Done, Problem, Stored, parse_key, reply, too_large
from terracekv.daemon.naming import find_namespace
from terracekv.daemon.store import COMMIT_S, Store
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk_shares import DiskShares
from terracekv.tiers.errors import BadRequest, NotFound, TierDown, TierFull
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.shares import Shares
from terracekv.tiers.slot_tier import DAEMON
from terracekv.tiers.slots import Slot, slot_bytes_for
from terracekv.tiers.tier import PAGE, Outcome

CHUNK_BYTES = 1 << 20
UPLOAD_IDLE_S = 30.0
UPLOAD_S_MAX = 600.0
DOWNLOAD_IDLE_S = 60.0
"""A reader that takes nothing for so long loses its connection, and with it its lease."""
PROMOTE_S_MAX = 30.0
LEARN_S_MAX = 2.0
"""Time in which a distant tier must say whether it has a block; after it the block is taken as absent."""
CHECKSUM = "X-TerraceKV-Checksum"
TIER = "X-TerraceKV-Tier"
ALGORITHM = "xxh3-64"


class Blocks:
    """GET, HEAD, PUT and DELETE of one shard of a block."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Bring the block into host if need be and stream it from there."""
        namespace, id = self._target(request, names)
        namespace = await self._store.learn(namespace, [id], LEARN_S_MAX)
        tier = self._store.holder(namespace, id) or "host"
        slot = await self._lease(request, namespace, id)
        try:
            digest = self._store.host.checksum_of(slot)
            payload = self._store.host.payload(slot, namespace.block_bytes)
            return await _stream(request, payload, digest, tier)
        finally:
            self._store.host.release([slot])

    async def head(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Whether it is here, and in which tier. Does not count as a use of the block."""
        namespace, id = self._target(request, names)
        namespace = await self._store.learn(namespace, [id], LEARN_S_MAX)
        tier = self._store.holder(namespace, id)
        if tier is None:
            raise NotFound("no such block", "POST /v1/lookup says how much of a chain is here")
        headers = {"Content-Length": str(namespace.block_bytes), TIER: tier, "Accept-Ranges": "bytes"}
        return web.Response(headers=headers, content_type="application/octet-stream")

    async def put(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Stream a block into host. 201 when it was stored, 200 when it was there already."""
        namespace, id = self._target(request, names)
        refuse_encoded(request)
        wanted = _wanted_checksum(request)
        durable = _flag(request, "durable")
        if durable and not self._store.below:
            raise BadRequest("durable=1, and there is no tier below host", "leave it out, or enable disk or s3")
        _check_length(request.content_length, namespace)
        (slot,) = self._store.reserve(namespace, [id], DAEMON)
        if isinstance(slot, Slot):
            outcome, digest = await self._receive(request, namespace, id, slot, wanted)
        elif slot is Outcome.PRESENT:
            await _skip(request, namespace.block_bytes)
            outcome, digest = slot, None
        else:
            raise self._full(namespace, slot)
        if outcome is Outcome.STALE:
            raise Problem(
                409, "stale", "the namespace was flushed during the upload", "compute the block anew; its bytes are old"
            )
        if durable:
            await self._make_durable(request, namespace, id)
        shown = None if digest is None else f"{ALGORITHM}:{digest:016x}"
        return reply(request, Stored(outcome, shown, durable), 201 if outcome is Outcome.STORED else 200)

    async def delete(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Forget the block in every tier. Idempotent; whoever reads it may finish."""
        namespace, id = self._target(request, names)
        counts = await self._store.delete(namespace, [id])
        done = {tier: {"deleted": count} for tier, count in counts.items()}
        skipped = {f"{tier}_unreachable": 1 for tier in self._store.tiers if tier not in counts}
        if not skipped and not any(counts.values()):
            skipped["absent"] = 1
        return reply(request, Done(namespace.id.hex(), 1, done, skipped))

    def _target(self, request: web.BaseRequest, names: Mapping[str, str]) -> tuple[Namespace, bytes]:
        namespace = find_namespace(self._store.namespaces, names["ns"], tenant_of(request))
        if not namespace.registered:
            raise NotFound(
                f"namespace {namespace.id.hex()[:16]} is known from stored blocks only, not what its blocks are",
                "an engine that connects with it makes it known again",
            )
        shard = names.get("shard", "0")
        if not shard.isascii() or not shard.isdigit() or int(shard) >= namespace.shards:
            raise BadRequest(
                f"shard {shard[:20]!r} is not one of {namespace.shards}", f"shards go from 0 to {namespace.shards - 1}"
            )
        return namespace, block_id(parse_key(names["key"]), int(shard))

    async def _lease(self, request: web.BaseRequest, namespace: Namespace, id: bytes) -> Slot:
        try:
            async with asyncio.timeout(PROMOTE_S_MAX):
                (result,) = await self._store.promoter.gather(namespace, [id])
        except TimeoutError:
            raise Problem(
                504, "deadline", f"the block did not come up to host within {PROMOTE_S_MAX:g} s", "try again later"
            ) from None
        if isinstance(result, Slot):
            return result
        if result in (Outcome.FULL, Outcome.QUOTA):
            raise self._full(namespace, result)
        if result is Outcome.FAILED:
            errors = [error for lower in self._store.below if (error := _last_error(request, lower))]
            raise TierDown(f"the block could not be read: {'; '.join(errors) or 'see the log'}", "treat it as a miss")
        raise NotFound(
            "no such block" if result is Outcome.MISS else f"no such block any more: {result}",
            "POST /v1/lookup says how much of a chain is here",
        )

    async def _receive(
        self, request: web.BaseRequest, namespace: Namespace, id: bytes, slot: Slot, wanted: int | None
    ) -> tuple[Outcome, int]:
        """The body into the slot, and the slot to its commit."""
        host, size = self._store.host, namespace.block_bytes
        try:
            room = host.payload(slot, size)
            await _fill(room, request)
            # Hashed once more at the commit: this one must be known before anything can be seen.
            digest = await self._store.mover.ask(lambda: checksum(room), COMMIT_S, "host")
            if wanted is not None and digest != wanted:
                raise BadRequest(
                    f"the body's checksum is {ALGORITHM}:{digest:016x}, {CHECKSUM} says {ALGORITHM}:{wanted:016x}",
                    "the body was damaged on its way, or the hash is of other bytes: hash the body and send both again",
                )
        except BaseException:
            host.abort([slot])
            raise
        (outcome,), _ = await self._store.commit(namespace, [(id, slot)])
        return outcome, digest

    async def _make_durable(self, request: web.BaseRequest, namespace: Namespace, id: bytes) -> None:
        if not await self._store.make_durable(namespace, id):
            tier = self._store.below[-1]
            shares, needed = self._store.shares.get(tier.name), PAGE + slot_bytes_for(namespace.block_bytes)
            limit = shares.limit(namespace.id) if shares is not None else None
            if shares is not None and limit is not None and limit < needed:
                raise _over_quota(shares, namespace, tier.name, needed)
            why = _last_error(request, tier) or "its queue is full, or see the log"
            raise Problem(
                503,
                "tier_down",
                f"the block is in host but did not reach {tier.name}: {why}",
                "repeat the request to try again",
                tier=tier.name,
            )

    def _full(self, namespace: Namespace, why: Outcome) -> TierFull | Problem:
        if why is Outcome.QUOTA:
            return _over_quota(self._store.host.shares, namespace, "host", slot_bytes_for(namespace.block_bytes))
        status = self._store.host.status()
        return TierFull(
            "host",
            slot_bytes_for(namespace.block_bytes),
            status.capacity_bytes - status.used_bytes,
            "every block that is left is leased, pinned or being written: release, unpin, or raise host.size",
        )


def _last_error(request: web.BaseRequest, lower: Lower) -> str | None:
    """A tier's, for who may see all: it may be of anybody's blocks, and name them."""
    return None if tenant_of(request) else lower.status().last_error


def _over_quota(shares: Shares | DiskShares, namespace: Namespace, tier: str, needed: int) -> Problem:
    """507 with the tenant's numbers."""
    tenant, limit = shares.tenant(namespace.id), shares.limit(namespace.id) or 0
    used = shares.of(tenant)
    return Problem(
        507,
        "quota",
        f"tenant {tenant} may hold {limit} bytes of {tier} and holds {used}; {needed} more are needed",
        "all that is left of its own is leased, pinned or being written: release, unpin, or raise its quota",
        tier=tier,
        needed_bytes=needed,
        used_bytes=used,
        limit_bytes=limit,
    )


async def _fill(room: memoryview, request: web.BaseRequest) -> None:
    """The body into ``room``, of which it must fill every byte."""
    size, filled = len(room), 0
    await go_ahead(request)
    try:
        async with asyncio.timeout(UPLOAD_S_MAX):
            while piece := await next_piece(request, UPLOAD_IDLE_S):
                end = filled + len(piece)
                if end > size:
                    raise too_large("the body", end, size, "a block of this namespace has exactly as many bytes")
                room[filled:end] = piece
                filled = end
    except TimeoutError:
        raise Problem(408, "timeout", f"the upload took more than {UPLOAD_S_MAX:g} s", "send it faster") from None
    if filled < size:
        raise _too_short(filled, size)


async def _skip(request: web.BaseRequest, size: int) -> None:
    """Read a body that is not needed, if the client sends it unasked: it will look at no answer before its end."""
    if not waits_for_leave(request):
        skipped = 0
        while skipped <= size and (piece := await next_piece(request, UPLOAD_IDLE_S)):
            skipped += len(piece)


async def _stream(request: web.BaseRequest, payload: memoryview, digest: int, tier: str) -> web.StreamResponse:
    etag, size = f'"{digest:016x}"', len(payload)
    first, last = 0, size
    ranged = "Range" in request.headers and request.headers.get("If-Range", etag) == etag
    if ranged:
        first, last = _range(request, size)
    headers = {CHECKSUM: f"{ALGORITHM}:{digest:016x}", "ETag": etag, "Accept-Ranges": "bytes", TIER: tier}
    if ranged:
        headers["Content-Range"] = f"bytes {first}-{last - 1}/{size}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = last - first
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the reader has gone")
    # The transport may keep a reference to what it could not send yet instead of a copy. With no buffer allowed, drain
    # returns when all of it is in the kernel, so nothing of the arena is looked at after the lease has ended. When the
    # transfer ends early the rest must not be sent later: the slot may hold another block by then.
    transport.set_write_buffer_limits(high=0)
    try:
        await response.prepare(request)
        for start in range(first, last, CHUNK_BYTES):
            async with asyncio.timeout(DOWNLOAD_IDLE_S):
                await response.write(payload[start : min(start + CHUNK_BYTES, last)])
                await request.writer.drain()
        await response.write_eof()
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError(f"the reader took nothing for {DOWNLOAD_IDLE_S:g} s") from None
    except BaseException:
        transport.abort()
        raise
    if not transport.is_closing():  # one of TLS that is gone has no limits to set
        transport.set_write_buffer_limits()
    return response


def _range(request: web.BaseRequest, size: int) -> tuple[int, int]:
    """First byte and the one after the last of a single range."""
    try:
        asked = request.http_range
        first, last, _ = asked.indices(size)
        if asked.start == 0 and request.headers["Range"].partition("=")[2].strip().startswith("-"):
            first, last = 0, 0  # the last 0 bytes are none, and not all of them
    except ValueError:
        first, last = 0, 0
    if first >= last:
        raise Problem(
            416,
            "range_not_satisfiable",
            f"Range: {request.headers['Range'][:80]!r} is not one range of {size} bytes",
            "write bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT",
            headers={"Content-Range": f"bytes */{size}"},
            size_bytes=size,
        )
    return first, last


def _wanted_checksum(request: web.BaseRequest) -> int | None:
    text = request.headers.get(CHECKSUM)
    if text is None:
        return None
    algorithm, _, digits = text.partition(":")
    try:
        if algorithm.strip().lower() != ALGORITHM or len(digits) != 16:
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadRequest(
            f"{CHECKSUM}: {text[:80]!r} is not {ALGORITHM}:<16 hex digits>",
            "send the XXH3 hash of 64 bits of the whole body, or leave the header out",
        ) from None


def _flag(request: web.BaseRequest, name: str) -> bool:
    unknown = [other for other in request.query if other != name]
    value = request.query.get(name, "0")
    if unknown or value not in ("0", "1", "true", "false"):
        raise BadRequest(f"the query is ?{request.query_string[:80]}", f"only {name}=1 or {name}=0 can be asked")
    return value in ("1", "true")


def _check_length(length: int | None, namespace: Namespace) -> None:
    size = namespace.block_bytes
    if length is None:
        return
    if length > size:
        raise too_large("the body", length, size, "a block of this namespace has exactly as many bytes")
    if length < size:
        raise _too_short(length, size)


def _too_short(length: int, size: int) -> Problem:
    return Problem(
        400,
        "bad_request",
        f"the body is {length} bytes; a block of this namespace has {size}",
        "only whole blocks are stored",
        size_bytes=length,
        needed_bytes=size,
    )

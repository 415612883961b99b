"""The store: all tiers as one. Says what is present, takes blocks in, hands them out, forgets them.

Owns the parts that do this (promoter, write-through, pins, events) and the counts. Everything here runs on the event
loop, so two steps without an ``await`` between them cannot be interrupted by another request; blocking work goes
through the mover. Both doors call it. Imports ``tiers`` and its own parts.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from terracekv.daemon.events import Events
from terracekv.daemon.mover import Mover
from terracekv.daemon.pins import SHARE, Pins
from terracekv.daemon.promotion import Arrived, Promoter
from terracekv.daemon.stats import Stats
from terracekv.daemon.write_through import WriteThrough
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.errors import BadRequest, NotFound
from terracekv.tiers.eviction import Ghosts
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Miss, Outcome

GHOSTS = 1 << 16
"""Evicted blocks remembered, to tell ``evicted`` from ``absent``."""
HOST_BYTES_PER_S = 5e9
"""Assumed copy rate from host to engine: the copy happens in the engine, out of the daemon's sight."""
DISK_LATENCY_MS = 0.5
DELETE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup. ``per_tier[t]``: leading blocks that can be had from tier t or above. ``split[t]``: how many
    of the matched blocks tier t would serve; the values add up to ``blocks``. ``bytes`` are those of all shards."""

    blocks: int
    per_tier: dict[str, int]
    split: dict[str, int]
    bytes: int
    load_ms: float
    first_miss: int | None
    reason: Miss | None


class Store:
    """``admission`` decides what of host is written through to disk: see ``WriteThrough``."""

    def __init__(
        self, *, namespaces: Namespaces, host: HostTier, disk: DiskTier | None, mover: Mover, admission: str
    ) -> None:
        self.namespaces = namespaces
        self.host = host
        self.disk = disk
        self.mover = mover
        self.events = Events()
        self.stats = Stats()
        self.promoter = Promoter(namespaces=namespaces, host=host, disk=disk, mover=mover, stats=self.stats)
        self.write_through = (
            WriteThrough(
                namespaces=namespaces, host=host, disk=disk, mover=mover, admission=admission, stats=self.stats
            )
            if disk
            else None
        )
        pinnable = int(host.status().capacity_bytes * SHARE)
        self.pins = Pins(host=host, promoter=self.promoter, namespaces=namespaces, bytes_max=pinnable)
        self._evicted = Ghosts(GHOSTS)
        host.on_evict = self._left_host

    @property
    def tiers(self) -> dict[str, HostTier | DiskTier]:
        """Configured tiers by name, from the top down."""
        return {"host": self.host} | ({"disk": self.disk} if self.disk else {})

    def resolve(self, name: str) -> Namespace:
        """A namespace by its id in hex, a unique prefix of it (8 digits or more), or a model name only it bears."""
        matches = [n for n in self.namespaces if n.model == name]
        if not matches and len(name) >= 8:
            matches = [n for n in self.namespaces if n.id.hex().startswith(name.lower())]
        if len(matches) > 1:
            ids = ", ".join(n.id.hex()[:16] for n in matches)
            raise BadRequest(f"{len(matches)} namespaces are called {name!r}", f"name one by its id: {ids}")
        if not matches:
            raise NotFound(
                f"no namespace {name!r}",
                "GET /v1/namespaces lists those that engines have registered; a prefix of an id needs 8 digits",
            )
        return matches[0]

    def lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> Found:
        """How many leading blocks are present, whole (all their shards), and from where. Reads no payload."""
        shards = max(1, namespace.shards)
        ids = [block_id(key, shard) for key in keys for shard in range(shards)]
        absent = self.host.absent(namespace, ids)
        in_host = absent[0] if absent else len(ids)
        below = self.disk.leading(namespace, [ids[index] for index in absent]) if self.disk and absent else 0
        position = absent[below] if below < len(absent) else len(ids)
        blocks = position // shards
        from_disk = min(blocks, -(-below // shards))
        load_ms = blocks * shards * namespace.block_bytes / HOST_BYTES_PER_S * 1e3
        if below:
            load_ms += DISK_LATENCY_MS + below * namespace.block_bytes / self.promoter.disk_read.bytes_per_s * 1e3
        missed = blocks < len(keys) or not keys
        found = Found(
            blocks=blocks,
            per_tier={"host": in_host // shards} | ({"disk": blocks} if self.disk else {}),
            split={"host": blocks - from_disk, "disk": from_disk},
            bytes=blocks * shards * namespace.block_bytes,
            load_ms=load_ms,
            first_miss=blocks if missed else None,
            reason=self._why(keys[blocks:], shards) if missed else None,
        )
        self._count(namespace, len(keys), found)
        return found

    def acquire(
        self, namespace: Namespace, ids: Sequence[bytes], arrived: Arrived
    ) -> tuple[list[Slot | None], list[int]]:
        """Lease the leading run of ``ids``: see ``Promoter.acquire``."""
        slots, pending = self.promoter.acquire(namespace, ids, arrived)
        self._touched(namespace, [id for id, slot in zip(ids, slots, strict=True) if slot is not None])
        return slots, pending

    def reserve(self, namespace: Namespace, ids: Sequence[bytes], session: int) -> list[Slot | Outcome]:
        """Slots to write for what is not in host: see ``HostTier.reserve``."""
        slots = self.host.reserve(namespace, ids, session)
        self._touched(namespace, [id for id, slot in zip(ids, slots, strict=True) if slot is Outcome.PRESENT])
        self.stats.refused_reservations += sum(slot is Outcome.FULL for slot in slots)
        return slots

    async def commit(
        self, namespace: Namespace, written: Sequence[tuple[bytes, Slot]], *, durable: bool = False
    ) -> tuple[list[Outcome], list[bool]]:
        """Seal written slots: outcomes (STORED, PRESENT or STALE), and with ``durable`` what has reached disk.

        ``namespace`` is the snapshot of the reservation: blocks computed before a flush do not come in after it.
        The caller has taken the slots out of the reservation: whatever happens, they are not its any more.
        """
        size = namespace.block_bytes
        payloads = [self.host.payload(slot, size) for _, slot in written]
        try:
            digests = await self.mover.load(lambda: [checksum(payload) for payload in payloads])
        except BaseException:
            self.host.abort([slot for _, slot in written])
            raise
        if not self.namespaces.is_current(namespace):
            self.host.abort([slot for _, slot in written])
            self.stats.stale_commits += len(written)
            return [Outcome.STALE] * len(written), [False] * len(written)
        outcomes = self.host.commit(
            namespace, [(id, slot, digest) for (id, slot), digest in zip(written, digests, strict=True)]
        )
        failpoint("store.committed")
        stored = [id for (id, _), outcome in zip(written, outcomes, strict=True) if outcome is Outcome.STORED]
        self._emit("stored", namespace, stored, tier="host")
        if self.write_through is None:
            return outcomes, [False] * len(written)
        writes = dict(zip(stored, self.write_through.committed(namespace, stored, durable), strict=True))
        if not durable:
            return outcomes, [False] * len(written)
        pending = [write for write in writes.values() if write is not None]
        if pending:
            await asyncio.wait(pending)
        failpoint("store.durable")
        return outcomes, [self._is_durable(namespace, id) for id, _ in written]

    async def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        """Forget blocks in every tier: how many each had. Whoever reads one under a lease may finish."""
        self.pins.unpin(ids)
        counts = dict.fromkeys(self.tiers, 0)
        # A block on its way from tier to tier arrives behind us, and would be listed again: so once more, until a round
        # finds nothing and nothing moves (or an engine keeps storing it: then it is there because it was stored).
        for _ in range(DELETE_ROUNDS):
            gone = await self._forget(namespace, ids)
            counts = {name: max(count, gone[name]) for name, count in counts.items()}
            if moving := self._under_way(set(ids)):
                await asyncio.wait(moving)
            elif not any(gone.values()):
                break
        return counts

    def _under_way(self, ids: set[bytes]) -> "list[asyncio.Future[Outcome]]":
        """Moves of these blocks between tiers that have not ended."""
        writes = self.write_through.under_way(ids) if self.write_through is not None else []
        return self.promoter.under_way(ids) + writes

    async def _forget(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        counts = {}
        for name, tier in self.tiers.items():
            counts[name] = await self.mover.load(lambda tier=tier: tier.delete(namespace, ids))  # type: ignore[misc]
        return counts

    async def flush(self, namespace: Namespace, tier: str | None = None) -> dict[str, int]:
        """Make all blocks of a namespace misses, in every tier or in one: how many each had.

        In every tier it raises the epoch: at once for lookups, for writes under way too, and for good.
        """
        if tier is not None and tier not in self.tiers:
            raise BadRequest(f"no tier {tier!r}", f"configured tiers: {', '.join(self.tiers)}")
        if tier is None:
            raised = await self.mover.load(lambda: self.namespaces.raise_epoch(namespace.id))
            namespace = replace(raised, epoch=raised.epoch - 1)  # of two flushes at once each ends an epoch of its own
            self.events.publish("flushed", namespace=namespace.id.hex(), epoch=raised.epoch)
            self.pins.expire()
        counts = {}
        if tier in (None, "host"):
            self.pins.end(namespace)
            counts["host"] = await self.mover.load(lambda: self.host.drop(namespace))
        disk = self.disk
        if disk is not None and tier in (None, "disk"):
            # What was being written when the epoch rose may still be listed, under the old epoch: after it, not before.
            if self.write_through is not None and (writing := self.write_through.under_way_in(namespace)):
                await asyncio.wait(writing)
            older_than = replace(namespace, epoch=namespace.epoch + 1)
            counts["disk"] = await self.mover.load(lambda: disk.reclaim(older_than))
        return counts

    def check(self) -> None:
        """Books of all tiers; AssertionError names the first difference."""
        for tier in self.tiers.values():
            tier.check()

    def _is_durable(self, namespace: Namespace, id: bytes) -> bool:
        return self.disk is not None and self.disk.leading(namespace, [id]) == 1

    def _touched(self, namespace: Namespace, ids: Sequence[bytes]) -> None:
        if self.write_through is not None and ids:
            self.write_through.touched(namespace, ids)

    def _left_host(self, namespace: Namespace, ids: list[bytes], reason: str) -> None:
        """Called under the host tier's lock, from any thread."""
        for id in ids:
            if reason != "capacity":
                self._evicted.discard(id)
                continue
            self._evicted.add(id)
            if self.disk is not None and not self.disk.leading(namespace, [id]):
                self.stats.evicted_before_persist += 1
        self._emit("removed", namespace, ids, tier="host", reason=reason)

    def _emit(self, kind: str, namespace: Namespace, ids: Sequence[bytes], **fields: str) -> None:
        if not self.events.listeners:
            self.events.skip(len(ids))
        else:
            for id in ids:
                self.events.publish(kind, namespace=namespace.id.hex(), block=id.hex(), **fields)

    def _why(self, rest: Sequence[bytes], shards: int) -> Miss:
        if not rest:
            return Miss.SHORTER_THAN_BLOCK
        if self.disk is not None and self.disk.status().mode == "down":
            return Miss.TIER_DOWN
        evicted = any(block_id(rest[0], shard) in self._evicted for shard in range(shards))
        return Miss.EVICTED if evicted else Miss.ABSENT

    def _count(self, namespace: Namespace, asked: int, found: Found) -> None:
        stats = self.stats
        stats.lookups += 1
        stats.asked_blocks += asked
        stats.asked_tokens += asked * namespace.block_tokens
        stats.matched_blocks += found.blocks
        stats.matched_tokens += found.blocks * namespace.block_tokens
        for tier, blocks in found.split.items():
            stats.matched[tier] += blocks
        if found.reason is not None:
            stats.misses[found.reason] += 1

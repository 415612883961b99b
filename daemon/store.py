"""The store: all tiers as one. Says what is present, takes blocks in, hands them out, forgets them.

Owns the parts that do this (promoter, write-through, pins, forgetting, events) and the counts. Everything here runs on
the event loop, so two steps without an ``await`` between them cannot be interrupted by another request; blocking work
goes through the movers. Both doors call it. Imports ``tiers`` and its own parts.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from terracekv.daemon.below import DISK_BYTES_PER_S, Lower, places
from terracekv.daemon.departed import Departed
from terracekv.daemon.distant import Distant
from terracekv.daemon.events import Events
from terracekv.daemon.forgetting import Flushed, Forgetting
from terracekv.daemon.mover import Mover
from terracekv.daemon.near import Near
from terracekv.daemon.pins import SHARE, Pins
from terracekv.daemon.promotion import Arrived, Promoter
from terracekv.daemon.recent import Recent
from terracekv.daemon.stats import Found, Stats
from terracekv.daemon.write_through import WriteThrough, settled
from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.disk_shares import DiskShares
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.shares import Shares
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Miss, Outcome, Tier, TierStatus

HOST_BYTES_PER_S = 5e9
"""Assumed copy rate from host to engine: the copy happens in the engine, out of the daemon's sight."""
COMMIT_S = 30.0
"""A commit waits no longer for its checksums."""


class Store:
    """``admission`` decides what of host is written through to disk: see ``WriteThrough``. ``far`` is the lowest tier,
    behind a network; ``near`` the one above host, on a GPU. ``mover`` works on memory; the disk and the folder of state
    have movers of their own where there is one that may hang."""

    def __init__(
        self,
        *,
        namespaces: Namespaces,
        host: HostTier,
        disk: DiskTier | None,
        mover: Mover,
        admission: str,
        far: Distant | None = None,
        near: Near | None = None,
        disk_mover: Mover | None = None,
        state_mover: Mover | None = None,
    ) -> None:
        self.namespaces = namespaces
        self.host = host
        self.disk = disk
        self.far = far
        self.near = near
        self.mover = mover
        self.disk_mover = disk_mover or mover
        self.state_mover = state_mover or mover
        self.below: list[Lower] = []
        if disk is not None:
            self.below.append(Lower(disk, self.disk_mover, admission=admission, bytes_per_s=DISK_BYTES_PER_S))
        if far is not None:
            self.below.append(far)
        self.sources = [near, *self.below] if near is not None else self.below
        """The tiers that host reads from, the quickest first."""
        self.events = Events()
        self.stats = Stats()
        self.recent = Recent()
        for lower in self.sources:
            self.stats.matched.setdefault(lower.name, 0)
            self.stats.tokens.setdefault(lower.name, 0)
            self.stats.loaded.setdefault(lower.name, 0)
        self.promoter = Promoter(
            namespaces=namespaces,
            host=host,
            below=self.sources,
            mover=mover,
            stats=self.stats,
            promoted=self._promoted,
        )
        self.through = [
            WriteThrough(namespaces=namespaces, host=host, lower=lower, stats=self.stats) for lower in self.below
        ]
        pinnable = int(host.status().capacity_bytes * SHARE)
        self.pins = Pins(host=host, promoter=self.promoter, namespaces=namespaces, bytes_max=pinnable)
        self.forgetting = Forgetting(
            namespaces=namespaces,
            host=host,
            below=self.below,
            near=near,
            mover=mover,
            state_mover=self.state_mover,
            promoter=self.promoter,
            through=self.through,
            pins=self.pins,
            events=self.events,
        )
        self.departed = Departed()
        self.promoter.damaged, self.promoter.lacking = self.departed.damaged, self._lacking
        host.on_evict = self._left_host
        if disk is not None and 4 * host.status().capacity_bytes <= 3 * disk.capacity_bytes:
            disk.roller.held_above = host.has  # one about as large as the disk has nearly all of it, used or not
        if near is not None:
            near.below = self.below
            near.hot.promoted = lambda namespace, id: self._emit("stored", namespace, [id], tier="gpu")
            near.gpu.on_evict = lambda ns, ids, why: self._emit("removed", ns, ids, tier="gpu", reason=why)
        self._places: list[HostTier | Lower] = [*([near] if near is not None else []), host, *self.below]

    @property
    def tiers(self) -> dict[str, Tier]:
        """Configured tiers by name, from the top down."""
        upper: dict[str, Tier] = {self.near.name: self.near.tier} if self.near is not None else {}
        return upper | {"host": self.host} | {lower.name: lower.tier for lower in self.below}

    @property
    def shares(self) -> dict[str, Shares | DiskShares]:
        """The books of who holds how much, of the tiers that can be shared out."""
        near = {self.near.name: self.near.gpu.shares} if self.near is not None else {}
        disk = {self.disk.name: self.disk.shares} if self.disk is not None else {}
        return near | {"host": self.host.shares} | disk

    def holders(self, namespace: Namespace, id: bytes) -> Iterator[str]:
        """The tiers that are known to have a block, the uppermost first. Does not count as a use of it."""
        return (place.name for place in self._places if place.leading(namespace, [id]))

    def holder(self, namespace: Namespace, id: bytes) -> str | None:
        """The uppermost of them."""
        return next(self.holders(namespace, id), None)

    def statuses(self) -> dict[str, TierStatus]:
        """What each tier says of itself, from the top down. Waits for no tier that is stuck."""
        return {place.name: place.status() for place in self._places}

    def lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> Found:
        """How many leading blocks are present, whole (all their shards), and from where, as far as is known here.
        Reads no payload and asks nobody."""
        found, _ = self.look(namespace, keys)
        self._count(namespace, len(keys), found)
        return found

    def begin_lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> "Found | asyncio.Future[int]":
        """The answer, when nobody need be asked for it; else a question under way, after which, or after as much of it
        as there is time for, ``lookup`` answers."""
        found, unknown = self.look(namespace, keys)
        question = self.far.ask(namespace, unknown) if self.far is not None and unknown else None
        if question is not None:
            return question
        self._count(namespace, len(keys), found)
        return found

    async def find(self, namespace: Namespace, keys: Sequence[bytes], wait_s: float) -> Found:
        """As ``lookup``, waiting up to ``wait_s`` for what a distant tier has to say."""
        begun = self.begin_lookup(namespace, keys)
        if isinstance(begun, Found):
            return begun
        await asyncio.wait([begun], timeout=wait_s)
        return self.lookup(self.namespaces.get(namespace.id) or namespace, keys)

    def question(self, namespace: Namespace, ids: Sequence[bytes]) -> "asyncio.Future[int] | None":
        """Ask about the first of ``ids`` of which nothing is known, and those after it; None when all is known."""
        if self.far is None:
            return None
        rest = [ids[index] for index in self._absent(namespace, ids)]
        known = len(places(self.below, namespace, rest, self.promoter))
        return self.far.ask(namespace, rest[known:])

    async def learn(self, namespace: Namespace, ids: Sequence[bytes], wait_s: float) -> Namespace:
        """Wait up to ``wait_s`` for what a distant tier has to say about ``ids``; the namespace's snapshot of then."""
        question = self.question(namespace, ids)
        if question is not None:
            await asyncio.wait([question], timeout=wait_s)
        return self.namespaces.get(namespace.id) or namespace

    def look(self, namespace: Namespace, keys: Sequence[bytes]) -> tuple[Found, list[bytes]]:
        """What is known, and the ids from the first one on of which nothing is. Counts as no lookup."""
        shards = max(1, namespace.shards)
        ids = [block_id(key, shard) for key in keys for shard in range(shards)]
        absent = self._absent(namespace, ids)
        rest = [ids[index] for index in absent]
        where = places(self.below, namespace, rest) if rest else []
        unknown, reason = rest[len(where) :], None
        if self.far is not None and not self._worth(namespace, where, shards):
            del where[where.index(self.far) :]
            unknown, reason = [], Miss.TOO_SLOW

        def end(count: int) -> int:
            """Whole blocks that precede the absent id of this number."""
            return (absent[count] if count < len(absent) else len(ids)) // shards

        blocks = end(len(where))
        per_tier, lowest = {"host": end(0)}, dict[int, str]()
        if self.near is not None:
            off_gpu = self.near.absent(namespace, ids)
            leading = off_gpu[0] // shards if off_gpu else len(keys)
            per_tier = {self.near.name: leading} | per_tier
            lowest = dict.fromkeys(set(range(blocks)) - {index // shards for index in off_gpu}, self.near.name)
        load_ms = blocks * shards * namespace.block_bytes / HOST_BYTES_PER_S * 1e3
        for depth, lower in enumerate(self.below):
            deeper = self.below[depth + 1 :]
            per_tier[lower.name] = end(next((at for at, place in enumerate(where) if place in deeper), len(where)))
            mine = [absent[at] // shards for at, place in enumerate(where) if place is lower]
            lowest |= {block: lower.name for block in mine if block < blocks}
            if mine:
                load_ms += lower.latency_s * 1e3 + len(mine) * namespace.block_bytes / lower.read.bytes_per_s * 1e3
        split = Counter(lowest.values())
        missed = blocks < len(keys) or not keys
        found = Found(
            blocks=blocks,
            per_tier=per_tier,
            split={"host": blocks - len(lowest), "disk": 0}
            | {name: split[name] for name in per_tier if name != "host"},
            bytes=blocks * shards * namespace.block_bytes,
            load_ms=load_ms,
            first_miss=blocks if missed else None,
            reason=(reason or self._why(namespace, keys[blocks:], shards, unknown)) if missed else None,
        )
        return found, unknown

    def _worth(self, namespace: Namespace, where: Sequence[Lower | None], shards: int) -> bool:
        """Whether what only the distant tier has is worth the time it takes to load."""
        count = where.count(self.far)
        return (
            self.far is None
            or not count
            or self.far.offers(namespace, -(-count // shards), count * namespace.block_bytes)
        )

    def acquire(
        self, namespace: Namespace, ids: Sequence[bytes], arrived: Arrived
    ) -> tuple[list[Slot | None], list[int]]:
        """Lease the leading run of ``ids``: see ``Promoter.acquire``."""
        slots, pending = self.promoter.acquire(namespace, ids, arrived)
        self._touched(namespace, [id for id, slot in zip(ids, slots, strict=True) if slot is not None])
        if self.far is not None:
            self.far.used.add(namespace.id)
            self.far.redate(namespace, ids[: sum(slot is not None for slot in slots) + len(pending)])
        return slots, pending

    def acquire_near(
        self, namespace: Namespace, ids: Sequence[bytes], arrived: Arrived
    ) -> tuple[list[Slot | None], list[int], dict[int, Slot]]:
        """The same for a reader that has the gpu tier open: see ``Near.acquire``."""
        assert self.near is not None
        slots, pending, on_gpu = self.near.acquire(namespace, ids, arrived, self.acquire)
        self.stats.loaded[self.near.name] += len(on_gpu)
        self._touched(namespace, [ids[index] for index in on_gpu])
        return slots, pending, on_gpu

    def reserve(self, namespace: Namespace, ids: Sequence[bytes], session: int) -> list[Slot | Outcome]:
        """Slots to write for what is not in host: see ``HostTier.reserve``."""
        slots = self.host.reserve(namespace, ids, session)
        self._touched(namespace, [id for id, slot in zip(ids, slots, strict=True) if slot is Outcome.PRESENT])
        self.stats.refused_reservations += sum(slot in (Outcome.FULL, Outcome.QUOTA) for slot in slots)
        return slots

    async def commit(
        self, namespace: Namespace, written: Sequence[tuple[bytes, Slot]], *, durable: bool = False
    ) -> tuple[list[Outcome], list[bool]]:
        """Seal written slots: outcomes (STORED, PRESENT or STALE), with ``durable`` what the lowest tier has.

        ``namespace`` is the snapshot of the reservation: blocks computed before a flush do not come in after it.
        The caller has taken the slots out of the reservation: whatever happens, they are not its any more.
        """
        size = namespace.block_bytes
        payloads = [self.host.payload(slot, size) for _, slot in written]
        try:
            digests = await self.mover.ask(lambda: [checksum(payload) for payload in payloads], COMMIT_S, "host")
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
        for through in self.through[:-1]:
            through.committed(namespace, stored, False)
        if self.through:
            # What was there already may have been stored by somebody who did not ask for so much.
            ids = [id for id, _ in written] if durable else stored
            writes = self.through[-1].committed(namespace, ids, durable)
            if durable:
                await settled(writes)
                failpoint("store.durable")
        return outcomes, [durable and self._is_durable(namespace, id) for id, _ in written]

    async def make_durable(self, namespace: Namespace, id: bytes) -> bool:
        """Write a block of host to the lowest tier, unless it is there; whether it is now."""
        if not self._is_durable(namespace, id):
            await settled(self.through[-1].committed(namespace, [id], True))
        return self._is_durable(namespace, id)

    async def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        """See ``Forgetting.delete``."""
        return await self.forgetting.delete(namespace, ids)

    async def flush(self, namespace: Namespace, tier: str | None = None) -> Flushed:
        """See ``Forgetting.flush``."""
        return await self.forgetting.flush(namespace, tier)

    async def keep_house(self) -> None:
        """What must happen now and then without anybody asking."""
        self.pins.expire()
        self.host.reap()
        if self.far is not None:
            self.far.watch(self.namespaces)
            self.forgetting.notice()
        for through in self.through:
            through.sweep()

    def check(self) -> None:
        """Books of all tiers; AssertionError names the first difference."""
        for tier in self.tiers.values():
            tier.check()

    def _absent(self, namespace: Namespace, ids: Sequence[bytes]) -> list[int]:
        """Indices of the ``ids`` that are neither in host nor above it."""
        absent = self.host.absent(namespace, ids)
        if self.near is None or not absent:
            return absent
        gone = self.near.absent(namespace, [ids[index] for index in absent])
        return [absent[at] for at in gone]

    def _is_durable(self, namespace: Namespace, id: bytes) -> bool:
        return bool(self.below) and self.below[-1].keeps(namespace, id)

    def _promoted(self, namespace: Namespace, id: bytes, source: Lower) -> None:
        """A block came into host: tiers on its way, or below when it came from above, may want it."""
        self._emit("stored", namespace, [id], tier="host")
        for through in self.through[: self.below.index(source) if source in self.below else None]:
            through.committed(namespace, [id], False)

    def _lacking(self, namespace: Namespace, id: bytes, source: Lower) -> None:
        """A tier could not read a block. If it has forgotten it for that, and it was stored anew meanwhile, that was
        not written there, since the tier still had it."""
        if source in self.below and self.host.leading(namespace, [id]) and not source.has(namespace, id):
            self.through[self.below.index(source)].committed(namespace, [id], True)

    def _touched(self, namespace: Namespace, ids: Sequence[bytes]) -> None:
        for through in self.through if ids else ():
            through.touched(namespace, ids)

    def _left_host(self, namespace: Namespace, ids: list[bytes], reason: str) -> None:
        """Called under the host tier's lock, from any thread."""
        for id in ids:
            self.departed.left(namespace, id, reason)
            if reason not in ("capacity", "quota"):
                continue
            if self.below and not any(lower.has(namespace, id) for lower in self.below):
                self.stats.evicted_before_persist += 1
        self._emit("removed", namespace, ids, tier="host", reason=reason)

    def _emit(self, kind: str, namespace: Namespace, ids: Sequence[bytes], **fields: str) -> None:
        if not self.events.listeners:
            self.events.skip(len(ids))
        else:
            for id in ids:
                self.events.publish(kind, namespace=namespace.id.hex(), block=id.hex(), **fields)

    def _why(self, namespace: Namespace, rest: Sequence[bytes], shards: int, unknown: Sequence[bytes]) -> Miss:
        if not rest:
            return Miss.SHORTER_THAN_BLOCK
        if not all(lower.up for lower in self.below):
            return Miss.TIER_DOWN
        if self.far is not None and unknown and self.far.tier.knows(namespace, unknown[0]) is None:
            return Miss.DEADLINE
        return self.departed.why(namespace, [block_id(rest[0], shard) for shard in range(shards)])

    def _count(self, namespace: Namespace, asked: int, found: Found) -> None:
        stats = self.stats
        if self.far is not None:
            self.far.used.add(namespace.id)
        stats.lookups += 1
        stats.asked_blocks += asked
        stats.asked_tokens += asked * namespace.block_tokens
        stats.matched_blocks += found.blocks
        stats.matched_tokens += found.blocks * namespace.block_tokens
        for tier, blocks in found.split.items():
            stats.matched[tier] += blocks
            stats.tokens[tier] += blocks * namespace.block_tokens
        if found.reason is not None:
            stats.misses[found.reason] += 1
        self.recent.add(namespace, asked, found)

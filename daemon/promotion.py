"""Leases on blocks wherever they are: at once when they are in host, later when they must come up first.

Owns the promotions under way (one a block, however many wait for it) and the first check of blocks that an earlier
daemon left in host. Runs on the event loop; hashes go through the mover, reads through that of the tier they are from.
Imports ``tiers``, ``below``, ``mover`` and ``stats``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from terracekv.daemon.below import Lower, Name, places
from terracekv.daemon.mover import Mover
from terracekv.daemon.stats import Stats
from terracekv.tiers.checksum import checksum
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slot_tier import DAEMON
from terracekv.tiers.slots import Slot, slot_bytes_for
from terracekv.tiers.tier import Outcome

Arrived = Callable[[int, Slot | Outcome], bool]
"""Told ``(index, slot under a lease, or what went wrong)``; answers whether the lease is still wanted."""


@dataclass(slots=True, eq=False)
class Coming:
    """A block on its way up. ``source`` is the tier it is read from, the last one once it has come."""

    done: "asyncio.Future[Outcome]"
    source: str


Promoted = Callable[[Namespace, bytes, Lower], None]
"""Told which block came into host, and from where."""


class Promoter:
    """Hands out leases on the leading run of a chain. ``below`` are the lower tiers, from the top down."""

    def __init__(
        self,
        *,
        namespaces: Namespaces,
        host: HostTier,
        below: Sequence[Lower],
        mover: Mover,
        stats: Stats,
        promoted: Promoted = lambda namespace, id, lower: None,
    ) -> None:
        self._namespaces = namespaces
        self._host = host
        self._below = below
        self._mover = mover
        self._stats = stats
        self._promoted = promoted
        self.damaged: Callable[[Namespace, bytes], None] = lambda namespace, id: None
        """Told of a block whose bytes were wrong, and which could be had from nowhere further down."""
        self.lacking: Promoted = lambda namespace, id, lower: None
        """Told which block a tier did not give, though it was believed to have it."""
        self._coming: dict[Name, Coming] = {}

    @property
    def coming(self) -> int:
        """Blocks on their way up."""
        return len(self._coming)

    def __contains__(self, name: object) -> bool:
        """Whether a block is on its way up."""
        return name in self._coming

    def under_way(self, namespace: Namespace, ids: Collection[bytes]) -> "list[asyncio.Future[Outcome]]":
        """Promotions of these blocks that have not ended."""
        return [coming.done for (of, id), coming in self._coming.items() if of == namespace.id and id in ids]

    def acquire(
        self, namespace: Namespace, ids: Sequence[bytes], arrived: Arrived, *, waits: bool = True
    ) -> tuple[list[Slot | None], list[int]]:
        """Lease the leading run of ``ids``: slots that can be read now, and indices that are on their way.

        ``arrived`` is called exactly once for each such index, always after this returned. Blocks behind the first
        one that is nowhere are not leased: a prefix has no holes. Without ``waits``, it is not called for blocks that
        somebody else's wish brings up already.
        """
        host = self._host
        slots = host.acquire(namespace, ids, serving=True)
        absent = [index for index, slot in enumerate(slots) if slot is None]
        found = places(self._below, namespace, [ids[index] for index in absent], self._coming)
        below = len(found)
        end = absent[below] if below < len(absent) else len(ids)
        host.release([slot for slot in slots[end:] if slot is not None])
        slots[end:] = [None] * (len(ids) - end)
        pending = absent[:below]
        comings = self._promote(namespace, [ids[index] for index in pending], found)
        named = zip(pending, comings, found, strict=True)
        waited = [(index, coming) for index, coming, lower in named if waits or lower is not None]
        told = self._together(namespace, ids[:end], len(waited), arrived)
        for index, coming in waited:
            self._wait(namespace, ids[index], index, coming, told)
        for index, slot in enumerate(slots):
            if slot is not None and host.unverified(slot):
                slots[index] = None
                pending.append(index)
                self._verify(namespace, ids[index], index, slot, arrived)
        self._stats.loaded["host"] += sum(slot is not None for slot in slots)
        return slots, sorted(pending)

    async def gather(self, namespace: Namespace, ids: Sequence[bytes]) -> list[Slot | Outcome]:
        """Lease the leading run of ``ids`` and wait until it is in host; MISS for what is nowhere.

        Cancelled, it keeps no lease.
        """
        results: list[Slot | Outcome] = [Outcome.MISS] * len(ids)
        waiting: set[int] = set()
        done = asyncio.Event()
        wanted = True

        def arrived(index: int, result: Slot | Outcome) -> bool:
            results[index] = result
            waiting.discard(index)
            if not waiting:
                done.set()
            return wanted

        slots, pending = self.acquire(namespace, ids, arrived)
        waiting.update(pending)
        for index, slot in enumerate(slots):
            results[index] = slot or results[index]
        try:
            if waiting:
                await done.wait()
        except asyncio.CancelledError:
            wanted = False
            self._host.release([result for result in results if isinstance(result, Slot)])
            raise
        return results

    def prefetch(self, namespace: Namespace, ids: Sequence[bytes]) -> tuple[int, int]:
        """Bring the leading run up without keeping it: blocks in host already, blocks on their way."""
        slots, pending = self.acquire(namespace, ids, lambda index, result: False, waits=False)
        held = [slot for slot in slots if slot is not None]
        self._host.release(held)
        return len(held), len(pending)

    def sources(self, namespace: Namespace, ids: Collection[bytes]) -> Counter[str]:
        """How many of these blocks are coming from each tier."""
        return Counter(coming.source for (of, id), coming in self._coming.items() if of == namespace.id and id in ids)

    def _promote(self, namespace: Namespace, ids: list[bytes], found: Sequence[Lower | None]) -> list[Coming]:
        """Start to bring blocks up, those that are not coming already; STORED or PRESENT when they are in host."""
        fresh = {id: lower for id, lower in zip(ids, found, strict=True) if lower is not None}
        reserved = self._host.reserve(namespace, list(fresh), DAEMON) if fresh else []
        for (id, lower), slot in zip(fresh.items(), reserved, strict=True):
            self._coming[namespace.id, id] = Coming(asyncio.get_running_loop().create_future(), lower.name)
            if isinstance(slot, Slot):
                self._read(namespace, id, slot, lower)
        comings = [self._coming[namespace.id, id] for id in ids]
        for (id, lower), slot in zip(fresh.items(), reserved, strict=True):
            if isinstance(slot, Outcome):
                self._settle(namespace, id, slot, lower)
        return comings

    def _read(self, namespace: Namespace, id: bytes, slot: Slot, lower: Lower) -> None:
        host = self._host

        def read() -> tuple[Outcome, int]:
            with lower.read as meter:
                outcome = lower.tier.get(namespace, id, host.payload(slot, slot_bytes_for(namespace.block_bytes)))
                if outcome is Outcome.HIT:
                    meter.moved(namespace.block_bytes)
            return outcome, checksum(host.payload(slot, namespace.block_bytes)) if outcome is Outcome.HIT else 0

        def came(future: "asyncio.Future[tuple[Outcome, int]]") -> None:
            failed = future.cancelled() or future.exception() is not None
            outcome, digest = (Outcome.FAILED, 0) if failed else future.result()
            if outcome is not Outcome.HIT or not self._namespaces.is_current(namespace):
                self._missed(namespace, id, slot, lower, outcome, closing=future.cancelled())
                return
            (outcome,) = host.commit(namespace, [(id, slot, digest)])
            failpoint("store.promoted")
            self._stats.promoted += 1
            lower.flow.promoted += 1
            # Held until all who wait have had their turn, or a reserve in between could evict the block again.
            held = [leased for leased in host.acquire(namespace, [id], touch=False) if leased is not None]
            self._settle(namespace, id, outcome, lower)
            asyncio.get_running_loop().call_soon(host.release, held)
            self._promoted(namespace, id, lower)

        lower.load(namespace.block_bytes, read).add_done_callback(came)

    def _missed(
        self, namespace: Namespace, id: bytes, slot: Slot, lower: Lower, outcome: Outcome, *, closing: bool
    ) -> None:
        """A read brought nothing that may be believed: it is tried from further down, if it is there."""
        lower.flow.vanished += outcome is Outcome.MISS
        if outcome is not Outcome.HIT and not closing and self._namespaces.is_current(namespace):
            self.lacking(namespace, id, lower)
            for next_lower in self._below[self._below.index(lower) + 1 :]:
                if next_lower.leading(namespace, [id]):
                    self._coming[namespace.id, id].source = next_lower.name
                    self._read(namespace, id, slot, next_lower)
                    return
        if outcome is Outcome.DAMAGED:
            self.damaged(namespace, id)
        self._host.abort([slot])
        self._settle(namespace, id, Outcome.STALE if outcome is Outcome.HIT else outcome, lower)

    def _settle(self, namespace: Namespace, id: bytes, outcome: Outcome, lower: Lower) -> None:
        if outcome not in (Outcome.STORED, Outcome.PRESENT):
            self._stats.promotions_failed += 1
            lower.flow.promotions_failed += 1
        self._coming.pop((namespace.id, id)).done.set_result(outcome)

    def _wait(self, namespace: Namespace, id: bytes, index: int, coming: Coming, arrived: Arrived) -> None:
        def came(future: "asyncio.Future[Outcome]") -> None:
            outcome = future.result()
            if outcome not in (Outcome.STORED, Outcome.PRESENT):
                arrived(index, outcome)
                return
            (slot,) = self._host.acquire(namespace, [id], touch=False)
            if slot is None:
                arrived(index, Outcome.MISS)
                return
            self._stats.loaded[coming.source] += 1
            if not arrived(index, slot):
                self._host.release([slot])

        coming.done.add_done_callback(came)

    def _together(self, namespace: Namespace, chain: Sequence[bytes], count: int, arrived: Arrived) -> Arrived:
        """As ``arrived``. When it was told of ``count`` blocks, the chain was used as a whole: its head, which came
        first, would go before its tail."""
        left = count

        def told(index: int, result: Slot | Outcome) -> bool:
            nonlocal left
            left -= 1
            wanted = arrived(index, result)
            if not left:
                self._host.touch(namespace, chain)
            return wanted

        return told

    def _verify(self, namespace: Namespace, id: bytes, index: int, slot: Slot, arrived: Arrived) -> None:
        """Check adopted bytes before they are believed; wrong ones are replaced from below where that has them."""

        def checked(future: "asyncio.Future[Outcome]") -> None:
            failed = future.cancelled() or future.exception() is not None
            outcome = Outcome.FAILED if failed else future.result()
            if outcome is Outcome.HIT and self._namespaces.is_current(namespace):
                self._stats.loaded["host"] += 1
                if not arrived(index, slot):
                    self._host.release([slot])
                return
            self._host.release([slot])
            found = places(self._below, namespace, [id], self._coming) if outcome is Outcome.DAMAGED else []
            if found:
                self._wait(namespace, id, index, self._promote(namespace, [id], found)[0], arrived)
            else:
                arrived(index, Outcome.STALE if outcome is Outcome.HIT else outcome)

        self._mover.load(lambda: self._host.verify(namespace, id, slot)).add_done_callback(checked)

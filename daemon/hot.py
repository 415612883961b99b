"""Hot blocks go up: what of host is copied into the gpu tier, and what comes back down when it leaves.

Owns the heat of blocks, the share of the bus and the promotions under way. Runs on the event loop, copies go through
the mover, behind every load. Imports ``below``, ``mover`` and ``tiers``.

A promotion is nobody's wish: over the share of the bus, over the mover's bound, or when a block is not in host any
more, it is left out and counted, and the block's next use asks again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from terracekv.daemon.below import Name
from terracekv.daemon.mover import Mover
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot, slot_bytes_for
from terracekv.tiers.tier import Outcome


@dataclass(slots=True)
class Moves:
    """Blocks since start."""

    promoted: int = 0
    failed: int = 0
    over_share: int = 0
    over_queue: int = 0


class Hot:
    """``held_below`` says whether a block that leaves the GPU could still be had: if not, it goes back to host."""

    def __init__(
        self,
        *,
        namespaces: Namespaces,
        host: HostTier,
        gpu: GpuTier,
        mover: Mover,
        held_below: Callable[[Namespace, bytes], bool],
        heat: Heat,
        share: BusShare,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespaces = namespaces
        self._host = host
        self._gpu = gpu
        self._mover = mover
        self._heat = heat
        self._share = share
        self._clock = clock
        self._coming: dict[Name, asyncio.Future[tuple[Outcome, float]]] = {}
        self.moves = Moves()
        self.promoted: Callable[[Namespace, bytes], None] = lambda namespace, id: None
        """Told of each block that came to the GPU."""
        gpu.held_below = held_below
        gpu.demote = self._hand_down

    def used(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """A chain was used, from its head on. How many of its blocks began to go up."""
        names = [(namespace.id, id) for id in ids]
        hot = [id for of, id in self._heat.used(names, self._clock()) if (of, id) not in self._coming]
        begun = 0
        for id in hot:
            if not self._gpu.has(namespace, id):
                begun += self._begin(namespace, id)
        self._gpu.touch(namespace, ids)
        return begun

    def under_way(self) -> "list[asyncio.Future[tuple[Outcome, float]]]":
        """All promotions that have not ended: each may also hand another block down to host."""
        return list(self._coming.values())

    def _begin(self, namespace: Namespace, id: bytes) -> bool:
        if not self._share.allows(self._clock()):
            self.moves.over_share += 1
            return False
        (slot,) = self._host.acquire(namespace, [id], touch=False)
        if slot is None:
            return False
        if self._host.unverified(slot):  # its next reader checks it
            self._host.release([slot])
            return False
        size = slot_bytes_for(namespace.block_bytes)
        promotion = self._mover.store(size, partial(self._promote, namespace, id, slot))
        if promotion is None:
            self._host.release([slot])
            self.moves.over_queue += 1
            return False
        self._coming[namespace.id, id] = promotion
        promotion.add_done_callback(partial(self._came, namespace, id, slot))
        return True

    def _promote(self, namespace: Namespace, id: bytes, slot: Slot) -> tuple[Outcome, float]:
        """In a worker: the outcome, and the seconds that it took."""
        start = self._clock()
        if not self._namespaces.is_current(namespace):
            return Outcome.STALE, 0.0
        payload = self._host.payload(slot, namespace.block_bytes)
        outcome = self._gpu.put(namespace, id, payload, self._host.checksum_of(slot))
        return outcome, self._clock() - start

    def _came(self, namespace: Namespace, id: bytes, slot: Slot, done: "asyncio.Future[tuple[Outcome, float]]") -> None:
        self._host.release([slot])
        del self._coming[namespace.id, id]
        if done.cancelled():
            return
        outcome, seconds = (Outcome.FAILED, 0.0) if done.exception() is not None else done.result()
        self._share.spent(seconds)
        self.moves.promoted += outcome is Outcome.STORED
        self.moves.failed += outcome in (Outcome.FAILED, Outcome.FULL, Outcome.QUOTA)
        if outcome is Outcome.STORED:
            self.promoted(namespace, id)

    def _hand_down(self, namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> None:
        """In a worker, before a block leaves the GPU that nobody else has."""
        if self._namespaces.is_current(namespace):
            self._host.put(namespace, id, payload, digest)

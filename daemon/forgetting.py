"""Making blocks misses: one by one, a namespace at a time, or because another node flushed it.

Owns the memory of the epochs that have been dealt with here. Runs on the event loop; tiers do their part in workers.
Imports ``below``, ``distant``, ``events``, ``mover``, ``near``, ``pins``, ``promotion``, ``write_through`` and
``tiers``.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from terracekv.daemon.below import Lower
from terracekv.daemon.distant import Distant
from terracekv.daemon.events import Events
from terracekv.daemon.mover import Mover
from terracekv.daemon.near import Near
from terracekv.daemon.pins import Pins
from terracekv.daemon.promotion import Promoter
from terracekv.daemon.write_through import WriteThrough
from terracekv.tiers.errors import BadRequest, TierDown
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier

log = logging.getLogger(__name__)

DELETE_ROUNDS = 8
DISTANT_S = 5.0
"""An order waits so long for a distant tier; it goes on there."""
EPOCHS_MAX = 64
"""Epochs of one namespace that host may hold between two looks."""


class Forgetting:
    """Where a method answers counts by tier, a tier is left out that did not do its part in time."""

    def __init__(
        self,
        *,
        namespaces: Namespaces,
        host: HostTier,
        below: Sequence[Lower],
        near: Near | None,
        mover: Mover,
        promoter: Promoter,
        through: Sequence[WriteThrough],
        pins: Pins,
        events: Events,
    ) -> None:
        self._namespaces = namespaces
        self._host = host
        self._below = below
        self._near = near
        self._mover = mover
        self._promoter = promoter
        self._through = through
        self._pins = pins
        self._events = events
        self._epochs = {namespace.id: namespace.epoch for namespace in namespaces}
        self._tasks = set[asyncio.Future[int]]()

    async def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        """Forget blocks in every tier: how many each had. Whoever reads one under a lease may finish."""
        self._pins.unpin(ids)
        counts: dict[str, int] = {}
        # A block on its way from tier to tier arrives behind us, and would be listed again: so once more, until a round
        # finds nothing and nothing moves (or an engine keeps storing it: then it is there because it was stored).
        for _ in range(DELETE_ROUNDS):
            gone = await self._forget(namespace, ids)
            counts = {name: max(count, counts.get(name, 0)) for name, count in gone.items()}
            if moving := self._under_way(set(ids)):
                limit_s = DISTANT_S if any(isinstance(lower, Distant) for lower in self._below) else None
                if (await asyncio.wait(moving, timeout=limit_s))[1]:
                    break  # what is still on its way to or from a distant tier may be there afterwards
            elif not any(gone.values()):
                break
        return counts

    async def flush(self, namespace: Namespace, tier: str | None = None) -> dict[str, int]:
        """Make all blocks of a namespace misses, in every tier or in one: how many each had.

        In every tier it raises the epoch: at once for lookups, for writes under way too, and for good.
        """
        names = [*(["gpu"] if self._near is not None else []), "host", *(lower.name for lower in self._below)]
        if tier is not None and tier not in names:
            raise BadRequest(f"no tier {tier!r}", f"configured tiers: {', '.join(names)}")
        if tier is None:
            raised = await self._mover.load(lambda: self._namespaces.raise_epoch(namespace.id))
            namespace = replace(raised, epoch=raised.epoch - 1)  # of two flushes at once each ends an epoch of its own
            self._epochs[namespace.id] = max(raised.epoch, self._epochs.get(namespace.id, 0))
            self._events.publish("flushed", namespace=namespace.id.hex(), epoch=raised.epoch)
            self._pins.expire()
        counts = {}
        if tier in (None, "gpu") and self._near is not None:
            counts["gpu"] = await self._drop_near(namespace)
        if tier in (None, "host"):
            self._pins.end(namespace)
            counts["host"] = await self._mover.load(lambda: self._host.drop(namespace))
        for lower, through in zip(self._below, self._through, strict=True):
            if tier in (None, lower.name):
                gone = await self._reclaim(namespace, lower, through, tell=tier is None)
                if gone is not None:
                    counts[lower.name] = gone
        return counts

    async def notice(self) -> None:
        """Deal with epochs that a tier took over from another node. Called every second or so."""
        for namespace in self._namespaces:
            before = self._epochs.setdefault(namespace.id, namespace.epoch)
            if before >= namespace.epoch:
                continue
            self._epochs[namespace.id] = namespace.epoch
            log.info("namespace %s was flushed by another node", namespace.id.hex()[:16])
            self._events.publish("flushed", namespace=namespace.id.hex(), epoch=namespace.epoch)
            self._pins.expire()
            for epoch in range(max(before, namespace.epoch - EPOCHS_MAX), namespace.epoch):
                if self._near is not None:
                    await self._drop_near(replace(namespace, epoch=epoch))
                await self._mover.load(partial(self._host.drop, replace(namespace, epoch=epoch)))
            old = replace(namespace, epoch=namespace.epoch - 1)
            for lower, through in zip(self._below, self._through, strict=True):
                if isinstance(lower, Distant):
                    lower.forget()  # whoever flushed sweeps the bucket
                else:
                    await self._reclaim(old, lower, through, tell=False)

    async def close(self) -> None:
        """Stop waiting for what still goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reclaim(self, namespace: Namespace, lower: Lower, through: WriteThrough, *, tell: bool) -> int | None:
        """Take back the room of a snapshot's epoch and those before; None when it goes on without us."""
        if not isinstance(lower, Distant):
            return await self._sweep(namespace, lower, through, tell=tell)
        work = asyncio.ensure_future(self._sweep(namespace, lower, through, tell=tell))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait([work], timeout=DISTANT_S)
        return work.result() if done else None

    async def _sweep(self, namespace: Namespace, lower: Lower, through: WriteThrough, *, tell: bool) -> int:
        older_than = replace(namespace, epoch=namespace.epoch + 1)
        if isinstance(lower, Distant):
            lower.forget()
            tier = lower.tier
            if tell:
                unheard = await lower.mover.load(lambda: _tell(tier, older_than))
                if unheard is not None:
                    log.warning("the bucket has not heard of a flush yet, it is told later: %s", unheard)
            # Another node may have flushed at the same time, and the epoch risen by more than one.
            present = self._namespaces.get(namespace.id)
            if tell and present is not None and present.epoch > older_than.epoch:
                older_than = present
        # What was being written when the epoch rose may still be listed, under the old epoch: after it, not before.
        if writing := through.under_way_in(namespace):
            await asyncio.wait(writing)
        return await lower.mover.load(lambda: lower.tier.reclaim(older_than))

    async def _drop_near(self, namespace: Namespace) -> int:
        """Empty the gpu tier of a snapshot's epoch, once nothing moves to it or, when it must make room, to host."""
        assert self._near is not None
        gpu = self._near.gpu
        if moving := self._near.hot.under_way():
            await asyncio.wait(moving)
        return await self._mover.load(lambda: gpu.drop(namespace))

    def _under_way(self, ids: set[bytes]) -> "list[asyncio.Future[Any]]":
        """Moves between tiers that have not ended, of these blocks or perhaps of them."""
        writes = [write for through in self._through for write in through.under_way(ids)]
        up = self._near.hot.under_way() if self._near is not None else []
        return [*self._promoter.under_way(ids), *writes, *up]

    async def _forget(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        counts = {}
        if self._near is not None:
            counts["gpu"] = await self._mover.load(partial(self._near.gpu.delete, namespace, ids))
        counts["host"] = await self._mover.load(lambda: self._host.delete(namespace, ids))
        for lower in self._below:
            if isinstance(lower, Distant):
                lower.forget(ids)
            work = lower.mover.load(partial(lower.tier.delete, namespace, ids))
            limit_s = DISTANT_S if isinstance(lower, Distant) else None
            done, _ = await asyncio.wait([work], timeout=limit_s)
            if done and lower.up:
                counts[lower.name] = work.result()
        return counts


def _tell(tier: "S3Tier", namespace: Namespace) -> TierDown | None:
    """Tell the bucket of a flush; the error, when it did not hear."""
    try:
        tier.flush(namespace)
    except TierDown as error:
        return error
    return None

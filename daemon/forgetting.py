"""Making blocks misses: one by one, a namespace at a time, or because another node flushed it.

Owns the memory of the epochs that have been dealt with here. Runs on the event loop; tiers do their part in workers.
Imports ``below``, ``distant``, ``events``, ``mover``, ``near``, ``pins``, ``promotion``, ``tasks``, ``write_through``
and ``tiers``.

An order is answered in its time whatever a tier does: what takes longer goes on behind the answer, which says so.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from terracekv.daemon import tasks
from terracekv.daemon.below import Lower
from terracekv.daemon.distant import Distant
from terracekv.daemon.events import Events
from terracekv.daemon.mover import Mover, heard
from terracekv.daemon.near import Near
from terracekv.daemon.pins import Pins
from terracekv.daemon.promotion import Promoter
from terracekv.daemon.write_through import WriteThrough
from terracekv.tiers.errors import NotFound
from terracekv.tiers.host import HostTier
from terracekv.tiers.journal import Journal
from terracekv.tiers.namespace import Namespace, Namespaces

journal = Journal(__name__)

DELETE_ROUNDS = 8
DISTANT_S = 5.0
LOCAL_S = 20.0
"""An order waits so long for a distant tier, or for one of this machine; it goes on there. For one that is stuck it
does not wait."""
STATE_S = 10.0
"""In so many seconds the folder of state must have taken a new epoch."""
SWEEP_S_MAX = 3600.0
"""A sweep that takes longer than this has got stuck."""
EPOCHS_MAX = 64
"""Epochs of one namespace that host may hold between two looks."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What became of a flush. ``dropped`` counts blocks by tier, without tiers that go on behind the answer;
    ``skipped`` names what was not done: ``s3_in_background`` (or ``disk_``) goes on, ``s3_unheard``: the bucket has not
    heard of the flush and is told before the namespace is next used, ``s3_unswept``: objects of flushed blocks are
    left."""

    dropped: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


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
        state_mover: Mover,
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
        self._state_mover = state_mover
        self._promoter = promoter
        self._through = through
        self._pins = pins
        self._events = events
        self._epochs = {namespace.id: namespace.epoch for namespace in namespaces}
        self._tasks = set[asyncio.Task[Any]]()
        self._sweeping = asyncio.Lock()
        """A sweep of a local tier takes one worker, however many wait for theirs."""

    async def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        """Forget blocks in every tier: how many each had. Whoever reads one under a lease may finish."""
        self._pins.unpin(namespace, ids)
        counts: dict[str, int] = {}
        # A block on its way from tier to tier arrives behind us, and would be listed again: so once more, until a round
        # finds nothing and nothing moves (or an engine keeps storing it: then it is there because it was stored).
        for _ in range(DELETE_ROUNDS):
            gone = await self._forget(namespace, ids)
            counts = {name: max(count, counts.get(name, 0)) for name, count in gone.items()}
            if moving := self._under_way(namespace, set(ids)):
                if (await asyncio.wait(moving, timeout=min(map(patience_s, self._below), default=LOCAL_S)))[1]:
                    break  # what is still on its way to or from a slow tier may be there afterwards
            elif not any(gone.values()):
                break
        return counts

    async def flush(self, namespace: Namespace, tier: str | None = None) -> Flushed:
        """Make all blocks of a namespace misses, in every tier or in one: how many each had.

        In every tier it raises the epoch: at once for lookups, for writes under way too, and for good.
        """
        names = [*(["gpu"] if self._near is not None else []), "host", *(lower.name for lower in self._below)]
        if tier is not None and tier not in names:
            raise NotFound(f"no tier {tier!r}", f"configured tiers: {', '.join(names)}")
        if tier is None:
            work = partial(self._namespaces.raise_epoch, namespace.id)
            raised = await self._state_mover.ask(work, STATE_S, "daemon.state_dir")
            namespace = replace(raised, epoch=raised.epoch - 1)  # of two flushes at once each ends an epoch of its own
            self._epochs[namespace.id] = max(raised.epoch, self._epochs.get(namespace.id, 0))
            self._events.publish("flushed", namespace=namespace.id.hex(), epoch=raised.epoch)
            self._pins.expire()
        flushed = Flushed()
        if tier in (None, "gpu") and self._near is not None:
            flushed.dropped["gpu"] = await self._drop_near(namespace)
        if tier in (None, "host"):
            self._pins.end(namespace)
            flushed.dropped["host"] = await self._mover.load(lambda: self._host.drop(namespace))
        for lower, through in zip(self._below, self._through, strict=True):
            if tier in (None, lower.name):
                if isinstance(lower, Distant):
                    work_below = self._sweep_distant(namespace, lower, through, flushed, tell=tier is None)
                else:
                    work_below = self._sweep(namespace, lower, through)
                await self._flush_below(work_below, lower, flushed)
        return flushed

    def notice(self) -> None:
        """Deal with epochs that a tier took over from another node. What tiers have to do for it goes on behind: who
        calls this, every second or so, has others to look after. Until then their blocks are misses by their epoch."""
        flushed: list[tuple[Namespace, int]] = []
        for namespace in self._namespaces:
            before = self._epochs.setdefault(namespace.id, namespace.epoch)
            if before >= namespace.epoch:
                continue
            self._epochs[namespace.id] = namespace.epoch
            text = f"namespace {namespace.id.hex()[:16]} was flushed by another node"
            journal.info("TKV-FLUSHED-ELSEWHERE", text, namespace=namespace.id.hex(), epoch=namespace.epoch)
            self._events.publish("flushed", namespace=namespace.id.hex(), epoch=namespace.epoch)
            self._pins.expire()
            for lower in self._below:
                if isinstance(lower, Distant):
                    lower.forget(namespace)  # whoever flushed sweeps the bucket
            flushed.append((namespace, before))
        if flushed:
            self._own(tasks.begin(self._follow(flushed), "flush-elsewhere"))

    async def close(self) -> None:
        """Stop waiting for what still goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, flushed: Sequence[tuple[Namespace, int]]) -> None:
        """Take back the room of namespaces that another node flushed, each since the epoch that was known before."""
        for namespace, before in flushed:
            for epoch in range(max(before, namespace.epoch - EPOCHS_MAX), namespace.epoch):
                if self._near is not None:
                    await self._drop_near(replace(namespace, epoch=epoch))
                await self._mover.load(partial(self._host.drop, replace(namespace, epoch=epoch)))
        for namespace, _ in flushed:
            for lower, through in zip(self._below, self._through, strict=True):
                if not isinstance(lower, Distant):
                    await self._sweep(replace(namespace, epoch=namespace.epoch - 1), lower, through)

    def _own(self, work: "asyncio.Task[Any]") -> None:
        """It ends with us."""
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    async def _flush_below(self, sweep: Coroutine[Any, Any, int], lower: Lower, flushed: Flushed) -> None:
        """A lower tier's part of a flush, for so long as somebody waits for it. It goes on whether or not."""
        work = tasks.begin(sweep, f"flush-{lower.name}")
        self._own(work)
        done, _ = await asyncio.wait([work], timeout=patience_s(lower))
        if done:
            flushed.dropped[lower.name] = work.result()
        else:
            flushed.skipped[f"{lower.name}_in_background"] = 1

    async def _sweep_distant(
        self, namespace: Namespace, far: Distant, through: WriteThrough, flushed: Flushed, *, tell: bool
    ) -> int:
        older_than = replace(namespace, epoch=namespace.epoch + 1)
        far.forget(namespace)
        if tell:
            unheard = await asyncio.shield(far.tells.turn(older_than))
            if unheard is not None:
                flushed.skipped[f"{far.name}_unheard"] = 1
                journal.warning(
                    "TKV-S3-UNHEARD", f"the bucket has not heard of a flush yet, it is told later: {unheard}"
                )
            # Another node may have flushed at the same time, and the epoch risen by more than one.
            present = self._namespaces.get(namespace.id)
            if present is not None and present.epoch > older_than.epoch:
                older_than = present
        await _ended(through, namespace)
        gone, left = await asyncio.shield(far.sweeps.turn(older_than))
        if left is not None:
            flushed.skipped[f"{far.name}_unswept"] = 1
        return gone

    async def _sweep(self, namespace: Namespace, lower: Lower, through: WriteThrough) -> int:
        """Take back the room of a snapshot's epoch and those before it in a local tier; how many blocks went."""
        await _ended(through, namespace)
        async with self._sweeping:
            work = partial(lower.tier.reclaim, replace(namespace, epoch=namespace.epoch + 1))
            return await lower.mover.load(work, limit_s=SWEEP_S_MAX)

    async def _drop_near(self, namespace: Namespace) -> int:
        """Empty the gpu tier of a snapshot's epoch, once nothing moves to it or, when it must make room, to host."""
        assert self._near is not None
        gpu = self._near.gpu
        if moving := self._near.hot.under_way():
            await asyncio.wait(moving, timeout=patience_s(self._near))
        return await self._mover.load(lambda: gpu.drop(namespace))

    def _under_way(self, namespace: Namespace, ids: set[bytes]) -> "list[asyncio.Future[Any]]":
        """Moves between tiers that have not ended, of these blocks or perhaps of them."""
        writes = [write for through in self._through for write in through.under_way(namespace, ids)]
        up = self._near.hot.under_way() if self._near is not None else []
        return [*self._promoter.under_way(namespace, ids), *writes, *up]

    async def _forget(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[str, int]:
        counts = {}
        if self._near is not None:
            counts["gpu"] = await self._mover.load(partial(self._near.gpu.delete, namespace, ids))
        counts["host"] = await self._mover.load(lambda: self._host.delete(namespace, ids))
        for lower in self._below:
            if isinstance(lower, Distant):
                lower.forget(namespace, ids)
            work = lower.mover.load(partial(lower.tier.delete, namespace, ids))
            work.add_done_callback(heard)
            done, _ = await asyncio.wait([work], timeout=patience_s(lower))
            if done and lower.up:
                counts[lower.name] = work.result()
        return counts


def patience_s(lower: Lower) -> float:
    """How long an order waits for a tier."""
    if lower.stuck is not None:
        return 0.0
    return DISTANT_S if isinstance(lower, Distant) else LOCAL_S


async def _ended(through: WriteThrough, namespace: Namespace) -> None:
    """What was being written when the epoch rose may still be listed, under the old epoch: sweep after it."""
    if writing := through.under_way_in(namespace):
        await asyncio.wait(writing)

"""What the daemon knows of one tier below host: its tier, its workers, its rates and its counts.

Owns nothing else. Made once for each lower tier, from the top down; used on the event loop. Imports ``mover`` and
``tiers``. Each lower tier has a mover of its own, or shares one with tiers of its speed: what waits for a slow one
keeps nobody else waiting.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from terracekv.daemon.mover import Meter, Mover
from terracekv.tiers.errors import TierStuck
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import Tier, TierStatus

DISK_BYTES_PER_S = 1e9
"""Assumed until measured."""
DISK_LATENCY_S = 0.0005

T = TypeVar("T")
Name = tuple[bytes, bytes]
"""A namespace's id and a block's: what is remembered of a block goes by both, as another namespace may have one of the
same id."""


@dataclass(slots=True)
class Flow:
    """Blocks that went up from and down to one tier since start. ``Stats`` has the sums over the tiers."""

    promoted: int = 0
    promotions_failed: int = 0
    vanished: int = 0
    """Blocks that the tier was believed to have and had not when they were read."""
    written: int = 0
    not_admitted: int = 0
    writes_failed: int = 0
    writes_dropped: int = 0
    """Blocks not written because the queue was full or the tier was down."""
    writes_dropped_bytes: int = 0


class LowerTier(Tier, Protocol):
    """A tier whose room is taken back after a flush."""

    def reclaim(self, namespace: Namespace) -> int:
        """Forget the blocks of epochs older than the snapshot's; how many. For a worker thread."""
        ...


class Lower:
    """``admission`` says what of host goes down here: see ``WriteThrough``."""

    def __init__(
        self, tier: LowerTier, mover: Mover, *, admission: str, bytes_per_s: float, latency_s: float = DISK_LATENCY_S
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.mover = mover
        self.admission = admission
        self.read = Meter(bytes_per_s)
        self.write = Meter(bytes_per_s)
        self.flow = Flow()
        self._latency_s = latency_s
        self.stuck: TierStuck | None = None
        """Set while a call of the tier does not come back: nobody asks it anything then. See ``heartbeat``."""
        self._status = tier.status()

    @property
    def latency_s(self) -> float:
        """Time to the first byte of a read."""
        return self._latency_s

    @property
    def up(self) -> bool:
        """Whether blocks can be had from it now."""
        return self.status().mode not in ("down", "stuck")

    @property
    def writable(self) -> bool:
        """Whether a write makes sense now."""
        return self.stuck is None

    @property
    def stalled_s(self) -> float:
        """How old the oldest call is that should have come back."""
        return self.mover.stalled_s

    def stalled(self, seconds: float) -> None:
        """The heartbeat's finding: for how long a call has been overdue; 0 when none is."""
        if not seconds:
            self.stuck = None
        elif self.stuck is None:
            self.stuck = TierStuck(
                f"a call has not come back for {seconds:.0f} s",
                f"the {self.name} tier is left out until it does, and then used again: see what it stands on (dmesg, "
                "mounts, the network), and the stacks in the daemon's log",
            )

    def shed(self, why: TierStuck) -> int:
        """Let go of what waits for the tier and need not; how much."""
        return self.mover.shed(why)

    def status(self) -> TierStatus:
        """As the tier's, or what it last said while it is stuck: then even that question might hang."""
        if self.stuck is None:
            self._status = self.tier.status()
            return self._status
        return replace(
            self._status,
            mode="stuck",
            last_error=self.stuck.message,
            last_error_at=None,
            last_event=self.stuck.event,
            advice=self.stuck.hint,
        )

    def leading(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.leading``; a stuck tier has nothing."""
        return 0 if self.stuck is not None else self.tier.leading(namespace, ids)

    def has(self, namespace: Namespace, id: bytes) -> bool:
        """Whether the tier has a block, as far as can be told without asking anybody."""
        return self.leading(namespace, [id]) == 1

    def keeps(self, namespace: Namespace, id: bytes) -> bool:
        """Whether the tier certainly has a block: what is answered as durable."""
        return self.has(namespace, id)

    def load(self, size_bytes: int, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a read of so many bytes in a worker, before all writes."""
        return self.mover.load(work, shed=True)


def places(
    below: Sequence[Lower], namespace: Namespace, ids: Sequence[bytes], coming: Container[Name] = ()
) -> list[Lower | None]:
    """For each of the leading ``ids`` that can be had from below: the uppermost tier that has it, or None for one that
    is ``coming`` already. Ends where the first is nowhere."""
    found: list[Lower | None] = []
    while len(found) < len(ids):
        if (namespace.id, ids[len(found)]) in coming:
            found.append(None)
            continue
        rest = ids[len(found) :]
        for depth, lower in enumerate(below):
            count = lower.leading(namespace, rest)
            if count:
                above = below[:depth]
                if above:  # what is here in a row may in part be had from above
                    hidden = (at for at in range(1, count) if any(upper.has(namespace, rest[at]) for upper in above))
                    count = next(hidden, count)
                found += [None if (namespace.id, id) in coming else lower for id in rest[:count]]
                break
        else:
            break
    return found

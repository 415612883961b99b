"""Why blocks that are not here any more went: evicted, or found damaged.

Owns two tables of fixed size. Owned by the store, which tells it of what leaves host (from any thread, under the host
tier's lock) and of what a tier found damaged (on the event loop). Imports ``eviction``, ``namespace`` and ``tier``.

A newer block overwrites an older one on the same slot, so the past fades: what is not remembered was never here, or
left longer ago than is remembered, and that is all that may be said of it.
"""

from collections.abc import Sequence

from terracekv.tiers.eviction import Ghosts
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import Miss

EVICTED_MAX = 1 << 16
DAMAGED_MAX = 1 << 10


class Departed:
    """The last word on a block counts: one that was damaged, stored anew and evicted was evicted."""

    def __init__(self) -> None:
        self._evicted = Ghosts(EVICTED_MAX)
        self._damaged = Ghosts(DAMAGED_MAX)

    def left(self, namespace: Namespace, id: bytes, reason: str) -> None:
        """A block left host, for a reason of ``Counters.evictions``."""
        self._evicted.discard(namespace.number, id)
        self._damaged.discard(namespace.number, id)
        if reason in ("capacity", "quota"):
            self._evicted.add(namespace.number, id)
        elif reason == "damaged":
            self._damaged.add(namespace.number, id)

    def damaged(self, namespace: Namespace, id: bytes) -> None:
        """Its bytes in a lower tier were wrong, and nowhere else right."""
        self.left(namespace, id, "damaged")

    def why(self, namespace: Namespace, ids: Sequence[bytes]) -> Miss:
        """Why a block is not here, of whose shards ``ids`` are missing."""
        if any(self._damaged.has(namespace.number, id) for id in ids):
            return Miss.DAMAGED
        return Miss.EVICTED if any(self._evicted.has(namespace.number, id) for id in ids) else Miss.ABSENT

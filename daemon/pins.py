"""Pins: leases that an operator holds on blocks for a while, so that they stay in host.

Owns the pinned leases. Runs on the event loop. Imports ``tiers``, ``below`` and ``promotion``.
"""

import time
from collections import Counter
from collections.abc import Sequence

from terracekv.daemon.below import Name
from terracekv.daemon.promotion import Promoter
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot, slot_bytes_for

SHARE = 0.5
"""At most this part of the arena may be pinned, or engines could store nothing."""
TTL_S_MAX = 7 * 86400.0
"""No pin is for ever: who wanted it may have forgotten it."""


class Pins:
    """A pin ends by ``unpin``, by its time to live, by a flush of its namespace, or with its block."""

    def __init__(self, *, host: HostTier, promoter: Promoter, namespaces: Namespaces, bytes_max: int) -> None:
        self._host = host
        self._promoter = promoter
        self._namespaces = namespaces
        self._held: dict[Name, tuple[Namespace, Slot, float]] = {}
        self.bytes_max = bytes_max
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def leases(self) -> list[Slot]:
        """The slots held, for the books."""
        return [slot for _, slot, _ in self._held.values()]

    async def pin(self, namespace: Namespace, ids: Sequence[bytes], ttl_s: float) -> dict[str, int]:
        """Hold ``ids``, from the first on, for ``ttl_s`` seconds: counts of pinned, renewed, and skipped by reason."""
        size = slot_bytes_for(namespace.block_bytes)
        until = time.monotonic() + min(ttl_s, TTL_S_MAX)
        counts: Counter[str] = Counter(pinned=0, renewed=0)
        for id in ids:
            if (held := self._held.get((namespace.id, id))) is not None and self._host.gone(held[1]):
                self._end((namespace.id, id))  # or what was stored anew would count as pinned
        room = max(0, self.bytes_max - self.bytes) // size
        wanted = [id for id in ids if (namespace.id, id) not in self._held]
        counts["skipped_pin_limit"] += max(0, len(wanted) - room)
        for name in ((namespace.id, id) for id in ids):
            if name in self._held:
                of, slot, before = self._held[name]
                self._held[name] = (of, slot, max(until, before))  # whoever wanted it for longer is still there
                counts["renewed"] += 1
        for id, result in zip(wanted, await self._promoter.gather(namespace, wanted[:room]), strict=False):
            if not isinstance(result, Slot):
                counts[f"skipped_{result}"] += 1
            elif (namespace.id, id) in self._held or not self._namespaces.is_current(namespace):
                self._host.release([result])
            elif self._host.gone(result):  # taken away while others were on their way up
                self._host.release([result])
                counts["skipped_miss"] += 1
            elif self.bytes + size > self.bytes_max:  # another pin was quicker while this one waited
                self._host.release([result])
                counts["skipped_pin_limit"] += 1
            else:
                self._held[namespace.id, id] = (namespace, result, until)
                self.bytes += size
                counts["pinned"] += 1
        return dict(counts)

    def unpin(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """End pins; how many there were."""
        return sum(self._end((namespace.id, id)) for id in ids)

    def end(self, namespace: Namespace) -> int:
        """End all pins of a namespace; how many there were."""
        return self.unpin(namespace, [id for owner, id in self._held if owner == namespace.id])

    def expire(self) -> None:
        """End pins that are over, or whose namespace was flushed or block is gone. Called every second or so."""
        now = time.monotonic()
        for name, (namespace, slot, until) in list(self._held.items()):
            if until < now or self._host.gone(slot) or not self._namespaces.is_current(namespace):
                self._end(name)

    def _end(self, name: Name) -> bool:
        held = self._held.pop(name, None)
        if held is None:
            return False
        self._host.release([held[1]])
        self.bytes -= slot_bytes_for(held[0].block_bytes)
        return True

"""A tier without bytes: what it would hold, hit and write, were it of another size or under another policy.

Owns its own books, and is pure but for these. Used by ``contest`` beside a real tier, and by the simulator. Imports
``eviction``, whose orders and admissions it runs: there is one of each, here and in the tiers.
"""

from collections.abc import Sequence

from terracekv.tiers.eviction import AUTO, Admission, ByWeight, Policy, Turnover, order_of

GHOSTS_PER_BLOCK = 4
"""Blocks remembered for ``second_touch``, for each that the tier holds."""


class ModelTier:
    """Holds ``capacity`` blocks of one size."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.capacity = capacity
        self.turnover = Turnover(capacity, frequency=policy.eviction == "frequency")
        self.order = order_of(policy.eviction, self.turnover, 1)
        slots = GHOSTS_PER_BLOCK * capacity if policy.admission in ("second_touch", AUTO) else 1
        self.admission = Admission(policy.admission, slots)
        self.writes = 0
        self._tick = 0

    def follow(self, policy: Policy) -> None:
        """Go on under another policy. For a tier made with ``auto``."""
        self.turnover.frequency = policy.eviction == "frequency"
        if isinstance(self.order, ByWeight) and not self.turnover.frequency:
            self.order.level()
        self.admission.rule = policy.admission

    def use(self, chain: Sequence[bytes]) -> int:
        """A request for a chain: how many leading blocks are here. What is not comes in, if admission lets it."""
        hits = self.order.leading(chain)
        self.store(chain)
        return hits

    def store(self, chain: Sequence[bytes]) -> None:
        """Touch what is here and take in what is not; blocks of the chain itself do not go for it."""
        order = self.order
        self._tick += 1
        order.touch(chain, self._tick)
        absent = [id for id in chain if id not in order]
        if absent:
            absent = self.admission.admits(0, absent)
        if not absent:
            return
        room, keep = self.capacity - len(order), set(chain)
        spared = set[bytes]()
        while room < len(absent) and (oldest := order.oldest()) is not None and oldest[0] not in spared:
            if oldest[0] in keep:
                order.spare(oldest[0], self._tick)
                spared.add(oldest[0])
            else:
                order.discard(oldest[0])
                room += 1
        for id in spared:
            order.resume(id)
        for id in reversed(absent[:room]):
            order.insert(id, 0, self._tick)
        self.writes += min(room, len(absent))
        order.touch(chain, self._tick)  # the new ones are its tail


class ModelStack:
    """A host tier and a disk below it, as the store runs them: what is asked for comes up into host, and what is in
    host goes down through the disk's admission."""

    def __init__(self, host: ModelTier, disk: ModelTier) -> None:
        self.host = host
        self.disk = disk

    def use(self, chain: Sequence[bytes]) -> tuple[int, int]:
        """A request for a chain: how many of its leading blocks host has, and how many more of them only disk."""
        found = [id in self.host.order for id in chain]
        lead = next((at for at, here in enumerate(found) if not here and chain[at] not in self.disk.order), len(chain))
        self.host.store(chain)
        self.disk.store(chain)
        return sum(found[:lead]), lead - sum(found[:lead])

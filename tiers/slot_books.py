"""What is in which slot: the books of a tier whose blocks lie in slots, and the steps that keep them in balance.

Owns the slot table, the orders of eviction, reservations, leases and shares, under one lock. Base of ``slot_tier.py``,
which has the verbs; its methods are called from there only. Imports ``eviction``, ``namespace``,
``shares``, ``slots`` and ``tier``.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from terracekv.tiers.eviction import Space, Turnover, order_of
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.shares import Shares
from terracekv.tiers.slots import RECORD_BYTES, Slot, SlotTable, State, slot_bytes_for
from terracekv.tiers.tier import Counters, Outcome


class Search:
    """Which block goes next, of all spaces: the one whose rank is the least. Good for as long as blocks only go or are
    spared, by which no rank becomes less. Looks at each space once, and then a few times for each block that goes."""

    def __init__(self, spaces: Iterable[Space]) -> None:
        firsts = ((number, space, space.order.oldest()) for number, space in enumerate(spaces))
        self._heap = [(first[2], number, space) for number, space, first in firsts if first]
        heapify(self._heap)

    def oldest(self) -> tuple[Space, bytes, int] | None:
        """Space, id and place of the next block to go."""
        while self._heap:
            rank, number, space = self._heap[0]
            first = space.order.oldest()
            if first is None:
                heappop(self._heap)
            elif first[2] != rank:
                heapreplace(self._heap, (first[2], number, space))
            else:
                return space, first[0], first[1]
        return None

    def leave_out(self) -> None:
        """Nothing of the space of the oldest block can go."""
        heappop(self._heap)


class SlotBooks:
    """A slot is free, being written (reserved), sealed and listed, or doomed: gone for lookups, leased yet."""

    def __init__(self, table: SlotTable, namespaces: Namespaces, *, eviction: str = "lru") -> None:
        """``eviction``: one of ``EVICTIONS``, or ``auto``, under which ``follow`` changes it."""
        self._table = table
        self._eviction = eviction
        self._turnover = Turnover(table.slabs * table.slab_bytes, frequency=eviction == "frequency")
        self._namespaces = namespaces
        self._lock = threading.RLock()
        self._spaces: dict[int, Space] = {}
        self._leases: dict[int, int] = {}
        self._passed: dict[int, tuple[Space, bytes]] = {}
        """By leased slot, the block in it that had to go and could not: it may go again when its last lease ends."""
        self._writing: dict[int, int] = {}
        self._written_for: dict[int, bytes] = {}
        """Of the slots being written, for which namespace; of those that an earlier daemon gave out nobody knows."""
        self.shares = Shares(namespaces)
        self._doomed: set[int] = set()
        self._tick = 0
        self._closed = False
        self.counters = Counters()
        self.on_evict: Callable[[Namespace, list[bytes], str], None] = lambda namespace, ids, reason: None
        """Called under the lock, with what left and why (capacity, quota, flush, delete, damaged); must be quick."""

    def check(self) -> None:
        """See ``Tier.check``."""
        with self._lock:
            self._table.check()
            listed = set()
            for stamp, space in self._spaces.items():
                assert stamp == space.namespace.stamp
                for id, place in space.order.places():
                    held = self._table.sealed(place * RECORD_BYTES)
                    assert (held.block, held.namespace, held.epoch) == (id, space.namespace.id, space.namespace.epoch)
                    listed.add(held.record)
            states = {record: self._table.state(record) for record in self._table.occupied()}
            sealed = {record for record, state in states.items() if state is not State.WRITING}
            assert sealed == listed | self._doomed and not listed & self._doomed, "sealed slots are not those listed"
            assert self._writing.keys() == states.keys() - sealed, "slots being written are not those reserved"
            assert self._leases.keys() <= sealed and self._doomed <= self._leases.keys(), "leases on what is not sealed"
            assert min(self._leases.values(), default=1) > 0
            assert self._passed.keys() <= self._leases.keys(), "blocks that cannot go are not leased"
            self._check_shares(sealed)

    def _check_shares(self, sealed: set[int]) -> None:
        """What namespaces are said to hold is what the slots say."""
        assert self._written_for.keys() <= self._writing.keys()
        held: Counter[bytes] = Counter()
        for record in sealed:
            held[self._table.sealed(record).namespace] += self._table.slot_bytes(record)
        for record, owner in self._written_for.items():
            held[owner] += self._table.slot_bytes(record)
        assert held == self.shares.held, f"namespaces hold {held}, counted {self.shares.held}"

    def leases(self) -> dict[int, int]:
        """Leases held, by slot record: what the sessions' books must add up to."""
        with self._lock:
            return dict(self._leases)

    def _space(self, namespace: Namespace, block_bytes: int) -> Space:
        if (space := self._spaces.get(namespace.stamp)) is None:
            space = self._spaces[namespace.stamp] = Space(
                namespace, size := slot_bytes_for(block_bytes), order_of(self._eviction, self._turnover, size)
            )
        return space

    def _seal(self, namespace: Namespace, id: bytes, slot: Slot, digest: int) -> Outcome:
        assert slot.record in self._writing, "commit of a slot that is not being written"
        space = self._space(namespace, namespace.block_bytes)
        if present := id in space.order:
            self._free(slot.record)
        else:
            self._table.seal(slot, id, namespace.id, namespace.epoch, namespace.block_bytes, digest)
            space.order.insert(id, slot.record // RECORD_BYTES, self._tick)
            self.counters.puts += 1
            self.counters.put_bytes += namespace.block_bytes
            del self._writing[slot.record], self._written_for[slot.record]
        return Outcome.PRESENT if present else Outcome.STORED

    def _drop(self, space: Space | None, ids: Sequence[bytes], reason: str) -> int:
        if space is None:
            return 0
        gone = []
        for id in ids:
            if (place := space.order.discard(id)) is None:
                continue
            gone.append(id)
            record = place * RECORD_BYTES
            if record in self._leases:
                self._doomed.add(record)
                self._table.doom(record)
            else:
                self._free(record)
        if gone:
            self.counters.evictions[reason] = self.counters.evictions.get(reason, 0) + len(gone)
            self.on_evict(space.namespace, gone, reason)
        return len(gone)

    def _free(self, record: int) -> None:
        """Under the lock: the slot is nobody's."""
        if self._writing.pop(record, None) is None:
            owner: bytes | None = self._table.sealed(record).namespace
        else:
            owner = self._written_for.pop(record, None)
        if owner is not None:
            self.shares.count(owner, -self._table.slot_bytes(record))
        self._table.free(record)

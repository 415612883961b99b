"""Which block goes next, which may come in, and what went: small objects without locks or I/O. Imports ``namespace``.

An ``Order`` is owned by the host tier (one for each namespace and epoch), an ``Admission`` by what writes to a lower
tier, ``Ghosts`` by the store; simulated tiers own the same ones. Their owners call them under their own locks.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from math import exp, log1p
from typing import NamedTuple, Protocol

from terracekv.tiers.namespace import Namespace

EVICTIONS = ("lru", "frequency")
ADMISSIONS = ("all", "second_touch")
AUTO = "auto"
"""In place of either: what currently wins."""
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_LAST = 1 << 62
"""The rank of what goes last: more than any weight."""
_UNIT = 1024
"""Parts of a turnover in which weights are told apart."""
_GAIN = [round(_UNIT * log1p(exp(-apart / _UNIT))) for apart in range(8 * _UNIT)]
"""What a second use adds to a weight, by how far apart the two are: both in units of the logarithm."""


class Policy(NamedTuple):
    """What goes and what may come in: one of ``EVICTIONS`` and one of ``ADMISSIONS``."""

    eviction: str = "lru"
    admission: str = "all"

    @property
    def name(self) -> str:
        return f"{self.eviction}/{self.admission}"


class Order(Protocol):
    """The blocks of one namespace and epoch in the order in which they go: index and order in one.

    Maps a block id to its place (a number below 2**32). ``tick`` is the owner's count of uses.
    """

    def __len__(self) -> int: ...

    def __contains__(self, id: object) -> bool: ...

    def ids(self, count: int | None = None) -> list[bytes]:
        """The first ``count`` ids (all by default) in order of eviction."""
        ...

    def get(self, id: bytes) -> int | None:
        """The block's place."""
        ...

    def leading(self, ids: Iterable[bytes]) -> int:
        """How many ids, from the first on, are here."""
        ...

    def insert(self, id: bytes, place: int, tick: int) -> None:
        """A block that is not here yet comes in, used now."""
        ...

    def touch(self, chain: Sequence[bytes], tick: int) -> None:
        """The blocks of a chain were used together; ids that are not here are passed over."""
        ...

    def oldest(self) -> tuple[bytes, int, int] | None:
        """``(id, place, rank)`` of the next block to go. Of all orders of a tier the least rank goes first."""
        ...

    def upcoming(self) -> Iterator[tuple[int, bytes]]:
        """``(rank, id)`` of the blocks in the order in which they go."""
        ...

    def spare(self, id: bytes, tick: int) -> None:
        """A block that cannot go now (it is leased, so in use) goes last, until ``resume`` or for good."""
        ...

    def resume(self, id: bytes) -> None:
        """One that was spared may go again. Not having been able to go is no use of it: it weighs what it weighed."""
        ...

    def discard(self, id: bytes) -> int | None:
        """Forget a block; its place, or None when it was not here."""
        ...

    def places(self) -> Iterator[tuple[bytes, int]]:
        """All ids with their places."""
        ...


class _Index:
    """What orders have in common: a block's rank and place in one number, by its id."""

    _entries: dict[bytes, int]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def get(self, id: bytes) -> int | None:
        entry = self._entries.get(id)
        return None if entry is None else entry & _PLACE_MASK

    def leading(self, ids: Iterable[bytes]) -> int:
        count = 0
        entries = self._entries
        for id in ids:
            if id not in entries:
                break
            count += 1
        return count

    def places(self) -> Iterator[tuple[bytes, int]]:
        return ((id, entry & _PLACE_MASK) for id, entry in self._entries.items())


class TailFirst(_Index):
    """Least recently used first, and within one chain the tail before the head, which would be useless without it.

    The rank is the tick of the last use. All operations are O(1) a block.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()

    def ids(self, count: int | None = None) -> list[bytes]:
        return list(islice(self._entries, count))

    def insert(self, id: bytes, place: int, tick: int) -> None:
        assert id not in self._entries
        self._entries[id] = tick << _PLACE_BITS | place

    def touch(self, chain: Sequence[bytes], tick: int) -> None:
        entries = self._entries
        move_to_end = entries.move_to_end
        stamp = tick << _PLACE_BITS
        for id in reversed(chain):
            entry = entries.get(id)
            if entry is not None:
                entries[id] = stamp | entry & _PLACE_MASK
                move_to_end(id)

    def oldest(self) -> tuple[bytes, int, int] | None:
        for id, entry in self._entries.items():
            return id, entry & _PLACE_MASK, entry >> _PLACE_BITS
        return None

    def upcoming(self) -> Iterator[tuple[int, bytes]]:
        return ((entry >> _PLACE_BITS, id) for id, entry in self._entries.items())

    def spare(self, id: bytes, tick: int) -> None:
        self._entries[id] = tick << _PLACE_BITS | self._entries[id] & _PLACE_MASK
        self._entries.move_to_end(id)

    def resume(self, id: bytes) -> None:
        """It was in use, so it counts as used when it was spared."""

    def discard(self, id: bytes) -> int | None:
        entry = self._entries.pop(id, None)
        return None if entry is None else entry & _PLACE_MASK


class Turnover:
    """The clock of the orders by weight of one tier: it goes on by one when as many bytes have come in as the tier
    holds. With ``frequency`` off only the last use of a block counts; it may be switched at any time."""

    def __init__(self, capacity_bytes: int, *, frequency: bool = True) -> None:
        self.capacity_bytes = max(1, capacity_bytes)
        self.frequency = frequency
        self.now = 0.0


class ByWeight(_Index):
    """The lightest first. Each use of a block weighs 1, and fades by a factor of e with each turnover of its tier.

    Weights are compared by the logarithm of what they would be at time 0, which does not change while a block is not
    used: of uses at t1, t2, ... it is log(e^t1 + e^t2 + ...). That is the rank, in parts of ``_UNIT``; of one rank
    goes first what was used first, the tail of a chain before its head. All operations are O(1) a block, amortised.
    """

    def __init__(self, turnover: Turnover, size_bytes: int) -> None:
        self._turnover = turnover
        self._step = size_bytes / turnover.capacity_bytes
        self._entries: dict[bytes, int] = {}
        """Rank and place."""
        self._spared: dict[bytes, int] = {}
        """Of blocks that are filed as the last, the rank that they have."""
        self._ranks: dict[int, OrderedDict[bytes, None]] = {}
        self._heap: list[int] = []
        """The keys of ``_ranks``, and some that have gone."""

    def ids(self, count: int | None = None) -> list[bytes]:
        return [id for _, id in islice(self.upcoming(), count)]

    def insert(self, id: bytes, place: int, tick: int) -> None:
        assert id not in self._entries
        self._turnover.now += self._step
        self._file(id, self._now(), place)

    def touch(self, chain: Sequence[bytes], tick: int) -> None:
        now, frequency = self._now(), self._turnover.frequency
        for id in reversed(chain):
            entry = self._entries.get(id)
            if entry is None:
                continue
            self._unfile(id, filed := entry >> _PLACE_BITS)
            rank = self._spared.get(id, filed) if frequency else now
            if frequency:
                apart = abs(now - rank)
                rank = max(now, rank) + (_GAIN[apart] if apart < len(_GAIN) else 0)
            if filed == _LAST:
                self._spared[id], rank = rank, _LAST
            self._file(id, rank, entry & _PLACE_MASK)

    def oldest(self) -> tuple[bytes, int, int] | None:
        while self._heap:
            rank = self._heap[0]
            if rank in self._ranks:
                id = next(iter(self._ranks[rank]))
                return id, self._entries[id] & _PLACE_MASK, rank
            heappop(self._heap)
        return None

    def upcoming(self) -> Iterator[tuple[int, bytes]]:
        return ((rank, id) for rank in sorted(self._ranks) for id in self._ranks[rank])

    def spare(self, id: bytes, tick: int) -> None:
        entry = self._entries[id]
        self._unfile(id, rank := entry >> _PLACE_BITS)
        if self._turnover.frequency:
            self._spared.setdefault(id, rank)
        self._file(id, _LAST if id in self._spared else self._now(), entry & _PLACE_MASK)

    def resume(self, id: bytes) -> None:
        if (rank := self._spared.pop(id, None)) is not None:
            self._unfile(id, _LAST)
            self._file(id, rank, self._entries[id] & _PLACE_MASK)

    def discard(self, id: bytes) -> int | None:
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        self._spared.pop(id, None)
        self._unfile(id, entry >> _PLACE_BITS)
        return entry & _PLACE_MASK

    def level(self) -> None:
        """Frequency counts no longer: what has gained weight by it is as if used now. Takes time for each of these."""
        now = self._now()
        self._spared = {id: min(now, rank) for id, rank in self._spared.items()}
        for rank in sorted(rank for rank in self._ranks if now < rank < _LAST):
            for id in list(self._ranks[rank]):
                self._unfile(id, rank)
                self._file(id, now, self._entries[id] & _PLACE_MASK)

    def _now(self) -> int:
        return int(self._turnover.now * _UNIT)

    def _file(self, id: bytes, rank: int, place: int) -> None:
        self._entries[id] = rank << _PLACE_BITS | place
        listed = self._ranks.get(rank)
        if listed is None:
            listed = self._ranks[rank] = OrderedDict()
            heappush(self._heap, rank)
        listed[id] = None

    def _unfile(self, id: bytes, rank: int) -> None:
        listed = self._ranks[rank]
        del listed[id]
        if not listed:
            del self._ranks[rank]


def order_of(eviction: str, turnover: Turnover, size_bytes: int) -> Order:
    """An order for blocks of one size in a tier. Only under ``auto`` can it be changed later, by its turnover."""
    return TailFirst() if eviction == "lru" else ByWeight(turnover, size_bytes)


class Admission:
    """Which blocks may come into a tier: ``all``, or at ``second_touch`` those that were met before. ``slots`` blocks
    are remembered (four times what the tier holds); ``rule`` may be changed at any time."""

    def __init__(self, rule: str, slots: int) -> None:
        self.rule = rule
        self.slots = slots
        self.seen = Ghosts(slots)

    def admits(self, owner: int, ids: Sequence[bytes]) -> list[bytes]:
        """Those of ``ids``, in the order of their chain, that may come in; ``owner`` numbers their namespace. All are
        remembered as met, the tail not as long. Who met a block has met all before it, even if the memory of one has
        faded: a prefix with a hole is worth no more than what is before the hole."""
        known = len(ids)
        while known and not self.seen.has(owner, ids[known - 1]):
            known -= 1
        for id in reversed(ids):
            self.seen.add(owner, id)
        return list(ids if self.rule == "all" else ids[:known])


class Space(NamedTuple):
    """The sealed blocks of one namespace and epoch, in order of eviction; all have slots of one size in bytes."""

    namespace: Namespace
    slot_bytes: int
    order: Order


def next_of(spaces: Iterable[Space]) -> Iterator[tuple[Space, bytes]]:
    """The blocks of all spaces in the order in which they go. Good until one of them changes."""

    def marked(space: Space) -> Iterator[tuple[int, Space, bytes]]:
        return ((tick, space, id) for tick, id in space.order.upcoming())

    merged = merge(*map(marked, spaces), key=lambda entry: entry[0])
    return ((space, id) for _, space, id in merged)


class Ghosts:
    """Remembers the last ``slots`` ids that were seen, nearly all of them, in a fixed 16 bytes each.

    Ids are hashes already: 8 bytes of one, with the shard and the number of the ``owner``, its namespace, are place and
    fingerprint. A place is a row of ``_ROW`` entries, half of which are in use on average; an entry is the count of ids
    at its time and a fingerprint, and a new one overwrites the oldest of its row. So memory is bounded and the past
    ends at one point in time.
    """

    def __init__(self, slots: int) -> None:
        self._slots = max(1, slots)
        self._rows = -(-2 * self._slots // _ROW)
        self._table = array("Q")
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._table = array("Q", bytes(8 * _ROW * self._rows))
        self._now = self._slots

    def add(self, owner: int, id: bytes) -> None:
        """Remember an id."""
        mark = _mark(owner, id)
        at, entry = self._find(mark)
        if entry is None:
            self._now += 1
            if self._now >> 32:
                self.clear()
        self._table[at] = self._now << 32 | mark >> 32

    def has(self, owner: int, id: bytes) -> bool:
        """Whether it is remembered."""
        _, entry = self._find(_mark(owner, id))
        return entry is not None and self._now - (entry >> 32) < self._slots

    def discard(self, owner: int, id: bytes) -> None:
        """Forget an id."""
        at, entry = self._find(_mark(owner, id))
        if entry is not None:
            self._table[at] = 0

    def _find(self, mark: int) -> tuple[int, int | None]:
        """Where a mark's entry is, and the entry; else where it would go."""
        start, print = mark % self._rows * _ROW, mark >> 32
        row = self._table[start : start + _ROW]
        for at, entry in enumerate(row, start):
            if entry & _PRINT == print and entry:
                return at, entry
        return start + row.index(min(row)), None


_KEY, _SHARD = struct.Struct("<Q"), struct.Struct("<H")
_SHARD_FACTOR = 0x9E3779B97F4A7C15
_OWNER_FACTOR = 0xC2B2AE3D27D4EB4F
_PRINT = (1 << 32) - 1
_ROW = 4


def _mark(owner: int, id: bytes) -> int:
    """Another one for each shard of a block and for each who has one of this id: what is true of one is not true of the
    others."""
    key, shard = _KEY.unpack_from(id)[0], _SHARD.unpack_from(id, len(id) - 2)[0]
    return int(key + shard * _SHARD_FACTOR + owner * _OWNER_FACTOR) & 0xFFFFFFFFFFFFFFFF

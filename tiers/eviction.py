"""Which block goes next, and what went: small objects without locks or I/O. Imports ``namespace``.

``TailFirst`` is owned by the host tier (one for each namespace and epoch), ``Ghosts`` by the store. Their owners call
them under their own locks.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import NamedTuple

from terracekv.tiers.namespace import Namespace

_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class TailFirst:
    """Least recently used first, and within one chain the tail before the head, which would be useless without it.

    Index and order in one: maps a block id to its place (a number below 2**32) and the tick of its last use.
    All operations are O(1) a block.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: bytes) -> bool:
        return id in self._entries

    def ids(self, count: int | None = None) -> list[bytes]:
        """The first ``count`` ids (all by default) in order of eviction."""
        return list(islice(self._entries, count))

    def get(self, id: bytes) -> int | None:
        """The block's place."""
        entry = self._entries.get(id)
        return None if entry is None else entry & _PLACE_MASK

    def leading(self, ids: Iterable[bytes]) -> int:
        """How many ids, from the first on, are here."""
        count = 0
        entries = self._entries
        for id in ids:
            if id not in entries:
                break
            count += 1
        return count

    def insert(self, id: bytes, place: int, tick: int) -> None:
        """A block that is not here yet becomes the last to go."""
        assert id not in self._entries
        self._entries[id] = tick << _PLACE_BITS | place

    def touch(self, chain: Sequence[bytes], tick: int) -> None:
        """The blocks of a chain were used together; ids that are not here are passed over."""
        entries = self._entries
        move_to_end = entries.move_to_end
        stamp = tick << _PLACE_BITS
        for id in reversed(chain):
            entry = entries.get(id)
            if entry is not None:
                entries[id] = stamp | entry & _PLACE_MASK
                move_to_end(id)

    def oldest(self) -> tuple[bytes, int, int] | None:
        """``(id, place, tick)`` of the next block to go."""
        for id, entry in self._entries.items():
            return id, entry & _PLACE_MASK, entry >> _PLACE_BITS
        return None

    def upcoming(self) -> Iterator[tuple[int, bytes]]:
        """``(tick, id)`` of the blocks in the order in which they go."""
        return ((entry >> _PLACE_BITS, id) for id, entry in self._entries.items())

    def spare(self, id: bytes) -> None:
        """A block that cannot go now (it is leased, so in use) goes last."""
        self._entries.move_to_end(id)

    def discard(self, id: bytes) -> int | None:
        """Forget a block; its place, or None when it was not here."""
        entry = self._entries.pop(id, None)
        return None if entry is None else entry & _PLACE_MASK

    def places(self) -> Iterator[tuple[bytes, int]]:
        """All ids with their places."""
        return ((id, entry & _PLACE_MASK) for id, entry in self._entries.items())


class Space(NamedTuple):
    """The sealed blocks of one namespace and epoch, in order of eviction; all have slots of one size in bytes."""

    namespace: Namespace
    slot_bytes: int
    order: TailFirst


def oldest_of(spaces: Iterable[Space]) -> tuple[Space, bytes, int] | None:
    """Space, id and place of the block that goes next, of all: the one whose last use is longest ago."""
    firsts = [(space, *first) for space in spaces if (first := space.order.oldest())]
    if not firsts:
        return None
    space, id, place, _ = min(firsts, key=lambda first: first[3])
    return space, id, place


def next_of(spaces: Iterable[Space], count: int) -> list[tuple[Namespace, bytes]]:
    """Namespace and id of the ``count`` blocks that go next, of all."""

    def marked(space: Space) -> Iterator[tuple[int, Namespace, bytes]]:
        return ((tick, space.namespace, id) for tick, id in space.order.upcoming())

    merged = merge(*map(marked, spaces), key=lambda entry: entry[0])
    return [(namespace, id) for _, namespace, id in islice(merged, count)]


class Ghosts:
    """Remembers ids that were seen, in a fixed 8 bytes each of a table of ``slots`` (rounded up to a power of two).

    A newer id overwrites an older one that falls on the same slot, so memory is bounded and the past fades. Ids are
    hashes already: 8 bytes of one, with the shard and the number of the ``owner``, its namespace, are fingerprint and
    position.
    """

    def __init__(self, slots: int) -> None:
        self._mask = (1 << max(1, slots - 1).bit_length()) - 1
        self._table = array("Q", bytes(8 * (self._mask + 1)))

    def add(self, owner: int, id: bytes) -> None:
        """Remember an id."""
        mark = _mark(owner, id)
        self._table[mark & self._mask] = mark

    def has(self, owner: int, id: bytes) -> bool:
        """Whether it is remembered."""
        mark = _mark(owner, id)
        return bool(self._table[mark & self._mask] == mark)

    def discard(self, owner: int, id: bytes) -> None:
        """Forget an id."""
        mark = _mark(owner, id)
        if self._table[mark & self._mask] == mark:
            self._table[mark & self._mask] = 0


_ID = struct.Struct("<Q24xH")
_SHARD_FACTOR = 0x9E3779B97F4A7C15
_OWNER_FACTOR = 0xC2B2AE3D27D4EB4F


def _mark(owner: int, id: bytes) -> int:
    """Another one for each shard of a block and for each who has one of this id: what is true of one is not true of the
    others."""
    key, shard = _ID.unpack(id)
    return int(key + shard * _SHARD_FACTOR + owner * _OWNER_FACTOR) & 0xFFFFFFFFFFFFFFFF

"""What changes of the catalog do to its tables, and the books of what each namespace's records take.

Owns nothing: all functions work on the caller's transaction. Called by ``catalog``, which owns the environment, from
worker threads. Imports ``entry``; a transaction is LMDB's, whose only import ``catalog`` is.

    blocks    block id -> entry                    | the map
    places    segment, page -> block id            | in the order of the disk; notes may be stale, entries never
    segments  segment -> page after its last record
    held      namespace number -> bytes of its records, headers and padding included

``held`` changes in the transaction that changes ``blocks``, so no crash comes between the two.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terracekv.tiers.entry import PLACE, PLACE_AT, STAMP, STAMP_AT, Entry, Place, pack, unpack

NUMBER = struct.Struct(">I")
ROW = struct.Struct(">II")
PAGES = struct.Struct("<I")
_BYTES = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tables:
    """LMDB's handles of the four."""

    blocks: Any
    segments: Any
    places: Any
    held: Any


class Change:
    """One transaction that changes the catalog. Ends with ``settle``."""

    def __init__(self, transaction: Any, tables: Tables) -> None:
        self._transaction = transaction
        self._tables = tables
        self._more: Counter[int] = Counter()
        self._unsound = False

    def publish(self, records: Sequence[tuple[bytes, Entry]]) -> list[bool]:
        """See ``Catalog.publish``."""
        done = []
        for id, entry in records:
            old = self._transaction.get(id)
            new = old is None or unpack(id, old) is None or entry.supersedes(old)
            done.append(new)
            if new:
                self._went(id, old)
                self._place(id, entry)
        return done

    def move(self, moves: Sequence[tuple[bytes, Entry, Entry]]) -> list[bool]:
        """See ``Catalog.move``."""
        done = []
        for id, old, new in moves:
            value = self._at(id, old.segment, old.page)
            done.append(value is not None)
            if value is not None:
                self._went(id, value)
                self._place(id, new)
        return done

    def forget(self, places: Sequence[Place]) -> int:
        """See ``Catalog.forget``."""
        return sum(self._remove(id, self._at(id, segment, page)) for id, segment, page in places)

    def forget_unsound(self, id: bytes) -> int:
        """See ``Catalog.forget_unsound``."""
        value = self._transaction.get(id)
        return self._remove(id, value) if value is not None and unpack(id, value) is None else 0

    def delete(self, stamp: int, ids: Sequence[bytes]) -> int:
        """See ``Catalog.delete``."""
        head = STAMP.pack(stamp)
        gone = 0
        for id in ids:
            value = self._transaction.get(id)
            entry = None if value is None else unpack(id, value)
            if entry is None or entry.namespace == stamp >> 32:
                gone += self._remove(id, value) and value[STAMP_AT] == head
        return gone

    def drop_some(self, number: int, count: int) -> tuple[int, bool]:
        """Forget what is listed in a segment, ``count`` notes of it, and the segment after the last: blocks forgotten,
        and whether there is more."""
        cursor = self._transaction.cursor(self._tables.places)
        end = NUMBER.pack(number + 1)
        dropped = 0
        cursor.set_range(ROW.pack(number, 0))
        for _ in range(count):
            row = bytes(cursor.key())  # empty beyond the last
            if not row or row >= end:
                self._transaction.delete(NUMBER.pack(number), db=self._tables.segments)
                return dropped, False
            id = bytes(cursor.value())
            dropped += self._remove(id, self._at(id, *ROW.unpack(row)))
            cursor.delete()  # and on to the next
        return dropped, True

    def set_segments(self, ends: Mapping[int, int]) -> None:
        """See ``Catalog.set_segments``."""
        for number, end_page in ends.items():
            self._transaction.put(NUMBER.pack(number), PAGES.pack(end_page), db=self._tables.segments)

    def recount(self) -> None:
        """Make the books anew from the entries when this ends."""
        self._unsound = True

    def settle(self) -> None:
        """Bring the books up to date, before the commit."""
        if self._unsound:
            self._more.clear()
            self._transaction.drop(self._tables.held, delete=False)
            for key, value in self._transaction.cursor(self._tables.blocks):
                entry = unpack(bytes(key), value)
                if entry is not None:
                    self._more[entry.namespace] += entry.record_bytes
        for number, more in self._more.items():
            key = NUMBER.pack(number)
            held = self._transaction.get(key, db=self._tables.held)
            total = more + (0 if held is None else _BYTES.unpack(held)[0])
            if more and total > 0:
                self._transaction.put(key, _BYTES.pack(total), db=self._tables.held)
            elif more:
                self._transaction.delete(key, db=self._tables.held)

    def _at(self, id: bytes, segment: int, page: int) -> Any:
        """The bytes of a block's entry while it is at that place."""
        value = self._transaction.get(id)
        return value if value is not None and value[PLACE_AT] == PLACE.pack(segment, page) else None

    def _remove(self, id: bytes, value: Any) -> bool:
        if value is None:
            return False
        self._went(id, value)
        return bool(self._transaction.delete(id))

    def _went(self, id: bytes, value: Any) -> None:
        """An entry is replaced or removed. Of one that contradicts its check nobody knows what it counted for."""
        if value is None:
            return
        entry = unpack(id, value)
        if entry is None:
            self._unsound = True
        else:
            self._more[entry.namespace] -= entry.record_bytes

    def _place(self, id: bytes, entry: Entry) -> None:
        """Set an entry; note in the order of places who is there, and how far the segment is filled: appending resumes
        there after a crash. The note of an entry that is replaced or removed stays until its segment is dropped:
        whoever reads notes compares them with the entry."""
        self._transaction.put(id, pack(id, entry))
        self._transaction.put(ROW.pack(entry.segment, entry.page), id, db=self._tables.places)
        number = NUMBER.pack(entry.segment)
        end = self._transaction.get(number, db=self._tables.segments)
        if end is None or PAGES.unpack(end)[0] < entry.end_page:
            self._transaction.put(number, PAGES.pack(entry.end_page), db=self._tables.segments)
        self._more[entry.namespace] += entry.record_bytes


def held_by(transaction: Any, tables: Tables) -> dict[int, int]:
    """Bytes of records by namespace number, of all namespaces that have any."""
    rows = transaction.cursor(tables.held)
    return {NUMBER.unpack(key)[0]: _BYTES.unpack(value)[0] for key, value in rows}

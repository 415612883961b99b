"""What is known of blocks that only a distant tier can tell about, and how to find out with few questions.

``PresenceTable`` owns a fixed table in memory; ``gallop`` is pure. Called by the s3 tier from any thread and, for
``leading``, on the event loop. Imports the standard library only.

All answers are hints with an end: another node may store or age out any block meanwhile. ``PresenceCache`` is what
the tier needs of whoever remembers them. The table keeps no ids but 64-bit marks, so a mistaken ``True`` is possible
(one in 2**61 questions) and harmless, as the read would tell. In the catalog the same would be a second LMDB database
``presence``: block id -> u64 stamp, u32 end in seconds, u8 answer, bounded by deleting the oldest ends on insertion;
``leading`` is then the catalog's with one comparison of the end more.
"""

import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

_KEY = struct.Struct("<Q24xH")
_STAMP_FACTOR = 0x9E3779B97F4A7C15
_SHARD_FACTOR = 0xC2B2AE3D27D4EB4F
_MASK64 = (1 << 64) - 1
_FOREVER_S = 2**32 - 1
_WAYS = 32
"""Slots in which a mark may stand. With few, neighbours would push each other out long before the table is full, and
one block lost ends the leading run of its chain."""


class PresenceCache(Protocol):
    """Bounded memory of ``(stamp, id) -> present?``, each for a time. Thread-safe, instant."""

    def get(self, stamp: int, id: bytes) -> bool | None:
        """Present, absent, or None for unknown and for what has ended."""
        ...

    def note(self, stamp: int, id: bytes, present: bool, ttl_s: float) -> None:
        """Remember an answer for ``ttl_s`` seconds, instead of any before."""
        ...

    def leading(self, stamp: int, ids: Sequence[bytes]) -> int:
        """How many ids, from the first on, are known to be present."""
        ...

    def count(self) -> int:
        """Blocks noted as present, those included whose time is over and whose place nobody has wanted since."""
        ...


class PresenceTable:
    """Room for at least ``entries`` answers, in 26 to 52 bytes each from the first one on; where it is full, the one
    that ends first makes room. Ends are in whole seconds of ``clock``."""

    def __init__(self, entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sets = 1 << max(0, (2 * entries // _WAYS - 1).bit_length())
        self._marks = array("Q", bytes(8 * self._sets * _WAYS))
        self._ends = array("I", bytes(4 * self._sets * _WAYS))
        self._present = bytearray(self._sets * _WAYS)
        self._clock = clock
        self._epoch = clock() - 1
        self._lock = threading.Lock()
        self._count = 0

    def get(self, stamp: int, id: bytes) -> bool | None:
        """See ``PresenceCache.get``."""
        mark, first = self._place(stamp, id)
        with self._lock:
            slot = self._find(mark, first)
            if slot is None or self._ends[slot] <= self._now():
                return None
            return bool(self._present[slot])

    def note(self, stamp: int, id: bytes, present: bool, ttl_s: float) -> None:
        """See ``PresenceCache.note``."""
        mark, first = self._place(stamp, id)
        with self._lock:
            slot = self._find(mark, first)
            if slot is None:
                slot = min(range(first, first + _WAYS), key=self._ends.__getitem__)
            self._count += int(present) - self._present[slot]
            self._marks[slot] = mark
            self._present[slot] = present
            self._ends[slot] = min(self._now() + max(1, round(min(ttl_s, _FOREVER_S))), _FOREVER_S)

    def leading(self, stamp: int, ids: Sequence[bytes]) -> int:
        """See ``PresenceCache.leading``. About a microsecond per id."""
        found = 0
        with self._lock:
            now = self._now()
            for id in ids:
                slot = self._find(*self._place(stamp, id))
                if slot is None or self._ends[slot] <= now or not self._present[slot]:
                    break
                found += 1
        return found

    def count(self) -> int:
        """See ``PresenceCache.count``."""
        return self._count

    def check(self) -> None:
        """AssertionError when the count is not that of the table."""
        with self._lock:
            assert self._count == sum(self._present), f"{self._count} counted, {sum(self._present)} there"

    def _place(self, stamp: int, id: bytes) -> tuple[int, int]:
        key, shard = _KEY.unpack(id)
        mark = (key + stamp * _STAMP_FACTOR + shard * _SHARD_FACTOR) & _MASK64 or 1
        return mark, (mark >> 32) % self._sets * _WAYS

    def _find(self, mark: int, first: int) -> int | None:
        try:
            return self._marks.index(mark, first, first + _WAYS)
        except ValueError:
            return None

    def _now(self) -> int:
        return int(self._clock() - self._epoch)


def gallop(low: int, high: int, ask: Callable[[Sequence[int]], dict[int, bool]]) -> tuple[int, bool]:
    """How many of a chain's first ``high`` blocks are present, given that the first ``low`` are: ``(count, sure)``.

    ``ask`` answers several positions at once and leaves out those it could not learn in time. A chain is taken to be
    monotone. First the blocks 1, 2, 4, 8 ... after ``low`` and the last one are asked about together: a chain that is
    there whole, or not at all, costs one round trip. Then the gap is bisected: 2 * log2(high - low) questions in all.
    Not sure when answers were missing; the count is then what is known.
    """
    if low >= high:
        return low, True
    steps = []
    step = 1
    while low + step < high:
        steps.append(low + step - 1)
        step *= 2
    steps.append(high - 1)
    while True:
        answers = ask(steps)
        absent = [position for position in steps if answers.get(position) is False]
        high = min(absent, default=high)
        low = max((p + 1 for p in steps if answers.get(p) and p < high), default=low)
        if low >= high:
            return low, True
        if len(answers) < len(steps):
            return low, False
        steps = [(low + high) // 2]

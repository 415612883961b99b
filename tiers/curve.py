"""What more memory would buy: prefix hits by capacity, kept from a small sample of the blocks that were asked for.

Owns the sample. Pure but for that; fed by the daemon's event loop (``demand``) and by tests. Imports ``sieve``.

Under ``lru`` a block is a hit in every tier that holds more blocks than were used since its own last use. That number
tells all capacities at once, and a sample has it, scaled down. A block counts as a prefix hit only where all before it
in its request are hits, too. The first block of each request is counted beside the sample: there are few of them, and
one that every request begins with would otherwise be in the sample, or not, with all its weight.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import log2

from terracekv.tiers.sieve import KEY_BYTES, MARK_BYTES, Sieve

BLOCKS_MAX = 4096
"""Blocks followed at most, and as many first blocks: about 200 bytes each."""
STEPS = 16
"""Parts of a doubling of the capacity that are told apart."""
SHRINK = 0.75
"""What is left of the sample when it has grown too large."""
FADE_BLOCKS = 1 << 24
"""Once so many blocks were asked for, what was counted so far is halved: the curve is that of the near past."""
_OCTAVES = 40


class _Counts:
    """How many blocks were asked for, and of these how many were hits, by the least capacity that hits them."""

    def __init__(self) -> None:
        self.asked = 0.0
        self._hits = [0.0] * (_OCTAVES * STEPS)

    def hit(self, capacity: float, weight: float) -> None:
        self._hits[int(log2(capacity) * STEPS)] += weight

    def share(self, capacity: float) -> float:
        upto = min(log2(max(1.0, capacity)) * STEPS, len(self._hits) - 1)
        whole = int(upto)
        found = sum(self._hits[:whole]) + self._hits[whole] * (upto - whole)
        return min(1.0, found / self.asked) if self.asked else 0.0

    def fade(self) -> None:
        self.asked /= 2
        self._hits = [hits / 2 for hits in self._hits]


class Curve:
    """``rate`` is the share of blocks that is followed at first; it falls when these are too many (``blocks_max``) or
    cost too much (``shrink``)."""

    def __init__(self, rate: float = 1.0, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._sieve = Sieve(rate)
        self._last: dict[bytes, int] = {}
        """Of each block followed, the number of its last use."""
        self._uses: list[int] = []
        """The same numbers in order."""
        self._now = 0
        self._first_sieve = Sieve(1.0)
        self._first_last: dict[bytes, int] = {}
        """Of first blocks, the number of uses when they were last used."""
        self._first, self._rest = _Counts(), _Counts()
        self._requests = 0
        self.asked_blocks = 0
        """As far as they are not forgotten."""

    def __len__(self) -> int:
        return len(self._last)

    @property
    def rate(self) -> float:
        """The share of blocks that is followed."""
        return self._sieve.rate

    def asked(self, keys: bytes) -> None:
        """A request for a chain of keys, joined: counts, and is a use of all of them."""
        first = keys[:MARK_BYTES]
        self._requests += 1
        self.asked_blocks += len(keys) // KEY_BYTES
        if counted := self._first_sieve.follows(first):
            self._ask_first(first)
        marks = self._sieve.followed(keys)
        if marks:
            self._ask_rest(marks[1:] if marks[0] == first else marks)
            self._use(marks)
        if counted:
            self._first_last[first] = self._now
            if len(self._first_last) > self._blocks_max:
                self._first_sieve = Sieve(self._first_sieve.rate * SHRINK)
                self._first_last = _kept(self._first_last, self._first_sieve)
        if self.asked_blocks > FADE_BLOCKS:
            self._fade()

    def stored(self, keys: bytes) -> None:
        """Blocks came in: those that nobody asked for before are used now."""
        fresh = [mark for mark in self._sieve.followed(keys) if mark not in self._last]
        if fresh:
            self._use(fresh)

    def shares(self, capacities: Iterable[float]) -> list[float]:
        """The share of all blocks asked for that would have been prefix hits in tiers of so many blocks."""
        rest, total = self.asked_blocks - self._requests, max(1, self.asked_blocks)
        return [
            (self._requests * self._first.share(size) + rest * self._rest.share(size)) / total for size in capacities
        ]

    def shrink(self) -> None:
        """Follow fewer blocks from now on."""
        self._sieve = Sieve(self.rate * SHRINK)
        self._last = _kept(self._last, self._sieve)
        self._uses = sorted(self._last.values())

    def _ask_first(self, mark: bytes) -> None:
        weight = 1 / self._first_sieve.rate
        self._first.asked += weight
        if (used := self._first_last.get(mark)) is not None:
            newer = len(self._uses) - bisect_right(self._uses, used)
            self._first.hit(1 + newer / self.rate, weight)

    def _ask_rest(self, marks: Sequence[bytes]) -> None:
        weight, reach = 1 / self.rate, 1
        self._rest.asked += weight * len(marks)
        for mark in marks:
            used = self._last.get(mark)
            if used is None:
                break
            reach = max(reach, len(self._uses) - bisect_left(self._uses, used))
            self._rest.hit(reach * weight, weight)

    def _use(self, marks: Sequence[bytes]) -> None:
        """A chain was used: its head last, as tiers have it."""
        last, uses, now = self._last, self._uses, self._now
        for mark in reversed(marks):
            before = last.get(mark)
            if before is not None:
                del uses[bisect_left(uses, before)]
            now += 1
            last[mark] = now
            uses.append(now)
        self._now = now
        if len(last) > self._blocks_max:
            self.shrink()

    def _fade(self) -> None:
        self._first.fade()
        self._rest.fade()
        self._requests //= 2
        self.asked_blocks //= 2


def _kept(uses: dict[bytes, int], sieve: Sieve) -> dict[bytes, int]:
    return {mark: used for mark, used in uses.items() if sieve.follows(mark)}

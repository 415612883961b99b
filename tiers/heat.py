"""Which blocks are hot, and how much of the bus may be spent on them. Small objects without locks or I/O.

Owns counts in bounded memory. The store owns one of each and calls them on its loop. Standard library only.
"""

from collections.abc import Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


class Heat:
    """Counts uses over the last one to two windows of ``window_s`` seconds. A block is hot from ``uses`` on.

    Two generations of counts: at the end of a window the older is forgotten and the newer ages, so nothing is swept and
    memory is bounded by ``blocks_max`` a generation; when that is full, new blocks are not counted until it ages.
    """

    def __init__(self, *, uses: int, window_s: float, blocks_max: int = 1 << 16) -> None:
        self._uses = uses
        self._window_s = window_s
        self._blocks_max = blocks_max
        self._now: dict[Hashable, int] = {}
        self._before: dict[Hashable, int] = {}
        self._until: float | None = None

    def used(self, names: Iterable[N], now: float) -> list[N]:
        """Count one use of each; those that are hot. They are called as the caller calls them, of all namespaces."""
        self._age(now)
        hot = []
        for name in names:
            count = self._now.get(name, 0) + 1
            if count > 1 or len(self._now) < self._blocks_max:
                self._now[name] = count
            if count + self._before.get(name, 0) >= self._uses:
                hot.append(name)
        return hot

    def _age(self, now: float) -> None:
        if self._until is None or now >= self._until + self._window_s:  # nothing of either window counts any more
            self._now, self._before = {}, {}
            self._until = now + self._window_s
        elif now >= self._until:
            self._now, self._before = {}, self._now
            self._until += self._window_s


class BusShare:
    """Lets copies take at most ``share`` of the bus's time, averaged over ``window_s`` seconds."""

    def __init__(self, share: float, window_s: float = 1.0) -> None:
        self._share = share
        self._most_s = share * window_s
        self._left_s = self._most_s
        self._at: float | None = None

    def allows(self, now: float) -> bool:
        """Whether another copy may begin. One that takes longer than what is left is paid for by waiting after it."""
        if self._at is not None:
            self._left_s = min(self._most_s, self._left_s + self._share * (now - self._at))
        self._at = now
        return self._left_s > 0

    def spent(self, seconds: float) -> None:
        """A copy took so long."""
        self._left_s -= seconds

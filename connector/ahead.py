"""Copies that were begun and are not known to be whole yet: how far a load or store runs ahead of them.

Owns the list of one call. Called by ``client.py`` under its lock. Imports ``connection`` and ``daemon.protocol``.

A copier that copies at once needs none of this: what it was told to copy is whole when it returns. One that only
starts copies (a GPU's) has a ``settle``; until that was called for a block its slot must neither be committed, nor be
believed, nor be given back.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from terracekv.connector.connection import Trouble
from terracekv.daemon.protocol import Slot

AHEAD_BYTES = 256 << 20
"""Copies under way at once: several of a staging buffer's size, so that neither bus nor GPU waits for a message."""

Settle = Callable[[int], None]
"""Returns when the copy of block ``index``, and all begun before it, are over; Trouble when one went wrong, and then
too nothing is under way any more."""


class Ahead:
    """Without ``settle`` every copy is whole at once."""

    def __init__(self, settle: Settle | None, block_bytes: int) -> None:
        self._settle = settle
        self._blocks_max = max(2, AHEAD_BYTES // block_bytes) if settle else 0
        self._begun: deque[tuple[int, Slot]] = deque()

    def begun(self, index: int, slot: Slot) -> list[tuple[int, Slot]]:
        """A copy was begun; those that are whole now and were not reported yet, in order."""
        self._begun.append((index, slot))
        return self._whole(self._blocks_max)

    def rest(self) -> list[tuple[int, Slot]]:
        """Wait for all."""
        return self._whole(0)

    def forget(self) -> None:
        """Wait until nothing is under way any more, however it ended. No error: the call has failed already."""
        if self._begun and self._settle is not None:
            with suppress(Trouble):
                self._settle(self._begun[-1][0])
        self._begun.clear()

    def _whole(self, left: int) -> list[tuple[int, Slot]]:
        whole = []
        while len(self._begun) > left:
            index, slot = self._begun[0]
            if self._settle is not None:
                self._settle(index)
            whole.append(self._begun.popleft())
        return whole

"""How a transfer of many blocks is cut: into parts that fit a staging buffer. Pure arithmetic; nothing is touched.

Owns no state. Called by ``transfer.py`` from any thread. Imports ``runs``.

A block's payload is one or more *pieces* (groups of layers that look alike), each a ``Runs`` without pages, one after
the other. A *part* is what one staging buffer holds and one launch a piece fills: several whole blocks when blocks are
small, and whole bases of one block when it is large.
"""

from collections.abc import Sequence
from typing import NamedTuple

from terracekv.kernels.runs import Runs


class Stripe(NamedTuple):
    """Neighbouring bases of one piece. ``offset`` is where their bytes begin in a part's share of a block."""

    piece: int
    first_base: int
    base_count: int
    offset: int


class Part(NamedTuple):
    """``size`` bytes at ``offset`` of the payloads of ``block_count`` blocks from ``first_block`` on."""

    first_block: int
    block_count: int
    offset: int
    size: int
    stripes: tuple[Stripe, ...]


class Cut:
    """Parts for blocks of ``pages_per_block`` pages in the memory of ``pieces``.

    A staging buffer has ``part_bytes`` or, where one base's share of a block is more than asked for, that.
    """

    def __init__(self, pieces: Sequence[Runs], pages_per_block: int, part_bytes: int) -> None:
        assert pages_per_block > 0 and pieces
        self.shares = [piece.run_bytes * pages_per_block for piece in pieces]
        self.block_bytes = sum(len(piece.bases) * share for piece, share in zip(pieces, self.shares, strict=True))
        self.part_bytes = max(part_bytes, *self.shares)
        self._pieces = pieces
        self._of_block = self._cut_block()

    def parts(self, block_count: int) -> list[Part]:
        """All bytes of the blocks, each once; parts of one block follow each other."""
        if len(self._of_block) > 1:
            return [part._replace(first_block=block) for block in range(block_count) for part in self._of_block]
        (whole,) = self._of_block
        together = self.part_bytes // self.block_bytes
        return [
            whole._replace(first_block=first, block_count=min(together, block_count - first))
            for first in range(0, block_count, together)
        ]

    def _cut_block(self) -> list[Part]:
        parts: list[Part] = []
        stripes: list[Stripe] = []
        offset = size = 0
        for number, (piece, share) in enumerate(zip(self._pieces, self.shares, strict=True)):
            base = 0
            while base < len(piece.bases):
                count = min(len(piece.bases) - base, (self.part_bytes - size) // share)
                if count:
                    stripes.append(Stripe(number, base, count, size))
                    size += count * share
                    base += count
                if base < len(piece.bases):
                    parts.append(Part(0, 1, offset, size, tuple(stripes)))
                    offset, size, stripes = offset + size, 0, []
        parts.append(Part(0, 1, offset, size, tuple(stripes)))
        return parts

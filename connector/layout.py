"""What an engine keeps, put into the protocol's words: the layout of a block, and where block i lies in its tensors.

Owns nothing. Called by connectors in the engine's process, from any thread. Imports ``kernels`` and
``daemon.protocol``; knows no engine and no tensor library: tensors come as addresses, shapes and byte strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides
from terracekv.kernels.host import gather_runs, scatter_runs
from terracekv.kernels.runs import Runs


class Plane(NamedTuple):
    """One layer's K, V or latent in memory, as heads x tokens x dim. ``strides`` are bytes, per head and per token."""

    address: int
    heads: int
    tokens: int
    dim: int
    strides: tuple[int, int]


def layout_of(
    *, axes: str, packing: str, layers: Sequence[tuple[int, ...]], block_tokens: int, item_bytes: int
) -> Layout:
    """The layout of a block whose layer i has planes of ``layers[i]`` per token: (heads, dim), or (dim,) when latent.

    Consecutive layers that look alike form a group. Raises ValueError, naming the field, for a layout that the
    protocol does not understand: nothing is guessed.
    """
    groups = []
    for per_token, alike in groupby(layers):
        token_axis = 1 if axes == "HND" else 0
        shape = (*per_token[:token_axis], block_tokens, *per_token[token_axis:])
        groups.append(LayerGroup(len(list(alike)), shape, dense_strides(shape, item_bytes)))
    layout = Layout(axes, packing, item_bytes, tuple(groups))
    problem = layout.problem(block_tokens)
    if problem:
        raise ValueError(problem)
    return layout


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one prompt in dense tensors: a payload is the ``pieces``, one after the other, at page i.

    Holds addresses only: the caller keeps the tensors alive, and unresized, for as long as it copies.
    """

    pieces: tuple[Runs, ...]

    @classmethod
    def of(cls, planes: Sequence[Plane], block_tokens: int, item_bytes: int) -> "Blocks":
        """Blocks in HND order: plane by plane, head by head. Whole blocks only; ``planes`` are K then V per layer.

        Raises ValueError when the tokens of a head are not dense in memory, or not even one block of them is there.
        """
        pieces = []
        for (dim, tokens), alike in groupby(planes, key=lambda plane: (plane.dim, plane.tokens)):
            bases: list[int] = []
            for plane in alike:
                if plane.strides[1] != dim * item_bytes:
                    raise ValueError(f"tokens are {plane.strides[1]} bytes apart, not {dim * item_bytes}")
                bases.extend(plane.address + head * plane.strides[0] for head in range(plane.heads))
            run_bytes = block_tokens * dim * item_bytes
            pieces.append(Runs(tuple(bases), run_bytes, tokens // block_tokens, run_bytes))
        return cls(tuple(pieces))

    def gather(self, index: int, payload: memoryview) -> None:
        """Copy block ``index`` into ``payload``."""
        for plan, part in self._parts(index, payload):
            gather_runs(plan, part)

    def scatter(self, index: int, payload: memoryview) -> None:
        """Copy ``payload`` out into block ``index``."""
        for plan, part in self._parts(index, payload):
            scatter_runs(plan, part)

    def _parts(self, index: int, payload: memoryview) -> list[tuple[Runs, memoryview]]:
        parts = []
        offset = 0
        for piece in self.pieces:
            plan = piece.at(index)
            parts.append((plan, payload[offset : offset + plan.payload_bytes]))
            offset += plan.payload_bytes
        return parts

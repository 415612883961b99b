"""Where vLLM keeps a block: the pages of its KV tensors as runs of memory, and a payload made of them.

Owns nothing. Called by the worker half, from its threads; copies pages that are in host memory. Imports ``kernels`` and
``daemon.protocol``; knows no vLLM and no torch: of a tensor it asks the address, the shape and the strides.

A *page* is what vLLM calls a block: the KV of a few tokens in every layer of one KV group. We treat it as opaque bytes,
since some backends transpose or interleave inside it. A payload is group after group, and in each group page after
page: so any stretch of pages can be copied by itself, and a block may be loaded in part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import Protocol

from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides
from terracekv.kernels.host import gather_runs, scatter_runs
from terracekv.kernels.runs import Runs

NULL_PAGE = 0
"""The page that stands for none: behind a sliding window, say."""
KINDS = {
    "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec",
    "SinkFullAttentionSpec",
}  # fmt: skip
"""Kinds of KV that are pages of tokens and nothing else. Any other is refused by name."""


class Unfit(ValueError):
    """What in this engine keeps it from being cached."""


class Tensor(Protocol):
    """What is asked of a KV tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A KV group as vLLM describes it: layers that share a table of pages of ``page_tokens`` tokens."""

    kind: str
    page_tokens: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group in memory. ``pieces`` differ in the size of their runs or the distance of their pages."""

    page_tokens: int
    pieces: tuple[Runs, ...]
    page_bytes: int
    offset: int
    """Of the group in a payload."""


def alignment(groups: Sequence[GroupSpec]) -> int:
    """Tokens after which every group is at the end of a page."""
    return lcm(*(group.page_tokens for group in groups))


def block_tokens_for(wanted: int, align: int, on_cpu: bool) -> int:
    """Tokens in a block: as asked for, or the least that suits the pages. Raises Unfit."""
    if wanted % align:
        raise Unfit(f"block_tokens: {wanted} is not a multiple of the engine's {align} tokens")
    return wanted or align * -(-(32 if on_cpu else 256) // align)


@dataclass(frozen=True, slots=True)
class Pages:
    """All pages of one worker. Holds addresses only: the engine keeps the tensors for as long as it lives."""

    groups: tuple[Group, ...]
    block_tokens: int
    page_count: int

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], specs: Sequence[GroupSpec], page_count: int, block_tokens: int
    ) -> "Pages":
        """Raises Unfit, naming the group, for KV that is not pages of tokens."""
        groups = []
        offset = 0
        for number, spec in enumerate(specs):
            if spec.kind not in KINDS:
                raise Unfit(f"KV group {number} is {spec.kind}: only {', '.join(sorted(KINDS))} are cached")
            bases: dict[tuple[int, int], dict[int, None]] = {}  # an ordered set: layers may share a tensor
            for layer in spec.layers:
                if layer not in tensors:
                    raise Unfit(f"KV group {number}: layer {layer} has no tensor")
                stride, run_bytes, addresses = runs_of(tensors[layer], page_count, layer)
                if run_bytes % spec.page_tokens:
                    raise Unfit(f"layer {layer}: a run of {run_bytes} bytes for {spec.page_tokens} tokens")
                bases.setdefault((stride, run_bytes), {}).update(dict.fromkeys(addresses))
            pieces = tuple(Runs(tuple(found), stride, page_count, run) for (stride, run), found in bases.items())
            page_bytes = sum(len(piece.bases) * piece.run_bytes for piece in pieces)
            groups.append(Group(spec.page_tokens, pieces, page_bytes, offset))
            offset += block_tokens // spec.page_tokens * page_bytes
        return cls(tuple(groups), block_tokens, page_count)

    @property
    def block_bytes(self) -> int:
        """Of this rank's shard."""
        return sum(self.block_tokens // group.page_tokens * group.page_bytes for group in self.groups)

    @property
    def layout(self) -> Layout:
        """As the daemon is told it."""
        groups = []
        for group in self.groups:
            for piece in group.pieces:
                shape = (self.block_tokens, piece.run_bytes // group.page_tokens)
                groups.append(LayerGroup(len(piece.bases), shape, dense_strides(shape, 1)))
        return Layout("ND", "pages", 1, tuple(groups))

    def gather(self, tables: Sequence[Sequence[int]], payload: memoryview) -> None:
        """Copy a block into ``payload``. ``tables[g]`` are its pages in group g, all of them."""
        for group, table in zip(self.groups, tables, strict=True):
            for number, page in enumerate(table):
                for plan, start, end in self._parts(group, number, page):
                    gather_runs(plan, payload[start:end])

    def scatter(self, tables: Sequence[Sequence[int]], first_token: int, payload: memoryview) -> None:
        """Copy ``payload`` out to the pages that hold the block's tokens from ``first_token`` on; ``NULL_PAGE`` is
        passed over."""
        for group, table in zip(self.groups, tables, strict=True):
            for number, page in enumerate(table, first_token // group.page_tokens):
                if page != NULL_PAGE:
                    for plan, start, end in self._parts(group, number, page):
                        scatter_runs(plan, payload[start:end])

    def _parts(self, group: Group, number: int, page: int) -> list[tuple[Runs, int, int]]:
        parts = []
        offset = group.offset + number * group.page_bytes
        for piece in group.pieces:
            plan = piece.at(page)
            parts.append((plan, offset, offset + plan.payload_bytes))
            offset += plan.payload_bytes
        return parts


def page_shapes(tensors: Mapping[str, Tensor], specs: Sequence[GroupSpec], page_count: int) -> list[list[int]]:
    """Tokens of a page, the parts that it has and the shape of one, each combination once. The same tokens in pages of
    another shape are other bytes, since inside of a page an axis of tokens may come behind others."""
    shapes = {
        (spec.page_tokens, tensors[layer].shape[0] // page_count, *tensors[layer].shape[1:])
        for spec in specs
        for layer in spec.layers
    }
    return [list(shape) for shape in sorted(shapes)]


def runs_of(tensor: Tensor, page_count: int, layer: str) -> tuple[int, int, list[int]]:
    """(distance of pages, bytes of a run, address of page 0 of each run) of a layer whose first axis counts pages.

    A page is one run when it is dense in memory, in whatever order of its axes; else as many as there are pieces.
    The first axis may count parts of a page, all equal. Raises Unfit.
    """
    item = tensor.element_size()
    (rows, *shape), (row_stride, *strides) = tensor.shape, tensor.stride()
    if rows % page_count:
        raise Unfit(f"layer {layer}: {rows} rows are not {page_count} pages of equal size")
    parts = rows // page_count
    axes = [(stride * item, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1]
    if parts > 1:
        axes.append((row_stride * item, parts))
    run_bytes = item
    outer: list[tuple[int, int]] = []
    for stride, extent in sorted(axes):
        if stride == run_bytes and not outer:
            run_bytes *= extent
        else:
            outer.append((stride, extent))
    start = tensor.data_ptr()
    addresses = [
        start + sum(step * stride for step, (stride, _) in zip(steps, reversed(outer), strict=True))
        for steps in product(*(range(extent) for _, extent in reversed(outer)))
    ]
    return row_stride * item * parts, run_bytes, addresses

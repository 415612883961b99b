"""Pages of a GPU in groups of layers, each with a page size of its own: the copier of engines like vLLM.

Owns a ``Transfer`` for each group and the pinning of the arena. Made by a connector once the KV cache is allocated;
called from its worker threads, ``Paged`` from one. Imports ``device``, ``connection`` and ``kernels``; knows no engine
and no tensor library.

A payload is group after group, in each group page after page, in each page piece after piece: the same bytes as a copy
of page by page on the CPU makes, so engines on either find each other's blocks. Any stretch of pages can be copied by
itself, so a block may be loaded in part. Page ``null_page`` stands for none: it is neither read nor written.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from terracekv.connector.connection import Trouble
from terracekv.connector.device import COPY_FAILED, Arenas, Move
from terracekv.kernels.batch import Batch
from terracekv.kernels.cuda import Device, device_of
from terracekv.kernels.pages import address_of
from terracekv.kernels.runs import Runs
from terracekv.kernels.shared import Shared
from terracekv.kernels.transfer import PART_BYTES, After, Transfer

Tables = Sequence[Sequence[int]]
"""For each group, pages in order."""


class Group(Protocol):
    """A group of layers in the GPU's memory. ``offset`` is that of the group in a payload."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def pieces(self) -> tuple[Runs, ...]: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def offset(self) -> int: ...


class PagedCopier:
    """``Client(..., attach=copier.attach, device=copier.device)``. NoCuda without a GPU; ValueError when the addresses
    are not a GPU's; RuntimeError when it has no room for the staging buffers of ``part_bytes``."""

    def __init__(
        self,
        groups: Sequence[Group],
        block_tokens: int,
        *,
        null_page: int | None = None,
        device: Device | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.device = device or device_of(groups[0].pieces[0].bases[0])
        self.groups = tuple(groups)
        self.null_page = null_page
        self.block_bytes = sum(block_tokens // group.page_tokens * group.page_bytes for group in groups)
        self._arenas = Arenas(self.device)
        self.attach = self._arenas.attach
        self.transfers: list[Transfer] = []
        try:
            for group in groups:
                made = Transfer(self.device, group.pieces, 1, self._arenas, part_bytes=part_bytes)
                self.transfers.append(made)
                made.prepare()
        except BaseException:
            self.close()
            raise

    def begin(self, after: After) -> "Paged":
        """Copies of one load or store, which come after ``after``."""
        return Paged(self, after)

    def report(self) -> dict[str, Any]:
        """For a status or a log."""
        return {"device": self.device.uuid, **self._arenas.report()}

    def close(self) -> None:
        """After the clients: they must have let go of the arena. Idempotent."""
        for transfer in self.transfers:
            transfer.close()


class Paged:
    """Copies that may only be begun; a block is whole when ``settle`` has returned for it. A failed copy is a Trouble,
    for this and all later blocks."""

    def __init__(self, copier: PagedCopier, after: After) -> None:
        self._copier = copier
        self._after = after
        self._begun: dict[int, list[Batch]] = {}
        """Blocks begun and not settled, in order."""
        self._failed: str | None = None

    def gather(self, index: int, tables: Tables, payload: memoryview) -> None:
        """Begin to copy block ``index``, which is in all pages of ``tables``, into ``payload``."""
        assert payload.nbytes >= self._copier.block_bytes
        self._start(index, [transfer.gather for transfer in self._copier.transfers], tables, 0, address_of(payload))

    def scatter(self, index: int, tables: Tables, first_token: int, payload: memoryview) -> None:
        """Begin to copy ``payload`` out to pages that hold the block's tokens from ``first_token`` on."""
        assert payload.nbytes >= self._copier.block_bytes
        moves: list[Move] = [transfer.scatter for transfer in self._copier.transfers]
        self._start(index, moves, tables, first_token, address_of(payload))

    def fetch(self, index: int, tables: Tables, first_token: int, shared: Shared, offset: int) -> None:
        """The same out of a slot of the gpu tier. ValueError for a slot that is not inside."""
        source = shared.address(offset, self._copier.block_bytes)
        moves: list[Move] = [transfer.scatter_from_device for transfer in self._copier.transfers]
        self._start(index, moves, tables, first_token, source)

    def settle(self, index: int) -> None:
        """Wait until block ``index``, and all begun before it, are whole."""
        if self._failed is not None:
            raise Trouble(COPY_FAILED, self._failed)
        try:
            while index in self._begun:
                first, batches = next(iter(self._begun.items()))
                for batch in batches:
                    batch.finish()
                del self._begun[first]
        except RuntimeError as error:
            raise self._trouble(error) from error

    def _start(self, index: int, moves: Sequence[Move], tables: Tables, first_token: int, payload: int) -> None:
        batches = self._begun.setdefault(index, [])
        try:
            for group, move, table in zip(self._copier.groups, moves, tables, strict=True):
                start, first = payload + group.offset, first_token // group.page_tokens
                placed = [(page, start + number * group.page_bytes) for number, page in enumerate(table, first)]
                placed = [(page, address) for page, address in placed if page != self._copier.null_page]
                if placed:
                    pages, addresses = zip(*placed, strict=True)
                    batches.append(move([[page] for page in pages], addresses, self._after))
        except RuntimeError as error:
            raise self._trouble(error) from error
        except ValueError as error:  # a page that is not there
            self._trouble(error)
            raise

    def _trouble(self, error: Exception) -> Trouble:
        """Nothing may be under way any more when a call fails: what was begun ends first, however it ends."""
        self._failed = str(error)
        left, self._begun = [batch for batches in self._begun.values() for batch in batches], {}
        for batch in left:
            with suppress(RuntimeError):
                batch.finish()
        return Trouble(COPY_FAILED, self._failed)

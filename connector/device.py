"""An engine's paged KV on a GPU: the copier of a client, with the verbs of ``layout.Blocks``.

Owns the transfers of one engine process on one GPU, and the pinning of the arena in it. Made by a connector once the
KV cache is allocated; ``DeviceBlocks`` are one thread's. Imports ``kernels``, ``connection``; no tensor library:
tensors come as addresses.

``Client(..., attach=copier.attach)`` lets it pin each arena that the client maps; ``blocks = copier.blocks(pages,
stream)`` stands for one prompt, and ``client.load(keys, blocks.scatter, settle=blocks.settle)`` moves it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from terracekv.connector.connection import Trouble
from terracekv.kernels.choice import SCRATCH_BYTES, Measured, measure
from terracekv.kernels.cuda import Device, device_of
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.kernels.runs import Runs
from terracekv.kernels.shared import Shared
from terracekv.kernels.transfer import PART_BYTES, STAGED, Batch, Transfer

COPY_FAILED = "copy_failed"


class Arenas:
    """The host memory that slots lie in: pinned in the background, one mapping after the other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned: list[Pinned] = []

    def attach(self, view: memoryview) -> Callable[[], None]:
        """Begin to pin a mapping; the answer ends it, and returns when nothing of it is pinned any more."""
        pinned = Pinned(self._device, address_of(view), view.nbytes)
        self._pinned.append(pinned)
        thread = threading.Thread(target=pinned.pin, name="terracekv-pin", daemon=True)
        thread.start()

        def detach() -> None:
            self._pinned.remove(pinned)
            pinned.close()
            thread.join()

        return detach

    def covers(self, address: int, size: int) -> bool:
        return any(pinned.covers(address, size) for pinned in list(self._pinned))

    def spans(self, address: int, size: int) -> list[tuple[int, int]]:
        for pinned in list(self._pinned):
            if pinned.holds(address, size):
                return pinned.spans(address, size)
        return [(address, size)]

    def report(self) -> dict[str, Any]:
        """Bytes of all mappings, and why some of them are not pinned."""
        pinned = list(self._pinned)
        return {
            "pinned_bytes": sum(each.pinned_bytes for each in pinned),
            "pageable_bytes": sum(each.pageable_bytes for each in pinned),
            "pageable_reason": next((each.reason for each in pinned if each.reason), None),
        }


class DeviceCopier:
    """``pieces`` are the KV cache, group of layers by group, without pages; a block is ``pages_per_block`` of them.

    Measures once which way of copying is faster here, unless told not to. NoCuda without a GPU; ValueError when the
    addresses are not a GPU's.
    """

    def __init__(
        self,
        pieces: Sequence[Runs],
        pages_per_block: int,
        *,
        device: Device | None = None,
        try_out: bool = True,
        part_bytes: int = PART_BYTES,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        self.device = device or device_of(pieces[0].bases[0])
        self._arenas = Arenas(self.device)
        self.measured = (
            measure(self.device, pieces, pages_per_block, scratch_bytes=scratch_bytes, part_bytes=part_bytes)
            if try_out
            else Measured(STAGED, {}, "not asked to")
        )
        self._transfer = Transfer(
            self.device, pieces, pages_per_block, self._arenas, choice=self.measured.choice, part_bytes=part_bytes
        )
        self.part_bytes = part_bytes
        self.attach = self._arenas.attach

    @property
    def block_bytes(self) -> int:
        return self._transfer.block_bytes

    def blocks(self, pages: Sequence[Sequence[int]], stream: int) -> "DeviceBlocks":
        """The blocks of one prompt: block i is in ``pages[i]``. ``stream`` is the engine's own, as a number."""
        return DeviceBlocks(self._transfer, pages, stream, self.part_bytes)

    def report(self) -> dict[str, Any]:
        """For a status or a log: how this process copies, and why so."""
        return {
            "device": self.device.uuid,
            "gather": str(self.measured.choice.gather),
            "scatter": str(self.measured.choice.scatter),
            "bytes_per_s": {way: {str(s): round(r) for s, r in of.items()} for way, of in self.measured.rates.items()},
            "not_measured": self.measured.reason,
            **self._arenas.report(),
        }

    def close(self) -> None:
        """After the client: it must have let go of the arena."""
        self._transfer.close()


class DeviceBlocks:
    """``gather`` and ``scatter`` take a copy on; small ones are collected and started together. Nothing is whole before
    ``settle``.

    What is begun comes after all that ``stream`` was given before, and what it is given after ``settle`` comes later.
    A failed copy is a Trouble, for this and all later blocks.
    """

    def __init__(self, transfer: Transfer, pages: Sequence[Sequence[int]], stream: int, part_bytes: int) -> None:
        self._transfer = transfer
        self._pages = pages
        self._stream = stream
        self._together = max(1, part_bytes // transfer.block_bytes)
        self._waiting: list[tuple[int, int]] = []
        self._gather = True
        self._where: dict[int, tuple[Batch, int]] = {}
        """Blocks begun and not settled, in order: batch, and place in it."""
        self._failed: str | None = None

    def gather(self, index: int, payload: memoryview) -> None:
        """Begin to copy block ``index`` into ``payload``, a slot of the arena."""
        self._take(True, index, payload)

    def scatter(self, index: int, payload: memoryview) -> None:
        """Begin to copy ``payload`` out into block ``index``."""
        self._take(False, index, payload)

    def scatter_shared(self, index: int, shared: Shared, offset: int) -> None:
        """Begin to copy block ``index`` out of a slot of the gpu tier, which this process has open: at memory speed,
        past the bus. ValueError for a slot that is not inside."""
        source = shared.address(offset, self._transfer.block_bytes)
        try:
            batch = self._transfer.scatter_from_device([self._pages[index]], [source], self._stream)
        except RuntimeError as error:
            raise self._trouble(error) from error
        self._where[index] = (batch, 0)

    def settle(self, index: int) -> None:
        """Wait until block ``index``, and all begun before it, are whole. A block that was settled already is."""
        if any(waiting == index for waiting, _ in self._waiting):
            self._start()
        if self._failed is not None:
            raise Trouble(COPY_FAILED, self._failed)
        try:
            while index in self._where:
                first, (batch, place) = next(iter(self._where.items()))
                del self._where[first]
                if not any(other is batch for other, _ in self._where.values()):
                    batch.finish()
                elif first == index:
                    batch.wait(place)
        except RuntimeError as error:
            raise self._trouble(error) from error

    def _take(self, gather: bool, index: int, payload: memoryview) -> None:
        assert payload.nbytes >= self._transfer.block_bytes
        if self._waiting and gather != self._gather:
            self._start()
        self._gather = gather
        self._waiting.append((index, address_of(payload)))
        if len(self._waiting) >= self._together:
            self._start()

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        move = self._transfer.gather if self._gather else self._transfer.scatter
        try:
            batch = move([self._pages[index] for index, _ in waiting], [slot for _, slot in waiting], self._stream)
        except RuntimeError as error:
            raise self._trouble(error) from error
        for place, (index, _) in enumerate(waiting):
            self._where[index] = (batch, place)

    def _trouble(self, error: RuntimeError) -> Trouble:
        self._failed = str(error)
        self._waiting.clear()
        return Trouble(COPY_FAILED, self._failed)

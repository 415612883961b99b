"""An engine's paged KV on a GPU: the copier of a client, with the verbs of ``layout.Blocks``.

Owns the transfers of one engine process on one GPU, and what is pinned of arenas in the process. Made by a connector
once the KV cache is allocated; ``DeviceBlocks`` are one thread's. Imports ``kernels``, ``connection``; no tensor
library: tensors come as addresses.

``Client(..., attach=copier.attach, device=copier.device)`` lets it pin each arena that the client maps, and the client
open the gpu tier's memory; ``blocks = copier.blocks(pages, stream)`` stands for one prompt, and ``client.load(keys,
blocks.scatter, blocks.settle, blocks.fetch)`` moves it.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from terracekv.connector.connection import Trouble
from terracekv.kernels.batch import Batch
from terracekv.kernels.choice import SCRATCH_BYTES, Measured, measure
from terracekv.kernels.cuda import Device, device_of
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.kernels.runs import Runs
from terracekv.kernels.shared import Shared
from terracekv.kernels.transfer import PART_BYTES, STAGED, After, Transfer

COPY_FAILED = "copy_failed"
READ_ONLY = "this client may only read the arena (access=read), and only what can be written is pinned"
Move = Callable[[Sequence[Sequence[int]], Sequence[int], After], Batch]
"""As ``Transfer.gather``: pages of blocks, addresses of payloads, and what to wait for."""


class _Pinning:
    """A mapping that is being pinned, or is, for all GPUs and clients of this process."""

    def __init__(self, device: Device, view: memoryview) -> None:
        self.pinned = Pinned(device, address_of(view), view.nbytes)
        self.users = 0
        self._thread = threading.Thread(target=self.pinned.pin, name="terracekv-pin", daemon=True)
        if view.readonly:
            self.pinned.reason = READ_ONLY  # CUDA would refuse it, and that would count for other mappings too
        else:
            self._thread.start()

    def end(self) -> None:
        """Returns when nothing of it is pinned any more."""
        self.pinned.close()
        if self._thread.ident is not None:
            self._thread.join()


_sharing = threading.Lock()
_pinnings: dict[int, _Pinning] = {}
"""By address: CUDA pins memory once, and then for every GPU of the process."""


def _after_fork() -> None:
    """In a forked child, whose parent's memory CUDA knows nothing of."""
    global _sharing
    _sharing = threading.Lock()
    _pinnings.clear()


os.register_at_fork(after_in_child=_after_fork)


class Arenas:
    """The host memory that slots lie in: pinned in the background, each mapping once however many clients have it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned: list[Pinned] = []

    def attach(self, view: memoryview) -> Callable[[], None]:
        """Begin to pin a mapping, if nobody has; the answer ends that, and when it was the last to need it returns once
        nothing of it is pinned any more."""
        address = address_of(view)
        with _sharing:
            pinning = _pinnings.get(address)
            if pinning is None:
                pinning = _pinnings[address] = _Pinning(self._device, view)
            pinning.users += 1
        self._pinned.append(pinning.pinned)

        def detach() -> None:
            self._pinned.remove(pinning.pinned)
            with _sharing:  # to its end: whoever pins the same mapping next may not find it half pinned
                pinning.users -= 1
                if not pinning.users:
                    del _pinnings[address]
                    pinning.end()

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
        pinned = list(dict.fromkeys(self._pinned))  # of each client that has it
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

    def blocks(self, pages: Sequence[Sequence[int]], after: After) -> "DeviceBlocks":
        """The blocks of one prompt: block i is in ``pages[i]``. ``after`` is the engine's own stream, as a number, or
        an event of it, for copies that another thread begins."""
        return DeviceBlocks(self._transfer, pages, after, self.part_bytes)

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

    What is begun comes after all that the stream ``after`` was given before, or after that event, and what the engine
    gives any stream after ``settle`` comes later. A failed copy is a Trouble, for this and all later blocks.
    """

    def __init__(self, transfer: Transfer, pages: Sequence[Sequence[int]], after: After, part_bytes: int) -> None:
        self._transfer = transfer
        self._pages = pages
        self._after = after
        self._together = max(1, part_bytes // transfer.block_bytes)
        self._waiting: list[tuple[int, int]] = []
        self._move: Move = transfer.gather
        self._where: dict[int, tuple[Batch, int]] = {}
        """Blocks begun and not settled, in order: batch, and place in it."""
        self._failed: str | None = None

    def gather(self, index: int, payload: memoryview) -> None:
        """Begin to copy block ``index`` into ``payload``, a slot of the arena."""
        self._take(self._transfer.gather, index, self._address(payload))

    def scatter(self, index: int, payload: memoryview) -> None:
        """Begin to copy ``payload`` out into block ``index``."""
        self._take(self._transfer.scatter, index, self._address(payload))

    def fetch(self, index: int, shared: Shared, offset: int) -> None:
        """Begin to copy block ``index`` out of a slot of the gpu tier, which this process has open: at memory speed,
        past the bus. ValueError for a slot that is not inside."""
        source = shared.address(offset, self._transfer.block_bytes)
        self._take(self._transfer.scatter_from_device, index, source)

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

    def _address(self, payload: memoryview) -> int:
        assert payload.nbytes >= self._transfer.block_bytes
        return address_of(payload)

    def _take(self, move: Move, index: int, address: int) -> None:
        if self._waiting and move != self._move:
            self._start()
        self._move = move
        self._waiting.append((index, address))
        if len(self._waiting) >= self._together:
            self._start()

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            pages = [self._pages[index] for index, _ in waiting]
            batch = self._move(pages, [address for _, address in waiting], self._after)
        except RuntimeError as error:
            raise self._trouble(error) from error
        except BaseException as error:  # a page that is not there, say
            self._trouble(error)
            raise
        for place, (index, _) in enumerate(waiting):
            self._where[index] = (batch, place)

    def _trouble(self, error: BaseException) -> Trouble:
        """Nothing may be under way any more when a call fails: what was begun ends first, however it ends."""
        self._failed = str(error)
        self._waiting.clear()
        left, self._where = {batch for batch, _ in self._where.values()}, {}
        for batch in left:
            with suppress(RuntimeError):
                batch.finish()
        return Trouble(COPY_FAILED, self._failed)

"""Blocks under way between pages and slots: when each is whole, when the pages are free, and what was lent for it all.

Owns nothing: events and buffer are its transfer's, which takes them back. Made by ``transfer.py``, used by whoever
called it. Imports ``cuda`` and ``pool``.
"""

from collections.abc import Callable

from terracekv.kernels.cuda import Device
from terracekv.kernels.pool import Buffer


class Batch:
    """Blocks under way; one thread's. ``finish`` must be called in the end, or what it holds is given back only by
    ``Transfer.close``."""

    def __init__(self, device: Device, block_count: int, take_back: "Callable[[Batch, bool], None]") -> None:
        self._device = device
        self._take_back = take_back
        self.events: list[int] = []
        """One for each part, in order."""
        self.part_of = [0] * block_count
        """The last part that has bytes of a block."""
        self.pages: int | None = None
        self.buffer: Buffer | None = None
        self._finished = False
        self._failed: BaseException | None = None

    def wait(self, block: int) -> None:
        """Until this block, and all before it, are whole where they go. Raises what went wrong."""
        if not self._over():
            self._device.await_event(self.events[self.part_of[block]])

    def done(self, block: int) -> bool:
        """Whether ``wait`` would return at once."""
        return self._over() or self._device.happened(self.events[self.part_of[block]])

    def hold(self, stream: int) -> None:
        """The stream does nothing more before the pages are free to be read and written again."""
        if not self._finished and self.pages is not None:
            self._device.wait(stream, self.pages)

    def finish(self) -> None:
        """Wait for all of it and give back what it used. Idempotent. What went wrong is raised when nothing of it is
        under way any more."""
        if self._finished:
            return
        try:
            for event in (*self.events[-1:], self.pages):
                if event is not None:
                    self._device.await_event(event)
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._finished = True
            self._take_back(self, self._failed is not None)

    def _over(self) -> bool:
        """Whether all was waited for; raises what went wrong then."""
        if self._failed is not None:
            raise self._failed
        return self._finished

"""Pinned host memory: an arena that the GPU's copy engines reach, registered piece by piece.

Owns the registrations of one mapping in one process. Made and closed by whoever mapped it, once; ``covers`` is for any
thread. Imports ``cuda``.

A system may refuse to pin more (a limit of the container, of WSL, of the kernel). What was pinned until then stays so,
the rest is copied as pageable memory, slower and correct, and the two amounts are told. A process that was refused
once does not ask again: a failed attempt has been seen to spoil later ones.
"""

import logging
import threading
from contextlib import suppress

from terracekv.kernels.cuda import Device

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
_refused: str | None = None
"""Why this process pins no more."""


class Pinned:
    """``pinned_bytes`` from the start of the mapping are registered, the other ``pageable_bytes`` are not: ``reason``.

    ``address`` and ``size`` are multiples of the page. Blocks while it pins, about a second for 4 GiB of fresh pages;
    ``pin`` may run in a thread, chunks count as soon as they are done.
    """

    def __init__(self, device: Device, address: int, size: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._address = address
        self._size = size
        self._chunk_bytes = chunk_bytes
        self._chunks: list[int] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.pinned_bytes = 0
        self.reason: str | None = None

    @property
    def pageable_bytes(self) -> int:
        return self._size - self.pinned_bytes

    def pin(self) -> None:
        """Register all that the system lets us, from the start on."""
        global _refused
        for offset in range(self.pinned_bytes, self._size, self._chunk_bytes):
            length = min(self._chunk_bytes, self._size - offset)
            with self._lock:
                if self._closed.is_set():
                    return
                if _refused is None:
                    try:
                        self._device.register(self._address + offset, length)
                        self._chunks.append(self._address + offset)
                        self.pinned_bytes += length
                        continue
                    except RuntimeError as error:
                        _refused = (
                            f"host memory could not be pinned beyond {self.pinned_bytes} of {self._size} bytes"
                            f" ({error}): raise the memory lock limit (ulimit -l) or the container's memory,"
                            " or lower host.size"
                        )
                        log.warning("%s; the rest is copied as pageable memory", _refused)
                self.reason = _refused
                return

    def covers(self, address: int, size: int) -> bool:
        """Whether all these bytes are pinned, and by one registration."""
        return self.covers_all(address, size) and len(self.spans(address, size)) == 1

    def covers_all(self, address: int, size: int) -> bool:
        """Whether all these bytes are pinned, be it by several registrations."""
        start = address - self._address
        return 0 <= start and start + size <= self.pinned_bytes

    def holds(self, address: int, size: int) -> bool:
        """Whether these bytes are of this mapping, pinned or not."""
        return 0 <= address - self._address and address - self._address + size <= self._size

    def spans(self, address: int, size: int) -> list[tuple[int, int]]:
        """(address, bytes) of the same bytes, cut where one registration ends: no single copy may touch two."""
        cut = []
        while size:
            length = min(size, self._chunk_bytes - (address - self._address) % self._chunk_bytes)
            cut.append((address, length))
            address += length
            size -= length
        return cut

    def close(self) -> None:
        """Unregister all. Nobody copies any more. Idempotent. After an error of the GPU there may be nothing to
        unregister with: what is pinned then ends with the process."""
        self._closed.set()
        with self._lock:
            while self._chunks:
                with suppress(RuntimeError):
                    self._device.unregister(self._chunks.pop())
            self.pinned_bytes = 0

"""Memory for work under way, lent within a bound. Owns the buffers; any thread. Standard library only."""

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Scratch:
    """Lends at most ``limit_bytes`` at once, and keeps what comes back for the next: fresh pages are slow.
    Buffers begin at a page, so that direct I/O can use them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._idle: list[memoryview] = []
        self._held_bytes = 0
        self.lent = 0

    @contextmanager
    def lend(self, size: int, deadline: float) -> Iterator[memoryview | None]:
        """A buffer of ``size`` bytes for the length of the context, full of anything; None when there is none before
        ``deadline`` (of ``time.monotonic``), or can never be."""
        buffer = self._take(size, deadline)
        try:
            yield None if buffer is None else buffer[:size]
        finally:
            if buffer is not None:
                with self._changed:
                    self._idle.append(buffer)
                    self.lent -= 1
                    self._changed.notify()

    def _take(self, size: int, deadline: float) -> memoryview | None:
        if size > self.limit_bytes:
            return None
        with self._changed:
            while True:
                fitting = min((buffer for buffer in self._idle if len(buffer) >= size), key=len, default=None)
                if fitting is None:
                    while self._idle and self._held_bytes + size > self.limit_bytes:
                        self._held_bytes -= len(self._idle.pop(0))
                    if self._held_bytes + size <= self.limit_bytes:
                        fitting = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE))
                        self._held_bytes += size
                        self.lent += 1
                        return fitting
                else:
                    self._idle.remove(fitting)
                    self.lent += 1
                    return fitting
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

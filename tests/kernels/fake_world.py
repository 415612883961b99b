"""The machine under a fake CUDA: its memory, in the test's own, and what a stream has still to do.

Owns the memory. Used by ``fake_cupy.py``. Standard library only.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

FRESH, FREED = 0xDD, 0xEE


class Record:
    """One recording of an event: what waits for it waits for this, whatever becomes of the event."""

    def __init__(self) -> None:
        self.done = False
        self.clock = 0.0


class Work:
    """One thing that a stream was given: ``before`` must have happened, ``run`` does it and says how many seconds it
    takes, ``record`` happens then."""

    def __init__(
        self,
        run: Callable[[], float] | None = None,
        before: Record | None = None,
        record: Record | None = None,
    ) -> None:
        self.run, self.before, self.record = run, before, record


class Queue:
    """What a stream has still to do, and its own clock."""

    def __init__(self) -> None:
        self.work: deque[Work] = deque()
        self.clock = 0.0


class World:
    """The machine: allocations of all its processes. ``bus`` and ``memory`` are bytes a second, for the clocks."""

    def __init__(self, *, bus: float = 50e9, memory: float = 1000e9, mapped: float = 25e9) -> None:
        self.bus, self.memory, self.mapped = bus, memory, mapped
        self.device: dict[int, int] = {}
        self.buffers: dict[int, Any] = {}
        self.freed: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.handles: dict[bytes, int] = {}

    def allocate(self, size: int) -> int:
        buffer = (ctypes.c_ubyte * (size + 512))()
        address = -(-ctypes.addressof(buffer) // 256) * 256
        ctypes.memset(address, FRESH, size)
        self.buffers[address] = buffer
        self.freed.pop(address, None)
        return address

    def inside(self, ranges: dict[int, int], address: int, size: int = 1) -> bool:
        return any(start <= address and address + size <= start + length for start, length in ranges.items())

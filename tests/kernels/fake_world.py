"""The machine under a fake CUDA: its memory, in the test's own, and what a stream has still to do.

Owns the memory, and in a ``SharedWorld`` the files through which other processes see it. Used by
``fake_cupy.py``. Standard library only.
"""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
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

    def allocate_device(self, size: int) -> int:
        return self.allocate(size)

    def export(self, start: int) -> bytes:
        """The handle of an allocation."""
        handle = start.to_bytes(64, "little")
        self.handles[handle] = start
        return handle

    def open(self, handle: bytes) -> int | None:
        """Where an allocation is here; None when there is no such."""
        address = self.handles.get(handle)
        return address if address in self.device else None

    def inside(self, ranges: dict[int, int], address: int, size: int = 1) -> bool:
        return any(start <= address and address + size <= start + length for start, length in ranges.items())


class SharedWorld(World):
    """A GPU of several processes: its memory lies in files of ``folder``, and a handle names one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[int, Path] = {}

    def allocate_device(self, size: int) -> int:
        path = self._folder / f"{os.getpid()}-{len(self._files)}"
        path.write_bytes(bytes([FRESH]) * size)
        address = self._mapped(path)
        self._files[address] = path
        return address

    def export(self, start: int) -> bytes:
        return self._files[start].name.encode().ljust(64, b"\0")

    def open(self, handle: bytes) -> int | None:
        path = self._folder / handle.rstrip(b"\0").decode()
        if not path.is_file():
            return None
        if handle not in self.handles:
            address = self.handles[handle] = self._mapped(path)
            self.device[address] = path.stat().st_size
        return self.handles[handle]

    def _mapped(self, path: Path) -> int:
        with open(path, "r+b") as file:
            made = mmap.mmap(file.fileno(), 0)
        buffer = (ctypes.c_ubyte * len(made)).from_buffer(made)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

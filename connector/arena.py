"""The engine's side of the arena: maps what Welcome names, and says whether a slot is still what it was.

Owns the mappings and, while a session lasts, the lock that tells the daemon that this process may still write. Used by
``client.py`` under its lock; the prefault runs in a thread of its own. Imports ``kernels.pages`` and
``daemon.protocol``.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence

from terracekv.daemon.protocol import Slot, Welcome
from terracekv.kernels.pages import populate

PREFAULT_BYTES = 32 << 20

Attach = Callable[[memoryview], Callable[[], None]]
"""Told of a mapping while it may be copied from and to; what it answers is called when that ends."""
_GENERATION = struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")


class Arena:
    """Mappings of one arena. Kept across sessions as long as the daemon goes on with the same files."""

    def __init__(self, welcome: Welcome, handed: list[int] | None = None, *, write: bool = True) -> None:
        """``handed`` are the descriptors of both files that came with Welcome, ours from now on; without them the files
        are opened by name. Without ``write`` the arena is mapped for reading."""
        self._files = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            for file in handed or ():
                undo.callback(os.close, file)
            if handed is None or len(handed) != 2:
                handed = [os.open(welcome.arena, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)]
                undo.callback(os.close, handed[0])
                handed.append(os.open(welcome.slots, os.O_RDONLY | os.O_CLOEXEC))
                undo.callback(os.close, handed[1])
            self._arena_fd, self._slots_fd = handed
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            self._arena = mmap.mmap(self._arena_fd, welcome.arena_bytes, prot=prot)
            self._slots = mmap.mmap(self._slots_fd, welcome.slots_bytes, prot=mmap.PROT_READ)
            self._files = undo.pop_all()
        self.view = memoryview(self._arena)
        self._welcome = welcome
        self._locked: int | None = None
        self._stop = threading.Event()
        self._prefault = threading.Thread(target=self._populate, name="terracekv-prefault", daemon=True)
        if write:
            self._prefault.start()
        self._detach: Callable[[], None] | None = None

    def attach(self, attach: Attach) -> None:
        """Tell of this mapping. At most once."""
        self._detach = attach(self.view)

    def serves(self, welcome: Welcome, handed: Sequence[int] = ()) -> bool:
        """Whether these mappings are those that another Welcome names: the same files, not just the same paths."""
        others: Sequence[int | str] = handed if len(handed) == 2 else (welcome.arena, welcome.slots)
        for fd, other in zip((self._arena_fd, self._slots_fd), others, strict=True):
            try:
                if not os.path.samestat(os.fstat(fd), os.stat(other)):
                    return False
            except OSError:
                return False
        return len(self.view) == welcome.arena_bytes and len(self._slots) == welcome.slots_bytes

    def lock(self, byte: int) -> None:
        """From here on the daemon reuses no slot that this session was given to write, even if it thinks it gone."""
        self.unlock()
        fcntl.fcntl(self._slots_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
        self._locked = byte

    def unlock(self) -> None:
        """This process writes no more for the session. Idempotent."""
        if self._locked is not None:
            fcntl.fcntl(self._slots_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._locked, 1, 0))
            self._locked = None

    def forget(self) -> None:
        """Close in a forked child, which shares the lock with its parent and must leave it locked."""
        self._locked = None
        self._detach = None  # what the parent's GPU pinned is the parent's
        self.close()

    def payload(self, slot: Slot, size_bytes: int) -> memoryview:
        """The slot's bytes."""
        return self.view[slot.offset : slot.offset + size_bytes]

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot still holds what it was leased for. Asked *after* a copy: only then do its bytes count."""
        return bool(_GENERATION.unpack_from(self._slots, slot.record)[0] == slot.generation)

    def close(self) -> None:
        """Unmap. Nobody copies any more."""
        self._stop.set()
        if self._prefault.is_alive():
            self._prefault.join()
        if self._detach is not None:
            self._detach()
            self._detach = None
        self.unlock()
        self._slots.close()
        with contextlib.suppress(BufferError):  # an engine may have kept a view; the mapping goes with it
            self.view.release()
            self._arena.close()
        self._files.close()

    def _populate(self) -> None:
        for offset in range(0, len(self.view), PREFAULT_BYTES):
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError):  # not allocated yet: those pages come with the first copy
                with self.view[offset : offset + PREFAULT_BYTES] as part:
                    if not populate(part):
                        return

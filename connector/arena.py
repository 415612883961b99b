"""The engine's side of the arena: maps what Welcome names, and says whether a slot is still what it was.

Owns the mappings and, while a session lasts, the lock that tells the daemon that this process may still write. Used by
``client.py`` under its lock; the prefault runs in a thread of its own. Imports ``kernels.pages`` and
``daemon.protocol``.

All clients of a process share one mapping of an arena: what CUDA pins it pins by address, and counts against the limit
of locked memory each time.
"""

import contextlib
import fcntl
import mmap
import os
import stat
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


class _Mapping:
    """The bytes of one file, for all clients of this process that may do the same with them. Made by ``_mapping_of``,
    let go of by ``leave``."""

    def __init__(self, fd: int, size_bytes: int, write: bool) -> None:
        self.fd = fd
        self.clients = 0
        self._map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
        self.view = memoryview(self._map)
        self._stop = threading.Event()
        self._prefault = threading.Thread(target=self._populate, name="terracekv-prefault", daemon=True)
        if write:
            with contextlib.suppress(RuntimeError):  # no thread is to be had: pages come with the first copy
                self._prefault.start()

    def leave(self) -> None:
        """A client copies no more; with the last one the mapping ends."""
        with _sharing:
            self.clients -= 1
            if self.clients:
                return
            for key in [key for key, mapping in _mappings.items() if mapping is self]:
                del _mappings[key]
        self._stop.set()
        if self._prefault.ident is not None:
            self._prefault.join()
        with contextlib.suppress(BufferError):  # an engine may have kept a view; the mapping goes with it
            self.view.release()
            self._map.close()
        os.close(self.fd)

    def _populate(self) -> None:
        for offset in range(0, len(self.view), PREFAULT_BYTES):
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError):  # not allocated yet: those pages come with the first copy
                with self.view[offset : offset + PREFAULT_BYTES] as part:
                    if not populate(part):
                        return


_sharing = threading.Lock()
_mappings: dict[tuple[int, int, int, bool], _Mapping] = {}
"""By device, inode, size and whether it may be written to, as long as a client has it: its descriptor keeps the inode
from being another file's."""


def _mapping_of(fd: int, size_bytes: int, write: bool) -> _Mapping:
    """This process's mapping of an open file, for one client more; ``fd`` is the mapping's from now on, or closed.
    OSError; ValueError when the file is not as large."""
    try:
        file = _regular(fd)
        key = file.st_dev, file.st_ino, size_bytes, write
        with _sharing:
            mapping = _mappings.get(key)
            if mapping is None:
                mapping = _mappings[key] = _Mapping(fd, size_bytes, write)
            mapping.clients += 1
    except BaseException:
        os.close(fd)
        raise
    if mapping.fd != fd:
        os.close(fd)
    return mapping


def _regular(fd: int) -> os.stat_result:
    """What is known of an open file. ValueError for a pipe, a device and the like."""
    known = os.fstat(fd)
    if not stat.S_ISREG(known.st_mode):
        raise ValueError("what the daemon named or handed over is no regular file")
    return known


def _opened(welcome: Welcome, handed: Sequence[int], write: bool) -> tuple[int, int]:
    """Descriptors of the arena and the slot table: those handed over, or, if these are not the two, of their names."""
    if len(handed) == 2:
        return handed[0], handed[1]
    for fd in handed:
        os.close(fd)
    flags = os.O_CLOEXEC | os.O_NONBLOCK  # the last: a pipe of that name would keep us waiting
    arena = os.open(welcome.arena, (os.O_RDWR if write else os.O_RDONLY) | flags)
    try:
        return arena, os.open(welcome.slots, os.O_RDONLY | flags)
    except BaseException:
        os.close(arena)
        raise


def _after_fork() -> None:
    """In a forked child, which maps anew: what it has of its parent's is closed by the clients."""
    global _sharing
    _sharing = threading.Lock()
    _mappings.clear()


os.register_at_fork(after_in_child=_after_fork)


class Arena:
    """Mappings of one arena. Kept across sessions as long as the daemon goes on with the same files."""

    def __init__(self, welcome: Welcome, handed: list[int] | None = None, *, write: bool = True) -> None:
        """``handed`` are the descriptors of both files that came with Welcome, ours from now on; without them the files
        are opened by name. Without ``write`` the arena is mapped for reading."""
        arena_fd, self._slots_fd = _opened(welcome, handed or [], write)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._slots_fd)
            self._mapping = _mapping_of(arena_fd, welcome.arena_bytes, write)
            undo.callback(self._mapping.leave)
            _regular(self._slots_fd)
            self._slots = mmap.mmap(self._slots_fd, welcome.slots_bytes, prot=mmap.PROT_READ)
            undo.pop_all()
        self.view = self._mapping.view
        self._welcome = welcome
        self._locked: int | None = None
        self._detach: Callable[[], None] | None = None

    def attach(self, attach: Attach) -> None:
        """Tell of the mapping. At most once."""
        self._detach = attach(self.view)

    def serves(self, welcome: Welcome, handed: Sequence[int] = ()) -> bool:
        """Whether these mappings are those that another Welcome names: the same files, not just the same paths."""
        others: Sequence[int | str] = handed if len(handed) == 2 else (welcome.arena, welcome.slots)
        for fd, other in zip((self._mapping.fd, self._slots_fd), others, strict=True):
            try:
                if not os.path.samestat(os.fstat(fd), os.stat(other)):
                    return False
            except (OSError, ValueError):
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
        """Unmap. Nobody copies for this client any more."""
        if self._detach is not None:
            self._detach()
            self._detach = None
        self.unlock()
        self._slots.close()
        os.close(self._slots_fd)
        self._mapping.leave()

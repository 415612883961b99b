"""The arena: one file on tmpfs that daemon and engines map, and through which every block's bytes pass.

Owns ``arena`` and ``owner.lock`` in the runtime folder. Made by the daemon before anything else; ``prepare`` runs in
a thread of its own, the rest is for any thread. Imports ``kernels.pages``, ``budget``, ``errors``, ``failpoint``,
``folder`` and ``numa``.

Room for the whole arena is checked before start. Slabs (equal parts of it) are allocated with ``posix_fallocate``
before anybody may write to them, so a shortage is an error with numbers and never a SIGBUS.
"""

import mmap
import os
import threading
from pathlib import Path

from terracekv.kernels.pages import address_of, populate
from terracekv.tiers.budget import filesystem_type
from terracekv.tiers.errors import NoRoom
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.folder import claim
from terracekv.tiers.numa import prefer

PREPARE_BYTES = 32 << 20


class Arena:
    """``view`` is the whole arena, writable. ``adopted`` tells whether the file of an earlier daemon was taken over;
    without ``adopt`` it never is, for what described its bytes is lost. Pages come from ``numa_node`` while it has any.

    Raises InUse when another live daemon owns the folder, NoRoom when the file system cannot hold ``size_bytes``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size_bytes: int,
        slab_bytes: int,
        prefault: bool = True,
        adopt: bool = True,
        numa_node: int | None = None,
    ) -> None:
        assert size_bytes % slab_bytes == 0 and slab_bytes % mmap.PAGESIZE == 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / "arena"
        self.filesystem = filesystem_type(folder)
        self.size_bytes = size_bytes
        self.slab_bytes = slab_bytes
        self.slabs = size_bytes // slab_bytes
        self._prefault = prefault
        self.slabs_ready = 0
        """Slabs, from the first on, that may be written to. Only grows."""
        self.last_error: str | None = None
        self._stopping = threading.Event()
        lock_fd = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._lock_fd = claim(lock_fd, folder, "daemon.runtime_dir")
        try:
            failpoint("arena.open")
            self.adopted = self._open(adopt)
            failpoint("arena.opened")
            self._map = mmap.mmap(self._fd, size_bytes)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.view = memoryview(self._map)
        self.placement = "anywhere"
        """The memory that pages are taken from: a node, or anywhere, with the reason when one was asked for."""
        if numa_node is not None:
            refused = prefer(address_of(self.view), size_bytes, numa_node)
            self.placement = f"node {numa_node}" if refused is None else f"anywhere: {refused}"
        self._prepared = 0
        if self.adopted and os.fstat(self._fd).st_blocks * 512 >= size_bytes:
            self.slabs_ready = self.slabs  # an earlier daemon allocated all of it
        self.prepare(slabs=1)

    def _open(self, adopt: bool) -> bool:
        """Open the arena file. One that is not adopted is replaced, neither truncated nor reused: engines may still map
        it, read from it and, unknown to a slot table made anew, be writing to it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o600)
        found = os.fstat(fd)
        adopted = adopt and found.st_size == self.size_bytes
        if not adopted and found.st_size:
            os.close(fd)
            self.path.unlink()
            fd = os.open(self.path, flags, 0o600)
        try:
            self._check_room(os.fstat(fd).st_blocks * 512)
            os.ftruncate(fd, self.size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return adopted

    def _check_room(self, allocated_bytes: int) -> None:
        folder = self.path.parent
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        needed = self.size_bytes - allocated_bytes
        if needed > free:
            fits = (free + allocated_bytes) // self.slab_bytes * self.slab_bytes
            raise NoRoom(
                f"host.size asks for {self.size_bytes} bytes in {folder}, which has {free + allocated_bytes} bytes free"
                f" of {room.f_blocks * room.f_frsize}",
                f"set host.size to at most {fits}, or give the folder more room (docker run --shm-size, the sizeLimit"
                " of an in-memory emptyDir, mount -o remount,size=...), or point daemon.runtime_dir at a larger tmpfs",
            )

    def prepare(self, slabs: int | None = None) -> None:
        """Allocate slabs, and with ``prefault`` map them, up to ``slabs`` (all by default).

        Blocks; ends early at a shortage (``last_error``) or on ``stop``.
        """
        while self._prepared < (self.slabs if slabs is None else slabs):
            start = self._prepared * self.slab_bytes
            for offset in range(start, start + self.slab_bytes, PREPARE_BYTES):
                if self._stopping.is_set():
                    return
                length = min(PREPARE_BYTES, start + self.slab_bytes - offset)
                try:
                    if self._prepared >= self.slabs_ready:
                        os.posix_fallocate(self._fd, offset, length)
                    if self._prefault:
                        with self.view[offset : offset + length] as part:
                            populate(part)
                except OSError as error:
                    self.last_error = f"only {self.slabs_ready} of {self.slabs} slabs could be allocated: {error}"
                    return
            self._prepared += 1
            self.slabs_ready = max(self.slabs_ready, self._prepared)

    def stop(self) -> None:
        """Make ``prepare``, in whatever thread it runs, return soon."""
        self._stopping.set()

    def close(self) -> None:
        """Stop preparing and let go of the folder; the file stays for the next daemon. Idempotent."""
        if self._lock_fd < 0:
            return
        self.stop()
        os.close(self._fd)
        os.close(self._lock_fd)
        self._lock_fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a view handed out is still alive somewhere: the mapping goes with the last one

"""A host tier for tests: few and small slots, opened again and again in the same folder.

Owns the folder that a test gives. Called by tests. Imports ``tiers``.
"""

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terracekv.tests.blocks import payload_of, registered
from terracekv.tiers.arena import Arena
from terracekv.tiers.checksum import checksum
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import LOCK_BASE, Slot, SlotTable, table_fits
from terracekv.tiers.tier import PAGE, Outcome

SLOTS = 4
"""Slots of one page in a slab."""
SLAB = SLOTS * PAGE
BLOCK = PAGE - 96
"""Bytes of a block: its slot is one page, and not all of it."""


class Host(HostTier):
    """A host tier whose parts a test may look at, with a namespace to put blocks in."""

    def __init__(self, folder: Path, slabs: int, eviction: str = "lru") -> None:
        path = folder / "slots"
        size = slabs * SLAB
        fits = table_fits(path, arena_bytes=size, slab_bytes=SLAB)
        self.arena = Arena(folder, size_bytes=size, slab_bytes=SLAB, adopt=fits)
        self.table = SlotTable(path, arena_bytes=size, slab_bytes=SLAB, adopt=self.arena.adopted)
        self.namespaces = Namespaces(folder / "namespaces.json")
        super().__init__(self.arena, self.table, self.namespaces, eviction=eviction)
        self.arena.prepare()
        self.namespace = registered(self.namespaces, 1, BLOCK)

    def put_chain(self, namespace: Namespace, ids: Sequence[bytes], session: int = 1) -> list[Outcome]:
        """Store a chain as an engine does: all of it reserved, then filled, then committed."""
        slots = self.reserve(namespace, ids, session)
        written = []
        for id, slot in zip(ids, slots, strict=True):
            if isinstance(slot, Slot):
                payload = payload_of(id, namespace.id, namespace.block_bytes)
                self.payload(slot, namespace.block_bytes)[:] = payload
                written.append((id, slot, checksum(payload)))
        outcomes = iter(self.commit(namespace, written))
        return [next(outcomes) if isinstance(slot, Slot) else slot for slot in slots]

    def held(self, namespace: Namespace, ids: Sequence[bytes]) -> list[Slot]:
        """Leases on blocks that must be here."""
        slots = self.acquire(namespace, ids)
        assert None not in slots
        return [slot for slot in slots if slot is not None]

    def detail(self, name: str) -> object:
        return self.status().details[name]


@contextmanager
def host_in(folder: Path, slabs: int = 1, eviction: str = "lru") -> Iterator[Host]:
    """Opened, and when all went well checked, and closed."""
    host = Host(folder, slabs, eviction)
    try:
        yield host
        host.check()
    finally:
        host.close()


def lock_byte(table: Path, session: int) -> int:
    """Hold a session's byte as its client does; the descriptor to close."""
    fd = os.open(table, os.O_RDONLY | os.O_CLOEXEC)
    flock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, LOCK_BASE + session, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
    return fd


@contextmanager
def writer_process(table: Path, session: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the session's byte until it is killed."""
    code = f"""
import sys
from pathlib import Path
from terracekv.tests.hosts import lock_byte
lock_byte(Path(sys.argv[1]), {session})
print(flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, str(table)], stdin=pipe, stdout=pipe)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def is_locked(table: Path, byte: int) -> bool:
    """Whether somebody holds a byte of the slot table."""
    fd = os.open(table, os.O_RDWR | os.O_CLOEXEC)
    try:
        ask = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, ask))[0]
        return bool(kind != fcntl.F_UNLCK)
    finally:
        os.close(fd)

"""The slot table: what each slot of the arena holds, in a tmpfs file that outlives the daemon.

Owns ``slots`` in the runtime folder. Written by the host tier under its lock; engines map it for reading, to compare
generations after a copy. Imports ``checksum`` and ``failpoint``.

A slot is FREE -> WRITING -> SEALED -> FREE; one that is leased while its block goes is DOOMED until its last lease
ends. Its generation changes whenever it enters or leaves FREE, and always before its bytes may change, so whoever
copied bytes and then finds another generation has copied nothing.
The table lives as long as the bytes that it describes: a restarted daemon adopts both, a reboot clears both.
"""

import fcntl
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from terracekv.tiers.checksum import checksum
from terracekv.tiers.failpoint import failpoint

PAGE = 4096
RECORD_BYTES = 128
LOCK_BASE = 1 << 40
"""Session ``s`` holds a shared lock on byte ``LOCK_BASE + s`` of the table for as long as it may write."""

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"TRKVslt1"
_SESSIONS = struct.Struct("<Q")
_SESSIONS_AT = 64
_SESSIONS_MAX = 1 << 62
"""Not reached by counting. A byte of that number can still be locked, whatever an adopted table says."""
_SLAB = struct.Struct("<Q")
_GENERATION = struct.Struct("<Q")
_WRITER_AT = 8
_STATE_AT = 16
_BODY = struct.Struct("<QQB34s32sIQQ")
_DIGEST = struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")
_DIGEST_AT = _BODY.size


class State(IntEnum):
    FREE = 0
    WRITING = 1
    SEALED = 2
    DOOMED = 3


_FREE, _WRITING, _SEALED, _DOOMED = (int(state) for state in State)  # an enum's call costs more than the rest of a step
_NOTHING = (bytes(34), bytes(32), 0, 0, 0)


class Slot(NamedTuple):
    """A place and the generation under which it was handed out. ``record`` and ``offset`` are bytes into the slot
    table and the arena."""

    record: int
    offset: int
    generation: int


class Sealed(NamedTuple):
    """What a sealed slot holds."""

    record: int
    block: bytes
    namespace: bytes
    epoch: int
    payload_bytes: int
    checksum: int


def slot_bytes_for(block_bytes: int) -> int:
    """A block's room in the arena: whole pages."""
    return -(-block_bytes // PAGE) * PAGE


def _shape(arena_bytes: int, slab_bytes: int) -> tuple[int, int, int]:
    """Where the records begin, bytes of one slab's records, bytes of the whole table."""
    slabs = arena_bytes // slab_bytes
    records_at = PAGE + -(-slabs * _SLAB.size // PAGE) * PAGE
    region_bytes = slab_bytes // PAGE * RECORD_BYTES
    return records_at, region_bytes, records_at + slabs * region_bytes


def table_fits(path: Path, *, arena_bytes: int, slab_bytes: int) -> bool:
    """Whether there is a table that describes an arena cut like this. Where there is none, nobody can know what an
    arena holds and who still writes to it: it must not be adopted either."""
    header = _HEADER.pack(_MAGIC, arena_bytes, slab_bytes, RECORD_BYTES)
    try:
        with open(path, "rb") as file:
            fits = os.fstat(file.fileno()).st_size == _shape(arena_bytes, slab_bytes)[2]
            return fits and file.read(len(header)) == header
    except FileNotFoundError:
        return False


class SlotTable:
    """All slots of an arena of ``slabs`` slabs. A slab serves one slot size until it is empty again.

    ``adopt`` keeps the content of a table that fits the arena; otherwise a fresh file is made. Not thread-safe:
    its owner (the host tier) calls it under its lock.
    """

    def __init__(self, path: Path, *, arena_bytes: int, slab_bytes: int, adopt: bool) -> None:
        self.path = path
        self.slab_bytes = slab_bytes
        self.slabs = arena_bytes // slab_bytes
        self._slabs_at = PAGE
        self._records_at, self._region_bytes, self.size_bytes = _shape(arena_bytes, slab_bytes)
        self.adopted = adopt and table_fits(path, arena_bytes=arena_bytes, slab_bytes=slab_bytes)
        if not self.adopted:
            path.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._fd, self.size_bytes)
        os.posix_fallocate(self._fd, 0, self._records_at)
        self._table = mmap.mmap(self._fd, self.size_bytes)
        self._table[: _HEADER.size] = _HEADER.pack(_MAGIC, arena_bytes, slab_bytes, RECORD_BYTES)
        self._slot_bytes = [0] * self.slabs
        self._used = [0] * self.slabs
        self._free: list[list[int]] = [[] for _ in range(self.slabs)]
        self._open: dict[int, dict[int, None]] = {}
        self._free_slots: Counter[int] = Counter()
        self._unassigned: dict[int, None] = {}
        self._offered = 0
        self.used_bytes = 0
        if self.adopted:
            self._read_slabs()

    def _read_slabs(self) -> None:
        for slab in range(self.slabs):
            (slot_bytes,) = _SLAB.unpack_from(self._table, self._slabs_at + slab * _SLAB.size)
            if not slot_bytes:
                continue
            if slot_bytes % PAGE or slot_bytes > self.slab_bytes:
                _SLAB.pack_into(self._table, self._slabs_at + slab * _SLAB.size, 0)
                continue
            self._slot_bytes[slab] = slot_bytes
            for record in self._records(slab):
                if self._table[record + _STATE_AT] == State.FREE:
                    self._free[slab].append(record)
                else:
                    self._used[slab] += 1
                    self.used_bytes += slot_bytes
            if self._free[slab]:
                self._open.setdefault(slot_bytes, {})[slab] = None
                self._free_slots[slot_bytes] += len(self._free[slab])
            self._let_go_if_empty(slab)

    def _records(self, slab: int) -> range:
        count = self.slab_bytes // self._slot_bytes[slab]
        start = self._records_at + slab * self._region_bytes
        return range(start, start + count * RECORD_BYTES, RECORD_BYTES)

    def next_session(self) -> int:
        """A session number that no earlier session of this arena had, restarts included."""
        number = int(_SESSIONS.unpack_from(self._table, _SESSIONS_AT)[0]) % _SESSIONS_MAX + 1
        _SESSIONS.pack_into(self._table, _SESSIONS_AT, number)
        return number

    def slab_of(self, record: int) -> int:
        """The slab that a record's slot lies in."""
        return (record - self._records_at) // self._region_bytes

    def slot_bytes(self, record: int) -> int:
        """Size of a slot in bytes."""
        return self._slot_bytes[self.slab_of(record)]

    def state(self, record: int) -> State:
        """The slot's state."""
        return State(self._table[record + _STATE_AT])

    def slot(self, record: int) -> Slot:
        """The slot as it may be handed out now."""
        slab, place = divmod(record - self._records_at, self._region_bytes)
        offset = slab * self.slab_bytes + place // RECORD_BYTES * self._slot_bytes[slab]
        return Slot(record, offset, _GENERATION.unpack_from(self._table, record)[0])

    def current(self, slot: Slot) -> bool:
        """Whether the slot is still what it was when it was handed out."""
        return bool(_GENERATION.unpack_from(self._table, slot.record)[0] == slot.generation)

    def offer(self, slabs_ready: int) -> None:
        """The first ``slabs_ready`` slabs of the arena may be written to; called when that number has grown."""
        for slab in range(self._offered, slabs_ready):
            if not self._slot_bytes[slab]:
                self._unassigned[slab] = None
        self._offered = slabs_ready

    def free_slots(self, slot_bytes: int) -> int:
        """How many slots of this size can be taken at once."""
        return self._free_slots[slot_bytes] + len(self._unassigned) * (self.slab_bytes // slot_bytes)

    def sparse(self, slot_bytes: int) -> list[int]:
        """Slabs of other slot sizes of which a quarter is in use at most, and all that is would fit into other slabs of
        that size: they give more to this size than they take from theirs. The emptiest first."""
        free_bytes = sum(size * count for size, count in self._free_slots.items() if size != slot_bytes)
        if slot_bytes > self.slab_bytes or free_bytes < self.slab_bytes * 3 // 4:  # as it is of a tier that is full
            return []
        found = []
        for slab, size in enumerate(self._slot_bytes):
            used, free = self._used[slab], len(self._free[slab])
            if size not in (0, slot_bytes) and 4 * used <= used + free and used <= self._free_slots[size] - free:
                found.append(slab)
        return sorted(found, key=lambda slab: self._used[slab] * self._slot_bytes[slab])

    def take(self, slot_bytes: int, session: int) -> Slot | None:
        """FREE -> WRITING for ``session``; None when no slot of this size is free and no slab is empty."""
        slabs = self._open.get(slot_bytes)
        if not slabs:
            if not self._assign(slot_bytes):
                return None
            slabs = self._open[slot_bytes]
        slab = next(iter(slabs))
        record = self._free[slab].pop()
        if not self._free[slab]:
            del slabs[slab]
        self._used[slab] += 1
        self._free_slots[slot_bytes] -= 1
        self.used_bytes += slot_bytes
        assert self._table[record + _STATE_AT] == _FREE
        generation = self._next_generation(record)
        self._write(record, generation, session, _WRITING, *_NOTHING)
        failpoint("slots.taken")
        return self.slot(record)

    def seal(self, slot: Slot, block: bytes, namespace: bytes, epoch: int, payload_bytes: int, digest: int) -> None:
        """WRITING -> SEALED: the slot holds this block from now on, restarts included."""
        assert self._table[slot.record + _STATE_AT] == _WRITING and self.current(slot)
        failpoint("slots.seal")
        self._write(slot.record, slot.generation, 0, _SEALED, block, namespace, epoch, payload_bytes, digest)
        failpoint("slots.sealed")

    def doom(self, record: int) -> None:
        """SEALED -> DOOMED: the bytes stay for those who lease them, and no restart lists them again."""
        assert self._table[record + _STATE_AT] == _SEALED
        generation, writer, _, *what = _BODY.unpack_from(self._table, record)
        self._write(record, generation, writer, _DOOMED, *what)

    def sealed(self, record: int) -> Sealed:
        """What a SEALED or DOOMED slot holds."""
        assert self._table[record + _STATE_AT] in (_SEALED, _DOOMED)
        _, _, _, block, namespace, epoch, payload_bytes, digest = _BODY.unpack_from(self._table, record)
        return Sealed(record, block, namespace, epoch, payload_bytes, digest)

    def writer(self, record: int) -> int:
        """The session that writes, or last wrote, a WRITING slot."""
        return int(_GENERATION.unpack_from(self._table, record + _WRITER_AT)[0])

    def writer_gone(self, session: int) -> bool:
        """Whether nobody can write for this session any more: its process ended, or its client let go."""
        ask = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + session, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, ask))
        return bool(answer[0] == fcntl.F_UNLCK)

    def free(self, record: int) -> None:
        """WRITING, SEALED or DOOMED -> FREE. An emptied slab may serve another slot size."""
        assert self._table[record + _STATE_AT] != _FREE
        slab = self.slab_of(record)
        generation = self._next_generation(record)
        failpoint("slots.free")
        self._write(record, generation, 0, _FREE, *_NOTHING)
        failpoint("slots.freed")
        self._free[slab].append(record)
        self._free_slots[self._slot_bytes[slab]] += 1
        self._open.setdefault(self._slot_bytes[slab], {})[slab] = None
        self._used[slab] -= 1
        self.used_bytes -= self._slot_bytes[slab]
        self._let_go_if_empty(slab)

    def slots_in_slab(self, slab: int) -> list[int]:
        """Records of the slab's slots that are not FREE: among them, after a crash, such as are in no state at all."""
        if not self._slot_bytes[slab]:
            return []
        return [record for record in self._records(slab) if self._table[record + _STATE_AT] != _FREE]

    def occupied(self) -> Iterator[int]:
        """Records of all slots that are not FREE."""
        for slab in range(self.slabs):
            if self._slot_bytes[slab]:
                yield from self.slots_in_slab(slab)

    def intact(self, record: int) -> bool:
        """Whether the record was written whole (a daemon can be killed inside any write)."""
        stored = _DIGEST.unpack_from(self._table, record + _DIGEST_AT)[0]
        return bool(checksum(self._table[record : record + _DIGEST_AT]) == stored)

    def check(self) -> None:
        """Free lists and counts against the states in the table."""
        used_bytes = 0
        free_slots: Counter[int] = Counter()
        for slab in range(self.slabs):
            if not self._slot_bytes[slab]:
                assert (slab in self._unassigned) == (slab < self._offered), f"slab {slab} is lost"
                assert not self._used[slab]
                continue
            states = [self.state(record) for record in self._records(slab)]
            free = states.count(State.FREE)
            assert sorted(self._free[slab]) == [
                record for record, state in zip(self._records(slab), states, strict=True) if state is State.FREE
            ], f"slab {slab}: the free list is not what the table says"
            assert len(states) - free == self._used[slab] > 0, f"slab {slab}: {self._used[slab]} slots counted as used"
            used_bytes += self._used[slab] * self._slot_bytes[slab]
            free_slots[self._slot_bytes[slab]] += free
        assert free_slots == +self._free_slots, f"{self._free_slots} free slots counted, {free_slots} there"
        assert used_bytes == self.used_bytes, f"{self.used_bytes} bytes accounted, {used_bytes} used"

    def close(self) -> None:
        """Unmap; the file stays for the next daemon. Idempotent."""
        if self._fd >= 0:
            self._table.close()
            os.close(self._fd)
            self._fd = -1

    def _next_generation(self, record: int) -> int:
        """Another than now. An adopted table may hold any number, the last one that there is too."""
        return (int(_GENERATION.unpack_from(self._table, record)[0]) + 1) % (1 << 64)

    def _write(
        self, record: int, generation: int, session: int, state: int, block: bytes, namespace: bytes, epoch: int,
        payload_bytes: int, digest: int,
    ) -> None:  # fmt: skip
        body = _BODY.pack(generation, session, state, block, namespace, epoch, payload_bytes, digest)
        self._table[record : record + _DIGEST_AT + 8] = body + _DIGEST.pack(checksum(body))

    def _assign(self, slot_bytes: int) -> bool:
        slab = next(iter(self._unassigned), None)
        if slab is None or slot_bytes > self.slab_bytes:
            return False
        count = self.slab_bytes // slot_bytes
        start = self._records_at + slab * self._region_bytes
        try:
            os.posix_fallocate(self._fd, start, count * RECORD_BYTES)
        except OSError:
            return False
        del self._unassigned[slab]
        self._slot_bytes[slab] = slot_bytes
        for record in self._records(slab):
            # Only the state is cleared: generations go on, or a reader of the slab's former life could be fooled.
            generation = self._next_generation(record)
            self._write(record, generation, 0, _FREE, *_NOTHING)
        failpoint("slots.assign")
        _SLAB.pack_into(self._table, self._slabs_at + slab * _SLAB.size, slot_bytes)
        self._free[slab] = list(reversed(self._records(slab)))
        self._free_slots[slot_bytes] += count
        self._open.setdefault(slot_bytes, {})[slab] = None
        return True

    def _let_go_if_empty(self, slab: int) -> None:
        if self._used[slab]:
            return
        _SLAB.pack_into(self._table, self._slabs_at + slab * _SLAB.size, 0)
        self._open.get(self._slot_bytes[slab], {}).pop(slab, None)
        self._free_slots[self._slot_bytes[slab]] -= len(self._free[slab])
        self._slot_bytes[slab] = 0
        self._free[slab] = []
        if slab < self._offered:
            self._unassigned[slab] = None

"""How a block lies in a segment: as a record of its payload or of its coded payload; and back again, checked.

Owns the disk tier's codec. Called by the disk tier from worker threads, which sees to it that the segment stays.
Imports ``checksum``, ``codec_id``, ``coder``, ``entry``, ``errors``, ``namespace`` and ``segment``.
"""

import mmap
import time
from contextlib import AbstractContextManager

from terracekv.tiers.checksum import checksum as checksum_of
from terracekv.tiers.codec_id import Codec
from terracekv.tiers.coder import Coder, Stored, coded_bytes_max
from terracekv.tiers.entry import Entry
from terracekv.tiers.errors import Damaged, TierDown
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.segment import Record, SegmentFiles, pages_of
from terracekv.tiers.tier import PAGE

MEMORY_S_MAX = 5.0
"""How long a thread waits for memory to code or decode in; a block takes milliseconds."""


class DiskRecords:
    """Writes and reads the records of one folder of segments. ``codec``: off, auto or on."""

    def __init__(self, files: SegmentFiles, codec: str) -> None:
        self._files = files
        self._coder = Coder(codec)

    def stored(self, namespace: Namespace, payload: memoryview) -> AbstractContextManager[Stored]:
        """What to write for a block, within the context: see ``Coder.stored``."""
        return self._coder.stored(namespace, payload, time.monotonic() + MEMORY_S_MAX)

    def write(self, namespace: Namespace, id: bytes, number: int, page: int, stored: Stored, checksum: int) -> Entry:
        """Write a record into room of a segment, and say what the catalog is to know of it. OSError of the medium."""
        size = namespace.block_bytes
        created_ms = time.time_ns() // 1_000_000
        record = Record(
            id, namespace.id, namespace.epoch, size, stored.size, checksum, number, created_ms, stored.codec
        )
        started = time.perf_counter()
        self._files.write(record, page, stored.view)
        self._coder.chooser.sent(stored.size, time.perf_counter() - started)
        self._coder.chooser.stored(stored.codec)
        return Entry(namespace.stamp, number, page, size, stored.size, checksum, stored.codec)

    def read(self, namespace: Namespace, id: bytes, entry: Entry, into: memoryview) -> bool:
        """Whether ``into`` begins with the block's payload now; if not, what lies there is not this block.

        OSError of the medium, TierDown when there is no memory to decode in.
        """
        size = namespace.block_bytes
        if entry.codec == Codec.RAW:
            if entry.stored_bytes != size:
                return False
            record = self._read(namespace, id, entry, into)
            return record is not None and record.checksum == checksum_of(into[:size])
        if entry.stored_bytes > coded_bytes_max(size):
            return False
        with self._coder.scratch.lend(coded_bytes_max(size), time.monotonic() + MEMORY_S_MAX) as room:
            if room is None:
                raise TierDown(f"no memory to decode a block of {size} bytes in {MEMORY_S_MAX:.0f} s")
            record = self._read(namespace, id, entry, room)
            if record is None:
                return False
            try:
                self._coder.decode(record, room[: record.stored_bytes], into[:size], f"block {id.hex()}")
            except Damaged:
                return False
            return True

    def is_whole(self, namespace: Namespace, id: bytes, entry: Entry) -> bool:
        """Whether a record is there with all its bytes, and right. Not if they cannot be read now."""
        room = memoryview(mmap.mmap(-1, pages_of(namespace.block_bytes) * PAGE))
        try:
            return self.read(namespace, id, entry, room)
        except (OSError, TierDown):
            return False

    def report(self) -> dict[str, int | float | str | None]:
        """The codec's speeds, and whether it is used."""
        return self._coder.report()

    def check(self) -> None:
        """See ``Coder.check``."""
        self._coder.check()

    def _read(self, namespace: Namespace, id: bytes, entry: Entry, into: memoryview) -> Record | None:
        """The record and its stored bytes; None when it is not the one that the catalog means."""
        started = time.perf_counter()
        record = self._files.read(entry.segment, entry.page, entry.stored_bytes, into)
        self._coder.chooser.received(entry.stored_bytes, time.perf_counter() - started)
        meant = (id, namespace.id, namespace.epoch, namespace.block_bytes)
        if record is None or (record.id, record.namespace_id, record.epoch, record.payload_bytes) != meant:
            return None
        said = (record.generation, record.codec, record.stored_bytes, record.checksum)
        return record if said == (entry.segment, entry.codec, entry.stored_bytes, entry.checksum) else None

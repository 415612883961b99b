"""How a block lies in a segment: as a record of its payload, coded or sealed if so wanted; and back, checked.

Owns the disk tier's codec and vault. Called by the disk tier from worker threads, which sees to it that the segment
stays. Imports ``checksum``, ``codec_id``, ``coder``, ``entry``, ``errors``, ``namespace``, ``segment`` and ``vault``.
"""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from terracekv.tiers.checksum import checksum as checksum_of
from terracekv.tiers.codec_id import Codec, inner, is_sealed
from terracekv.tiers.coder import Coder, coded_bytes_max
from terracekv.tiers.entry import Entry
from terracekv.tiers.errors import Damaged, TierDown
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.segment import Record, SegmentFiles, pages_of
from terracekv.tiers.tier import PAGE
from terracekv.tiers.vault import Sealed, Vault

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

MEMORY_S_MAX = 5.0
"""How long a thread waits for memory to code or decode in; a block takes milliseconds."""


class DiskRecords:
    """Writes and reads the records of one folder of segments. ``codec``: off, auto or on."""

    def __init__(self, files: SegmentFiles, codec: str, keys: "Keys | None" = None) -> None:
        self._files = files
        self._coder = Coder(codec)
        self._vault = Vault(self._coder, keys)

    @contextmanager
    def stored(self, namespace: Namespace, id: bytes, payload: memoryview, checksum: int) -> Iterator[Sealed]:
        """What to write for a block, within the context: see ``Coder.stored`` and ``Vault.sealed``."""
        deadline = time.monotonic() + MEMORY_S_MAX
        about = Record(id, namespace.id, namespace.epoch, namespace.block_bytes, 0, checksum, 0, 0)
        with (
            self._coder.stored(namespace, payload, deadline) as coded,
            self._vault.sealed(about, coded, payload, deadline) as sealed,
        ):
            yield sealed

    def write(self, namespace: Namespace, id: bytes, number: int, page: int, stored: Sealed) -> Entry:
        """Write a record into room of a segment, and say what the catalog is to know of it. OSError of the medium."""
        size, digest = namespace.block_bytes, stored.checksum
        created_ms = time.time_ns() // 1_000_000
        record = Record(id, namespace.id, namespace.epoch, size, stored.size, digest, number, created_ms, stored.codec)
        started = time.perf_counter()
        self._files.write(record, page, stored.view)
        self._coder.chooser.sent(stored.size, time.perf_counter() - started)
        self._coder.chooser.stored(Codec(inner(stored.codec)))
        return Entry(namespace.stamp, number, page, size, stored.size, digest, stored.codec)

    def read(self, namespace: Namespace, id: bytes, entry: Entry, into: memoryview) -> str | None:
        """None when ``into`` begins with the block's payload now; else what is wrong with what lies there.

        OSError of the medium, TierDown when there is no memory to decode in.
        """
        size, damaged = namespace.block_bytes, f"block {id.hex()} is damaged"
        if is_sealed(entry.codec):
            return self._read_sealed(namespace, id, entry, into[:size])
        if entry.codec == Codec.RAW:
            if entry.stored_bytes != size:
                return damaged
            record = self._read(namespace, id, entry, into)
            return None if record is not None and record.checksum == checksum_of(into[:size]) else damaged
        if entry.stored_bytes > coded_bytes_max(size):
            return damaged
        with self._coder.scratch.lend(coded_bytes_max(size), time.monotonic() + MEMORY_S_MAX) as room:
            if room is None:
                raise TierDown(f"no memory to decode a block of {size} bytes in {MEMORY_S_MAX:.0f} s")
            record = self._read(namespace, id, entry, room)
            if record is None:
                return damaged
            try:
                self._coder.decode(record, room[: record.stored_bytes], into[:size], f"block {id.hex()}")
            except Damaged:
                return damaged
            return None

    def _read_sealed(self, namespace: Namespace, id: bytes, entry: Entry, into: memoryview) -> str | None:
        meant = Record(
            id, namespace.id, namespace.epoch, len(into), entry.stored_bytes, entry.checksum, entry.segment, 0,
            entry.codec,
        )  # fmt: skip

        def fill(pages: memoryview) -> None:
            if self._read(namespace, id, entry, pages) is None:
                raise Damaged(f"block {id.hex()} is damaged")

        try:
            self._vault.restore(meant, fill, into, f"block {id.hex()}", time.monotonic() + MEMORY_S_MAX)
        except Damaged as damage:
            return damage.message
        return None

    def is_whole(self, namespace: Namespace, id: bytes, entry: Entry) -> bool:
        """Whether a record is there with all its bytes, and right. Not if they cannot be read now. Of a sealed one its
        sealed bytes tell: no key is needed."""
        room = memoryview(mmap.mmap(-1, pages_of(max(namespace.block_bytes, entry.stored_bytes)) * PAGE))
        try:
            if is_sealed(entry.codec):
                return self._is_whole_sealed(namespace, id, entry, room)
            return self.read(namespace, id, entry, room) is None
        except (OSError, TierDown):
            return False

    def is_locked(self, namespace: Namespace, id: bytes, entry: Entry) -> bool:
        """Whether a record is whole, and sealed with a key that is not here: what it holds cannot be told. OSError of
        the medium."""
        if not is_sealed(entry.codec):
            return False
        room = memoryview(bytearray(pages_of(entry.stored_bytes) * PAGE))
        return self._is_whole_sealed(namespace, id, entry, room) and self._vault.is_locked(room)

    def _is_whole_sealed(self, namespace: Namespace, id: bytes, entry: Entry, room: memoryview) -> bool:
        record = self._read(namespace, id, entry, room)
        return record is not None and checksum_of(room[: entry.stored_bytes]) == entry.checksum

    def report(self) -> dict[str, int | float | str | None]:
        """The codec's speeds, and whether it is used; blocks sealed."""
        return self._coder.report() | {"sealed_blocks": self._vault.sealed_blocks}

    def check(self) -> None:
        """See ``Coder.check``."""
        self._coder.check()
        self._vault.check()

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

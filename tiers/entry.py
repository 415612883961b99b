"""An entry of the catalog: where a block is, and the bytes that say so.

Owns the format of the catalog's values. Called by ``catalog`` from any thread. Imports ``checksum`` and ``tier``.
"""

import struct
from typing import NamedTuple

from terracekv.tiers.checksum import checksum
from terracekv.tiers.tier import PAGE

STAMP = struct.Struct("<Q")
STAMP_AT = slice(0, 8)
PLACE = struct.Struct("<II")
PLACE_AT = slice(8, 16)
"""Where stamp and place lie in an entry, for comparing without unpacking."""

_ENTRY = struct.Struct("<QIIQQQHH")
_CHECK = struct.Struct("<I")


class Entry(NamedTuple):
    """Where a block is. Sizes in bytes, ``page`` in pages from the segment's start."""

    stamp: int
    segment: int
    page: int
    payload_bytes: int
    stored_bytes: int
    checksum: int
    codec: int = 0
    flags: int = 0

    @property
    def namespace(self) -> int:
        """The number of its namespace."""
        return self.stamp >> 32

    @property
    def end_page(self) -> int:
        """The page after the record."""
        return self.page + 1 + -(-self.stored_bytes // PAGE)

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, header and padding included."""
        return (self.end_page - self.page) * PAGE

    def supersedes(self, old: bytes | memoryview) -> bool:
        """Whether this may be listed in place of an entry's bytes: not when those are of the same epoch, nor of a later
        one, which is so when a flush and a new write have overtaken the write that is published here. Nor of another
        namespace: no chain leads to another's ids, whoever names one must not take its place."""
        (stamp,) = STAMP.unpack(old[STAMP_AT])
        return bool(stamp < self.stamp and stamp >> 32 == self.namespace)


Place = tuple[bytes, int, int]
"""A block id with the segment and page where it was seen."""


def pack(id: bytes, entry: Entry) -> bytes:
    """The entry's bytes, with a check over them and the block's id."""
    value = _ENTRY.pack(*entry)
    return value + _CHECK.pack(checksum(id + value) & 0xFFFFFFFF)


def unpack(id: bytes, value: bytes | memoryview) -> Entry | None:
    """The entry of a block, or None when its bytes contradict their check."""
    if len(value) != _ENTRY.size + _CHECK.size:
        return None
    if _CHECK.unpack_from(value, _ENTRY.size)[0] != checksum(id + bytes(value[: _ENTRY.size])) & 0xFFFFFFFF:
        return None
    return Entry(*_ENTRY.unpack_from(value))

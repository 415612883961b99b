"""Segments: how a block lies on disk, and every read and write of a segment file.

Owns the record format, the files ``<number>.segment`` of one folder and the choice between direct and buffered I/O.
Called by the disk tier from any thread; which pages of which segment are in use is the tier's business, not ours.
Imports ``checksum``, ``codec_id``, ``errors``, ``failpoint``, ``folder`` and ``tier``.

A segment's number is its generation: it is in the file's name and in every record, it only grows, and a file that is
reused gets a new name. So a place (number, page) never means two things, and what an earlier life of the file, or
another file, left at a place is recognised by its generation.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from terracekv.tiers.checksum import checksum
from terracekv.tiers.codec_id import Codec
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.folder import sync_folder
from terracekv.tiers.journal import Journal
from terracekv.tiers.tier import PAGE

MAGIC = int.from_bytes(b"TRKV", "little")
VERSION = 1
"""Names the checksum too: version 1 is xxh3-64."""

_HEADER = struct.Struct("<IHH34s32sIQQQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size
_MAGIC_BYTES = b"TRKV"

_SCAN_PAGES = 16
"""A window of headers: one read of 64 KiB costs hardly more than one of a page, and holds many small records."""
_NAME = re.compile(r"[0-9a-f]{8}\.segment")
_UNFIT = (errno.EINVAL, errno.EOPNOTSUPP)

journal = Journal(__name__)


def pages_of(size: int) -> int:
    """Pages that ``size`` bytes take."""
    return -(-size // PAGE)


@dataclass(frozen=True, slots=True)
class Record:
    """What a record says of itself. Sizes in bytes; ``checksum`` is of the payload before any codec."""

    id: bytes
    namespace_id: bytes
    epoch: int
    payload_bytes: int
    stored_bytes: int
    checksum: int
    generation: int
    created_ms: int
    codec: int = Codec.RAW

    @property
    def pages(self) -> int:
        """Pages of the whole record: one of header, the rest of stored bytes."""
        return 1 + pages_of(self.stored_bytes)

    def encode(self) -> bytes:
        """The header without its padding."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            self.codec,
            self.id,
            self.namespace_id,
            self.epoch,
            self.payload_bytes,
            self.stored_bytes,
            self.checksum,
            self.generation,
            self.created_ms,
        )
        return head + _CHECK.pack(checksum(head))


def decode(page: bytes | bytearray | memoryview) -> Record | None:
    """The record that starts at ``page``, or None when none of this version does."""
    if bytes(page[:4]) != _MAGIC_BYTES or len(page) < HEADER_BYTES:
        return None
    head = bytes(page[: _HEADER.size])
    if _CHECK.unpack_from(page, _HEADER.size)[0] != checksum(head):
        return None
    _, version, codec, id, namespace_id, epoch, payload, stored, digest, generation, created = _HEADER.unpack(head)
    if version != VERSION:
        return None
    return Record(id, namespace_id, epoch, payload, stored, digest, generation, created, codec)


class _Staging(threading.local):
    """One aligned header page per thread, and a payload buffer for callers whose memory direct I/O cannot use."""

    def __init__(self) -> None:
        self.header = memoryview(mmap.mmap(-1, PAGE))
        self.payload = memoryview(b"")

    def room(self, size: int) -> memoryview:
        """At least ``size`` bytes, aligned."""
        if len(self.payload) < size:
            self.payload = memoryview(mmap.mmap(-1, size))
        return self.payload[:size]


def _fits(view: memoryview, padded: int) -> bool:
    """Whether I/O of ``padded`` bytes can go straight to ``view``: page-aligned, whole pages, writable.

    A view of whole pages is a slot, whose bytes after the payload are nobody's: they may be written out as padding
    and overwritten by it.
    """
    if view.readonly or len(view) < padded or len(view) % PAGE:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


class SegmentFiles:
    """The segment files of one folder. Thread-safe: its only state is the mode, which changes at most once.

    Files are opened for each operation: a file removed, replaced or made unreadable is then noticed at once, a
    thousand segments need no thousand descriptors, and an open costs microseconds beside a block's milliseconds.
    """

    def __init__(self, folder: Path, direct: str) -> None:
        """``direct`` is ``auto``, ``on`` (ConfigError when impossible) or ``off``."""
        if direct not in ("auto", "on", "off"):
            raise ConfigError(f"disk direct I/O: {direct!r} is unknown", "use auto, on or off")
        self.folder = folder
        self._staging = _Staging()
        self._direct = direct != "off"
        self._mode_lock = threading.Lock()
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)
        if self._direct:
            self._probe(must=direct == "on")

    @property
    def mode(self) -> str:
        """``direct`` or ``buffered``: what is really done."""
        return "direct" if self._direct else "buffered"

    def path(self, number: int) -> str:
        """Plain text: ``pathlib`` would intern the name for each read and write, and Python's table of interned names
        is made anew, megabytes each time, when it is full of names that have gone."""
        return os.path.join(self.folder, f"{number:08x}.segment")

    def found(self) -> tuple[dict[int, int], list[str]]:
        """Segment numbers with their file sizes in bytes, and the names of files that are not ours."""
        ours: dict[int, int] = {}
        foreign = []
        for item in os.scandir(self.folder):
            if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                ours[int(item.name[:8], 16)] = item.stat().st_size
            else:
                foreign.append(item.name)
        return dict(sorted(ours.items())), sorted(foreign)

    def create(self, number: int, size: int) -> None:
        """A file of ``size`` bytes, all of them allocated, whose name is on the medium. OSError leaves no file, or one
        that could not be removed."""
        path = self.path(number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            failpoint("segment.create")
            os.posix_fallocate(file, 0, size)
            sync_folder(self.folder)
            failpoint("segment.created")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(file)

    def rename(self, number: int, fresh: int) -> None:
        """Begin another life of a file: its old records are of an old generation from here on, and after a loss of
        power too, or it would come back under its old name with new records over its old ones. OSError leaves the name.
        """
        failpoint("segment.reuse")
        os.rename(self.path(number), self.path(fresh))
        try:
            sync_folder(self.folder)
        except OSError:
            os.rename(self.path(fresh), self.path(number))
            raise
        failpoint("segment.reused")

    def remove(self, number: int) -> None:
        """Give the file's bytes back; no error when it is gone."""
        failpoint("segment.remove")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number))
        failpoint("segment.removed")

    def write(self, record: Record, page: int, payload: memoryview) -> None:
        """Write a record at ``page`` of its segment, in one call; OSError when not all of it could be."""
        padded = pages_of(record.stored_bytes) * PAGE
        if _fits(payload, padded):
            body = payload[:padded]
        else:
            body = self._staging.room(padded)
            body[: record.stored_bytes] = payload[: record.stored_bytes]
        header = self._staging.header
        header[:HEADER_BYTES] = record.encode()
        failpoint("segment.write")
        written = self._io(record.generation, os.O_WRONLY, os.pwritev, [header, body], page * PAGE)
        if written != PAGE + padded:
            raise OSError(
                errno.EIO, f"only {written} of {PAGE + padded} bytes were written", self.path(record.generation)
            )
        failpoint("segment.written")

    def erase(self, number: int, page: int) -> None:
        """Let no record start at ``page`` any more, nor after a loss of power: for one whose bytes are not there."""
        header = self._staging.header
        header[:] = bytes(PAGE)
        self._io(number, os.O_WRONLY, os.pwritev, [header], page * PAGE)
        self.sync(number)

    def read(self, number: int, page: int, stored_bytes: int, into: memoryview) -> Record | None:
        """Read the record at ``page`` and its ``stored_bytes`` into ``into``; nothing is verified but the header.

        None when no whole record is there; the bytes of ``into`` then mean nothing. OSError is the medium's.
        """
        padded = pages_of(stored_bytes) * PAGE
        straight = _fits(into, padded)
        body = into[:padded] if straight else self._staging.room(padded)
        header = self._staging.header
        failpoint("segment.read")
        got = self._io(number, os.O_RDONLY, os.preadv, [header, body], page * PAGE)
        if got < PAGE + stored_bytes:
            return None
        if not straight:
            into[:stored_bytes] = body[:stored_bytes]
        return decode(header)

    def header(self, number: int, page: int) -> Record | None:
        """The record that starts at ``page``."""
        view = self._staging.header
        got = self._io(number, os.O_RDONLY, os.preadv, [view], page * PAGE)
        return decode(view[:got])

    def scan(self, number: int, end_page: int) -> Iterator[tuple[int, Record]]:
        """The records of a segment before ``end_page``, in order, with the page each starts at.

        Where no record of this generation starts (a write that failed, or was under way when the process was
        killed), the next one is looked for page by page. OSError is the medium's; a short file ends the scan.
        """
        window = memoryview(mmap.mmap(-1, _SCAN_PAGES * PAGE))
        first = pages = 0
        page = 0
        while page < end_page:
            if not first <= page < first + pages:
                first = page
                pages = self._io(number, os.O_RDONLY, os.preadv, [window], page * PAGE) // PAGE
                if pages == 0:
                    return
            start = (page - first) * PAGE
            record = decode(window[start : start + HEADER_BYTES])
            if record is None or record.generation != number or page + record.pages > end_page:
                page += 1
                continue
            yield page, record
            page += record.pages

    def sync(self, number: int) -> None:
        """Bring a segment's bytes to the medium, for power loss."""
        failpoint("segment.sync")
        file = os.open(self.path(number), os.O_RDONLY)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)
        failpoint("segment.synced")

    def _io(
        self,
        number: int,
        flags: int,
        operation: Callable[[int, Sequence[memoryview], int], int],
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        """One vectored read or write; a file system that refuses direct I/O is asked again without it."""
        while True:
            direct = self._direct
            try:
                file = os.open(self.path(number), flags | (os.O_DIRECT if direct else 0))
                try:
                    return operation(file, buffers, offset)
                finally:
                    os.close(file)
            except OSError as error:
                if not direct or error.errno not in _UNFIT:
                    raise
                self._fall_back(error)

    def _probe(self, must: bool) -> None:
        """Find out once, with a real write, whether this folder takes direct I/O."""
        path = self.folder / "direct.probe"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            try:
                os.pwritev(file, [self._staging.header], 0)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in _UNFIT and must:
                raise ConfigError(
                    f"{self.folder} does not take direct I/O: {error.strerror}",
                    "set direct to auto, or use another folder",
                ) from error
            if error.errno in _UNFIT:
                self._fall_back(error)
            elif error.errno != errno.ENOSPC:
                raise
        finally:
            path.unlink(missing_ok=True)

    def _fall_back(self, error: OSError) -> None:
        with self._mode_lock:
            if self._direct:
                text = f"{self.folder} does not take direct I/O ({error.strerror}): buffered from now on"
                journal.warning("TKV-DISK-BUFFERED", text, tier="disk")
            self._direct = False

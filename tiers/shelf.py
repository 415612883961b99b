"""The shelf: which segments a disk tier has, which one is being filled, and who is using them.

Owns the table of segments, the spare files and the count of their bytes, all under one lock that is never held during
I/O of blocks or a call of the catalog; another one is held by whoever syncs. Called by the disk tier from any thread.
Imports ``segment`` and ``tier``.

    table   | oldest .. newest: hold blocks; the newest may be the active one, which takes appends |
    spares  | allocated files that hold nothing; the next to become active                         |
    pages   | 0 .. cursor: taken by writers                  cursor .. size: free                  |
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping

from terracekv.tiers.errors import event_and_advice
from terracekv.tiers.journal import Journal
from terracekv.tiers.segment import SegmentFiles
from terracekv.tiers.tier import PAGE

OVERHEAD_BYTES = 2 * PAGE
"""What a file system may take for a segment besides its bytes: the tree of its extents."""
SEGMENTS_MIN = 2
"""One takes appends while the blocks of the other that were hit are saved into it."""

journal = Journal(__name__)


class Segment:
    """One segment of the table. Fields change under the shelf's lock; ``number`` never does."""

    __slots__ = (
        "number", "size", "pages", "cursor", "kept", "readers", "writers", "leaving", "unsynced", "doubtful", "_hits",
    )  # fmt: skip

    def __init__(self, number: int, size: int, cursor: int) -> None:
        """``size`` is in bytes, ``cursor`` in pages."""
        self.number = number
        self.size = size
        self.pages = size // PAGE
        self.cursor = min(cursor, self.pages)
        self.kept = 0
        """Pages of the free ones that are only for blocks saved from the segment that leaves next."""
        self.readers = 0
        self.writers = 0
        self.leaving = False
        self.unsynced = False
        self.doubtful = False
        """A sync failed: the kernel may have dropped what it could not write, and the next one would not say so."""
        self._hits: bytearray | None = None

    @property
    def hit(self) -> bool:
        """Whether any record was read."""
        return self._hits is not None

    def mark(self, page: int) -> None:
        """Note that the record at ``page`` was read. A record has at least two pages, so two share no bit."""
        if self._hits is None:
            self._hits = bytearray(self.pages // 16 + 1)
        self._hits[page >> 4] |= 1 << (page >> 1 & 7)

    def marked(self, page: int) -> bool:
        """Whether the record at ``page`` was read since it was written or the tier was opened."""
        return self._hits is not None and bool(self._hits[page >> 4] >> (page >> 1 & 7) & 1)


class Shelf:
    """The segments of one folder. Thread-safe."""

    def __init__(
        self,
        files: SegmentFiles,
        *,
        segment_bytes: int,
        limit_bytes: Callable[[], int],
        free_floor_bytes: int,
        ends: Mapping[int, int] | None,
        synced: bool = False,
    ) -> None:
        """``ends`` names the segments that hold blocks and the page after their last record; None when unknown: all
        are then taken for full. ``synced`` vouches for their bytes on the medium. ``limit_bytes`` answers what all
        files together may take, and takes no lock."""
        self.files = files
        self.segment_bytes = segment_bytes
        self.limit_bytes = limit_bytes
        self._free_floor_bytes = free_floor_bytes
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._syncing = threading.Lock()
        """Held during I/O: of two who ask for the same, the second hears of it when it is on the medium, too."""
        self._table: dict[int, Segment] = {}
        self._spares: list[tuple[int, int]] = []
        self._active: Segment | None = None
        self._creating = 0
        self._draining: Segment | None = None
        found, self.foreign = files.found()
        for number, size in found.items():
            if ends is None:
                self._table[number] = Segment(number, size, size // PAGE)
            elif number in ends:
                self._table[number] = Segment(number, size, ends[number])
            else:
                self._spares.append((number, size))
        self._next_number = 1 + max([*found, *(ends or ())], default=0)
        self.lost = sorted(set(ends or ()) - set(found))
        """Segments that should hold blocks and whose files are gone."""
        for segment in self._table.values():
            segment.unsynced = not synced
        if ends and self._table:
            self._active = self._table[max(self._table)]

    @property
    def bytes(self) -> int:
        """Bytes of all segment files."""
        with self._lock:
            return self._bytes()

    @property
    def cost(self) -> int:
        """Bytes of all segment files with what the file system takes for them, and of one being created."""
        with self._lock:
            return self._cost()

    def over_limit(self) -> bool:
        """Whether the files take more than they may, or the disk has less free than it should."""
        with self._lock:
            return self._cost() > self.limit_bytes() or (
                self._count() > SEGMENTS_MIN and self._free() < self._free_floor_bytes
            )

    def counts(self) -> dict[str, int]:
        """Segments, spares and bytes taken by records, for the status."""
        with self._lock:
            taken = sum(segment.cursor for segment in self._table.values()) * PAGE
            return {"segments": len(self._table), "spare_segments": len(self._spares), "record_bytes": taken}

    def segments(self) -> list[Segment]:
        """Those of the table, oldest first."""
        with self._lock:
            return list(self._table.values())

    def spares(self) -> list[tuple[int, int]]:
        """Numbers and bytes of the spare files."""
        with self._lock:
            return list(self._spares)

    def has(self, number: int) -> bool:
        with self._lock:
            return number in self._table

    def take(self, pages: int, *, saved: bool = False) -> tuple[Segment, int] | None:
        """Room for a record at the end of the active segment; None when it does not fit. Ends with ``done``. ``saved``
        blocks may have what is kept for them."""
        with self._lock:
            active = self._active
            if active is None or active.cursor + pages > active.pages - (0 if saved else active.kept):
                return None
            page = active.cursor
            active.cursor += pages
            if saved:
                active.kept = max(0, active.kept - pages)
            active.writers += 1
            active.unsynced = True
            return active, page

    def done(self, segment: Segment, page: int, pages: int, used: bool) -> None:
        """A writer is done. Room that it did not use is given back when nobody has taken the room behind it."""
        with self._lock:
            assert segment.writers > 0
            segment.writers -= 1
            segment.unsynced = True  # a sync may have come between taking the room and writing there
            if not used and segment.cursor == page + pages:
                segment.cursor = page

    def pin(self, number: int) -> Segment | None:
        """Keep a segment from being reused until ``unpin``; None when it holds no blocks any more."""
        with self._lock:
            segment = self._table.get(number)
            if segment is not None:
                segment.readers += 1
            return segment

    def unpin(self, segment: Segment, hit: int | None = None) -> None:
        """A reader is done; ``hit`` is the page of the record that it served."""
        with self._lock:
            assert segment.readers > 0
            segment.readers -= 1
            if hit is not None:
                segment.mark(hit)
            if not segment.readers:
                self._drained.notify_all()

    def pin_to_list(self, number: int) -> Segment | None:
        """Pin a segment to publish what it holds: None also while its blocks are being forgotten, since what is
        published behind the eviction's back would be listed after the file is reused."""
        with self._lock:
            segment = self._table.get(number)
            if segment is None or segment.leaving:
                return None
            segment.readers += 1
            return segment

    def victim(self) -> Segment | None:
        """The oldest segment that nobody is reading, writing or filling; ends with ``retire`` or ``keep``."""
        with self._lock:
            for segment in self._table.values():
                if segment is not self._active and not segment.readers and not segment.writers:
                    segment.leaving = True
                    return segment
            return None

    def filled(self, segment: Segment, end_page: int) -> None:
        """A scan found the end of the last record."""
        with self._lock:
            segment.cursor = end_page

    def keep(self, segment: Segment) -> None:
        """The eviction failed: the segment stays."""
        with self._lock:
            segment.leaving = False

    def retire(self, segment: Segment) -> None:
        """A segment all of whose blocks are forgotten becomes a spare, or is given back when it is over the limit.

        Whoever looked a place up before it was forgotten may still pin the segment, until it leaves the table here;
        such readers are waited for, since after this the file's bytes are overwritten. One caller at a time.
        """
        with self._lock:
            if self._table.pop(segment.number, None) is None:
                return
            self._draining = segment
            while segment.readers:
                self._drained.wait()
            self._draining = None
            self._spares.append((segment.number, segment.size))
        self.trim()

    def lose(self, segment: Segment) -> bool:
        """A segment's file is gone: it holds nothing any more. False when that was known."""
        with self._lock:
            if self._active is segment:
                self._active = None
            return self._table.pop(segment.number, None) is not None

    def shrink(self) -> list[int]:
        """At start, before anybody reads: remove files over the limit, spares first, then the oldest segments, whose
        numbers are returned."""
        self.trim()
        dropped = []
        while len(self._table) > 1 and self._cost() > self.limit_bytes():
            segment = next(iter(self._table.values()))
            self.files.remove(segment.number)
            self.lose(segment)
            dropped.append(segment.number)
        return dropped

    def seal(self, segment: Segment | None = None) -> None:
        """Append no more to this segment, or to whichever is active."""
        with self._lock:
            if segment is None or self._active is segment:
                self._active = None

    def trim(self) -> None:
        """Give spare files back, oldest first, while too much is taken."""
        while self.over_limit():
            with self._lock:
                if not self._spares:
                    return
                spare = self._spares.pop(0)
            try:
                self.files.remove(spare[0])
            except OSError:
                self._still_there(spare)
                raise

    def can_advance(self) -> bool:
        """Whether ``advance`` needs no eviction first."""
        with self._lock:
            return bool(self._spares) or self._may_create()

    def share(self) -> None:
        """No more blocks are to be saved: the active segment is for everybody."""
        with self._lock:
            if self._active is not None:
                self._active.kept = 0

    def advance(self, *, keep: bool = False) -> bool:
        """Make a spare or a new file the active segment; False when there is neither. With ``keep`` half of it is for
        blocks to be saved, until ``share``: writers, who are many, would have all of it first. One caller at a time."""
        while True:
            with self._lock:
                spare = self._spares.pop(0) if self._spares else None
                if spare is None and not self._may_create():
                    return False
                number = self._next_number
                self._next_number += 1
                self._creating = 0 if spare else self.segment_bytes + OVERHEAD_BYTES
            try:
                if spare is None:
                    self.files.create(number, self.segment_bytes)
                elif spare[1] != self.segment_bytes:
                    self.files.remove(spare[0])
                    continue
                else:
                    self.files.rename(spare[0], number)
            except FileNotFoundError:
                continue
            except OSError as error:
                if spare is not None:
                    self._still_there(spare)
                else:
                    with contextlib.suppress(OSError):
                        self._still_there((number, os.stat(self.files.path(number)).st_size))
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                text = f"no room for another segment in {self.files.folder}: {error}"
                journal.warning(event_and_advice(error)[0], text, tier="disk")
                return False
            finally:
                self._creating = 0
            with self._lock:
                self._active = self._table[number] = Segment(number, self.segment_bytes, 0)
                self._active.kept = self._active.pages // 2 if keep else 0
            return True

    def sync(self) -> int:
        """Bring what was written since the last call to the medium; segments below the number that is returned will
        not change any more and are there whole. OSError when that cannot be said, now or ever of a segment."""
        with self._syncing:
            return self._sync()

    def _sync(self) -> int:
        for segment in self.segments():
            with self._lock:
                due, segment.unsynced = segment.unsynced, False
            if not due:
                continue
            try:
                if segment.doubtful:
                    raise OSError(errno.EIO, "an earlier sync of it failed", self.files.path(segment.number))
                self.files.sync(segment.number)
            except FileNotFoundError:
                continue
            except OSError:
                segment.unsynced = segment.doubtful = True
                raise
        for number, _ in self.spares():  # what they held is not listed, but a rebuild would find it
            with contextlib.suppress(FileNotFoundError):
                self.files.sync(number)
        return self.settled()

    def settled(self) -> int:
        """Segments below this number will not change any more, and are on the medium."""
        with self._lock:
            open = [s.number for s in self._table.values() if s is self._active or s.writers or s.unsynced]
            open += [self._draining.number] if self._draining else []
            return min(open, default=self._next_number)

    def check(self) -> None:
        """Every segment's file is there with the size we count, and nothing else is."""
        found, _ = self.files.found()
        with self._lock:
            counted = {number: segment.size for number, segment in self._table.items()} | dict(self._spares)
            assert found == counted, f"segment files {found}, counted {counted}"
            for segment in self._table.values():
                assert 0 <= segment.cursor <= segment.pages, f"segment {segment.number} is filled beyond its end"
                assert segment.readers >= 0 and segment.writers >= 0
            assert self._cost() <= self.limit_bytes(), f"{self._cost()} bytes, limit {self.limit_bytes()}"

    def _still_there(self, spare: tuple[int, int]) -> None:
        """A spare file that could not be renamed or removed is counted on, and so is one that was not finished."""
        with self._lock:
            self._spares.append(spare)

    def _bytes(self) -> int:
        held = sum(segment.size for segment in self._table.values()) + sum(size for _, size in self._spares)
        return held + (self._draining.size if self._draining else 0)

    def _count(self) -> int:
        return len(self._table) + len(self._spares) + bool(self._draining)

    def _cost(self) -> int:
        return self._bytes() + self._count() * OVERHEAD_BYTES + self._creating

    def _free(self) -> int:
        """Bytes that the file system has free, whoever took the others."""
        state = os.statvfs(self.files.folder)
        return state.f_bavail * state.f_frsize

    def _may_create(self) -> bool:
        more = self.segment_bytes + OVERHEAD_BYTES
        return self._cost() + more <= self.limit_bytes() and self._free() - self.segment_bytes >= self._free_floor_bytes

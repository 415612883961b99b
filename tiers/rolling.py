"""Room for records: rolling from one segment to the next, and evicting the oldest.

Owns the lock under which one thread at a time rolls; the others wait for the room it makes. Called by ``disk`` from
worker threads. Imports ``catalog``, ``failpoint``, ``ledger``, ``namespace``, ``segment``, ``shelf``, ``tier`` and
``upkeep``.
"""

import mmap
import threading
from dataclasses import replace

from terracekv.tiers import upkeep
from terracekv.tiers.catalog import Catalog, Place
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.ledger import Ledger
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.segment import Record, SegmentFiles, pages_of
from terracekv.tiers.shelf import Segment, Shelf
from terracekv.tiers.tier import PAGE

_BATCH = 1024


class Roller:
    """Makes room on a shelf."""

    def __init__(
        self, files: SegmentFiles, shelf: Shelf, catalog: Catalog, namespaces: Namespaces, ledger: Ledger
    ) -> None:
        self._files = files
        self._shelf = shelf
        self._catalog = catalog
        self._namespaces = namespaces
        self._ledger = ledger
        self._rolling = threading.Lock()

    def room(self, pages: int) -> tuple[Segment, int] | None:
        """Room for a record, after evicting if need be; None when nothing can be evicted."""
        if pages * PAGE > self._shelf.segment_bytes:
            self._ledger.last_error = f"a block of {pages * PAGE} bytes is larger than a segment"
            return None
        while True:
            if room := self._shelf.take(pages):
                return room
            with self._rolling:
                # Another thread may have rolled while this one waited.
                if room := self._shelf.take(pages):
                    return room
                if not self._roll():
                    return None

    def _roll(self) -> bool:
        """Begin another active segment, and evict ahead for the one after it. The caller holds ``_rolling``."""
        self._shelf.trim()
        while self._shelf.over_limit() and self._evict(save=False):
            pass
        if not self._shelf.can_advance() and not self._evict_now():
            self._ledger.last_error = "every segment is being read or written"
            return False
        if not self._shelf.advance() and not (self._evict_now() and self._shelf.advance()):
            self._ledger.last_error = "the disk has no room for a segment"
            return False
        if not self._shelf.can_advance():
            self._evict(save=True)
        return True

    def _evict_now(self) -> bool:
        """Evict for room that is needed at once, from the full active segment when no other is idle."""
        if self._evict(save=False):
            return True
        self._shelf.seal()
        return self._evict(save=False)

    def _evict(self, save: bool) -> bool:
        """Empty the oldest idle segment; False when there is none. ``save`` appends anew those of its blocks that were
        hit, up to half of the segment, so that eviction always gains room."""
        segment = self._shelf.victim()
        if segment is None:
            return False
        try:
            evicted = self._empty(segment, segment.pages // 2 if save else 0)
            failpoint("disk.evicted")
            self._catalog.drop_segment(segment.number)
        except BaseException:
            self._shelf.keep(segment)
            raise
        self._shelf.retire(segment)
        self._ledger.left("capacity", evicted)
        return True

    def _empty(self, segment: Segment, saving: int) -> int:
        """Save hit blocks, up to ``saving`` pages, and forget the others; the number forgotten."""
        gone: list[Place] = []
        evicted = covered = 0
        try:
            for page, record in self._files.scan(segment.number, segment.cursor):
                covered += record.pages
                if segment.marked(page) and record.pages <= saving and self._save(segment, page, record):
                    saving -= record.pages
                    continue
                gone.append((record.id, segment.number, page))
                if len(gone) == _BATCH:
                    evicted += self._catalog.forget(gone)
                    gone = []
            evicted += self._catalog.forget(gone)
        except OSError as error:
            self._ledger.failed(error)
            covered = 0
        if covered == segment.cursor:
            return evicted
        # Not every header could be read: what else was listed here is looked for in the catalog.
        return evicted + upkeep.forget_segments(self._catalog, {segment.number})

    def _save(self, segment: Segment, page: int, record: Record) -> bool:
        """Append a block of a segment under eviction anew, without rolling; False when it must go."""
        entry = self._catalog.get(record.id)
        namespace = self._namespaces.get(record.namespace_id)
        if entry is None or (entry.segment, entry.page) != (segment.number, page):
            return False
        if namespace is None or entry.stamp != namespace.stamp:
            return False
        room = self._shelf.take(record.pages)
        if room is None:
            return False
        target, target_page = room
        used = False
        try:
            with mmap.mmap(-1, pages_of(record.stored_bytes) * PAGE) as buffer, memoryview(buffer) as view:
                if self._files.read(segment.number, page, record.stored_bytes, view) != record:
                    return False
                self._files.write(replace(record, generation=target.number), target_page, view)
            moved = entry._replace(segment=target.number, page=target_page)
            used = self._catalog.move([(record.id, entry, moved)])[0]
            return used
        except OSError as error:
            self._ledger.failed(error)
            return False
        finally:
            self._shelf.done(target, target_page, record.pages, used)

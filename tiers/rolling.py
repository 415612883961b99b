"""Room for records: rolling from one segment to the next, and evicting the oldest.

Owns the lock under which one thread at a time rolls; the others wait for the room it makes. Called by ``disk`` from
worker threads. Imports ``catalog``, ``entry``, ``failpoint``, ``ledger``, ``namespace``, ``segment``, ``shelf`` and
``tier``.
"""

import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from terracekv.tiers.catalog import Catalog
from terracekv.tiers.entry import Entry, id_of
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.ledger import Ledger
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.segment import SegmentFiles
from terracekv.tiers.shelf import Segment, Shelf
from terracekv.tiers.tier import PAGE


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
        self.held_above: Callable[[Namespace, bytes], bool] | None = None
        """Whether a smaller tier above holds a block: it does of an old one only if that was used since. Asked of the
        blocks of a segment under eviction: what is served from above is never read here, and is used all the same."""

    def room(self, pages: int) -> tuple[Segment, int] | None:
        """Room for a record, after evicting if need be; None when nothing can be evicted."""
        if pages * PAGE > self._shelf.segment_bytes:
            self._ledger.full(f"a block of {pages * PAGE} bytes is larger than a segment", "raise disk.segment")
            return None
        while True:
            if room := self._shelf.take(pages):
                return room
            with self._rolling:
                # Another thread may have rolled while this one waited.
                if room := self._shelf.take(pages):
                    return room
                if not self._roll(pages):
                    return None

    def _roll(self, pages: int) -> bool:
        """Begin another active segment, and evict ahead for the one after it. The caller holds ``_rolling``, and wants
        room for a record of so many pages: what is saved leaves it, or a large one would have to roll without end."""
        self._shelf.trim()
        while self._shelf.over_limit() and self._evict():
            pass
        if not self._shelf.can_advance() and not self._evict_now():
            self._ledger.full("every segment is being read or written", "raise disk.size, or lower disk.segment")
            return False
        if not self._shelf.advance(keep=True) and not (self._evict_now() and self._shelf.advance(keep=True)):
            self._ledger.full("the disk has no room for a segment", "free space there, or lower disk.free_floor")
            return False
        try:
            if not self._shelf.can_advance():
                self._evict(save=self._shelf.segment_bytes // PAGE - pages)
        finally:
            self._shelf.share()
        return True

    def _evict_now(self) -> bool:
        """Evict for room that is needed at once, from the full active segment when no other is idle."""
        if self._evict():
            return True
        self._shelf.seal()
        return self._evict()

    def _evict(self, save: int = 0) -> bool:
        """Empty the oldest idle segment; False when there is none. Those of its blocks that were hit, here or above,
        are appended anew, in ``save`` pages and in half of the segment at most, so that eviction always gains room."""
        segment = self._shelf.victim()
        if segment is None:
            return False
        try:
            if save and (segment.hit or self.held_above is not None):
                for number in self._save_hits(segment, min(save, segment.pages // 2)):
                    self._files.sync(number)  # or a loss of power would take what was on the medium before
            evicted = self._catalog.drop_segment(segment.number)
            failpoint("disk.evicted")
        except BaseException:
            self._shelf.keep(segment)
            raise
        self._shelf.retire(segment)
        self._ledger.left("capacity", evicted)
        return True

    def _save_hits(self, segment: Segment, saving: int) -> set[int]:
        """Append its hits anew, in so many pages at most; the segments that took them."""
        targets, stamps = set[int](), {namespace.stamp: namespace for namespace in self._namespaces}
        after = -1
        # Of the buffer only what the largest block takes is ever touched. It is not closed by hand: whatever goes wrong
        # below would still hold views of it, and closing would raise an error of its own in its place.
        buffer = memoryview(mmap.mmap(-1, saving * PAGE))
        while saving and (rows := self._catalog.held(segment.number, after)):
            for name, entry in rows:
                pages = entry.end_page - entry.page
                if pages > saving or not (segment.marked(entry.page) or self._is_above(stamps, name, entry)):
                    continue
                if target := self._save(name, entry, buffer):
                    saving -= pages
                    targets.add(target)
            after = rows[-1][1].page
        return targets

    def _is_above(self, stamps: Mapping[int, Namespace], name: bytes, entry: Entry) -> bool:
        namespace = stamps.get(entry.stamp)
        return namespace is not None and self.held_above is not None and self.held_above(namespace, id_of(name))

    def _save(self, name: bytes, entry: Entry, buffer: memoryview) -> int:
        """Append a block of a segment under eviction anew, without rolling; the segment, 0 when it must go."""
        pages = entry.end_page - entry.page
        room = self._shelf.take(pages, saved=True)
        if room is None:
            return 0
        target, page = room
        used = False
        try:
            record = self._files.read(entry.segment, entry.page, entry.stored_bytes, buffer)
            if record is None or record.id != id_of(name) or record.stored_bytes != entry.stored_bytes:
                return 0
            namespace = self._namespaces.get(record.namespace_id)
            if namespace is None or namespace.stamp != entry.stamp:
                return 0
            self._files.write(replace(record, generation=target.number), page, buffer)
            used = self._catalog.move([(name, entry, entry._replace(segment=target.number, page=page))])[0]
            return target.number if used else 0
        except OSError as error:
            self._ledger.failed(error)
            return 0
        finally:
            self._shelf.done(target, page, pages, used)

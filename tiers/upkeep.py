"""Upkeep of the disk tier: rebuilding the catalog from segments, dropping what is stale, comparing the books.

Owns the progress of a rebuild, nothing else. Called by ``disk`` in worker threads, beside puts and gets. Imports
``catalog``, ``errors``, ``namespace``, ``segment``, ``shelf`` and ``tier``.
"""

import logging
from collections.abc import Collection, Sequence

from terracekv.tiers.catalog import Catalog, Entry, Place
from terracekv.tiers.errors import TierFull
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.segment import CODEC_RAW, Record
from terracekv.tiers.shelf import Segment, Shelf

_BATCH = 1024

log = logging.getLogger(__name__)


class Rebuild:
    """Brings a catalog in line with the segments: fills a fresh one, unlists what was in segments that are gone."""

    def __init__(
        self, catalog: Catalog, shelf: Shelf, namespaces: Namespaces, *, scan: bool, gone: Sequence[int]
    ) -> None:
        self._catalog = catalog
        self._shelf = shelf
        self._namespaces = namespaces
        self._unscanned = list(reversed(shelf.segments())) if scan else []
        self._gone = set() if scan else set(gone)
        self._stopped = False
        self.segments_done = 0
        self.blocks = 0

    @property
    def scanning(self) -> bool:
        """Whether blocks on disk are not listed yet."""
        return bool(self._unscanned)

    @property
    def due(self) -> bool:
        return bool(self._unscanned or self._gone)

    def stop(self) -> None:
        """Return from ``run`` soon; what is left stays due."""
        self._stopped = True

    def run(self) -> int:
        """Newest segments first, so that the newest of two records of a block is the one listed."""
        before = self.blocks
        if self._gone:
            forget_segments(self._catalog, self._gone)
            self._gone = set()
        while self._unscanned and not self._stopped:
            segment = self._unscanned[0]
            # Pinned, so that no put evicts it between the scan and the publishing.
            if self._shelf.pin_to_list(segment.number) is not None:
                try:
                    self._adopt(segment)
                except TierFull as full:
                    log.warning("older blocks are not listed: %s", full)
                    self._unscanned = [segment]
                except OSError as error:
                    log.warning("segment %d cannot be read: %s", segment.number, error)
                finally:
                    self._shelf.unpin(segment)
            self._unscanned.pop(0)
            self.segments_done += 1
        return self.blocks - before

    def _adopt(self, segment: Segment) -> None:
        found = list(self._shelf.files.scan(segment.number, segment.pages))
        end_page = found[-1][0] + found[-1][1].pages if found else 0
        self._shelf.filled(segment, end_page)
        self._catalog.set_segments({segment.number: end_page})
        found.reverse()
        for start in range(0, len(found), _BATCH):
            rows = [row for row in map(self._row, found[start : start + _BATCH]) if row is not None]
            self.blocks += sum(self._catalog.publish(rows))

    def _row(self, item: tuple[int, Record]) -> tuple[bytes, Entry] | None:
        """The entry of a record that may be served; a flushed one may not."""
        page, record = item
        namespace = self._namespaces.adopt(record.namespace_id, record.epoch)
        if namespace.epoch != record.epoch or record.codec != CODEC_RAW:
            return None
        entry = Entry(
            namespace.stamp, record.generation, page, record.payload_bytes, record.stored_bytes, record.checksum
        )
        return record.id, entry


def forget_segments(catalog: Catalog, numbers: Collection[int]) -> int:
    """Unlist what is in segments whose headers cannot be asked, by a walk of the catalog; the number of blocks."""
    gone = 0
    for rows in catalog.walk():
        places: list[Place] = [
            (id, entry.segment, entry.page) for id, entry in rows if entry is not None and entry.segment in numbers
        ]
        if places:
            gone += catalog.forget(places)
    for number in numbers:
        catalog.drop_segment(number)
    return gone


def drop_stale(catalog: Catalog, namespace: Namespace) -> int:
    """Remove entries of a namespace's older epochs; the number removed."""
    gone = 0
    for rows in catalog.walk(_BATCH):
        places: list[Place] = [
            (id, entry.segment, entry.page)
            for id, entry in rows
            if entry is not None and entry.stamp >> 32 == namespace.number and entry.stamp < namespace.stamp
        ]
        if places:
            gone += catalog.forget(places)
    return gone


def check_entries(catalog: Catalog, shelf: Shelf) -> None:
    """AssertionError unless every entry names a record that lies whole in its segment and bears its name."""
    segments = {segment.number: segment for segment in shelf.segments()}
    listed = 0
    for rows in catalog.walk():
        for id, entry in rows:
            assert entry is not None, f"the entry of {id.hex()} contradicts its check"
            segment = segments.get(entry.segment)
            assert segment is not None, f"{id.hex()} is listed in segment {entry.segment}, which is not there"
            assert entry.end_page <= segment.cursor, f"{id.hex()} lies beyond the cursor of segment {entry.segment}"
            record = shelf.files.header(entry.segment, entry.page)
            assert record is not None, f"no record where {id.hex()} should be"
            said = (record.id, record.generation, record.epoch, record.stored_bytes, record.checksum)
            known = (id, entry.segment, entry.stamp & 0xFFFFFFFF, entry.stored_bytes, entry.checksum)
            assert said == known, f"the record of {id.hex()} is {said}, the catalog says {known}"
            listed += 1
    assert listed == catalog.count()
    for number, end_page in catalog.segments().items():
        assert number in segments, f"the catalog knows segment {number}, which is not there"
        assert end_page <= segments[number].cursor, f"segment {number} ends at {end_page} in the catalog"

"""Upkeep of the disk tier: rebuilding the catalog from segments, dropping what is stale, comparing the books.

Owns the progress of a rebuild, nothing else. Called by ``disk`` in worker threads, beside puts and gets. Imports
``catalog``, ``codec_id``, ``entry``, ``errors``, ``namespace``, ``segment``, ``shelf`` and ``tier``.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from terracekv.tiers.catalog import Catalog
from terracekv.tiers.codec_id import known
from terracekv.tiers.entry import Entry, Place
from terracekv.tiers.errors import TierFull
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.segment import Record
from terracekv.tiers.shelf import Segment, Shelf

_BATCH = 1024

log = logging.getLogger(__name__)


class Rebuild:
    """Fills an empty catalog with what the segments hold."""

    def __init__(self, catalog: Catalog, shelf: Shelf, namespaces: Namespaces, segments: Sequence[Segment]) -> None:
        """``segments`` are those to read, oldest first."""
        self._catalog = catalog
        self._shelf = shelf
        self._namespaces = namespaces
        self._unscanned = list(reversed(segments))
        self._stopped = False
        self.segments_done = 0
        self.blocks = 0

    @property
    def due(self) -> bool:
        """Whether blocks on disk are not listed yet."""
        return bool(self._unscanned)

    def stop(self) -> None:
        """Return from ``run`` soon; what is left stays due."""
        self._stopped = True

    def run(self) -> int:
        """Newest segments first, so that the newest of two records of a block is the one listed."""
        before = self.blocks
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
        """The entry of a record that may be served: not of one that was flushed, nor of a codec of a later version."""
        page, record = item
        namespace = self._namespaces.adopt(record.namespace_id, record.epoch)
        if namespace.epoch != record.epoch or not known(record.codec):
            return None
        sizes = (record.payload_bytes, record.stored_bytes)
        return record.id, Entry(namespace.stamp, record.generation, page, *sizes, record.checksum, record.codec)


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
    listed, taken = 0, Counter[int]()
    for rows in catalog.walk():
        for id, entry in rows:
            assert entry is not None, f"the entry of {id.hex()} contradicts its check"
            segment = segments.get(entry.segment)
            assert segment is not None, f"{id.hex()} is listed in segment {entry.segment}, which is not there"
            assert entry.end_page <= segment.cursor, f"{id.hex()} lies beyond the cursor of segment {entry.segment}"
            record = shelf.files.header(entry.segment, entry.page)
            assert record is not None, f"no record where {id.hex()} should be"
            said = (record.id, record.generation, record.epoch, record.codec, record.stored_bytes, record.checksum)
            meant = (id, entry.segment, entry.stamp & 0xFFFFFFFF, entry.codec, entry.stored_bytes, entry.checksum)
            assert said == meant, f"the record of {id.hex()} is {said}, the catalog says {meant}"
            listed += 1
            taken[entry.stamp >> 32] += entry.record_bytes
    held = sum(count_held(catalog, number) for number in segments)
    assert held == listed, f"{listed} blocks are listed, {held} are known by their places"
    assert listed == catalog.count()
    counted = catalog.bytes_by_namespace()
    assert counted == taken, f"records of namespaces take {dict(taken)} bytes, counted {counted}"
    for number, end_page in catalog.segments().items():
        assert number in segments, f"the catalog knows segment {number}, which is not there"
        assert end_page <= segments[number].cursor, f"segment {number} ends at {end_page} in the catalog"


def count_held(catalog: Catalog, number: int) -> int:
    """Blocks that the catalog knows to lie in a segment."""
    count, after = 0, -1
    while rows := catalog.held(number, after):
        count += len(rows)
        after = rows[-1][1].page
    return count

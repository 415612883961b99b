"""Upkeep of the disk tier: opening the catalog or rebuilding it from segments, dropping what is stale, comparing books.

Owns the progress of a rebuild, nothing else. Called by ``disk`` in worker threads, beside puts and gets. Imports
``audit``, ``catalog``, ``codec_id``, ``disk_record``, ``entry``, ``errors``, ``folder``, ``journal``, ``namespace``,
``segment``, ``shelf`` and ``tier``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from terracekv.tiers.audit import Audit
from terracekv.tiers.catalog import DATA, Catalog
from terracekv.tiers.codec_id import known
from terracekv.tiers.disk_record import DiskRecords
from terracekv.tiers.entry import NAME_BYTES, Entry, Place, id_of, name_of
from terracekv.tiers.errors import Damaged, TierFull, event_and_advice
from terracekv.tiers.folder import NAMES, OwnedFolder
from terracekv.tiers.journal import Journal
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.segment import Record
from terracekv.tiers.shelf import Segment, Shelf

_BATCH = 1024
AUDIT_BLOCKS = 256
AUDIT_BYTES = 64 << 20
"""An audit looks at so much at a time."""

journal = Journal(__name__)


def open_catalog(
    owned: OwnedFolder, identity: str, *, may_grow: Callable[[int], bool], map_bytes_max: int
) -> tuple[Catalog, bool]:
    """The catalog of a disk tier's folder, and whether it lists what the segments hold; if not, it is empty.

    While it is not whole no state vouches for it, so a crash before the rebuild ends leads to another rebuild. One
    whose next growth would pass ``map_bytes_max`` is made anew.
    """
    path = owned.folder / "catalog"
    if owned.trusted(identity, path / DATA):
        owned.opened(identity, owned.synced)
        try:
            catalog = Catalog(path, may_grow=may_grow)
        except Damaged as damage:
            journal.warning(damage.event, str(damage), tier="disk")
        else:
            if not catalog.created and catalog.next_map_bytes <= map_bytes_max and _named_as_now(catalog):
                return catalog, True
            catalog.close()
    elif owned.was_clean:
        journal.warning("TKV-DAMAGED", f"{path} is not as it was left: rebuilt from segments", tier="disk")
    owned.distrust()
    Catalog.discard(path)
    return Catalog(path, may_grow=may_grow), False


def _named_as_now(catalog: Catalog) -> bool:
    """Whether blocks are called in it as ``name_of`` does. Earlier versions went by their ids alone."""
    return all(len(name) == NAME_BYTES for name, _ in catalog.entries(limit=1))


class Rebuild:
    """Fills an empty catalog with what the segments hold."""

    def __init__(
        self,
        catalog: Catalog,
        shelf: Shelf,
        namespaces: Namespaces,
        segments: Sequence[Segment],
        *,
        unsure_from: int | None,
        is_whole: Callable[[Namespace, bytes, Entry], bool],
    ) -> None:
        """``segments`` are those to read, oldest first. After a loss of power, in those from ``unsure_from`` on a
        record's header may be there and its bytes not: only what ``is_whole`` is listed."""
        self._unsure_from = unsure_from
        self._is_whole = is_whole
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
                    journal.warning(full.event, f"older blocks are not listed: {full}", tier="disk")
                    self._unscanned = [segment]
                except OSError as error:
                    text = f"segment {segment.number} cannot be read: {error}"
                    journal.warning(event_and_advice(error)[0], text, tier="disk")
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
        entry = Entry(namespace.stamp, record.generation, page, *sizes, record.checksum, record.codec)
        unsure = self._unsure_from is not None and record.generation >= self._unsure_from
        if unsure and not self._is_whole(replace(namespace, block_bytes=record.payload_bytes), record.id, entry):
            # The next rebuild may take this segment for sure.
            self._shelf.files.erase(entry.segment, page)
            return None
        return name_of(entry.stamp, record.id), entry


def warn_of_foreign_files(folder: Path, shelf: Shelf) -> None:
    """Files in a disk tier's folder that it did not put there are left alone, and named."""
    names = {item.name for item in folder.iterdir()} - NAMES - {"catalog", "segments"}
    if foreign := sorted(names) + shelf.foreign:
        text = f"{folder} holds files that are not ours, left alone: {', '.join(foreign)}"
        journal.warning("TKV-DISK-FOREIGN", text, tier="disk")


def drop_stale(catalog: Catalog, namespace: Namespace) -> int:
    """Remove entries of a namespace's older epochs; the number removed."""
    gone = 0
    for rows in catalog.walk(_BATCH):
        places: list[Place] = [
            (name, entry.segment, entry.page)
            for name, entry in rows
            if entry is not None and entry.stamp >> 32 == namespace.number and entry.stamp < namespace.stamp
        ]
        if places:
            gone += catalog.forget(places)
    return gone


def audit(
    catalog: Catalog, shelf: Shelf, records: DiskRecords, namespaces: Namespaces, after: bytes
) -> tuple[Audit, list[tuple[bytes, Place | None, str]]]:
    """Some of the blocks behind ``after``: what was found, and what is to be forgotten, with the reason."""
    found, wrong = Audit(), list[tuple[bytes, Place | None, str]]()
    stamps = {namespace.stamp: namespace for namespace in namespaces}
    rows, looked_at, read_bytes = catalog.entries(after, AUDIT_BLOCKS), 0, 0
    for name, entry in rows:
        if read_bytes > AUDIT_BYTES:
            break
        looked_at += 1
        id = id_of(name)
        if entry is None:
            wrong.append((name, None, f"the catalog's entry of block {id.hex()} is wrong"))
            continue
        namespace = stamps.get(entry.stamp)
        if namespace is None:
            found.passed_over += 1
            continue
        read_bytes += entry.stored_bytes
        found.checked += 1
        why, locked = _wrong(shelf, records, replace(namespace, block_bytes=entry.payload_bytes), id, entry)
        found.locked += locked
        if why is not None:
            still = catalog.get(name)  # moved or replaced since: then what was read is not what is listed
            if still == entry:
                wrong.append((name, (name, entry.segment, entry.page), why))
    if looked_at < len(rows) or len(rows) == AUDIT_BLOCKS:
        found.next = rows[looked_at - 1][0].hex()
    found.wrong = {id_of(name).hex(): why for name, _, why in wrong}
    return found, wrong


def _wrong(
    shelf: Shelf, records: DiskRecords, namespace: Namespace, id: bytes, entry: Entry
) -> tuple[str | None, bool]:
    """What is wrong with a block on disk, if anything is; and whether it cannot be told what it holds."""
    where = f"segment {entry.segment}, page {entry.page}"
    segment = shelf.pin(entry.segment)
    if segment is None:
        return f"block {id.hex()}: there is no such segment ({where})", False
    try:
        wrong = records.read(namespace, id, entry, memoryview(bytearray(entry.payload_bytes)))
        if wrong is not None and records.is_locked(namespace, id, entry):
            return None, True
    except OSError as error:
        return f"block {id.hex()} cannot be read: {error} ({where})", False
    finally:
        shelf.unpin(segment)
    return None if wrong is None else f"{wrong} ({where})", False


def check_entries(catalog: Catalog, shelf: Shelf) -> None:
    """AssertionError unless every entry names a record that lies whole in its segment and bears its name."""
    segments = {segment.number: segment for segment in shelf.segments()}
    listed, taken = 0, Counter[int]()
    for rows in catalog.walk():
        for name, entry in rows:
            id = id_of(name)
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

"""The disk tier: a log of segments, with the catalog as its index.

Owns one folder, alone: ``catalog/``, ``segments/``, the lock and the state file. Called by the daemon's worker threads;
``leading`` and ``status`` also on its event loop. Imports ``audit``, ``catalog``, ``disk_record``, ``disk_shares``,
``entry``, ``errors``, ``failpoint``, ``folder``, ``ledger``, ``namespace``, ``rolling``, ``segment``,
``shelf``, ``tier``, ``upkeep`` and ``vault``.

A put takes room under the shelf's lock, writes the record outside of any lock, then publishes it in the catalog: from
there on it is listed, and it survives the death of the process. A get pins the segment, so it never reads a file that
is being reused. When the active segment is full the next one becomes active and the oldest is evicted, its blocks that
were hit since, here or above, being appended anew; so bytes on disk stay below the capacity by construction:

    segment files with their overhead + the catalog's map after its next growth + small files <= capacity
"""

import contextlib
import errno
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from terracekv.tiers import upkeep
from terracekv.tiers.audit import Audit, id_after
from terracekv.tiers.catalog import DATA, MAP_STEP_BYTES
from terracekv.tiers.disk_record import DiskRecords
from terracekv.tiers.disk_shares import DiskShares
from terracekv.tiers.entry import Entry, Place, name_of, names_of
from terracekv.tiers.errors import ConfigError, Damaged, TierDown, TierFull
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.folder import OwnedFolder
from terracekv.tiers.ledger import Ledger
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.rolling import Roller
from terracekv.tiers.segment import SegmentFiles, pages_of
from terracekv.tiers.shelf import OVERHEAD_BYTES, SEGMENTS_MIN, Segment, Shelf
from terracekv.tiers.tier import PAGE, Outcome, TierStatus
from terracekv.tiers.vault import Sealed

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

SMALL_BYTES = 256 << 10
"""Folders, lock files, LMDB's table of readers and the state file, with room to spare."""
FREE_FLOOR_BYTES = 1 << 30
_UNREACHABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_LOOKS = 3
"""Times a get looks a block up again that moved between the lookup and the read."""

Records = Callable[[SegmentFiles], DiskRecords]


def least_capacity_bytes(segment_bytes: int, catalog_bytes: int = MAP_STEP_BYTES) -> int:
    """The smallest capacity with which a disk tier of such segments can work."""
    return SEGMENTS_MIN * (segment_bytes + OVERHEAD_BYTES) + catalog_bytes + MAP_STEP_BYTES + SMALL_BYTES


class DiskTier:
    """Keeps ``terracekv.tiers.tier.Tier``. Sizes in bytes."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        segment_bytes: int = 256 << 20,
        direct: str = "auto",
        codec: str = "off",
        namespaces: Namespaces,
        free_floor_bytes: int = FREE_FLOOR_BYTES,
        keys: "Keys | None" = None,
    ) -> None:
        """Open a folder, or create it. ``namespaces`` is the daemon's, ``codec`` as in ``Chooser``; ``keys`` seal.

        Returns without reading segments. When the catalog could not be trusted ``rebuilding`` is true, and
        ``rebuild`` should be called in a worker thread; the tier serves meanwhile.
        Raises InUse, ConfigError, and OSError when the folder cannot be used at all.
        """
        least = least_capacity_bytes(segment_bytes)
        if segment_bytes < SEGMENTS_MIN * PAGE or segment_bytes % PAGE or capacity_bytes < least:
            raise ConfigError(
                f"a disk tier of {capacity_bytes} bytes cannot have segments of {segment_bytes} bytes",
                f"a segment is a multiple of {PAGE} bytes, and {least} bytes are the least for such segments",
            )
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._ledger = Ledger(self.name)
        self._namespaces = namespaces
        self._closed = False
        self._owned = OwnedFolder(folder)
        try:
            self._open(segment_bytes, direct, partial(DiskRecords, codec=codec, keys=keys), free_floor_bytes)
        except BaseException:
            self._owned.release()
            raise

    def _open(self, segment_bytes: int, direct: str, records: Records, free_floor_bytes: int) -> None:
        files = SegmentFiles(self.folder / "segments", direct)
        segments_bytes = SEGMENTS_MIN * (segment_bytes + OVERHEAD_BYTES)
        self._catalog, whole = upkeep.open_catalog(
            self._owned,
            self._namespaces.identity,
            may_grow=self._may_grow,
            map_bytes_max=self.capacity_bytes - SMALL_BYTES - segments_bytes,
        )
        try:
            self._files = files
            self._records = records(files)
            self.shares = DiskShares(self._catalog, self._namespaces, self._ledger)
            self._shelf = Shelf(
                files,
                segment_bytes=segment_bytes,
                limit_bytes=self._segments_limit,
                free_floor_bytes=free_floor_bytes,
                ends=self._catalog.segments() if whole else None,
                synced=whole and self._owned.was_clean,
            )
            self.roller = Roller(files, self._shelf, self._catalog, self._namespaces, self._ledger)
            upkeep.warn_of_foreign_files(self.folder, self._shelf)
            for number in self._shelf.shrink() + self._shelf.lost:
                self._catalog.drop_segment(number)
            self._rebuild = upkeep.Rebuild(
                self._catalog,
                self._shelf,
                self._namespaces,
                [] if whole else self._shelf.segments(),
                unsure_from=None if self._owned.same_boot or self._owned.was_clean else self._owned.synced,
                is_whole=self._records.is_whole,
            )
            if not whole and not self.rebuilding:
                self._owned.opened(self._namespaces.identity, self._owned.synced)
        except BaseException:
            self._catalog.close()
            raise

    @property
    def rebuilding(self) -> bool:
        """Whether blocks on disk are not listed yet; ``rebuild`` lists them."""
        return self._rebuild.due

    def rebuild(self) -> int:
        """Read what the segments hold into the catalog, newest first; the number of blocks that came back. For one
        worker thread, beside any other call. Does nothing when the catalog is whole."""
        if not self.rebuilding:
            return 0
        try:
            blocks = self._rebuild.run()
            if not self.rebuilding:
                self._owned.opened(self._namespaces.identity, self._owned.synced)
            return blocks
        except (OSError, TierDown) as error:
            self._failed(error)
            return 0

    def leading(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.leading``. Microseconds per id; no segment is touched."""
        try:
            return self._catalog.leading(namespace.stamp, names_of(namespace.stamp, ids))
        except TierDown as error:
            self._failed(error)
            return 0

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, checksum: int) -> Outcome:
        """See ``Tier.put``. A page-aligned payload of whole pages is written from where it lies."""
        known = self._namespaces.get(namespace.id)
        if known is None or known.stamp != namespace.stamp:
            return Outcome.STALE
        try:
            if self._listed(namespace.stamp, id):
                return Outcome.PRESENT
            with (
                self._records.stored(namespace, id, payload, checksum) as stored,
                self.shares.admitted(namespace, (1 + pages_of(stored.size)) * PAGE) as fits,
            ):
                return self._append(namespace, id, stored) if fits else Outcome.QUOTA
        except (OSError, TierDown) as error:
            self._failed(error)
            return Outcome.FAILED
        except TierFull as full:
            self._ledger.noted(full)
            return Outcome.FULL

    def get(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        """See ``Tier.get``. A page-aligned ``into`` of whole pages is read into directly."""
        try:
            outcome = self._read(namespace, id, into)
        except (OSError, TierDown) as error:
            self._failed(error)
            return Outcome.FAILED
        except TierFull as full:
            self._ledger.noted(full)
            return Outcome.FAILED
        self._ledger.got(outcome, namespace.block_bytes)
        return outcome

    def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.delete``. A later rebuild of the catalog may list deleted blocks again, as any that were put."""
        try:
            gone = self._catalog.delete(namespace.stamp, list(names_of(namespace.stamp, ids)))
        except (TierDown, TierFull) as error:
            self._failed(error)
            return 0
        self._ledger.left("delete", gone)
        return gone

    def reclaim(self, namespace: Namespace) -> int:
        """After a flush: drop the entries of older epochs, in small batches; the number dropped. For a worker thread.

        Their bytes are reused as their segments are evicted.
        """
        try:
            gone = upkeep.drop_stale(self._catalog, namespace)
        except (TierDown, TierFull) as error:
            self._failed(error)
            return 0
        self._ledger.left("flush", gone)
        return gone

    def status(self) -> TierStatus:
        """See ``Tier.status``."""
        try:
            blocks, catalog_bytes = self._catalog.count(), self._catalog.used_bytes()
        except TierDown:
            blocks = catalog_bytes = 0
        return TierStatus(
            name=self.name,
            mode=self._files.mode,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._shelf.bytes + catalog_bytes,
            blocks=blocks,
            counters=self._ledger.counters(),
            last_error=self._ledger.last_error,
            last_error_at=self._ledger.last_error_at,
            last_event=self._ledger.last_event,
            advice=self._ledger.advice,
            details={
                **self._shelf.counts(),
                "segment_bytes": self._shelf.segment_bytes,
                "catalog_bytes": catalog_bytes,
                "catalog_map_bytes": self._catalog.map_bytes,
                "rebuilding": int(self.rebuilding),
                "rebuilt_segments": self._rebuild.segments_done,
                "rebuilt_blocks": self._rebuild.blocks,
                **self._records.report(),
            },
        )

    def audit(self, after: str | None) -> Audit:
        """Read some of the blocks that are listed, in the order of their ids, and check each against its record and its
        entry; wrong ones are forgotten. For a worker thread; does not count as a use of them."""
        found, wrong = upkeep.audit(self._catalog, self._shelf, self._records, self._namespaces, id_after(after))
        for name, place, why in wrong:
            self._quarantine(name, place, why)
        return found

    def sync(self) -> None:
        """Make everything put so far survive a loss of power. OSError or TierDown when the medium cannot.

        What a start after a loss of power need not look at is noted: of the rest it reads every byte."""
        self._owned.synced = self._shelf.sync()
        if not self.rebuilding and self._catalog.sound:
            self._owned.opened(self._namespaces.identity, self._owned.synced)

    def check(self) -> None:
        """See ``Tier.check``: every entry names a record of its segment, every file is counted, all is within the cap.
        Reads a header per block."""
        self._shelf.check()
        self._records.check()
        assert SMALL_BYTES + self._shelf.cost + self._catalog.map_bytes <= self.capacity_bytes
        if not self.rebuilding:
            upkeep.check_entries(self._catalog, self._shelf)

    def close(self) -> None:
        """See ``Tier.close``: syncs, so that the next start trusts the catalog even after a restart of the machine."""
        if self._closed:
            return
        self._closed = True
        self._rebuild.stop()
        try:
            self.sync()
            failpoint("catalog.sync")
            self._catalog.sync()
            self._catalog.close()
            if not self._catalog.sound:  # seen by somebody who only asked for the books, perhaps
                self._owned.distrust()
            elif not self.rebuilding:
                self._owned.closed(self._namespaces.identity, self._owned.synced, self.folder / "catalog" / DATA)
        except (OSError, TierDown) as error:
            self._failed(error)
        finally:
            self._catalog.close()
            self._owned.release()

    def _listed(self, stamp: int, id: bytes) -> bool:
        """Whether the block is there; what stands in the way of putting it again is cleaned up."""
        name = name_of(stamp, id)
        try:
            entry = self._catalog.get(name)
        except Damaged as damage:
            self._quarantine(name, None, damage.message)
            return False
        if entry is None or entry.stamp != stamp:
            return False
        if self._shelf.has(entry.segment):
            return True
        self._catalog.forget([(name, entry.segment, entry.page)])
        return False

    def _append(self, namespace: Namespace, id: bytes, stored: Sealed) -> Outcome:
        pages = 1 + pages_of(stored.size)
        room = self.roller.room(pages)
        if room is None:
            return Outcome.FULL
        segment, page = room
        used = False
        try:
            try:
                entry = self._records.write(namespace, id, segment.number, page, stored)
            except OSError as error:
                if error.errno in _UNREACHABLE:
                    self._unreachable(segment, error)
                raise
            failpoint("disk.publish")
            used = self._catalog.publish([(name_of(namespace.stamp, id), entry)])[0]
            failpoint("disk.published")
        finally:
            self._shelf.done(segment, page, pages, used)
        if not used:
            return Outcome.PRESENT if self._namespaces.is_current(namespace) else Outcome.STALE
        self._ledger.put(namespace.block_bytes)
        return Outcome.STORED

    def _read(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        name = name_of(namespace.stamp, id)
        for _ in range(_LOOKS):
            try:
                entry = self._catalog.get(name)
            except Damaged as damage:
                return self._quarantine(name, None, damage.message)
            if entry is None or entry.stamp != namespace.stamp:
                return Outcome.MISS
            segment = self._shelf.pin(entry.segment)
            if segment is not None:
                return self._read_pinned(namespace, id, entry, segment, into)
            # Moved or evicted since the lookup; if it still names that place, the segment is gone for good.
            self._catalog.forget([(name, entry.segment, entry.page)])
        return Outcome.MISS

    def _read_pinned(
        self, namespace: Namespace, id: bytes, entry: Entry, segment: Segment, into: memoryview
    ) -> Outcome:
        hit, place = None, (name_of(namespace.stamp, id), entry.segment, entry.page)
        try:
            if (wrong := self._records.read(namespace, id, entry, into)) is None:
                hit = entry.page
                return Outcome.HIT
        except OSError as error:
            if error.errno in _UNREACHABLE:
                self._unreachable(segment, error)
                self._catalog.forget([place])
                return Outcome.MISS
            if error.errno == errno.EIO:  # of these pages, not of the disk: what cannot be read is not listed
                self._ledger.left("damaged", self._catalog.forget([place]))
            raise
        finally:
            self._shelf.unpin(segment, hit)
        where = f"segment {entry.segment}, page {entry.page}"
        return self._quarantine(place[0], place, f"{wrong} ({where})")

    def _quarantine(self, name: bytes, place: Place | None, why: str) -> Outcome:
        """Forget a damaged block, unless a good one has been published in its stead meanwhile."""
        self._ledger.damaged(why)
        gone = self._catalog.forget([place]) if place else self._catalog.forget_unsound(name)
        self._ledger.left("damaged", gone)
        return Outcome.DAMAGED

    def _unreachable(self, segment: Segment, error: OSError) -> None:
        """A segment's file is gone, with all it held, or not ours to open: nothing more goes there."""
        self._ledger.failed(error)
        if error.errno != errno.ENOENT:
            self._shelf.seal(segment)
            return
        if self._shelf.lose(segment):
            self._ledger.left("damaged", self._catalog.drop_segment(segment.number))

    def _failed(self, error: OSError | TierDown | TierFull) -> None:
        self._ledger.failed(error)
        if not self._catalog.sound:
            with contextlib.suppress(OSError):
                self._owned.distrust()

    def _segments_limit(self) -> int:
        """What segment files may take: the catalog can grow once more without asking anyone."""
        return self.capacity_bytes - SMALL_BYTES - self._catalog.next_map_bytes

    def _may_grow(self, map_bytes: int) -> bool:
        return SMALL_BYTES + self._shelf.cost + map_bytes <= self.capacity_bytes

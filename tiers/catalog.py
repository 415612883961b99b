"""The catalog: block id -> place on disk, in LMDB. The only ``import lmdb``.

Owns one LMDB environment. It *is* the index: nothing of it is kept in Python, so memory does not grow with blocks.
All of it is derived from segments and can be thrown away, hence no syncing at commit: a commit survives the death of
the process, and ``sync`` is for the death of the machine. ``leading`` and ``get`` are called on the event loop and in
worker threads, changes come from worker threads. Imports ``catalog_tables``,
``entry``, ``errors``, ``failpoint``, ``gate`` and ``tier``.

The map (LMDB's limit on its file) grows in steps. LMDB forbids that under live transactions, so a gate lets in
either any number of transactions or one growth.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import lmdb

from terracekv.tiers.catalog_tables import NUMBER, PAGES, ROW, Change, Tables, held_by
from terracekv.tiers.entry import STAMP, Entry, Place, unpack
from terracekv.tiers.errors import Damaged, Fenced, TierDown, TierFull
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.gate import Gate
from terracekv.tiers.tier import PAGE

MAP_STEP_BYTES = 1 << 20
DATA = "data.mdb"
_READERS_MAX = 256
_BATCH = 2048
_HEADROOM_PAGES = 64
"""Pages that a change may need besides those of its records: copies of branches, the list of free pages."""

_BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.CursorFullError)

T = TypeVar("T")


class Catalog:
    """The open catalog of one folder, whose single owner the caller is. Methods raise TierDown when LMDB fails or the
    catalog is closed, TierFull when it may not grow, Fenced in a forked child."""

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int = MAP_STEP_BYTES,
        step_bytes: int = MAP_STEP_BYTES,
        may_grow: Callable[[int], bool] = lambda map_bytes: True,
    ) -> None:
        """Open or create. ``may_grow(map_bytes)`` is asked before each growth, with no transaction open.

        Raises Damaged when what is there is not a whole catalog: ``discard`` it then.
        """
        folder.mkdir(exist_ok=True)
        self._data = folder / DATA
        self.created = not self._data.exists() or not self._data.stat().st_size
        """Whether there was no catalog."""
        self._step_bytes = step_bytes
        self._may_grow = may_grow
        self._gate = Gate()
        self._pid = os.getpid()
        self._open = False
        self.sound = True
        """False once LMDB has said that its file contradicts itself: to be rebuilt at the next start."""
        try:
            self._environment = lmdb.open(
                str(folder),
                map_size=map_bytes,
                max_dbs=4,
                max_readers=_READERS_MAX,
                max_spare_txns=16,
                sync=False,
                metasync=False,
                writemap=False,
                readahead=False,
            )
        except lmdb.Error as error:
            raise Damaged(f"the catalog {folder} cannot be opened: {error}", "it is rebuilt from segments") from error
        try:
            self._adopt(map_bytes)
        except (lmdb.Error, Damaged) as error:
            self._environment.close()
            raise Damaged(f"the catalog {folder} cannot be read: {error}", "it is rebuilt from segments") from error
        self._open = True

    @staticmethod
    def discard(folder: Path) -> None:
        """Throw away the catalog of a folder that is not open."""
        for name in (DATA, "lock.mdb"):
            (folder / name).unlink(missing_ok=True)

    @property
    def next_map_bytes(self) -> int:
        """The map's size after one more growth."""
        return self.map_bytes + max(1, self.map_bytes // 4 // self._step_bytes) * self._step_bytes

    def leading(self, stamp: int, ids: Sequence[bytes]) -> int:
        """How many of ``ids``, from the first on, have an entry with this stamp."""
        head = STAMP.pack(stamp)
        found = 0
        with self._reading() as transaction:
            for value in map(cast(Callable[[bytes], bytes | None], transaction.get), ids):
                if value is None or not value.startswith(head):
                    break
                found += 1
        return found

    def get(self, id: bytes) -> Entry | None:
        """The entry of a block, of whatever stamp. Raises Damaged when its bytes contradict their check."""
        with self._reading() as transaction:
            value = transaction.get(id)
        if value is None:
            return None
        entry = unpack(id, value)
        if entry is None:
            raise Damaged(f"the catalog's entry of block {id.hex()} is wrong", "the block is forgotten")
        return entry

    def publish(self, records: Sequence[tuple[bytes, Entry]]) -> list[bool]:
        """Make records findable, all in one transaction; False where the block is there, of this epoch or a later, or
        of another namespace."""
        return self._write(lambda change: change.publish(records), len(records))

    def move(self, moves: Sequence[tuple[bytes, Entry, Entry]]) -> list[bool]:
        """Replace old entries by new ones, each only while the block is still at its old place."""
        return self._write(lambda change: change.move(moves), len(moves), spend_reserve=True)

    def forget(self, places: Sequence[Place]) -> int:
        """Remove entries, each only while the block is still at that place; the number removed."""
        return self._write(lambda change: change.forget(places), len(places), spend_reserve=True)

    def forget_unsound(self, id: bytes) -> int:
        """Remove an entry while its bytes contradict its check; the number removed."""
        return self._write(lambda change: change.forget_unsound(id), 1, spend_reserve=True)

    def delete(self, stamp: int, ids: Sequence[bytes]) -> int:
        """Remove the namespace's entries wherever they point; the number that bore ``stamp``."""
        return self._write(lambda change: change.delete(stamp, ids), len(ids), spend_reserve=True)

    def entries(self, after: bytes = b"", limit: int = 4096) -> list[tuple[bytes, Entry | None]]:
        """The next ``limit`` entries in the order of ids; None stands for one that contradicts its check.

        Each call is a transaction of its own, so a long walk keeps no page of the catalog from being reused.
        """
        rows: list[tuple[bytes, Entry | None]] = []
        with self._reading() as transaction:
            cursor = transaction.cursor()
            if not cursor.set_range(after + b"\0" if after else b"\0"):
                return rows
            for key, value in cursor:
                id = bytes(key)
                rows.append((id, unpack(id, value)))
                if len(rows) == limit:
                    break
        return rows

    def walk(self, batch: int = 4096) -> Iterator[list[tuple[bytes, Entry | None]]]:
        """All entries in batches; what is published meanwhile may or may not be among them."""
        after = b""
        while rows := self.entries(after, batch):
            yield rows
            after = rows[-1][0]

    def segments(self) -> dict[int, int]:
        """Segments that hold entries, in order, with the page after their last published record."""
        with self._reading() as transaction:
            cursor = transaction.cursor(self._tables.segments)
            return {NUMBER.unpack(key)[0]: PAGES.unpack(value)[0] for key, value in cursor}

    def set_segments(self, ends: Mapping[int, int]) -> None:
        """Note segments with the page after their last record."""
        self._write(lambda change: change.set_segments(ends), len(ends))

    def bytes_by_namespace(self) -> dict[int, int]:
        """Bytes that records take, headers and padding included, by namespace number. Counted as entries change."""
        with self._reading() as transaction:
            return held_by(transaction, self._tables)

    def held(self, number: int, after: int = -1, limit: int = 1024) -> list[tuple[bytes, Entry]]:
        """The next blocks that lie in a segment beyond page ``after``, in the order of pages."""
        found: list[tuple[bytes, Entry]] = []
        with self._reading() as transaction:
            cursor = transaction.cursor(self._tables.places)
            more = cursor.set_range(ROW.pack(number, after + 1))
            while more and len(found) < limit:
                segment, page = ROW.unpack(cursor.key())
                if segment != number:
                    break
                id = bytes(cursor.value())
                value = transaction.get(id)
                entry = None if value is None else unpack(id, value)
                if entry is not None and (entry.segment, entry.page) == (segment, page):
                    found.append((id, entry))
                more = cursor.next()
        return found

    def drop_segment(self, number: int) -> int:
        """Forget a segment and what is still listed in it, some blocks at a time; the number of blocks."""
        gone, more = 0, True
        while more:
            dropped, more = self._write(lambda change: change.drop_some(number, _BATCH), _BATCH, spend_reserve=True)
            gone += dropped
        return gone

    def count(self) -> int:
        """Entries, of all stamps."""
        with self._reading() as transaction:
            return int(transaction.stat(self._tables.blocks)["entries"])

    def used_bytes(self) -> int:
        """Bytes of the file that hold data or are free for reuse; at most ``map_bytes``."""
        with self._inside():
            return (int(self._environment.info()["last_pgno"]) + 1) * self._page_bytes

    def sync(self) -> None:
        """Bring everything committed to the medium, for power loss."""
        with self._inside(), self._errors():
            self._environment.sync(True)

    def close(self) -> None:
        """Wait for transactions under way, then close. Idempotent."""
        if not self._open or os.getpid() != self._pid:
            return
        with self._gate.alone():
            if self._open:
                self._open = False
                self._environment.close()

    def _adopt(self, map_bytes: int) -> None:
        """Check that every page is in the file, before any is touched; take the map size that the content needs."""
        info = self._environment.info()
        # Kept: names in them stay interned. Else each answer would intern and drop them, until Python makes its table
        # of such names (2 MB) anew, in the heap of whichever thread.
        self._answers = info, self._environment.stat()
        self._page_bytes = int(self._answers[1]["psize"])
        used = (int(info["last_pgno"]) + 1) * self._page_bytes
        if (size := self._data.stat().st_size) < used:
            # Reading a page that the file lacks would be SIGBUS.
            raise Damaged(f"its file has {size} bytes, its last page ends at {used}")
        self.map_bytes = max(map_bytes, -(-used // self._step_bytes) * self._step_bytes)
        self._environment.set_mapsize(self.map_bytes)
        # A hole up to the map's end takes no room and makes the comparison above exact at the next start.
        os.truncate(self._data, self.map_bytes)
        opened = [self._environment.open_db(name) for name in (b"blocks", b"segments", b"places", b"held")]
        self._tables = Tables(*opened)
        self._environment.reader_check()
        with self._environment.begin(db=self._tables.blocks) as transaction:
            counted, blocks = (transaction.stat(db)["entries"] for db in (self._tables.held, self._tables.blocks))
        if blocks and not counted:  # one of before there were such books
            self._commit(Change.recount)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise Fenced("this catalog belongs to the process that opened it", "open tiers after forking, or spawn")
        self._gate.enter()
        try:
            if not self._open:
                raise TierDown("the catalog is closed")
            yield
        finally:
            self._gate.leave()

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        with self._inside(), self._errors(), self._environment.begin(db=self._tables.blocks) as transaction:
            yield transaction

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            self.sound = self.sound and not isinstance(error, _BROKEN)
            raise TierDown(f"the catalog failed: {error}", "make room; if that is not it, remove its folder") from error

    def _write(self, change: Callable[[Change], T], records: int, spend_reserve: bool = False) -> T:
        """Do ``change`` in one transaction, growing the map first or again as needed; it may run more than once.

        Changes that remove entries are what makes room: they may grow the map without asking (``spend_reserve``),
        so that a full catalog can always be emptied.
        """
        full = False
        while True:
            with self._inside(), self._errors():
                seen = self.map_bytes
                left = seen // self._page_bytes - int(self._environment.info()["last_pgno"]) - 1
                if not full and (spend_reserve or left >= _HEADROOM_PAGES + records // 8):
                    try:
                        return self._commit(change)
                    except lmdb.MapFullError:
                        full = True
            if self._grow(seen, spend_reserve):
                full = False
                continue
            # Past the last page there is no room, but pages freed inside may still do.
            with self._inside(), self._errors():
                try:
                    return self._commit(change)
                except lmdb.MapFullError:
                    pass
            raise TierFull("disk", records * PAGE, 0, "the catalog may not grow; raise the disk tier's capacity")

    def _commit(self, change: Callable[[Change], T]) -> T:
        with self._environment.begin(write=True, db=self._tables.blocks) as transaction:
            pending = Change(transaction, self._tables)
            result = change(pending)
            pending.settle()
            failpoint("catalog.commit")
        failpoint("catalog.committed")
        return result

    def _grow(self, seen_bytes: int, unasked: bool) -> bool:
        """Whether the map is larger than ``seen_bytes`` now."""
        with self._gate.alone():
            if self.map_bytes == seen_bytes and self._open:
                if not (self._may_grow(wanted := self.next_map_bytes) or unasked):
                    return False
                self._environment.set_mapsize(wanted)
                os.truncate(self._data, wanted)
                self.map_bytes = wanted
            return True

"""Write-through: which blocks of host also go to disk, and their way there.

Owns the memory of what was seen before (for admission) and of what left host. Runs on the event loop; writes go through
the mover and are bounded there. Imports ``tiers``, ``mover`` and ``stats``.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial

from terracekv.daemon.mover import Meter, Mover
from terracekv.daemon.stats import Stats
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.eviction import Ghosts
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot, slot_bytes_for
from terracekv.tiers.tier import Outcome

ASSUMED_BYTES_PER_S = 1e9
"""Write rate of the disk until the first write is measured."""
SEEN = 1 << 18
"""Ids remembered for ``second_touch``: 8 bytes each."""


class WriteThrough:
    """``admission``: ``all`` writes every committed block, ``second_touch`` those that are met again after they were
    first stored (leased, or stored anew after an eviction)."""

    def __init__(
        self, *, namespaces: Namespaces, host: HostTier, disk: DiskTier, mover: Mover, admission: str, stats: Stats
    ) -> None:
        assert admission in ("all", "second_touch")
        self._namespaces = namespaces
        self._host = host
        self._disk = disk
        self._mover = mover
        self._stats = stats
        self.admission = admission
        self._seen = Ghosts(SEEN)
        self._under_way: dict[asyncio.Future[Outcome], tuple[bytes, bytes]] = {}
        """Namespace id and block id of each write that has not ended."""
        self.disk_write = Meter(ASSUMED_BYTES_PER_S)

    def committed(
        self, namespace: Namespace, ids: Sequence[bytes], durable: bool
    ) -> "list[asyncio.Future[Outcome] | None]":
        """Blocks came into host. For each, the future of its write, or None where it is not written.

        ``durable`` asks for the write whatever admission says.
        """
        if durable or self.admission == "all":
            return self._write(namespace, ids)
        admitted = [id for id in ids if id in self._seen]
        for id in ids:
            self._seen.add(id)
        self._stats.not_admitted += len(ids) - len(admitted)
        writes = dict(zip(admitted, self._write(namespace, admitted), strict=True))
        return [writes.get(id) for id in ids]

    def under_way(self, ids: Collection[bytes]) -> "list[asyncio.Future[Outcome]]":
        """Writes of these blocks that have not ended."""
        return [write for write, (_, id) in self._under_way.items() if id in ids]

    def under_way_in(self, namespace: Namespace) -> "list[asyncio.Future[Outcome]]":
        """Writes of a namespace, whatever its epoch, that have not ended."""
        return [write for write, (of, _) in self._under_way.items() if of == namespace.id]

    def touched(self, namespace: Namespace, ids: Sequence[bytes]) -> None:
        """Blocks of host were used again."""
        if self.admission != "second_touch":
            return
        again = [id for id in ids if id in self._seen]
        for id in again:
            self._seen.discard(id)
        self._write(namespace, [id for id in again if not self._disk.leading(namespace, [id])])

    def _write(self, namespace: Namespace, ids: Sequence[bytes]) -> "list[asyncio.Future[Outcome] | None]":
        writes: list[asyncio.Future[Outcome] | None] = []
        size = slot_bytes_for(namespace.block_bytes)
        for id, slot in zip(ids, self._host.acquire(namespace, ids), strict=True):
            if slot is None:
                writes.append(None)
                continue
            payload = self._host.payload(slot, size)
            write = self._mover.store(size, self._job(namespace, id, payload, self._host.checksum_of(slot)))
            if write is None:
                self._host.release([slot])
                self._stats.writes_dropped += 1
                self._stats.writes_dropped_bytes += size
            else:
                self._under_way[write] = (namespace.id, id)
                write.add_done_callback(partial(self._written, slot))
            writes.append(write)
        return writes

    def _job(self, namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> Callable[[], Outcome]:
        def write() -> Outcome:
            if not self._namespaces.is_current(namespace):
                return Outcome.STALE
            with self.disk_write as meter:
                outcome = self._disk.put(namespace, id, payload, digest)
                if outcome is Outcome.STORED:
                    meter.moved(namespace.block_bytes)
            return outcome

        return write

    def _written(self, slot: Slot, done: "asyncio.Future[Outcome]") -> None:
        self._host.release([slot])
        del self._under_way[done]
        failed = done.cancelled() or done.exception() is not None
        outcome = Outcome.FAILED if failed else done.result()
        if outcome is Outcome.STORED:
            self._stats.written += 1
        elif outcome in (Outcome.FAILED, Outcome.FULL):
            self._stats.writes_failed += 1

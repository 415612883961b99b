"""The host tier: blocks in the arena, and the hub through which every other tier's bytes pass.

Owns the bytes of the arena's slots and what an earlier daemon left in them; slots, leases and eviction are those of
``SlotTier``. Called by the daemon's event loop and its workers; one lock, held for microseconds, never over I/O or a
copy. Imports ``arena``, ``checksum``, ``errors``, ``failpoint``, ``namespace``, ``slot_tier``, ``slots`` and ``tier``.
"""

from collections.abc import Sequence

from terracekv.tiers.arena import Arena
from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import NoRoom, event_of_kind
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slot_tier import DAEMON, SlotTier
from terracekv.tiers.slots import RECORD_BYTES, Slot, SlotTable, State, slot_bytes_for
from terracekv.tiers.tier import Outcome, TierStatus

SHORTAGE = "give daemon.runtime_dir more room (--shm-size, the volume's sizeLimit) or lower host.size, and restart"


class HostTier(SlotTier):
    """Takes over what an earlier daemon left in ``arena`` and ``table``: sealed blocks of present epochs are listed at
    once and checked when first read; slots that were being written are freed once their writers are gone."""

    name = "host"

    def __init__(self, arena: Arena, table: SlotTable, namespaces: Namespaces, *, eviction: str = "lru") -> None:
        super().__init__(table, namespaces, eviction=eviction)
        self._arena = arena
        self._orphans: dict[int, list[int]] = {}
        self._unverified: set[int] = set()
        self.adopted_blocks = self._adopt()

    def _adopt(self) -> int:
        adopted = 0
        for record in list(self._table.occupied()):
            if not self._table.intact(record) or self._table.state(record) is State.DOOMED:
                self._table.free(record)
            elif self._table.state(record) is State.WRITING:
                if (session := self._table.writer(record)) == DAEMON:
                    self._table.free(record)
                else:
                    self._writing[record] = session
                    self._orphans.setdefault(session, []).append(record)
            else:
                held = self._table.sealed(record)
                namespace = self._namespaces.adopt(held.namespace, held.epoch)
                space = self._space(namespace, held.payload_bytes)
                fits = slot_bytes_for(held.payload_bytes) == self._table.slot_bytes(record) == space.slot_bytes
                if held.epoch != namespace.epoch or not fits or held.block in space.order:
                    self._table.free(record)
                    continue
                space.order.insert(held.block, record // RECORD_BYTES, 0)
                self.shares.count(held.namespace, space.slot_bytes)
                self._unverified.add(record)
                adopted += 1
                failpoint("host.adopt")
        return adopted

    def orphan(self, slots: Sequence[Slot]) -> None:
        """The session is over but its process may still be writing: ``reap`` frees the slots when it cannot."""
        with self._lock:
            for slot in slots:
                if (session := self._writing.get(slot.record)) is not None:
                    self._orphans.setdefault(session, []).append(slot.record)

    def reap(self) -> int:
        """Free orphaned slots whose writers are gone; how many are left."""
        with self._lock:
            for session in list(self._orphans):
                if self._table.writer_gone(session):
                    for record in self._orphans.pop(session):
                        self._free(record)
            return sum(map(len, self._orphans.values()))

    def unverified(self, slot: Slot) -> bool:
        """Whether the bytes were taken over from an earlier daemon and not checked since."""
        return slot.record in self._unverified

    def verify(self, namespace: Namespace, id: bytes, slot: Slot) -> Outcome:
        """Check a leased slot's bytes; HIT, or DAMAGED, in which case the block is dropped. Takes as long as a hash."""
        held = self._table.sealed(slot.record)
        good = held.checksum == checksum(self.payload(slot, held.payload_bytes))
        with self._lock:
            if good:
                self._unverified.discard(slot.record)
                return Outcome.HIT
            # It stays unverified until it is freed: another reader may hold it and not have asked yet.
            self._damaged(namespace, id, slot)
        return Outcome.DAMAGED

    def payload(self, slot: Slot, size_bytes: int) -> memoryview:
        """The slot's bytes in the arena. Whole pages may be asked for: what follows the payload is zero."""
        return self._arena.view[slot.offset : slot.offset + size_bytes]

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> Outcome:
        """See ``Tier.put``."""
        assert len(payload) >= namespace.block_bytes
        if not self._namespaces.is_current(namespace):
            return Outcome.STALE
        (slot,) = self.reserve(namespace, [id], DAEMON)
        if isinstance(slot, Outcome):
            return slot
        self.payload(slot, namespace.block_bytes)[:] = payload[: namespace.block_bytes]
        return self.commit(namespace, [(id, slot, digest)])[0]

    def status(self) -> TierStatus:
        """See ``Tier.status``."""
        with self._lock:
            return TierStatus(
                name=self.name,
                mode=self._arena.filesystem,
                capacity_bytes=self._arena.size_bytes,
                used_bytes=self._table.used_bytes,
                blocks=sum(len(space.order) for space in self._spaces.values()),
                counters=self.counters,
                last_error=self._arena.last_error,
                last_event=event_of_kind(NoRoom.kind) if self._arena.last_error else None,
                advice=SHORTAGE if self._arena.last_error else None,
                details={
                    "ready_bytes": self._arena.slabs_ready * self._arena.slab_bytes,
                    "slab_bytes": self._arena.slab_bytes,
                    "placement": self._arena.placement,
                    "leased_blocks": len(self._leases),
                    "reserved_blocks": len(self._writing),
                    "orphaned_blocks": sum(map(len, self._orphans.values())),
                    "doomed_blocks": len(self._doomed),
                    "unverified_blocks": len(self._unverified),
                    "adopted_blocks": self.adopted_blocks,
                },
            )

    def close(self) -> None:
        """See ``Tier.close``."""
        if not self._closed:
            self._closed = True
            self._table.close()
            self._arena.close()

    def check(self) -> None:
        """See ``Tier.check``."""
        super().check()
        with self._lock:
            assert not self._unverified - set(self._table.occupied()), "bytes to be verified in slots that are free"

    def _read(self, namespace: Namespace, id: bytes, slot: Slot, into: memoryview) -> Outcome:
        if self.unverified(slot) and (outcome := self.verify(namespace, id, slot)) is not Outcome.HIT:
            return outcome
        into[:] = self.payload(slot, len(into))
        return Outcome.HIT

    def _examine(self, namespace: Namespace, id: bytes, slot: Slot) -> Outcome:
        return self.verify(namespace, id, slot)

    def _slabs_ready(self) -> int:
        return self._arena.slabs_ready

    def _taken(self, slot: Slot, block_bytes: int, slot_bytes: int) -> None:
        """Direct I/O writes whole pages, so what follows the payload is zero."""
        self._arena.view[slot.offset + block_bytes : slot.offset + slot_bytes] = bytes(slot_bytes - block_bytes)

    def _free(self, record: int) -> None:
        self._unverified.discard(record)
        super()._free(record)

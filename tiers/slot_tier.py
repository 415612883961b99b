"""A tier whose blocks lie in slots: who may write them, who reads them, and which sealed one goes next.

Owns nothing beside the books that it is built on (``slot_books.py``); of the bytes in the slots it knows nothing: they
are its heirs' (``host.py``, ``gpu.py``). Called by the daemon's event loop and its workers; one lock, held for
microseconds, never over I/O or a copy. Imports ``audit``, ``eviction``, ``namespace``, ``slot_books``, ``slots`` and
``tier``.

Beyond the contract of ``tier.py`` it has the two-phase verbs: ``reserve`` -> ``commit`` or ``abort`` (write) and
``acquire`` -> ``release`` (read). A block is in exactly one place: reserved, sealed, or doomed (deleted or flushed
while leased: gone for lookups, freed by the last release).
"""

from collections.abc import Sequence
from itertools import islice

from terracekv.tiers.audit import Audit, slab_after
from terracekv.tiers.eviction import AUTO, ByWeight, Space, next_of
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slot_books import Search, SlotBooks
from terracekv.tiers.slots import RECORD_BYTES, Slot, State
from terracekv.tiers.tier import Outcome

DAEMON = 0
"""The session number under which the daemon itself writes slots (promotion, HTTP)."""
BATCH = 128


class SlotTier(SlotBooks):
    """What host and gpu have in common. An heir says which slabs are ready, and moves the bytes: ``put``, ``_read``."""

    name: str

    def leading(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.leading``. O(1) a block."""
        if (space := self._spaces.get(namespace.stamp)) is None:
            return 0
        with self._lock:
            return space.order.leading(ids)

    def absent(self, namespace: Namespace, ids: Sequence[bytes]) -> list[int]:
        """Indices of the ``ids`` that are not here. O(1) a block."""
        if (space := self._spaces.get(namespace.stamp)) is None:
            return list(range(len(ids)))
        with self._lock:
            return [index for index, id in enumerate(ids) if id not in space.order]

    def has(self, namespace: Namespace, id: bytes) -> bool:
        """Whether a block is here."""
        return self.leading(namespace, [id]) == 1

    def reserve(self, namespace: Namespace, ids: Sequence[bytes], session: int) -> list[Slot | Outcome]:
        """A slot to write for each id that is not here; PRESENT for those that are, FULL where nothing can be evicted,
        QUOTA where the tenant's share is full and nothing of its own can be.

        ``ids`` is a chain from its head: present blocks of it are touched and never evicted to make room for its tail.
        """
        with self._lock:
            space = self._space(namespace, namespace.block_bytes)
            self._tick += 1
            space.order.touch(ids, self._tick)
            self._table.offer(self._slabs_ready())
            if absent := sum(id not in space.order for id in ids):
                absent = self._make_own_room(space, absent, set(ids))
                self._make_room(space, absent, set(ids))
            result: list[Slot | Outcome] = []
            for id in ids:
                if id in space.order:
                    result.append(Outcome.PRESENT)
                    continue
                if not absent:
                    result.append(Outcome.QUOTA)
                    continue
                slot = self._table.take(space.slot_bytes, session)
                if slot is None:
                    result.append(Outcome.FULL)
                    continue
                absent -= 1
                self._writing[slot.record] = session
                self._written_for[slot.record] = namespace.id
                self.shares.count(namespace.id, space.slot_bytes)
                self._taken(slot, namespace.block_bytes, space.slot_bytes)
                result.append(slot)
            return result

    def commit(self, namespace: Namespace, written: Sequence[tuple[bytes, Slot, int]]) -> list[Outcome]:
        """Seal slots that hold ``(id, slot, checksum of the payload)``: findable from here on.

        PRESENT when another session was quicker with the same block: its slot is freed, the block is readable.
        ``namespace`` is the snapshot of now; of an epoch that was flushed since ``reserve``, use ``abort``.
        """
        with self._lock:
            try:
                return [self._seal(namespace, *each) for each in reversed(written)][::-1]
            except BaseException:
                self.abort([slot for _, slot, _ in written])  # those that were not sealed
                raise

    def touch(self, namespace: Namespace, chain: Sequence[bytes]) -> None:
        """A chain was used as a whole: its tail goes before its head."""
        with self._lock:
            if (space := self._spaces.get(namespace.stamp)) is not None:
                self._tick += 1
                space.order.touch(chain, self._tick)

    def follow(self, eviction: str) -> None:
        """Evict by another rule from now on. Only under ``auto``."""
        assert self.auto
        with self._lock:
            self._turnover.frequency = eviction == "frequency"
            for space in self._spaces.values():
                if isinstance(space.order, ByWeight) and not self._turnover.frequency:
                    space.order.level()

    @property
    def auto(self) -> bool:
        """Whether the rule may be changed."""
        return self._eviction == AUTO

    @property
    def eviction(self) -> str:
        """The rule in force."""
        return "frequency" if self._turnover.frequency else "lru"

    def next_out(self, count: int) -> list[tuple[Namespace, bytes]]:
        """The next ``count`` blocks to go when room is needed, the very next first."""
        with self._lock:
            return [(space.namespace, id) for space, id in islice(next_of(self._spaces.values()), count)]

    def abort(self, slots: Sequence[Slot]) -> None:
        """Give back slots whose writer has certainly stopped writing."""
        with self._lock:
            for slot in slots:
                if slot.record in self._writing:
                    self._free(slot.record)

    def acquire(
        self, namespace: Namespace, ids: Sequence[bytes], *, serving: bool = False, touch: bool = True
    ) -> list[Slot | None]:
        """One more lease on each block that is here; None for those that are not. Ends with ``release``.

        A slot of ``unverified`` must pass ``verify`` first. ``serving``: they count as hits; ``touch``: as used now.
        """
        with self._lock:
            if (space := self._spaces.get(namespace.stamp)) is None:
                return [None] * len(ids)
            if touch:
                self._tick += 1
                space.order.touch(ids, self._tick)
            slots: list[Slot | None] = []
            for id in ids:
                place = space.order.get(id)
                if place is None:
                    slots.append(None)
                    continue
                record = place * RECORD_BYTES
                self._leases[record] = self._leases.get(record, 0) + 1
                slots.append(self._table.slot(record))
            self.counters.hits += serving * (len(ids) - slots.count(None))
            return slots

    def release(self, slots: Sequence[Slot]) -> None:
        """End one lease on each slot."""
        with self._lock:
            for slot in slots:
                self._leases[slot.record] -= 1
                if self._leases[slot.record]:
                    continue
                del self._leases[slot.record]
                if (passed := self._passed.pop(slot.record, None)) is not None:
                    passed[0].order.resume(passed[1])
                if slot.record in self._doomed:
                    self._doomed.remove(slot.record)
                    self._free(slot.record)

    def gone(self, slot: Slot) -> bool:
        """Whether the block of a leased slot is not listed any more: deleted, flushed or damaged meanwhile."""
        return slot.record in self._doomed

    def get(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        """See ``Tier.get``."""
        assert len(into) >= namespace.block_bytes
        (slot,) = self.acquire(namespace, [id])
        outcome = Outcome.MISS
        if slot is not None:
            try:
                outcome = self._read(namespace, id, slot, into[: namespace.block_bytes])
            finally:
                self.release([slot])
        with self._lock:
            self.counters.misses += outcome is Outcome.MISS
            self.counters.hits += outcome is Outcome.HIT
            self.counters.get_bytes += namespace.block_bytes * (outcome is Outcome.HIT)
        return outcome

    def checksum_of(self, slot: Slot) -> int:
        """The checksum that was computed when the leased slot was sealed."""
        return self._table.sealed(slot.record).checksum

    def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.delete``. Bytes under a lease stay readable for its holder until it is released."""
        with self._lock:
            return self._drop(self._spaces.get(namespace.stamp), ids, "delete")

    def doomed(self, namespace: Namespace) -> int:
        """Blocks of a namespace, of any epoch, that are gone for lookups and whose room comes back with their last
        lease."""
        with self._lock:
            return sum(self._table.sealed(record).namespace == namespace.id for record in self._doomed)

    def drop(self, namespace: Namespace, reason: str = "flush") -> int:
        """Free all blocks of this snapshot's epoch, in batches, letting others in between; how many there were."""
        dropped = 0
        while True:
            with self._lock:
                space = self._spaces.get(namespace.stamp)
                ids = space.order.ids(BATCH) if space else []
                dropped += self._drop(space, ids, reason)
                if not ids:
                    self._spaces.pop(namespace.stamp, None)
                    return dropped

    def audit(self, after: str | None) -> Audit:
        """Check the bytes of the blocks of one slab; wrong ones are dropped. Takes as long as to hash a slab."""
        slab = slab_after(after, self._table.slabs)
        if slab is None:
            return Audit()
        found = Audit(next=str(slab + 1) if slab + 1 < self._table.slabs else None)
        for record in self._table.slots_in_slab(slab):
            with self._lock:
                if self._table.state(record) is not State.SEALED:
                    continue
                held = self._table.sealed(record)
                spaces = [space.namespace for space in self._spaces.values() if space.namespace.id == held.namespace]
            namespace = next((each for each in spaces if each.epoch == held.epoch), None)
            (slot,) = self.acquire(namespace, [held.block], touch=False) if namespace is not None else [None]
            if namespace is None or slot is None:
                found.passed_over += 1
                continue
            try:
                outcome = self._examine(namespace, held.block, slot)
            finally:
                self.release([slot])
            found.checked += 1
            if outcome is not Outcome.HIT:
                found.wrong[held.block.hex()] = f"its bytes in {self.name} are not those that were stored: {outcome}"
        return found

    def _make_own_room(self, space: Space, wanted: int, keep: set[bytes]) -> int:
        """Where the tenant has a quota: evict blocks of its own, as few as will do, until ``wanted`` more slots are
        within it, or nothing of its that is not in ``keep`` can go; how many are."""
        limit = self.shares.limit(space.namespace.id)
        if limit is None:
            return wanted
        tenant = self.shares.tenant(space.namespace.id)
        wanted = min(wanted, limit // space.slot_bytes)
        held, spared = self.shares.of(tenant), dict[int, tuple[Space, bytes]]()
        if held + wanted * space.slot_bytes <= limit:
            return wanted
        own = Search(each for each in self._spaces.values() if self.shares.tenant(each.namespace.id) == tenant)
        while held + wanted * space.slot_bytes > limit and (oldest := own.oldest()):
            victim, id, place = oldest
            if place in spared:
                own.leave_out()
            elif place * RECORD_BYTES in self._leases or (victim is space and id in keep):
                victim.order.spare(id, self._tick)
                spared[place] = victim, id
            else:
                self._drop(victim, [id], "quota")
                held -= victim.slot_bytes
        self._spared(spared)
        return min(wanted, max(0, limit - held) // space.slot_bytes)

    def _make_room(self, space: Space, wanted: int, keep: set[bytes]) -> None:
        """Evict until ``wanted`` slots are free, or nothing that is not in ``keep`` can go."""
        if self._table.free_slots(space.slot_bytes) >= wanted:
            return
        while self._table.free_slots(space.slot_bytes) < wanted and self._empty_sparse(space.slot_bytes):
            pass
        search, spared, in_use = Search(self._spaces.values()), dict[int, tuple[Space, bytes]](), set[int]()
        while self._table.free_slots(space.slot_bytes) < wanted and (oldest := search.oldest()):
            victim, id, place = oldest
            record = place * RECORD_BYTES
            if place in spared:  # it went last: nothing of this space can go
                search.leave_out()
                continue
            if victim.slot_bytes == space.slot_bytes:
                if record not in self._leases and not (victim is space and id in keep):
                    self._drop(victim, [id], "capacity")
                    continue
            elif (slab := self._table.slab_of(record)) not in in_use:
                if self._empty_slab(slab):
                    continue
                in_use.add(slab)
            victim.order.spare(id, self._tick)
            spared[place] = victim, id
        self._spared(spared)

    def _spared(self, spared: dict[int, tuple[Space, bytes]]) -> None:
        """After a search: blocks, by their place, that were passed over may go again, leased ones when they are not."""
        for place, (space, id) in spared.items():
            if place * RECORD_BYTES in self._leases:
                self._passed[place * RECORD_BYTES] = space, id
            else:
                space.order.resume(id)

    def _empty_sparse(self, slot_bytes: int) -> bool:
        """Evict what little is in one slab of another size. By age alone, some blocks in each slab that are used all
        the time would keep this size out of memory of which most is free."""
        return any(map(self._empty_slab, self._table.sparse(slot_bytes)))

    def _empty_slab(self, slab: int) -> bool:
        """Evict a whole slab for another slot size, unless any of its slots is in use."""
        records = self._table.slots_in_slab(slab)
        if self._in_use(records):
            return False
        for record in records:
            space, id = self._listed_in(record)
            self._drop(space, [id], "capacity")
        return True

    def _in_use(self, records: Sequence[int]) -> bool:
        """Whether any of these slots is being written or read."""
        return any(record in self._leases or record in self._writing for record in records)

    def _listed_in(self, record: int) -> tuple[Space, bytes]:
        """Whose block a slot holds that is sealed and not doomed, and which."""
        id = self._table.sealed(record).block
        return next(s for s in self._spaces.values() if s.order.get(id) == record // RECORD_BYTES), id

    def _read(self, namespace: Namespace, id: bytes, slot: Slot, into: memoryview) -> Outcome:
        """Copy a leased slot's payload out: HIT, DAMAGED once ``_damaged`` was told, or FAILED."""
        raise NotImplementedError

    def _damaged(self, namespace: Namespace, id: bytes, slot: Slot) -> None:
        """A leased slot holds other bytes than were sealed: the block is not listed any more."""
        with self._lock:
            self.counters.checksum_failures += 1
            space = self._spaces.get(namespace.stamp)
            if space is not None and space.order.get(id) == slot.record // RECORD_BYTES:
                self._drop(space, [id], "damaged")

    def _examine(self, namespace: Namespace, id: bytes, slot: Slot) -> Outcome:
        """Whether a leased slot's bytes are right: HIT; if not, the block is dropped."""
        raise NotImplementedError

    def _slabs_ready(self) -> int:
        """How many slabs, from the first on, may be written to."""
        raise NotImplementedError

    def _taken(self, slot: Slot, block_bytes: int, slot_bytes: int) -> None:
        """Under the lock: a slot was taken for a block. Must be quick."""

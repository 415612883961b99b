"""Write-through: which blocks of host also go to a lower tier, and their way there.

Owns, for one lower tier, the memory of what was seen before (for admission) and of what is being written. Runs on the
event loop; writes go through the tier's mover and are bounded there. Imports ``tiers``, ``below`` and ``stats``.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import groupby

from terracekv.daemon.below import Lower
from terracekv.daemon.distant import Distant
from terracekv.daemon.stats import Stats
from terracekv.tiers.eviction import AUTO, Admission
from terracekv.tiers.host import HostTier
from terracekv.tiers.journal import Journal
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot, slot_bytes_for
from terracekv.tiers.tier import Outcome

journal = Journal(__name__)

RULES = ("all", "second_touch", "on_evict", AUTO)
SEEN_PER_BLOCK = 4
"""Ids remembered for ``second_touch``, for each block that the tier has room for: 16 bytes each,"""
SEEN_MIN, SEEN_MAX = 1 << 12, 1 << 18
"""but no fewer and no more; as many as this for a tier without a bound."""
SWEEP_FROM = 0.8
"""``on_evict`` writes once this part of host is taken."""
SWEEP_BLOCKS = 1024
"""Blocks looked at in one sweep: those that would be evicted next."""
DURABLE_S = 60.0
"""A durable commit waits no longer for the lowest tier, and then says that it is not."""


class WriteThrough:
    """``admission``: ``all`` writes every committed block, ``second_touch`` those that are met again after they were
    first stored (leased, or stored anew after an eviction), ``auto`` follows what a contest says of these two,
    ``on_evict`` those that are about to be evicted. A block whose write was dropped or failed is tried again when it is
    next used."""

    def __init__(self, *, namespaces: Namespaces, host: HostTier, lower: Lower, stats: Stats) -> None:
        assert lower.admission in RULES
        self._namespaces = namespaces
        self._host = host
        self.lower = lower
        self._stats = stats
        self.admission = lower.admission
        self._gate = Admission("all" if lower.admission == AUTO else lower.admission, SEEN_MIN)
        self._smallest = 1 << 62
        """Slots of the smallest blocks that were met, in bytes."""
        self._seen = self._gate.seen
        """What is to be written when it is met again: what ``second_touch`` saw once, and what could not be written."""
        self._owing = False
        """Whether any write was dropped or failed yet."""
        self._under_way: dict[asyncio.Future[Outcome], tuple[Namespace, bytes]] = {}
        """Namespace and block id of each write that has not ended."""
        self._too_large = set[bytes]()
        """Namespaces of which a block is larger than the whole queue."""

    def committed(
        self, namespace: Namespace, ids: Sequence[bytes], durable: bool
    ) -> "list[asyncio.Future[Outcome] | None]":
        """Blocks came into host. For each, the future of its write, or None where it is not written.

        ``durable`` asks for the write whatever admission says.
        """
        if durable or self.admission == "all":
            return self._write(namespace, ids)
        if self.admission == "on_evict":
            return [None] * len(ids)
        self._make_room(namespace)
        admitted = self._gate.admits(namespace.number, ids)
        self._count("not_admitted", len(ids) - len(admitted))
        writes = dict(zip(admitted, self._write(namespace, admitted), strict=True))
        return [writes.get(id) for id in ids]

    @property
    def rule(self) -> str:
        """The rule in force."""
        return self._gate.rule

    def follow(self, rule: str) -> None:
        """Admit by another rule from now on. Only under ``auto``."""
        assert self.admission == AUTO
        self._gate.rule = rule

    def under_way(self, namespace: Namespace, ids: Collection[bytes]) -> "list[asyncio.Future[Outcome]]":
        """Writes of these blocks that have not ended."""
        return [write for write, (of, id) in self._under_way.items() if of.id == namespace.id and id in ids]

    @property
    def writes(self) -> "list[asyncio.Future[Outcome]]":
        """All that have not ended."""
        return list(self._under_way)

    @property
    def blocks_under_way(self) -> int:
        """Blocks whose writes have not ended."""
        return len(self._under_way)

    def under_way_in(self, namespace: Namespace) -> "list[asyncio.Future[Outcome]]":
        """Writes of a namespace, whatever its epoch, that have not ended."""
        return [write for write, (of, _) in self._under_way.items() if of.id == namespace.id]

    def touched(self, namespace: Namespace, ids: Sequence[bytes]) -> None:
        """Blocks of host were used again: what is due is written, also what was dropped while the tier was down."""
        if not self.lower.writable or not (self._owing or self.rule == "second_touch"):
            return
        size = slot_bytes_for(namespace.block_bytes)
        room = self.lower.mover.room(size)
        due: list[bytes] = []
        late = 0
        for id in ids:
            if not self._seen.has(namespace.number, id):
                continue
            if len(due) == room:
                late += 1
                continue
            self._seen.discard(namespace.number, id)
            if not self.lower.has(namespace, id):
                due.append(id)
        self._write(namespace, due)
        self._count_dropped(late, size)

    def sweep(self) -> int:
        """Under ``on_evict``: write what is next to be evicted, as far as the queue has room; how many blocks.
        Called every second or so."""
        if self.admission != "on_evict" or not self.lower.writable:
            return 0
        status = self._host.status()
        if status.used_bytes < SWEEP_FROM * status.capacity_bytes:
            return 0
        begun = 0
        writing = {(of.id, id) for of, id in self._under_way.values()}
        room = self.lower.mover.queue_bytes_max - self.lower.mover.queue_bytes
        for stamp, group in groupby(self._host.next_out(SWEEP_BLOCKS), lambda entry: entry[0].stamp):
            namespace, ids = _wanted(group, lambda ns, id: (ns.id, id) not in writing and not self.lower.has(ns, id))
            current = self._namespaces.get(namespace.id)
            if current is None or current.stamp != stamp or not current.registered:
                continue
            count = room // slot_bytes_for(current.block_bytes)
            begun += len(ids[:count])
            room -= len(ids[:count]) * slot_bytes_for(current.block_bytes)
            self._write(current, ids[:count], touch=False)
        return begun

    def _write(
        self, namespace: Namespace, ids: Sequence[bytes], *, touch: bool = True
    ) -> "list[asyncio.Future[Outcome] | None]":
        size = slot_bytes_for(namespace.block_bytes)
        if ids and size > self.lower.mover.queue_bytes_max and namespace.id not in self._too_large:
            self._too_large.add(namespace.id)
            queue = "s3.queue" if isinstance(self.lower, Distant) else "daemon.queue"
            journal.warning(
                "TKV-QUEUE-SMALL",
                f"no block of {namespace.model} (namespace {namespace.id.hex()[:16]}) is written to {self.lower.name}: "
                f"one takes {size} bytes, and {queue} is {self.lower.mover.queue_bytes_max}. Raise it",
                tier=self.lower.name,
            )
        if not self.lower.writable:
            self._dropped(namespace, ids, size)
            return [None] * len(ids)
        room = self.lower.mover.room(size)
        ids, late = ids[:room], ids[room:]
        writes: list[asyncio.Future[Outcome] | None] = []
        for id, slot in zip(ids, self._host.acquire(namespace, ids, touch=touch), strict=True):
            if slot is None or self._host.unverified(slot):
                self._host.release([slot] if slot is not None else [])
                writes.append(None)
                continue
            payload = self._host.payload(slot, size)
            write = self.lower.mover.store(size, self._job(namespace, id, payload, self._host.checksum_of(slot)))
            if write is None:
                self._host.release([slot])
                self._dropped(namespace, [id], size)
            else:
                self._under_way[write] = (namespace, id)
                write.add_done_callback(partial(self._written, slot))
            writes.append(write)
        self._dropped(namespace, late, size)
        return [*writes, *[None] * len(late)]

    def _job(self, namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> Callable[[], Outcome]:
        lower = self.lower

        def write() -> Outcome:
            if not self._namespaces.is_current(namespace):
                return Outcome.STALE
            with lower.write as meter:
                outcome = lower.tier.put(namespace, id, payload, digest)
                if outcome is Outcome.STORED:
                    meter.moved(namespace.block_bytes)
            return outcome

        return write

    def _written(self, slot: Slot, done: "asyncio.Future[Outcome]") -> None:
        self._host.release([slot])
        namespace, id = self._under_way.pop(done)
        failed = done.cancelled() or done.exception() is not None
        outcome = Outcome.FAILED if failed else done.result()
        if outcome in (Outcome.STORED, Outcome.PRESENT) and isinstance(self.lower, Distant):
            self.lower.wrote(namespace, id)
        if outcome is Outcome.STORED:
            self._count("written", 1)
        elif outcome in (Outcome.FAILED, Outcome.FULL, Outcome.QUOTA):
            self._count("writes_failed", 1)
            self._owe(namespace, [id])

    def _make_room(self, namespace: Namespace) -> None:
        """Remember as much as blocks of this size ask for. What was remembered until now is forgotten."""
        size = slot_bytes_for(namespace.block_bytes)
        if size >= self._smallest:
            return
        self._smallest = size
        capacity = self.lower.tier.status().capacity_bytes
        slots = SEEN_PER_BLOCK * capacity // size if capacity else SEEN_MAX
        if (slots := min(SEEN_MAX, slots)) > self._gate.slots:
            self._gate = Admission(self.rule, slots)
            self._seen = self._gate.seen

    def _dropped(self, namespace: Namespace, ids: Sequence[bytes], size: int) -> None:
        if ids:
            self._count_dropped(len(ids), size)
            self._owe(namespace, ids)

    def _count_dropped(self, blocks: int, size: int) -> None:
        self._count("writes_dropped", blocks)
        self._count("writes_dropped_bytes", blocks * size)

    def _owe(self, namespace: Namespace, ids: Iterable[bytes]) -> None:
        self._owing = True
        self._make_room(namespace)
        for id in ids:
            self._seen.add(namespace.number, id)

    def _count(self, field: str, count: int) -> None:
        for counts in (self._stats, self.lower.flow):
            setattr(counts, field, getattr(counts, field) + count)


def _wanted(
    entries: Iterable[tuple[Namespace, bytes]], wanted: Callable[[Namespace, bytes], bool]
) -> tuple[Namespace, list[bytes]]:
    listed = list(entries)
    return listed[0][0], [id for namespace, id in listed if wanted(namespace, id)]


async def settled(writes: "Iterable[asyncio.Future[Outcome] | None]") -> None:
    """Wait until these have ended, as long as a durable commit waits."""
    if pending := [write for write in writes if write is not None]:
        await asyncio.wait(pending, timeout=DURABLE_S)

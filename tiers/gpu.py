"""The gpu tier: blocks that are hot enough for it, in the memory of one GPU, for all engine processes of that GPU.

Owns one allocation on the device, the copies to and from it, and what other processes need to open it; slots, leases
and eviction are those of ``SlotTier``. Made by the daemon where it is configured, called from its loop and its workers;
copies happen outside the lock. Imports ``kernels``, ``checksum``, ``errors``, ``eviction``, ``namespace``,
``slot_tier``, ``slots`` and ``tier``.

Only the daemon writes here, so a block is whole before an engine can hear of it. Engines read slots directly, under a
lease, when CUDA lets them open the allocation; where it does not, ``sharing`` says why and they are served from host.
What is evicted is dropped when a tier below has it, and otherwise handed down first. Nothing survives a restart.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from terracekv.kernels.cuda import Device, devices, pick
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.kernels.shared import Exported, NotShared, export
from terracekv.kernels.shuttle import Shuttle
from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import NoGpu, NoRoom
from terracekv.tiers.eviction import Space, next_of
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slot_tier import DAEMON, SlotTier
from terracekv.tiers.slots import RECORD_BYTES, Slot, SlotTable, slot_bytes_for
from terracekv.tiers.tier import PAGE, Outcome, TierStatus

FAILING = "see the kernel's log for the GPU's errors (dmesg, Xid); if it goes on, restart the daemon"


class GpuTier(SlotTier):
    """``table`` describes ``size_bytes`` of the GPU's memory, and is fresh. ``host`` is memory whose copies need no
    detour once it is pinned; its pinning ends with the tier.

    NoRoom, with the numbers, when the GPU cannot give so much.
    """

    name = "gpu"

    def __init__(
        self, device: Device, table: SlotTable, namespaces: Namespaces, *, size_bytes: int, host: Pinned | None = None
    ) -> None:
        assert not table.adopted and size_bytes == table.slabs * table.slab_bytes
        super().__init__(table, namespaces)
        self.device = device
        self.size_bytes = size_bytes
        self._host = host
        self._base, self._shuttle = _allocated(device, size_bytes, host)
        self.exported: Exported | None = None
        self.sharing = "ipc"
        """``ipc``, or why engines cannot open this memory."""
        try:
            self.exported = export(device, self._base, size_bytes)
        except NotShared as error:
            self.sharing = str(error)
        self.lent = False
        """Whether an engine may have this memory open: it was offered."""
        self.last_error: str | None = None
        self.demoted = 0
        self.held_below: Callable[[Namespace, bytes], bool] = lambda namespace, id: True
        """Whether a block that leaves would still be had from elsewhere."""
        self.demote: Callable[[Namespace, bytes, memoryview, int], object] = lambda namespace, id, payload, digest: None
        """Given what would otherwise be lost, before it goes. Called by the thread that puts."""

    def pin(self) -> None:
        """Pin the host's memory, as far as the system lets us. Takes a second for 4 GiB: in a thread of its own, once
        that memory has its pages."""
        if self._host is not None:
            self._host.pin()

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> Outcome:
        """See ``Tier.put``."""
        assert len(payload) >= namespace.block_bytes
        if not self._namespaces.is_current(namespace):
            return Outcome.STALE
        self._hand_down(namespace, id)
        (slot,) = self.reserve(namespace, [id], DAEMON)
        if isinstance(slot, Outcome):
            return slot
        try:
            self._shuttle.write(self._base + slot.offset, payload[: namespace.block_bytes])
        except RuntimeError as error:
            self._failed(error)
            self.abort([slot])
            return Outcome.FAILED
        return self.commit(namespace, [(id, slot, digest)])[0]

    def reclaim(self, namespace: Namespace) -> int:
        """Forget the blocks of epochs older than the snapshot's; how many."""
        older = [space.namespace for space in list(self._spaces.values()) if space.namespace.id == namespace.id]
        return sum(self.drop(old) for old in older if old.epoch < namespace.epoch)

    def status(self) -> TierStatus:
        """See ``Tier.status``."""
        with self._lock:
            return TierStatus(
                name=self.name,
                mode="ipc" if self.exported else "copy",
                capacity_bytes=self.size_bytes,
                used_bytes=self._table.used_bytes,
                blocks=sum(len(space.order) for space in self._spaces.values()),
                counters=self.counters,
                last_error=self.last_error,
                last_event="TKV-GPU-ERROR" if self.last_error else None,
                advice=FAILING if self.last_error else None,
                details={
                    "device": self.device.uuid,
                    "device_name": self.device.name,
                    "sharing": self.sharing,
                    "leased_blocks": len(self._leases),
                    "reserved_blocks": len(self._writing),
                    "doomed_blocks": len(self._doomed),
                    "demoted_blocks": self.demoted,
                    "slab_bytes": self._table.slab_bytes,
                    "pinned_bytes": self._host.pinned_bytes if self._host else 0,
                    "pageable_bytes": self._host.pageable_bytes if self._host else 0,
                    "pageable_reason": self._host.reason if self._host else None,
                },
            )

    def close(self) -> None:
        """See ``Tier.close``. Memory that an engine may still have open, and be copying from, is left to the end of the
        process: to free it before that engine closed it is undefined, says CUDA."""
        if not self._closed:
            self._closed = True
            if self._host is not None:
                self._host.close()
            self._table.close()
            self._shuttle.close()
            if not self.lent:
                with contextlib.suppress(RuntimeError):  # a GPU in error: its memory goes with the process
                    self.device.free(self._base)
            with contextlib.suppress(OSError):  # whoever opens the tier next removes it
                self._table.path.unlink(missing_ok=True)

    def _read(self, namespace: Namespace, id: bytes, slot: Slot, into: memoryview) -> Outcome:
        try:
            self._shuttle.read(self._base + slot.offset, into)
        except RuntimeError as error:
            self._failed(error)
            return Outcome.FAILED
        if checksum(into) == self.checksum_of(slot):
            return Outcome.HIT
        self._damaged(namespace, id, slot)
        return Outcome.DAMAGED

    def _hand_down(self, namespace: Namespace, id: bytes) -> None:
        """Before a block is put that needs the place of others: keep those, if nobody below has them."""
        with self._lock:
            leaving = [] if self.has(namespace, id) else self._leaving(namespace)
        for victim, going in leaving:
            if self.held_below(victim, going):
                continue
            (slot,) = self.acquire(victim, [going], touch=False)
            if slot is None:
                continue
            payload = memoryview(bytearray(victim.block_bytes))
            try:
                if self._read(victim, going, slot, payload) is Outcome.HIT:
                    self.demote(victim, going, payload, self.checksum_of(slot))
                    self.demoted += 1
            finally:
                self.release([slot])

    def _leaving(self, namespace: Namespace) -> list[tuple[Namespace, bytes]]:
        """Under the lock: what goes for one more block of this namespace. Blocks of its tenant where that has as much
        as it may; and where there is no room a block, or all of a slab of another size."""
        slot_bytes = slot_bytes_for(namespace.block_bytes)
        leaving = self._leaving_for_quota(namespace, slot_bytes)
        if self._table.free_slots(slot_bytes) or any(slot_bytes_for(of.block_bytes) == slot_bytes for of, _ in leaving):
            return leaving
        for slab in self._table.sparse(slot_bytes):
            records = self._table.slots_in_slab(slab)
            if not self._in_use(records):
                return leaving + [(of.namespace, each) for of, each in map(self._listed_in, records)]
        in_use = set[int]()
        for space, id in next_of(self._spaces.values()):
            records = [self._record(space, id)]
            slab = self._table.slab_of(records[0])
            if space.slot_bytes != slot_bytes:
                records = self._table.slots_in_slab(slab) if slab not in in_use else []
            if not records or self._in_use(records):
                in_use.add(slab)
                continue
            return leaving + [(of.namespace, each) for of, each in map(self._listed_in, records)]
        return leaving

    def _leaving_for_quota(self, namespace: Namespace, slot_bytes: int) -> list[tuple[Namespace, bytes]]:
        limit, tenant = self.shares.limit(namespace.id), self.shares.tenant(namespace.id)
        leaving: list[tuple[Namespace, bytes]] = []
        if limit is None or slot_bytes > limit:
            return leaving
        over = self.shares.of(tenant) + slot_bytes - limit
        own = [space for space in self._spaces.values() if self.shares.tenant(space.namespace.id) == tenant]
        for space, id in next_of(own):
            if over <= 0:
                break
            if self._record(space, id) not in self._leases:
                leaving.append((space.namespace, id))
                over -= space.slot_bytes
        return leaving

    def _record(self, space: Space, id: bytes) -> int:
        place = space.order.get(id)
        assert place is not None
        return place * RECORD_BYTES

    def _failed(self, error: RuntimeError) -> None:
        with self._lock:
            self.counters.io_errors += 1
            self.last_error = str(error)

    def _examine(self, namespace: Namespace, id: bytes, slot: Slot) -> Outcome:
        return self._read(namespace, id, slot, memoryview(bytearray(self._table.sealed(slot.record).payload_bytes)))

    def _slabs_ready(self) -> int:
        return self._table.slabs


def open_gpu(
    wanted: str, *, size_bytes: int, slab_bytes: int, slots: Path, arena: memoryview, namespaces: Namespaces
) -> GpuTier:
    """A tier on the GPU that ``wanted`` names, with its slot table at ``slots``; CUDA begins here. NoGpu or NoRoom,
    and nothing is left."""
    slab_bytes = min(slab_bytes, size_bytes // PAGE * PAGE)
    size_bytes -= size_bytes % slab_bytes
    try:
        device = pick(devices(), wanted)
        table = SlotTable(slots, arena_bytes=size_bytes, slab_bytes=slab_bytes, adopt=False)
        try:
            host = Pinned(device, address_of(arena), arena.nbytes)
            return GpuTier(device, table, namespaces, size_bytes=size_bytes, host=host)
        except BaseException:
            table.close()
            slots.unlink(missing_ok=True)
            raise
    except RuntimeError as error:  # of CUDA
        raise NoGpu(str(error), "see gpu.device and docs/gpu.md, or set gpu.enabled to false") from error


def _allocated(device: Device, size_bytes: int, host: Pinned | None) -> tuple[int, Shuttle]:
    free, total = device.room()
    try:
        base = device.allocate(size_bytes)
    except RuntimeError as error:
        raise NoRoom(
            f"gpu.size asks for {size_bytes} bytes of {device.uuid} ({device.name}), which has {free} bytes free of"
            f" {total}: {error}",
            "lower gpu.size, or leave more of the GPU to the daemon: vLLM's gpu_memory_utilization, SGLang's"
            " mem_fraction_static",
        ) from error
    try:
        return base, Shuttle(device, host)
    except BaseException:
        device.free(base)
        raise

"""The gpu tier beside the store: leases on what is there, what goes up into it, and what comes back from it to host.

Owns what becomes hot and moves up (``Hot``), and the meter of reads. Made where a gpu tier was opened; used on the
event loop. Imports ``below``, ``hot``, ``mover``, ``promotion`` and ``tiers``.

For sessions that have the GPU's memory open it is a place to lease from. For all others it is one more tier that host
reads from, as it does from those below: a block that only the GPU has comes back to host when it is asked for.
"""

from collections.abc import Callable, Sequence

from terracekv.daemon.below import Lower
from terracekv.daemon.hot import Hot
from terracekv.daemon.mover import Mover
from terracekv.daemon.promotion import Arrived
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot

BUS_BYTES_PER_S = 2e10
"""Assumed until measured."""
BUS_LATENCY_S = 0.0001


Elsewhere = Callable[[Namespace, Sequence[bytes], Arrived], tuple[list[Slot | None], list[int]]]
"""As ``Store.acquire``."""


class Near(Lower):
    """``below`` are set by the store: the tiers that may still have what leaves the GPU."""

    def __init__(
        self, gpu: GpuTier, *, namespaces: Namespaces, host: HostTier, mover: Mover, heat: Heat, share: BusShare
    ) -> None:
        super().__init__(gpu, mover, admission="hot", bytes_per_s=BUS_BYTES_PER_S, latency_s=BUS_LATENCY_S)
        self.gpu = gpu
        self.below: Sequence[Lower] = ()
        self._host = host
        self.hot = Hot(
            namespaces=namespaces,
            host=host,
            gpu=gpu,
            mover=mover,
            held_below=self._held_below,
            heat=heat,
            share=share,
        )

    def lease(self, namespace: Namespace, ids: Sequence[bytes]) -> dict[int, Slot]:
        """One more lease on each block that is on the GPU, by its index. Ends with ``release``."""
        if self.stuck is not None:
            return {}
        slots = self.gpu.acquire(namespace, ids, serving=True)
        return {index: slot for index, slot in enumerate(slots) if slot is not None}

    def acquire(
        self, namespace: Namespace, ids: Sequence[bytes], arrived: Arrived, elsewhere: Elsewhere
    ) -> tuple[list[Slot | None], list[int], dict[int, Slot]]:
        """Lease the leading run of ``ids``: what is on the GPU there, by index, the rest from ``elsewhere``.

        For a reader that has the GPU's memory open. Counts as a use: what is used often goes up."""
        on_gpu = self.lease(namespace, ids)
        rest = [index for index in range(len(ids)) if index not in on_gpu]
        held, coming = elsewhere(
            namespace, [ids[index] for index in rest], lambda at, result: arrived(rest[at], result)
        )
        pending = [rest[at] for at in coming]
        slots: list[Slot | None] = [None] * len(ids)
        for index, slot in zip(rest, held, strict=True):
            slots[index] = slot
        here = on_gpu.keys() | set(pending)
        end = next((index for index, slot in enumerate(slots) if slot is None and index not in here), len(ids))
        self.release([on_gpu.pop(index) for index in list(on_gpu) if index >= end])
        if on_gpu:
            self._host.touch(namespace, ids[:end])  # its head is leased here, and must not go first there
        if self.stuck is None:
            self.hot.used(namespace, ids[:end])
        return slots, pending, on_gpu

    def absent(self, namespace: Namespace, ids: Sequence[bytes]) -> list[int]:
        """Indices of those that are not on the GPU."""
        return [*range(len(ids))] if self.stuck is not None else self.gpu.absent(namespace, ids)

    def release(self, slots: Sequence[Slot]) -> None:
        """End one lease on each slot."""
        self.gpu.release(slots)

    def _held_below(self, namespace: Namespace, id: bytes) -> bool:
        """In a worker."""
        return self._host.has(namespace, id) or any(lower.has(namespace, id) for lower in self.below)

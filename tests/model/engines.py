"""Engines of the model test: sessions with open leases and reservations, and processes that outlive them.

Owns what an engine was given: slots with the bytes it saw in them, slots that it may still write. Used by the machine
of ``test_store.py``. Imports ``connector``'s idea of a lock, ``daemon`` and ``tiers``.
"""

import asyncio
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from terracekv.daemon.sessions import Lease, Session
from terracekv.tests.model.books import Books, Model
from terracekv.tests.model.world import World
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import LOCK_BASE, Slot
from terracekv.tiers.tier import Outcome

_FLOCK = struct.Struct("hhqqi4x")


@dataclass(eq=False)
class Writer:
    """A process that may write slots of a session, whether or not the session lasts."""

    lock: int
    slots: list[Slot]

    def end(self) -> None:
        os.close(self.lock)


@dataclass(eq=False)
class Commit:
    """A commit that is not answered yet."""

    task: "asyncio.Task[tuple[list[int], list[int]]]"
    namespace: Namespace
    ids: dict[int, bytes]
    durable: bool


@dataclass(eq=False)
class Engine:
    """One session and what its engine knows."""

    model: Model
    session: Session
    lock: int
    seen: dict[int, dict[int, tuple[Slot, bytes]]] = field(default_factory=dict)
    """By lease and index: the slot and its bytes when it was handed out."""
    seen_on_gpu: dict[int, dict[int, tuple[Slot, bytes]]] = field(default_factory=dict)
    """Likewise, of slots of the gpu tier."""

    @property
    def reserved(self) -> list[Slot]:
        return [slot for reservation in self.session.reservations.values() for slot in reservation.slots.values()]


def join(world: World, model: Model, shard: int | None) -> Engine:
    """What the engine door does with a Hello, and the client with a Welcome."""
    namespace = world.tiers.namespaces.get(model.id)
    assert namespace is not None
    number = world.tiers.table.next_session()
    lock = os.open(world.tiers.table.path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, LOCK_BASE + number, 1, 0))
    session = world.sessions.start(number, namespace, shard, os.getpid(), "model")
    session.near = world.gpu is not None and shard is not None and number % 4 > 0
    return Engine(model, session, lock)


def acquire(world: World, books: Books, engine: Engine, keys: Sequence[bytes]) -> int:
    """Lease a prefix; each slot must hold right bytes at the moment it is handed out, now or later. Three engines of
    four have the gpu tier open, where there is one."""
    size = engine.model.wanted.block_bytes
    box: list[tuple[int, Lease]] = []

    def note(handle: int, lease: Lease, index: int, slot: Slot) -> None:
        found = bytes(world.tiers.host.payload(slot, size))
        right = books.is_right(lease.ids[index], lease.namespace.epoch, found)
        assert right, f"block {index} was served with wrong bytes"
        engine.seen.setdefault(handle, {})[index] = (slot, found)

    def arrived(handle: int, index: int, result: Slot | Outcome) -> None:
        assert box, "told of a block before the lease was answered"
        if isinstance(result, Slot):
            note(handle, box[0][1], index, result)

    def ask() -> None:
        box.append(world.sessions.acquire(engine.session, keys, arrived, near=True))

    world.on_loop(ask)
    handle, lease = box[0]
    for index, slot in lease.near.items():
        found = world.on_gpu(slot, size)
        right = books.is_right(lease.ids[index], lease.namespace.epoch, found)
        assert right, f"block {index} was served with wrong bytes, from the GPU"
        engine.seen_on_gpu.setdefault(handle, {})[index] = (slot, found)
    for index, slot in list(lease.slots.items()):
        if index not in engine.seen.get(handle, {}):
            note(handle, lease, index, slot)
    return handle


def commit(
    world: World, books: Books, engine: Engine, handle: int, choose: Callable[[int], bool], durable: bool
) -> Commit:
    """Write some of a reservation's slots and ask to make them findable."""
    reservation = engine.session.reservations[handle]
    namespace = reservation.namespace
    wanted = [index for n, index in enumerate(reservation.slots) if choose(n)]
    for index in wanted:
        content = books.fresh(reservation.ids[index], namespace)
        world.tiers.host.payload(reservation.slots[index], namespace.block_bytes)[:] = content
    ids = {index: reservation.ids[index] for index in wanted}
    task = world.task(world.sessions.commit(engine.session, handle, wanted, durable))
    return Commit(task, namespace, ids, durable)

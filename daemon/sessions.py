"""Sessions: who is connected, what they lease and reserve, and that it ends with them.

Owns the books of leases and reservations by session. Runs on the event loop. Imports ``tiers``, ``access_file``,
``demand``, ``peers`` and ``store``.

A session's leases end when it closes. Its reservations do too, but their slots are freed only once its process can no
longer write: the client holds a lock on a byte of the slot table for that long (``SlotTable.writer_gone``).
"""

import hashlib
import hmac
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from terracekv.daemon.access_file import Caller
from terracekv.daemon.demand import Demand
from terracekv.daemon.peers import Peer
from terracekv.daemon.store import Store
from terracekv.tiers.block import block_id
from terracekv.tiers.errors import BadRequest, Damaged, NotFound
from terracekv.tiers.folder import sync_folder
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Outcome

SECRET_BYTES = 32
LEASES_MAX = 1 << 14
"""Of a session: an engine that needs more has forgotten to release."""


def read_secret(path: Path) -> bytes:
    """The secret that tenants' salts are derived with; made when there is none. Nodes of a cluster share the file.

    Raises Damaged when the file holds too little to be one: whoever guesses it can name other tenants' blocks.
    """
    if not path.exists():
        fresh = path.with_name(path.name + ".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)  # all of it or nothing, wherever the daemon is killed
        sync_folder(path.parent)
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise Damaged(
            f"the secret in {path} has {len(secret)} bytes, {SECRET_BYTES} are the least",
            "restore it, or remove it: a new one is made, under which tenants find none of their old blocks",
        )
    return secret


def tenant_salt(secret: bytes, credential: bytes) -> bytes:
    """The salt of the namespaces of whoever presents ``credential``; no credential, no salt.

    Only the daemon can compute it, so nobody chooses another tenant's.
    """
    return hmac.digest(secret, b"terracekv/tenant/1\0" + credential, hashlib.sha256) if credential else b""


def salt_of_tenant(secret: bytes, tenant: str) -> bytes:
    """The salt of a tenant that the access file names: that of its name, so that a new token finds the old blocks."""
    return hmac.digest(secret, b"terracekv/tenant/2\0" + tenant.encode(), hashlib.sha256) if tenant else b""


@dataclass(slots=True, eq=False)
class Lease:
    """The right to read slots. ``slots`` of host grows as blocks come up; ``pending`` are still on their way; ``near``
    are slots of the gpu tier."""

    namespace: Namespace
    ids: list[bytes]
    slots: dict[int, Slot] = field(default_factory=dict)
    near: dict[int, Slot] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    coming: int = 0
    """Blocks that it is still told of, wanted or not any more."""
    settled: Callable[[object], object] | None = None
    """Called when none is coming any more."""
    over: bool = False


@dataclass(slots=True, eq=False)
class Reservation:
    """The right to write slots: those of ``slots``, by index into ``ids``, that are not committed yet."""

    namespace: Namespace
    ids: list[bytes]
    slots: dict[int, Slot]


@dataclass(slots=True, eq=False)
class Session:
    """One connection. ``shard`` is None for a scheduler, whose leases cover all shards of a block."""

    number: int
    namespace: Namespace
    shard: int | None
    pid: int
    engine: str
    gpu: str = ""
    """The GPU on which the engine's KV is, as far as it told; "" for none."""
    near: bool = False
    """Whether the engine has the gpu tier's memory open."""
    not_near: str | None = None
    """Why it has not, where it has a GPU."""
    caller: Caller | None = None
    """Whom the daemon took it for."""
    peer: Peer | None = None
    """The process at the other end, as the kernel says."""
    may_write: bool = True
    since: float = field(default_factory=time.monotonic)
    """Of ``time.monotonic``."""
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    handles: int = 0

    @property
    def busy(self) -> bool:
        """Whether it writes, or reads memory that ends with the daemon."""
        return bool(self.reservations) or any(lease.near for lease in self.leases.values())

    @property
    def transport(self) -> str:
        """How blocks reach the engine: ``ipc`` where it reads the gpu tier by itself, beside the ``arena``."""
        return "ipc" if self.near else "arena"

    @property
    def ids_per_key(self) -> int:
        """How many block ids this session means by a key."""
        return self.namespace.shards if self.shard is None else 1

    def ids_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """The block ids that this session means by ``keys``, key by key."""
        shards = range(self.namespace.shards) if self.shard is None else (self.shard,)
        return [block_id(key, shard) for key in keys for shard in shards]


class Sessions:
    """All sessions of the daemon."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.open: dict[int, Session] = {}
        self.demand = Demand(store.host, store.through)

    def start(self, number: int, namespace: Namespace, shard: int | None, pid: int, engine: str) -> Session:
        """A connection said who it is."""
        session = self.open[number] = Session(number, namespace, shard, pid, engine)
        return session

    def close(self, session: Session) -> None:
        """The connection ended, in whatever way. Idempotent."""
        if self.open.pop(session.number, None) is None:
            return
        for handle in list(session.leases):
            self.release(session, handle)
        for reservation in session.reservations.values():
            self._store.host.orphan(list(reservation.slots.values()))
            self._store.host.touch(reservation.namespace, reservation.ids)
        session.reservations.clear()
        self._store.host.reap()

    def acquire(
        self,
        session: Session,
        keys: Sequence[bytes],
        arrived: Callable[[int, int, Slot | Outcome], None],
        *,
        near: bool = False,
    ) -> tuple[int, Lease]:
        """Lease the leading run of ``keys``, of which a scheduler gets whole blocks only. With ``near``, blocks in the
        gpu tier are leased there, if the session has it open.

        ``arrived(lease, index, slot or outcome)`` comes later, once for each pending index, as long as the lease
        lasts. Indices count the ids of the lease, not the keys. BadRequest when the session holds too many."""
        if len(session.leases) >= LEASES_MAX:
            raise BadRequest(f"this session holds {LEASES_MAX} leases", "release those that are not read any more")
        namespace = self.current(session)
        self.demand.leased(session.number, namespace, keys)
        lease = Lease(namespace, session.ids_of(keys))
        session.handles += 1
        handle = session.handles

        def came(index: int, result: Slot | Outcome) -> bool:
            lease.coming -= 1
            if not lease.coming and lease.settled is not None:
                lease.settled(lease)
            if lease.over or index not in lease.pending:
                return False
            lease.pending.discard(index)
            if isinstance(result, Slot):
                lease.slots[index] = result
            arrived(handle, index, result)
            return True

        if near and session.near and session.shard is not None and self._store.near is not None:
            slots, pending, lease.near = self._store.acquire_near(namespace, lease.ids, came)
        else:
            slots, pending = self._store.acquire(namespace, lease.ids, came)
        lease.coming = len(pending)
        leading = sum(slot is not None for slot in slots) + len(pending) + len(lease.near)
        end = leading // session.ids_per_key * session.ids_per_key
        self._store.host.release([slot for slot in slots[end:] if slot is not None])
        lease.slots = {index: slot for index, slot in enumerate(slots[:end]) if slot is not None}
        lease.pending = {index for index in pending if index < end}
        del lease.ids[end:]  # nobody asks for them under this lease, and there may be many
        session.leases[handle] = lease
        return handle, lease

    def give_up(self, lease: Lease) -> list[int]:
        """A deadline passed: what has not come by now will not come under this lease; which indices that was."""
        late = sorted(lease.pending)
        lease.pending.clear()
        return late

    def release(self, session: Session, handle: int) -> bool:
        """End a lease; False when it was over already."""
        lease = session.leases.pop(handle, None)
        if lease is None:
            return False
        lease.over = True
        self._store.host.release(list(lease.slots.values()))
        if self._store.near is not None:
            self._store.near.release(list(lease.near.values()))
        return True

    def reserve(self, session: Session, keys: Sequence[bytes]) -> tuple[int, list[Slot | Outcome]]:
        """Slots to write; see ``Store.reserve``. Only a session with a shard writes."""
        assert session.shard is not None
        namespace = self.current(session)
        self.demand.stored(session.number, namespace, keys)
        ids = session.ids_of(keys)
        results = self._store.reserve(namespace, ids, session.number)
        slots = {index: slot for index, slot in enumerate(results) if isinstance(slot, Slot)}
        session.handles += 1
        if slots:
            session.reservations[session.handles] = Reservation(namespace, ids, slots)
        return session.handles, results

    async def commit(
        self, session: Session, handle: int, indices: Sequence[int], durable: bool
    ) -> tuple[list[int], list[int]]:
        """Make slots findable; ``(indices that are readable now, those of them that are in the lowest tier)``.

        NotFound when the reservation, or one of the indices in it, is not the session's to commit: nothing is done.
        """
        reservation = session.reservations.get(handle)
        if reservation is None or len(set(indices)) != len(indices) or any(i not in reservation.slots for i in indices):
            raise NotFound(
                f"reservation {handle} has no open slots {list(indices)[:8]}",
                "commit each index of Reserved.slots once, and not after Abort",
            )
        # Taken out before the first await: if the session closes meanwhile, these slots are not orphaned, they go on.
        written = [(reservation.ids[index], reservation.slots.pop(index)) for index in indices]
        if not reservation.slots:
            del session.reservations[handle]
        outcomes, durables = await self._store.commit(reservation.namespace, written, durable=durable)
        if not reservation.slots:
            self._store.host.touch(reservation.namespace, reservation.ids)
        good = (Outcome.STORED, Outcome.PRESENT)
        stored = [index for index, outcome in zip(indices, outcomes, strict=True) if outcome in good]
        return stored, [index for index, on_disk in zip(indices, durables, strict=True) if on_disk]

    def abort(self, session: Session, handle: int) -> bool:
        """Give back what is not committed; the client has stopped writing. False when there was nothing."""
        reservation = session.reservations.pop(handle, None)
        if reservation is None:
            return False
        self._store.host.abort(list(reservation.slots.values()))
        self._store.host.touch(reservation.namespace, reservation.ids)  # committed in part: its head still goes last
        return True

    def check(self) -> None:
        """Leases held by sessions, pins and the daemon's own work add up to those of the host and the gpu tier.

        Meant for an idle daemon: a promotion or a write under way holds a lease of its own.
        """
        held: dict[int, int] = {}
        leased = [slot for s in self.open.values() for lease in s.leases.values() for slot in lease.slots.values()]
        for slot in leased + self._store.pins.leases():
            held[slot.record] = held.get(slot.record, 0) + 1
        assert held == self._store.host.leases(), "leases of the sessions are not those of the host tier"
        near = self._store.near.gpu.leases() if self._store.near is not None else {}
        leased = [slot for s in self.open.values() for lease in s.leases.values() for slot in lease.near.values()]
        assert Counter(slot.record for slot in leased) == near, "leases of the sessions are not those of the gpu tier"

    def current(self, session: Session) -> Namespace:
        """The namespace as it is now: a flush gives it another epoch."""
        present = self._store.namespaces.get(session.namespace.id)
        assert present is not None
        session.namespace = present
        return present

"""A scheduler's session: it looks up, and holds what it has promised until its workers have copied it.

``Leases`` owns the leases that it was given. Called by one thread, beside whoever may call a ``Client``. Imports
``connector.client``, ``connection``, ``turn`` and ``daemon.protocol``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from terracekv.connector.client import Client
from terracekv.connector.connection import Connection, Trouble, after, joined
from terracekv.connector.turn import Turn
from terracekv.daemon import protocol


@dataclass(slots=True, eq=False)
class Held:
    """A lease on the first ``blocks`` blocks of a prompt, all their shards. ``pending`` are on their way up."""

    session: Connection
    lease: int
    blocks: int
    pending: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    @property
    def ready(self) -> int:
        """Leading blocks that are in host now."""
        return min(self.pending | self.failed, default=self.blocks)


class Leases(Client):
    """``options`` are those of ``Client``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._held: dict[int, Held] = {}
        super().__init__(*args, shard=None, **options)

    def hold(self, keys: Sequence[bytes]) -> Held | None:
        """Lease the leading run of ``keys``; what is below host comes up meanwhile. None: no answer."""
        deadline = after(self.lookup_budget_ms)
        try:
            with Turn(self, deadline) as session:
                if session.notices is None:
                    session.notices = []
                    self._held.clear()  # they were of a session that is over
                leased = session.ask(
                    lambda id: protocol.Acquire(id, joined(keys), self.load_deadline_ms), protocol.Leased, deadline
                )
                if leased.lease in self._held:
                    raise Trouble("protocol", "Leased: this lease is another's already")
                held = Held(session, leased.lease, leased.blocks, set(leased.pending))
                self._held[leased.lease] = held
                self._note(session)
                return held
        except (OSError, Trouble) as error:
            self._trouble(error)
            return None

    def release(self, held: Held) -> None:
        """End a lease. Idempotent; one of a session that is over has ended with it."""
        if self._session is not held.session or self._held.pop(held.lease, None) is None:
            return
        try:
            with Turn(self, after(self.lookup_budget_ms)) as session:
                if session is held.session:
                    session.tell(protocol.Release(held.lease), after(self.lookup_budget_ms))
        except (OSError, Trouble) as error:
            self._trouble(error)

    def keep(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Ask that blocks stay in host for so long."""
        ttl_ms = int(ttl_s * 1e3)  # a number that is none ends no session
        deadline = after(self.lookup_budget_ms)
        try:
            with Turn(self, deadline) as session:
                session.tell(protocol.Pin(joined(keys), ttl_ms), deadline)
        except (OSError, Trouble) as error:
            self._trouble(error)

    def lasts(self, held: Held) -> bool:
        """Whether a lease still holds."""
        return self._session is held.session and held.lease in self._held

    def listen(self) -> bool:
        """Note which blocks have come up, without waiting; whether there is a session that may say more."""
        if self._session is None or self._session.notices is None:
            return False
        try:
            deadline = after(self.lookup_budget_ms)
            with Turn(self, deadline) as session:
                if session.notices is not None:
                    session.read_notices(deadline)
                    self._note(session)
                return True
        except (OSError, Trouble) as error:
            self._trouble(error)
            return False

    def _note(self, session: Connection) -> None:
        notices, session.notices = session.notices or [], []
        for notice in notices:
            held = self._held.get(notice.lease)
            if held is not None:
                session.check(notice, held.pending, held.failed)
                held.pending.difference_update(notice.indices)
                if isinstance(notice, protocol.Failed):
                    held.failed.update(notice.indices)

"""The engine door's reception: what becomes of a Hello.

Owns the way from a Hello to a session: who it is, what namespace it means, and its note in the state folder. Called by
the engine door on the event loop. Imports ``access``, ``hello``, ``peers``, ``protocol``, ``sessions``, ``store``,
``tiers`` and ``wire``.
"""

from functools import partial

from terracekv.daemon import protocol
from terracekv.daemon.access import Access, Denied
from terracekv.daemon.hello import judge
from terracekv.daemon.peers import Peer
from terracekv.daemon.sessions import Session, Sessions
from terracekv.daemon.store import Store
from terracekv.daemon.wire import shown
from terracekv.tiers.errors import TierStuck
from terracekv.tiers.slots import SlotTable

NAMESPACES_MAX = 4096
TOO_MANY = "are known already: see TKV-REFUSED in docs/errors.md for how to be rid of those that are not used any more"
NAME_MAX = 128
NOTE_S_MAX = 5.0
"""Time for a new namespace to be noted in the state folder."""


class Reception:
    """``secret`` derives tenants' salts."""

    def __init__(self, store: Store, table: SlotTable, sessions: Sessions, access: Access, secret: bytes) -> None:
        self._store = store
        self._table = table
        self._sessions = sessions
        self.access = access
        self._secret = secret

    async def welcome(self, hello: protocol.Hello, peer: Peer | None) -> protocol.Refused | Session:
        """Judge a Hello: a started session, or what is wrong with it by the name of its field."""
        if (refusal := self.access.admission.refusal(peer)) is not None:
            self.access.refused += 1
            return protocol.Refused("peer", refusal)
        may_write = hello.access == "write"
        try:
            caller, salt = self.access.at_engine_door(hello.credential, peer, write=may_write, secret=self._secret)
        except Denied as denied:
            return protocol.Refused("access" if denied.known else "credential", f"{denied.message}: {denied.hint}")
        wanted = judge(hello, slab_bytes=self._table.slab_bytes, tenant=caller.tenant, salt=salt)
        if isinstance(wanted, protocol.Refused):
            return wanted
        namespace = self._store.namespaces.get(wanted.id)
        if namespace is None or not namespace.registered:
            if namespace is None and sum(1 for _ in self._store.namespaces) >= NAMESPACES_MAX:
                return protocol.Refused("model", f"{NAMESPACES_MAX} namespaces {TOO_MANY}")
            try:
                work = partial(self._store.namespaces.register, wanted)
                namespace = await self._store.state_mover.ask(work, NOTE_S_MAX, "daemon.state_dir")
            except (OSError, TierStuck) as error:
                return protocol.Refused("model", f"a new namespace cannot be noted in the state folder: {error}")
            if not self.access.knows(caller):  # taken back meanwhile, when there was no session yet to end
                return protocol.Refused("credential", f"{caller.name} is not known any more")
        session = self._sessions.start(
            self._table.next_session(), namespace, hello.shard, hello.pid, shown(hello.engine, NAME_MAX)
        )
        session.caller, session.peer, session.may_write = caller, peer, may_write
        return session

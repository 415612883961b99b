"""The engine door: a Unix socket on which engines ask for blocks. Messages are those of ``protocol.py``.

Owns the listening socket and one ``Connection`` for each engine. Runs on the event loop and never blocks it. Imports
``access``, ``descriptors``, ``gpus``, ``handover``, ``inbox``, ``line``, ``own_socket``, ``peers``, ``protocol``,
``reception``, ``sessions``, ``sharing``, ``stats``, ``store``, ``tasks``, ``unfinished``, ``wire`` and ``tiers``.

Every request is answered, in order except for those that wait (Commit, what comes after Leased, and Lookup and Acquire
of blocks of which only a distant tier can tell). A frame that cannot be read is answered by Error; one that is too
long ends the connection, since what follows it is unknown.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec

from terracekv.daemon import protocol, tasks
from terracekv.daemon.access import Access
from terracekv.daemon.descriptors import most
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.handover import Handover
from terracekv.daemon.inbox import Inbox
from terracekv.daemon.line import Line
from terracekv.daemon.own_socket import bind
from terracekv.daemon.peers import peer_of
from terracekv.daemon.protocol import VERSION
from terracekv.daemon.reception import Reception
from terracekv.daemon.sessions import Session, Sessions
from terracekv.daemon.sharing import Sharing
from terracekv.daemon.stats import Found
from terracekv.daemon.store import Store
from terracekv.daemon.unfinished import Unfinished
from terracekv.daemon.wire import distinct, shown, slots_of, wire, within_s
from terracekv.tiers.block import KEY_BYTES
from terracekv.tiers.errors import BadRequest, TerraceError
from terracekv.tiers.journal import INTERNAL, Journal
from terracekv.tiers.slots import Slot, SlotTable
from terracekv.tiers.tier import Outcome

journal = Journal(__name__)

CONNECTIONS_MAX = 1024
BACKLOG = 512
HELLO_S = 5.0
"""Time for a new connection to say who it is."""
ASK_S_MAX = 2.0
"""Of the time of an Acquire, what may be spent on finding out what there is to lease."""
PIN_S_MAX = 60.0
INDEX_BYTES = 8
REASON_MAX = 1000
"""Characters of a refusal in the log: of what an engine sent, some stand in it."""


class EngineDoor:
    """Listens on ``path``; ``secret`` derives tenants' salts; ``access`` says who is who."""

    def __init__(
        self,
        path: Path,
        *,
        store: Store,
        table: SlotTable,
        arena: Path,
        secret: bytes,
        access: Access,
        gpus: Gpus | None = None,
    ) -> None:
        self.path = path
        self.store = store
        self.table = table
        self.arena = arena
        self.sessions = Sessions(store)
        self.sharing = Sharing(gpus or Gpus())
        self.handover = Handover(arena, store.host.status().capacity_bytes, table)
        self.reception = Reception(store, table, self.sessions, access, secret)
        self.connections: set[Connection] = set()
        self.closing = False
        self.errors = 0
        self.unfinished = Unfinished()
        self.line = Line()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Open the door. A socket that a dead daemon left is replaced; one that answers is InUse."""
        loop = asyncio.get_running_loop()
        with bind(self.path, self.reception.access.socket_owner) as bound:
            self._server = await loop.create_unix_server(lambda: Connection(self), sock=bound.dup(), backlog=BACKLOG)
        self._files = {path: path.stat().st_ino for path in (self.arena, self.table.path, self.path)}

    def missing(self) -> list[str]:
        """Files that an engine needs to join and that somebody has removed or replaced under us."""
        return [path.name for path, inode in self._files.items() if not path.exists() or path.stat().st_ino != inode]

    async def close(self, grace_s: float) -> None:
        """Take no more work, give engines ``grace_s`` to finish writing, then end all sessions."""
        self.closing = True
        self._server.close()
        deadline = asyncio.get_running_loop().time() + grace_s
        while asyncio.get_running_loop().time() < deadline and (
            self._tasks or self.line or any(session.busy for session in self.sessions.open.values())
        ):
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.end()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    def end_unknown(self) -> None:
        """End the sessions of callers that the access file does not have any more, or has with other rights."""
        for connection in list(self.connections):
            connection.end_if_unknown(self.reception.access)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the loop's other work, owned by the door."""
        task = tasks.begin(work, "engine-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Connection(asyncio.Protocol):
    """One engine's connection, which is its session."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._inbox: Inbox
        self._session: Session | None = None
        self._transport: asyncio.Transport
        self._hello_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        door = self._door
        self._inbox = Inbox(self._transport, door.line, door.unfinished, self._frame, self._break_off)
        door.connections.add(self)
        if len(self._door.connections) > (limit := most(CONNECTIONS_MAX)):
            self._send(protocol.Refused("connections", f"{limit} engines are connected already"))
            transport.close()
            return
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_S, self._no_hello)

    def connection_lost(self, error: Exception | None) -> None:
        self._door.connections.discard(self)
        self._inbox.end()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._session is not None:
            self._door.sessions.close(self._session)

    def end(self) -> None:
        """Close from our side: the session's end."""
        self._transport.close()

    def end_if_unknown(self, access: Access) -> None:
        """Close when whose session this is may not have it any more."""
        session = self._session
        if session is not None and session.caller is not None and not access.knows(session.caller):
            text = f"session {session.number} ends: {session.caller.name} is not known any more"
            journal.warning("TKV-ACCESS-ENDED", text, session=session.number)
            self.end()

    def pause_writing(self) -> None:
        """The engine does not read its answers: take no more requests from it until it does."""
        self._inbox.full(True)

    def resume_writing(self) -> None:
        self._inbox.full(False)

    def data_received(self, data: bytes) -> None:
        self._inbox.take(data)

    def _break_off(self, why: str, hint: str) -> None:
        self._fail(0, BadRequest(why, hint))
        self._transport.close()

    def _frame(self, body: bytes) -> None:
        id = 0
        try:
            request = protocol.request_decoder.decode(body)
            id = getattr(request, "id", 0)
            self._handle(request)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # the last: nested too deep
            self._fail(
                id, BadRequest(f"the message cannot be read: {error}", f"speak version {VERSION} of the protocol")
            )
        except TerraceError as error:
            self._fail(id, error)
        except Exception as error:
            journal.failed(INTERNAL, "a request of an engine failed", error)
            self._fail(id, TerraceError(f"the daemon failed on this request: {error}", "see its log"))

    def _handle(self, request: protocol.Request) -> None:
        session = self._session
        if isinstance(request, protocol.Hello):
            if self._hello_timer is None:
                raise BadRequest("a second Hello", "open another connection for another session")
            self._hello_timer.cancel()
            self._hello_timer = None
            self._door.spawn(self._hello(request))
        elif session is None:
            raise BadRequest(f"{type(request).__name__} before Hello", "say Hello first")
        elif not session.may_write and isinstance(request, protocol.Reserve | protocol.Pin):
            raise BadRequest(f"{type(request).__name__} in a session that reads", "say Hello with access: write")
        elif isinstance(request, protocol.Lookup):
            self._lookup(session, request)
        elif isinstance(request, protocol.Acquire):
            self._acquire(session, request)
        elif isinstance(request, protocol.Release):
            self._door.sessions.release(session, request.lease)
        elif isinstance(request, protocol.Reserve):
            self._reserve(session, request)
        elif isinstance(request, protocol.Commit):
            self._wait(INDEX_BYTES * len(request.indices), self._commit(session, request))
        elif isinstance(request, protocol.Abort):
            self._door.sessions.abort(session, request.reservation)
        elif isinstance(request, protocol.Pin):
            ids = session.ids_of(protocol.split_keys(request.keys))
            self._wait(len(request.keys), self._pin(session, ids, request.ttl_ms))
        elif isinstance(request, protocol.Opened):
            if (refused := self._door.sharing.opened(session, request.why)) is not None:
                self._fail(0, BadRequest(refused.reason, "set gpu.strict to false to serve such engines from host"))
                self._transport.close()
        else:
            self._prefetch(session, session.ids_of(protocol.split_keys(request.keys)))

    def _wait(self, size_bytes: int, work: Coroutine[Any, Any, None]) -> None:
        """Go on with a request that is not answered at once; what it keeps meanwhile counts for its connection."""
        self._door.spawn(work).add_done_callback(self._inbox.hold(size_bytes))

    async def _hello(self, hello: protocol.Hello) -> None:
        try:
            answer = await self._door.reception.welcome(hello, peer_of(self._transport))
        except Exception as error:
            journal.failed(INTERNAL, "a Hello failed", error)
            self._fail(0, TerraceError(f"the daemon failed on Hello: {error}", "see its log"))
            self._transport.close()
            return
        if not isinstance(answer, Session):
            self._refuse(answer)
            return
        offer = self._door.sharing.offer(answer, hello.gpu)
        if isinstance(offer, protocol.Refused) or self._transport.is_closing():
            self._door.sessions.close(answer)
            if isinstance(offer, protocol.Refused):
                self._refuse(offer)
            return
        self._session = answer
        handover = self._door.handover
        handover.send(self._transport, answer, handover.welcome(answer, offer))

    def _refuse(self, refused: protocol.Refused) -> None:
        why = shown(refused.reason, REASON_MAX)
        journal.warning("TKV-REFUSED", f"refused an engine: {refused.field}: {why}", field=refused.field)
        self._send(refused)
        self._transport.close()

    def _prefetch(self, session: Session, ids: list[bytes]) -> None:
        store, sessions = self._door.store, self._door.sessions
        store.promoter.prefetch(sessions.current(session), ids)
        question = store.question(sessions.current(session), ids)
        if question is not None:

            def more() -> None:
                store.promoter.prefetch(sessions.current(session), ids)

            self._wait(KEY_BYTES * len(ids), self._later(0, question, ASK_S_MAX, more))

    async def _pin(self, session: Session, ids: list[bytes], ttl_ms: int) -> None:
        try:
            async with asyncio.timeout(PIN_S_MAX):
                await self._door.store.pins.pin(self._door.sessions.current(session), ids, ttl_ms / 1e3)
        except (TerraceError, TimeoutError) as error:
            journal.warning("TKV-PIN", f"an engine's pin was not done: {str(error) or 'it took too long'}")

    def _lookup(self, session: Session, request: protocol.Lookup) -> None:
        keys = protocol.split_keys(request.keys)
        self._door.sessions.demand.asked(session.number, session.namespace, request.keys)
        begun = self._door.store.begin_lookup(self._door.sessions.current(session), keys)
        if isinstance(begun, Found):
            self._found(request.id, begun)
            return
        question = begun

        def answer() -> None:
            self._found(request.id, self._door.store.lookup(self._door.sessions.current(session), keys))

        wait_s = within_s(request.deadline_ms)
        self._wait(len(request.keys), self._later(request.id, question, wait_s, answer))

    def _found(self, id: int, found: Found) -> None:
        self._send(protocol.Found(id, found.blocks, found.per_tier, found.first_miss, found.reason, found.load_ms))

    def _acquire(self, session: Session, request: protocol.Acquire) -> None:
        keys = distinct(request.keys)
        until = asyncio.get_running_loop().time() + within_s(request.deadline_ms)
        question = self._door.store.question(self._door.sessions.current(session), session.ids_of(keys))
        if question is None:
            self._lease(session, request, keys, until)
            return
        # A hint older than its time, or no lookup before: what a distant tier has is asked for first.
        wait_s = min(ASK_S_MAX, within_s(request.deadline_ms))
        later = self._later(request.id, question, wait_s, lambda: self._lease(session, request, keys, until))
        self._wait(len(request.keys), later)

    async def _later(self, id: int, question: "asyncio.Future[int]", wait_s: float, answer: Callable[[], None]) -> None:
        """Answer once a distant tier has told what it has, or when there is no more time to wait for it."""
        try:
            await asyncio.wait([question], timeout=wait_s)
            if not self._transport.is_closing():
                answer()
        except TerraceError as error:
            self._fail(id, error)
        except Exception as error:
            journal.failed(INTERNAL, "a request of an engine failed", error)
            self._fail(id, TerraceError(f"the daemon failed on this request: {error}", "see its log"))

    def _lease(self, session: Session, request: protocol.Acquire, keys: list[bytes], until: float) -> None:
        """``until`` is of the loop's clock."""
        per_key = session.namespace.shards if session.shard is None else 1
        failed: set[int] = set()

        def arrived(handle: int, index: int, result: Slot | Outcome) -> None:
            key = index // per_key
            if not isinstance(result, Slot):
                if key not in failed:
                    failed.add(key)
                    self._send(protocol.Failed(handle, [key], result))
            elif session.shard is not None:
                self._send(protocol.Ready(handle, [key], [wire(result)]))
            elif key not in failed and not any(key * per_key + n in lease.pending for n in range(per_key)):
                self._send(protocol.Ready(handle, [key], []))

        handle, lease = self._door.sessions.acquire(session, keys, arrived, near=request.gpu)
        slots = [] if session.shard is None else slots_of(lease, len(keys))
        blocks = (len(lease.slots) + len(lease.near) + len(lease.pending)) // per_key
        pending = sorted({index // per_key for index in lease.pending})
        self._send(protocol.Leased(request.id, handle, blocks, slots, pending))
        if lease.coming:  # after its release too: whoever asks again and again is told of it as often
            lease.settled = self._inbox.hold(KEY_BYTES * lease.coming)
        if lease.pending:

            def deadline() -> None:
                late = self._door.sessions.give_up(lease)
                if late and not lease.over:
                    self._send(protocol.Failed(handle, sorted({index // per_key for index in late}), "deadline"))

            asyncio.get_running_loop().call_at(until, deadline)

    def _reserve(self, session: Session, request: protocol.Reserve) -> None:
        if session.shard is None:
            raise BadRequest("a session without a shard cannot write", "say Hello with the shard of the worker")
        if self._door.closing:
            raise BadRequest("the daemon is going down", "treat it as a refused store")
        handle, results = self._door.sessions.reserve(session, distinct(request.keys))
        outcomes = {index: result for index, result in enumerate(results) if isinstance(result, Outcome)}
        self._send(
            protocol.Reserved(
                request.id,
                handle,
                slots=[wire(result) if isinstance(result, Slot) else None for result in results],
                present=[index for index, outcome in outcomes.items() if outcome is Outcome.PRESENT],
                refused={index: outcome for index, outcome in outcomes.items() if outcome is not Outcome.PRESENT},
            )
        )

    async def _commit(self, session: Session, request: protocol.Commit) -> None:
        try:
            stored, durable = await self._door.sessions.commit(
                session, request.reservation, request.indices, request.durable
            )
            self._send(protocol.Committed(request.id, stored, durable))
        except TerraceError as error:
            self._fail(request.id, error)
        except Exception as error:
            journal.failed(INTERNAL, "a commit failed", error)
            self._fail(request.id, TerraceError(f"the daemon failed on this commit: {error}", "see its log"))

    def _fail(self, id: int, error: TerraceError) -> None:
        self._door.errors += 1
        self._send(protocol.Error(id, error.kind, error.message, error.hint))

    def _no_hello(self) -> None:
        self._fail(0, BadRequest(f"no Hello within {HELLO_S} s", "say Hello first"))
        self._transport.close()

    def _send(self, answer: protocol.Answer) -> None:
        if not self._transport.is_closing():
            self._transport.write(protocol.frame(answer))

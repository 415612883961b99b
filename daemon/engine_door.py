"""The engine door: a Unix socket on which engines ask for blocks. Messages are those of ``protocol.py``.

Owns the listening socket and one ``Connection`` for each engine. Runs on the event loop and never blocks it. Imports
``gpus``, ``hello``, ``own_socket``, ``protocol``, ``sessions``, ``sharing``, ``store``, ``wire`` and ``tiers``.

Every request is answered, in order except for those that wait (Commit, what comes after Leased, and Lookup and Acquire
of blocks of which only a distant tier can tell). A frame that cannot be read is answered by Error; one that is too
long ends the connection, since what follows it is unknown.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.hello import judge
from terracekv.daemon.own_socket import take_over
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH, VERSION
from terracekv.daemon.sessions import Session, Sessions
from terracekv.daemon.sharing import Sharing
from terracekv.daemon.store import Found, Store
from terracekv.daemon.wire import distinct, slots_of, wire
from terracekv.tiers.errors import BadRequest, TerraceError
from terracekv.tiers.slots import LOCK_BASE, Slot, SlotTable
from terracekv.tiers.tier import Outcome

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
HELLO_S = 5.0
"""Time for a new connection to say who it is."""
DEADLINE_MS_MAX = 600_000
ASK_S_MAX = 2.0
"""Of the time of an Acquire, what may be spent on finding out what there is to lease."""
ANSWER_MS = 20.0
"""Kept of a deadline for the way back, or a tenth of it if that is less."""
NAMESPACES_MAX = 4096


class EngineDoor:
    """Listens on ``path``; ``secret`` derives tenants' salts."""

    def __init__(
        self, path: Path, *, store: Store, table: SlotTable, arena: Path, secret: bytes, gpus: Gpus | None = None
    ) -> None:
        self.path = path
        self.store = store
        self.table = table
        self.arena = arena
        self.arena_bytes = store.host.status().capacity_bytes
        self.sessions = Sessions(store)
        self.sharing = Sharing(gpus or Gpus())
        self.secret = secret
        self.connections: set[Connection] = set()
        self.closing = False
        self.errors = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Open the door. A socket that a dead daemon left is replaced; one that answers is InUse."""
        take_over(self.path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Connection(self), str(self.path))
        os.chmod(self.path, 0o600)
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
            self._tasks or any(session.busy for session in self.sessions.open.values())
        ):
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.end()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the loop's other work, owned by the door."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def welcome(self, hello: protocol.Hello) -> protocol.Refused | Session:
        """Judge a Hello: a started session, or what is wrong with it by the name of its field."""
        wanted = judge(hello, slab_bytes=self.table.slab_bytes, secret=self.secret)
        if isinstance(wanted, protocol.Refused):
            return wanted
        namespace = self.store.namespaces.get(wanted.id)
        if namespace is None or not namespace.registered:
            if sum(1 for _ in self.store.namespaces) >= NAMESPACES_MAX:
                return protocol.Refused("model", f"{NAMESPACES_MAX} namespaces are known already")
            try:
                namespace = await self.store.mover.load(lambda: self.store.namespaces.register(wanted))
            except OSError as error:
                return protocol.Refused("model", f"a new namespace cannot be noted in the state folder: {error}")
        return self.sessions.start(self.table.next_session(), namespace, hello.shard, hello.pid, hello.engine[:128])


class Connection(asyncio.Protocol):
    """One engine's connection, which is its session."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._buffer = bytearray()
        self._session: Session | None = None
        self._transport: asyncio.Transport
        self._hello_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self._door.connections.add(self)
        if len(self._door.connections) > CONNECTIONS_MAX:
            self._send(protocol.Refused("connections", f"{CONNECTIONS_MAX} engines are connected already"))
            transport.close()
            return
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_S, self._no_hello)

    def connection_lost(self, error: Exception | None) -> None:
        self._door.connections.discard(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._session is not None:
            self._door.sessions.close(self._session)

    def end(self) -> None:
        """Close from our side: the session's end."""
        self._transport.close()

    def pause_writing(self) -> None:
        """The engine does not read its answers: take no more requests from it until it does."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > FRAME_BYTES_MAX:
                self._fail(
                    0, BadRequest(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}", "split the keys")
                )
                buffer.clear()
                self._transport.close()
                return
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            self._frame(bytes(buffer[start + LENGTH.size : end]))
            start = end
            if self._transport.is_closing():
                buffer.clear()
                return
        del buffer[:start]

    def _frame(self, body: bytes) -> None:
        id = 0
        try:
            request = protocol.request_decoder.decode(body)
            id = getattr(request, "id", 0)
            self._handle(request)
        except (msgspec.MsgspecError, ValueError) as error:
            self._fail(
                id, BadRequest(f"the message cannot be read: {error}", f"speak version {VERSION} of the protocol")
            )
        except TerraceError as error:
            self._fail(id, error)
        except Exception as error:
            log.exception("a request of an engine failed")
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
        elif isinstance(request, protocol.Lookup):
            self._lookup(session, request)
        elif isinstance(request, protocol.Acquire):
            self._acquire(session, request)
        elif isinstance(request, protocol.Release):
            self._door.sessions.release(session, request.lease)
        elif isinstance(request, protocol.Reserve):
            self._reserve(session, request)
        elif isinstance(request, protocol.Commit):
            self._door.spawn(self._commit(session, request))
        elif isinstance(request, protocol.Abort):
            self._door.sessions.abort(session, request.reservation)
        elif isinstance(request, protocol.Pin):
            self._door.spawn(self._pin(session, request))
        elif isinstance(request, protocol.Opened):
            if (refused := self._door.sharing.opened(session, request.why)) is not None:
                self._fail(0, BadRequest(refused.reason, "set gpu.strict to false to serve such engines from host"))
                self._transport.close()
        else:
            self._prefetch(session, session.ids_of(protocol.split_keys(request.keys)))

    async def _hello(self, hello: protocol.Hello) -> None:
        try:
            answer = await self._door.welcome(hello)
        except Exception as error:
            log.exception("a Hello failed")
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
        table = self._door.table
        self._send(
            protocol.Welcome(
                session=answer.number,
                namespace_id=answer.namespace.id,
                epoch=answer.namespace.epoch,
                block_bytes=answer.namespace.block_bytes,
                arena=str(self._door.arena),
                arena_bytes=self._door.arena_bytes,
                slots=str(table.path),
                slots_bytes=table.size_bytes,
                lock_byte=LOCK_BASE + answer.number,
                gpu=offer,
                no_gpu=answer.not_near if offer is None else None,
            )
        )

    def _refuse(self, refused: protocol.Refused) -> None:
        log.warning("refused an engine: %s: %s", refused.field, refused.reason)
        self._send(refused)
        self._transport.close()

    def _prefetch(self, session: Session, ids: list[bytes]) -> None:
        store, sessions = self._door.store, self._door.sessions
        store.promoter.prefetch(sessions.current(session), ids)
        question = store.question(sessions.current(session), ids)
        if question is not None:

            def more() -> None:
                store.promoter.prefetch(sessions.current(session), ids)

            self._door.spawn(self._later(0, question, ASK_S_MAX, more))

    async def _pin(self, session: Session, request: protocol.Pin) -> None:
        try:
            ids = session.ids_of(protocol.split_keys(request.keys))
            await self._door.store.pins.pin(self._door.sessions.current(session), ids, request.ttl_ms / 1e3)
        except (TerraceError, ValueError) as error:
            log.warning("an engine's pin was not done: %s", error)

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

        self._door.spawn(self._later(request.id, question, within_s(request.deadline_ms), answer))

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
        self._door.spawn(self._later(request.id, question, wait_s, lambda: self._lease(session, request, keys, until)))

    async def _later(self, id: int, question: "asyncio.Future[int]", wait_s: float, answer: Callable[[], None]) -> None:
        """Answer once a distant tier has told what it has, or when there is no more time to wait for it."""
        try:
            await asyncio.wait([question], timeout=wait_s)
            if not self._transport.is_closing():
                answer()
        except TerraceError as error:
            self._fail(id, error)
        except Exception as error:
            log.exception("a request of an engine failed")
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
        slots = [] if session.shard is None else slots_of(lease)
        blocks = (len(lease.slots) + len(lease.near) + len(lease.pending)) // per_key
        pending = sorted({index // per_key for index in lease.pending})
        self._send(protocol.Leased(request.id, handle, blocks, slots, pending))
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
            log.exception("a commit failed")
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


def within_s(deadline_ms: int) -> float:
    """How long an answer may wait for somebody, so that it arrives before the deadline."""
    deadline_ms = min(max(deadline_ms, 0), DEADLINE_MS_MAX)
    return max(0.0, deadline_ms - min(deadline_ms / 10, ANSWER_MS)) / 1e3

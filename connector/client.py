"""The client: an engine's session with the daemon. Synchronous, for any thread of the engine.

Owns the session, the mappings of the arena, the opening of the gpu tier and the thread that re-joins a daemon that went
away. Imports ``arena``, ``connection``, ``near``, ``turn``, ``daemon.protocol`` and ``tiers.block``; loads no asyncio.

Any trouble is a miss. A call costs at most its deadline; after one failure calls answer at once, without asking,
until the joiner has a session again. With ``strict`` trouble raises ``Trouble`` instead.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from terracekv.connector.ahead import Ahead, Settle
from terracekv.connector.arena import Arena, Attach
from terracekv.connector.commits import Commits
from terracekv.connector.connection import JOIN_S, Connection, Trouble, after, checked_ms, joined
from terracekv.connector.near import Fetch, Near
from terracekv.connector.turn import Turn
from terracekv.daemon import protocol
from terracekv.daemon.protocol import PROBE, VERSION, Found, Layout, Slot, Welcome
from terracekv.kernels.cuda import Device
from terracekv.tiers.block import block_keys

log = logging.getLogger(__name__)

RETRY_S = (0.05, 1.0)
"""First and longest pause between attempts to join."""

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()

Copy = Callable[[int, memoryview], None]
"""Copies block ``index`` between the engine and a payload in the arena; with a ``Settle``, it may only begin to."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """``blocks`` leading blocks are good; ``why`` the next one is not (None when all are)."""

    blocks: int
    why: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks stored now, present already, refused; ``durable`` of the stored ones are in the lowest tier (if asked)."""

    stored: int = 0
    present: int = 0
    refused: int = 0
    durable: int = 0
    why: str | None = None


class Client:
    """``socket`` is the daemon's ``engine.sock``. ``shard`` is None for a scheduler, which only looks up.

    Budgets are milliseconds: a lookup waits for the daemon at most ``lookup_budget_ms``, a load or store at most its
    deadline. The first attempt to join is made here; if it fails, joining goes on in the background. ``attach`` is told
    of each arena that is mapped. ``device`` is the GPU that the engine's KV is on, where it has one. With
    ``access="read"`` nothing is stored, and the arena is mapped for reading only.
    """

    def __init__(
        self,
        socket: str | Path,
        *,
        model: str,
        revision: str,
        dtype: str,
        block_tokens: int,
        layout: Layout,
        shards: int = 1,
        shard: int | None = 0,
        credential: bytes = b"",
        engine: str = "",
        strict: bool = False,
        lookup_budget_ms: int = 20,
        load_deadline_ms: int = 10_000,
        store_deadline_ms: int = 10_000,
        attach: Attach | None = None,
        device: Device | None = None,
        access: str = "write",
    ) -> None:
        self.path = str(socket)
        self.block_tokens = block_tokens
        self.strict = strict
        self.lookup_budget_ms = checked_ms("lookup_budget_ms", lookup_budget_ms)
        self.load_deadline_ms = checked_ms("load_deadline_ms", load_deadline_ms)
        self.store_deadline_ms = checked_ms("store_deadline_ms", store_deadline_ms)
        self.troubles = 0
        self.last_trouble: str | None = None
        self.near = Near(device)
        self._hello = protocol.Hello(
            VERSION, PROBE, model, revision, dtype, block_tokens, layout, shards, shard, os.getpid(), credential,
            engine, self.near.uuid, access,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._turn_of: int | None = None  # the thread in whose call the lock is held
        self._joining = threading.Lock()
        self._session: Connection | None = None
        self._welcome: Welcome | None = None
        self._arena: Arena | None = None
        self._attach = attach
        self._joiner: threading.Thread | None = None
        self._closing = threading.Event()
        _clients.add(self)
        try:
            self._join(after(JOIN_S * 1e3))
        except (OSError, Trouble) as error:
            self._trouble(error)
            if strict:
                raise
            self._join_later(f"the daemon at {self.path} {error}" if isinstance(error, Trouble) else "")

    @property
    def joined(self) -> bool:
        """Whether there is a session now."""
        return self._session is not None

    @property
    def namespace_id(self) -> bytes | None:
        """Known once a daemon was joined, and the same from every daemon with the same secret."""
        return self._welcome.namespace_id if self._welcome else None

    @property
    def block_bytes(self) -> int:
        """Bytes of one shard of a block."""
        return self._hello.layout.block_bytes

    def keys(
        self, tokens: Sequence[int], extras: Mapping[int, Sequence[tuple[int, bytes]]] | None = None
    ) -> list[bytes]:
        """Keys of the full blocks of ``tokens``; none as long as no daemon was ever joined."""
        namespace = self.namespace_id
        return block_keys(namespace, tokens, self.block_tokens, extras) if namespace else []

    def lookup(self, keys: Sequence[bytes]) -> Found:
        """How many leading blocks the daemon has, and from which tier."""
        deadline = after(self.lookup_budget_ms)
        try:
            with Turn(self, deadline) as session:
                asked = partial(protocol.Lookup, keys=joined(keys, each=False), deadline_ms=self.lookup_budget_ms)
                return session.ask(asked, Found, deadline)
        except (OSError, Trouble) as error:
            why = self._trouble(error)
            return Found(0, 0, {}, 0, why, 0.0)

    def load(
        self, keys: Sequence[bytes], scatter: Copy, settle: Settle | None = None, fetch: Fetch | None = None
    ) -> Loaded:
        """Copy the leading run of blocks out of the arena, each as soon as it is there. ``scatter`` may be given bytes
        that turn out to be stale: only blocks below ``Loaded.blocks`` count. With ``fetch``, those in the gpu tier are
        copied from there, if this process has it open."""
        deadline = after(self.load_deadline_ms)
        good: list[int] = []
        missed: list[str] = []
        try:
            with Turn(self, deadline) as session:
                leased = session.ask(
                    lambda id: protocol.Acquire(id, joined(keys), self.load_deadline_ms, fetch is not None),
                    protocol.Leased,
                    deadline,
                )
                ahead = Ahead(settle, self.block_bytes)
                try:
                    for index, slot in session.arrivals(leased, len(keys), deadline, missed):
                        if slot.gpu:
                            self._fetch(fetch, index, slot)
                        else:
                            with self._mapped().payload(slot, self.block_bytes) as payload:
                                scatter(index, payload)
                        self._believe(session, ahead.begun(index, slot), good)
                    self._believe(session, ahead.rest(), good)
                except BaseException:
                    ahead.forget()
                    self._give_back(session, protocol.Release(leased.lease), deadline)
                    raise
                session.tell(protocol.Release(leased.lease), deadline)
            return Loaded(len(good), missed[0] if missed else None)
        except (OSError, Trouble) as error:
            return Loaded(len(good), self._trouble(error))

    def store(
        self,
        keys: Sequence[bytes],
        gather: Copy,
        durable: bool = False,
        settle: Settle | None = None,
        *,
        first: int = 0,
    ) -> Stored:
        """Copy blocks into the arena and make them findable. ``keys`` is the whole chain, from its first block.

        ``gather`` is called only for blocks that are not present. Commits are sent ahead: the daemon checks one block
        while the next is copied. With ``durable``, returns when those copied now are in the lowest tier configured, or
        known not to get there. Blocks before ``first`` the caller has not got: if one is not present, nothing is
        stored, and ``why`` is ``head_absent``.
        """
        deadline = after(self.store_deadline_ms)
        try:
            if self._hello.access != "write":
                raise Trouble("read_only", "this client was made with access=read")
            with Turn(self, deadline) as session:
                reserved = session.ask(lambda id: protocol.Reserve(id, joined(keys)), protocol.Reserved, deadline)
                ahead = Ahead(settle, self.block_bytes)
                commits = Commits(session, reserved.reservation, self.block_bytes, durable, deadline)
                try:
                    if not set(reserved.present).issuperset(range(first)):
                        session.tell(protocol.Abort(reserved.reservation), deadline)
                        return Stored(present=len(reserved.present), why="head_absent")
                    self._fill(reserved, gather, ahead, commits)
                except BaseException:
                    ahead.forget()
                    self._give_back(session, protocol.Abort(reserved.reservation), deadline)
                    raise
                present, refused = len(reserved.present), len(reserved.refused)
                why = next(iter(reserved.refused.values()), None)
                return Stored(len(commits.stored), present, refused, len(commits.on_disk), why)
        except (OSError, Trouble) as error:
            return Stored(why=self._trouble(error))

    def close(self) -> None:
        """End the session and the joining. Idempotent. From within a call, by a copy or a signal, when that ends."""
        self._closing.set()
        if self._turn_of == threading.get_ident():
            return
        if self._joiner is not None:
            self._joiner.join()
        with self._lock:
            self._end()

    def _fill(self, reserved: protocol.Reserved, gather: Copy, ahead: Ahead, commits: Commits) -> None:
        for index, slot in enumerate(reserved.slots):
            if slot is None:
                continue
            with self._mapped().payload(slot, self.block_bytes) as payload:
                gather(index, payload)
            for copied, _ in ahead.begun(index, slot):
                commits.add(copied)
        for copied, _ in ahead.rest():
            commits.add(copied)
        commits.finish()

    def _fetch(self, fetch: Fetch | None, index: int, slot: Slot) -> None:
        if fetch is None or self.near.memory is None:
            raise Trouble("protocol", "a slot of a GPU where none was asked for")
        try:
            fetch(index, self.near.memory, slot.offset)
        except ValueError as error:  # outside what the daemon exported
            raise Trouble("protocol", str(error)) from None

    def _believe(self, session: Connection, whole: list[tuple[int, Slot]], good: list[int]) -> None:
        """The bytes of these blocks were copied: they count if the slots are still what was leased. A slot of the GPU
        is, for as long as the session lasts: its memory ends with the daemon's process."""
        if any(slot.gpu for _, slot in whole) and session.hung_up():
            raise Trouble("fenced", "the daemon went away during the copy")
        for index, slot in whole:
            if not slot.gpu and not self._mapped().is_current(slot):
                raise Trouble("fenced", "the slot changed during the copy")
            good.append(index)

    def _give_back(self, session: Connection, message: protocol.Request, deadline: float) -> None:
        """After a failure, which stays the one that is told of: where the daemon cannot be told, the session ends."""
        try:
            session.tell(message, deadline)
        except (OSError, Trouble):
            session.close()

    def _mapped(self) -> Arena:
        assert self._arena is not None
        return self._arena

    def _join(self, deadline: float) -> None:
        """Connect, say Hello, map the arena. OSError or Trouble when that does not work; then there is no session."""
        connection = Connection(self.path, deadline)
        try:
            welcome = connection.hello(self._hello, deadline)
            with self._lock:
                if self._closing.is_set():
                    raise Trouble("no_daemon", "the client was closed meanwhile")
                self._start(connection, welcome, deadline)
        except BaseException:
            connection.close()
            raise

    def _join_at_once(self, deadline: float) -> None:
        """Under the lock: the daemon has hung up; if another is there already, nobody need notice."""
        self._leave()
        connection = Connection(self.path, deadline)
        try:
            self._start(connection, connection.hello(self._hello, deadline), deadline)
        except BaseException:
            connection.close()
            raise

    def _start(self, connection: Connection, welcome: Welcome, deadline: float) -> None:
        """Under the lock: the session begins."""
        handed = connection.take_handed()
        if self._arena is not None and self._arena.serves(welcome, handed):
            for file in handed:
                os.close(file)
        else:
            try:
                fresh = Arena(welcome, handed, write=self._hello.access == "write")
            except ValueError as error:  # the files are not as large as Welcome says
                raise Trouble("protocol", str(error)) from None
            if self._arena is not None:
                self._arena.close()
            self._arena = fresh
            if self._attach is not None:
                fresh.attach(self._attach)
        if (opened := self.near.meet(welcome)) is not None:
            connection.tell(opened, deadline)
        self._arena.lock(welcome.lock_byte)
        self._welcome = welcome
        self._session = connection
        log.info("joined the daemon at %s", self.path)

    def _join_later(self, what: str = "") -> None:
        with self._joining:
            if self._closing.is_set() or (self._joiner is not None and self._joiner.is_alive()):
                return
            what = what or f"no daemon at {self.path} ({self.last_trouble})"
            joiner = threading.Thread(target=self._keep_joining, name="terracekv-joiner", daemon=True)
            try:
                joiner.start()
            except RuntimeError as error:  # no thread is to be had now: the next call tries again
                self.last_trouble = str(error)
                return
            self._joiner = joiner
            log.warning("%s: everything is a miss until it is joined", what)

    def _keep_joining(self) -> None:
        pause, longest = RETRY_S
        while not self._closing.wait(pause):
            try:
                self._join(after(JOIN_S * 1e3))
                return
            except (OSError, Trouble) as error:
                self.last_trouble = str(error)
            pause = min(pause * 2, longest)

    def _leave(self) -> None:
        """Under the lock: this process copies nothing for the session any more."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self.near.close()
        if self._arena is not None:
            self._arena.unlock()

    def _end(self) -> None:
        """Under the lock: the client is closed. Idempotent."""
        self._leave()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _trouble(self, error: Exception) -> str:
        why = (
            error.why if isinstance(error, Trouble) else "deadline" if isinstance(error, TimeoutError) else "no_daemon"
        )
        self.troubles += 1
        self.last_trouble = str(error) or why
        if self.strict:
            raise error
        return why

    def _forget_after_fork(self) -> None:
        """A forked child shares its parent's socket and lock and must use neither: it starts without a session.

        Other threads of the parent, which are not there in the child, may have been inside any lock."""
        self._hello.pid, self._hello.gpu = os.getpid(), ""
        self._lock, self._turn_of = threading.Lock(), None
        self._joining = threading.Lock()
        closing, self._closing = self._closing.is_set(), threading.Event()
        if closing:
            self._closing.set()
        self._joiner = None
        if self._session is not None:
            self._session.close()
            self._session = None
        self.near.forget()
        if self._arena is not None:
            self._arena.forget()
            self._arena = None


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

"""Fuzzing the engine door in this process: real connections of it on a transport of ours, real tiers below.

Owns nothing but what it opens. Called by the test and by ``make fuzz``. Imports ``daemon`` and the other parts of the
fuzzer.

What is checked after each batch: every complete frame that asks for an answer got exactly one, or its connection was
closed with a reason; a well-behaved session still stores and loads; all books balance; nothing was logged as an error,
no task and no thread died; the process has not grown.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terracekv.daemon import protocol
from terracekv.daemon.access import Access
from terracekv.daemon.config import Config
from terracekv.daemon.engine_door import Connection, EngineDoor
from terracekv.daemon.protocol import LENGTH
from terracekv.tests.fuzz.frames import Frames
from terracekv.tests.fuzz.mutants import Mutants
from terracekv.tests.fuzz.owed import Owed
from terracekv.tests.harness import hello
from terracekv.tests.stores import World, key

BATCH = 4000
PEERS = 6
LIFE = 400
"""Frames of a connection, about; then it hangs up in the middle of whatever it does."""
GROWTH_BYTES_MAX = 64 << 20
GOOD = [key(1000 + index) for index in range(3)]
"""Blocks of the well-behaved session."""


class Pipe(asyncio.Transport):
    """What the door writes to; ``close`` ends the connection as a transport does: soon, and once."""

    def __init__(self, lost: Callable[[], None]) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._lost = lost
        self._closing = False

    def write(self, data: Any) -> None:
        assert not self._closing, "written to after it was closed"
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        """Never nothing: no descriptor can be handed over here, and the door sends none past what waits."""
        return 1

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lost)

    def pause_reading(self) -> None:
        """All is read here."""

    def resume_reading(self) -> None:
        """All is read here."""


class Peer:
    """One connection of the door, and what it is owed."""

    def __init__(self, door: EngineDoor) -> None:
        self.owed = Owed()
        self.left = False
        connection = Connection(door)
        self.pipe = Pipe(lambda: connection.connection_lost(None))
        self._connection = connection
        connection.connection_made(self.pipe)

    @property
    def closed(self) -> bool:
        return self.pipe.is_closing()

    def send(self, data: bytes) -> None:
        """Hand it to the door, unless that has closed the connection."""
        if not self.closed:
            self.owed.sent(data)
            self._connection.data_received(data)

    def hang_up(self) -> None:
        """The engine is gone, without a word."""
        self.left = True
        if not self.closed:
            self.pipe.close()

    def answers(self) -> list[protocol.Answer]:
        """What has come since the last call; noted."""
        written, self.pipe.written = self.pipe.written, []
        found = []
        for data in written:
            assert LENGTH.unpack_from(data)[0] == len(data) - LENGTH.size, "an answer is framed wrongly"
            found.append(protocol.answer_decoder.decode(data[LENGTH.size :]))
            self.owed.came(found[-1])
        return found

    def settled(self) -> None:
        """Nothing is under way any more: the answers are what was owed."""
        self.answers()
        assert self.left or (wrong := self.owed.wrong(self.closed)) is None, wrong


class Listening(logging.Handler):
    """Collects what is logged as an error, and what the loop says of dead tasks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(self.format(record))


@contextmanager
def listening() -> Iterator[list[str]]:
    """Errors that anybody logs meanwhile; warnings, of which a fuzzed daemon has many, are not printed."""
    logger, ear = logging.getLogger(), Listening()
    loggers = [logging.getLogger("terracekv"), logging.getLogger("asyncio")]
    levels = [each.level for each in loggers]
    logger.addHandler(ear)
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield ear.heard
    finally:
        logger.removeHandler(ear)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def resident_bytes() -> int:
    """Memory of this process that is its own."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class DoorFuzz:
    """Runs on one loop, in one world."""

    def __init__(self, shm: Path, folder: Path, seed: int) -> None:
        self.seed = seed
        self.frames = Frames(Mutants(seed))
        self.random = self.frames.random
        self.sent = 0
        self.answered: Counter[str] = Counter()
        self.recent: list[bytes] = []
        self.world = World(shm, folder, slabs=4, shards=1)
        self.door = EngineDoor(
            shm / "engine.sock",
            store=self.world.store,
            table=self.world.host.table,
            arena=self.world.host.arena.path,
            secret=bytes(32),
            access=Access(Config()),
        )
        self.peers: list[Peer] = []

    async def run(self, count: int, dead: list[str]) -> dict[str, object]:
        """At least ``count`` frames; figures for the summary. AssertionError names the seed and what was wrong."""
        begun = time.monotonic()
        with listening() as heard:
            try:
                await self._batch(min(count, BATCH))
                before, threads = resident_bytes(), threading.active_count()
                while self.sent < count:
                    await self._batch(min(count - self.sent, BATCH))
                    assert heard == [], heard[:3]
                    assert threading.active_count() == threads, "a thread has died, or was left"
                grown = resident_bytes() - before
                assert grown < GROWTH_BYTES_MAX, f"the process has grown by {grown} bytes"
                assert heard + dead == []
            except BaseException as error:
                frames = [frame.hex() for frame in self.recent[-3:] if len(frame) < 1000]
                error.add_note(f"dead: {dead[:3]}, logged: {heard[:3]}")
                error.add_note(f"seed {self.seed}, after {self.sent} frames, the last of them {frames}")
                raise
        answered = dict(sorted(self.answered.items()))
        return {"frames": self.sent, "answered": answered, "grown_bytes": max(0, grown), "s": took(begun)}

    async def _batch(self, count: int) -> None:
        for _ in range(count):
            if len(self.peers) < PEERS:
                self._join()
            peer = self.random.choice(self.peers)
            self.frames.handles = peer.owed.handles
            data = self.frames.next()
            self.recent = [*self.recent[-2:], data]
            self.sent += 1
            for part in self._cut(data):
                peer.send(part)
            if self.random.randrange(8) == 0:
                await asyncio.sleep(0)
                peer.answers()
            if peer.closed or self.random.randrange(LIFE) == 0:
                await self._part_with(peer)
        await self._settle()

    def _join(self) -> None:
        peer = Peer(self.door)
        if self.random.randrange(10):
            peer.send(protocol.frame(self.frames.hello()))
        self.peers.append(peer)

    def _cut(self, data: bytes) -> list[bytes]:
        if len(data) > 100 or self.random.randrange(20):
            return [data]
        at = sorted(self.random.sample(range(len(data) + 1), 2))
        return [data[: at[0]], data[at[0] : at[1]], data[at[1] :]]

    async def _part_with(self, peer: Peer) -> None:
        """Sometimes an engine waits for all answers, sometimes it is just gone."""
        self.peers.remove(peer)
        if not peer.closed and self.random.randrange(2):
            await self._idle()
        if not (self.door._tasks or self.door.line) or peer.closed:
            peer.settled()
        self.answered += peer.owed.answered
        peer.hang_up()

    async def _settle(self) -> None:
        """End of a batch: all peers get what they are owed, then go; the books balance, and others are served."""
        await self._idle()
        for peer in self.peers:
            peer.settled()
            self.answered += peer.owed.answered
            peer.hang_up()
        self.peers.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        known = (len(self.door.connections), [*self.door.sessions.open.values()])
        assert known == (0, []), f"ended connections are still known: {known}"
        for namespace in self.world.host.namespaces:
            self.world.store.pins.end(namespace)
        await self._well_behaved()
        await self.world.balanced()

    async def _idle(self) -> None:
        while self.door._tasks or self.door.line:
            await asyncio.sleep(0.001)
        await self.world.idle()

    async def _well_behaved(self) -> None:
        """A session of its own stores three blocks and leases them, with the right bytes."""
        before = set(self.world.host.leases())
        peer = Peer(self.door)
        peer.send(protocol.frame(hello(4000, model="well behaved")))
        keys = b"".join(GOOD)
        peer.send(protocol.frame(protocol.Lookup(1, keys, 1000)))
        await self._idle()
        session = next(iter(self.door.sessions.open.values()), None)
        assert session is not None, f"no session: {[*peer.answers()]}"
        peer.send(protocol.frame(protocol.Reserve(2, keys)))
        (reserved,) = [answer for answer in peer.answers() if isinstance(answer, protocol.Reserved)]
        wanted = [index for index, slot in enumerate(reserved.slots) if slot is not None]
        assert len(wanted) + len(reserved.present) == len(GOOD), reserved
        for index in wanted:
            slot = session.reservations[reserved.reservation].slots[index]
            self.world.host.payload(slot, 4000)[:] = (GOOD[index] * 125)[:4000]
        peer.send(protocol.frame(protocol.Commit(3, reserved.reservation, wanted)) if wanted else b"")
        await self._idle()
        peer.send(protocol.frame(protocol.Acquire(4, keys, 5000)))
        await self._idle()
        answers = [*peer.answers()]
        (leased,) = [answer for answer in answers if isinstance(answer, protocol.Leased)]
        assert leased.blocks == len(GOOD), answers
        for index, slot in session.leases[leased.lease].slots.items():
            assert bytes(self.world.host.payload(slot, 4000)) == (GOOD[index] * 125)[:4000], "other bytes"
        peer.hang_up()
        await asyncio.sleep(0)
        assert set(self.world.host.leases()) <= before


def took(begun: float) -> float:
    """Seconds since then."""
    return round(time.monotonic() - begun, 1)


def fuzz_door(shm: Path, folder: Path, *, count: int, seed: int) -> dict[str, object]:
    """``count`` frames at a door of this process."""

    async def fuzz() -> dict[str, object]:
        running = DoorFuzz(shm, folder, seed)
        dead: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: dead.append(str(context)))
        try:
            return await running.run(count, dead)
        finally:
            running.world.close()

    return asyncio.run(fuzz())

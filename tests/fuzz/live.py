"""Fuzzing the engine door of a daemon that is a process of its own, over its real socket.

Owns the connections that it opens. Called by the test and by ``make fuzz``. Imports the harness and the other parts of
the fuzzer.

Slower than ``door``, and true where that is not: bytes cross a kernel, answers fill buffers, connections end at bad
moments, and what the process holds is seen from outside.
"""

import array
import contextlib
import http.client
import json
import select
import socket
import time
from collections import Counter
from pathlib import Path

from terracekv.daemon import protocol
from terracekv.daemon.protocol import LENGTH
from terracekv.tests.fuzz.frames import Frames
from terracekv.tests.fuzz.mutants import Mutants
from terracekv.tests.fuzz.owed import Owed
from terracekv.tests.harness import MIB, Blocks, Daemon, until

BATCH = 2000
PEERS = 8
LIFE = 300
PATIENCE_S = 20.0
GROWTH_BYTES_MAX = 64 * MIB


class Caller:
    """A connection to the daemon, and what it is owed."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.setblocking(False)
        self.owed = Owed()
        self.closed = False
        self._buffer = b""

    def send(self, data: bytes) -> None:
        """Send it all, listening while the daemon does not take it."""
        view = memoryview(data)
        self.owed.sent(data)
        while view and not self.closed:
            self.listen()
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                select.select([self.socket], [self.socket], [], PATIENCE_S)
            except (BrokenPipeError, ConnectionResetError):
                self.listen()
                self.closed = True

    def listen(self) -> None:
        """Note what has come."""
        while not self.closed:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            self.closed = not data
            self._buffer += data
            self._read()

    def settle(self) -> None:
        """Wait until all that is owed has come."""
        end = time.monotonic() + PATIENCE_S
        while self.owed.due and not self.closed and time.monotonic() < end:
            select.select([self.socket], [], [], 0.1)
            self.listen()
        assert (wrong := self.owed.wrong(self.closed)) is None, wrong

    def hang_up(self) -> None:
        self.socket.close()

    def _read(self) -> None:
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[LENGTH.size : end], self._buffer[end:]
            self.owed.came(protocol.answer_decoder.decode(body))


class LiveFuzz:
    """Sends frames to ``daemon`` until there were enough."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.daemon = daemon
        self.frames = Frames(Mutants(seed))
        self.random = self.frames.random
        self.seed = seed
        self.sent = 0
        self.answered: Counter[str] = Counter()
        self.callers: list[Caller] = []

    def run(self, count: int) -> dict[str, object]:
        """At least ``count`` frames; figures for the summary."""
        begun = time.monotonic()
        try:
            self._batch(min(count, BATCH))
            before = self._held()
            while self.sent < count:
                self._batch(min(BATCH, count - self.sent))
                self._same(before)
        except BaseException as error:
            error.add_note(f"seed {self.seed}, after {self.sent} frames")
            raise
        finally:
            for caller in self.callers:
                caller.hang_up()
        return {
            "frames": self.sent,
            "answered": dict(sorted(self.answered.items())),
            "grown_bytes": max(0, self._held()["bytes"] - before["bytes"]),
            "s": round(time.monotonic() - begun, 1),
        }

    def _batch(self, count: int) -> None:
        for _ in range(count):
            if len(self.callers) < PEERS:
                self.callers.append(Caller(self.daemon.socket))
                if self.random.randrange(10):
                    self.callers[-1].send(protocol.frame(self.frames.hello()))
            caller = self.random.choice(self.callers)
            self.frames.handles = caller.owed.handles
            data = self.frames.next()
            self.sent += 1
            if self.random.randrange(60) == 0:
                with_descriptors(caller, data)
            else:
                caller.send(data)
            if caller.closed or self.random.randrange(LIFE) == 0:
                self._part_with(caller)
        for caller in list(self.callers):
            caller.settle()
            self._part_with(caller)
        self._well_behaved()

    def _part_with(self, caller: Caller) -> None:
        """Some wait for all that they are owed, some are just gone, some end their half and listen on."""
        self.callers.remove(caller)
        if caller.closed or self.random.randrange(2):
            caller.settle()
        elif self.random.randrange(2):
            caller.socket.shutdown(socket.SHUT_WR)
        self.answered += caller.owed.answered
        caller.hang_up()

    def _flush_all(self) -> None:
        """End all pins: some of each size of slot can keep every slab from serving another size."""
        for namespace in self.daemon.http("/v1/namespaces")[1]["namespaces"]:
            connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.connect(str(self.daemon.runtime / "http.sock"))
                body = json.dumps({"namespace": namespace["namespace_id"]})
                connection.request("POST", "/v1/flush", body, {"Content-Type": "application/json"})
                assert connection.getresponse().status == 200

    def _well_behaved(self) -> None:
        self._flush_all()
        with self.daemon.client(model="well behaved") as client:
            client.rejoin()
            self._stores_and_loads(client)
        assert self.daemon.alive and self.daemon.errors() == [], self.daemon.tail()
        until(lambda: self._nothing_is_held(), "what ended connections held is let go")

    def _stores_and_loads(self, client: Blocks) -> None:
        keys = client.chain(self.sent, 4)
        stored = client.put(keys)
        assert stored.stored + stored.present == 4, stored
        assert client.get(keys).blocks == 4

    def _nothing_is_held(self) -> bool:
        status = self.daemon.http("/v1/status")[1]
        host = status["tiers"]["host"]
        return not status["sessions"] and host["reserved_blocks"] == 0

    def _held(self) -> dict[str, int]:
        threads = len(list(Path(f"/proc/{self.daemon.pid}/task").iterdir()))
        return {
            "bytes": self.daemon.memory_bytes()["anonymous"],
            "descriptors": self.daemon.descriptors(),
            "threads": threads,
        }

    def _same(self, before: dict[str, int]) -> None:
        now = self._held()
        assert now["threads"] >= before["threads"], f"a thread has died: {before}, then {now}"
        assert now["bytes"] < before["bytes"] + GROWTH_BYTES_MAX, f"the daemon grows: {before}, then {now}"
        until(lambda: self._held()["descriptors"] <= before["descriptors"] + 2, "descriptors are let go")


def with_descriptors(caller: Caller, data: bytes) -> None:
    """Send it with three descriptors that nobody asked for."""
    caller.listen()
    if caller.closed or len(data) > 1000:
        return
    with socket.socket(socket.AF_UNIX) as spare:
        passed = array.array("i", [spare.fileno()] * 3)
        try:
            sent = caller.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            caller.listen()
            caller.closed = True
            return
    caller.owed.sent(data[:sent])
    caller.send(data[sent:])


def fuzz_live(shm: Path, folder: Path, *, count: int, seed: int) -> dict[str, object]:
    """``count`` frames at a daemon that is started for them."""
    with Daemon(shm, folder) as daemon:
        figures = LiveFuzz(daemon, seed).run(count)
        assert daemon.term() == 0 and daemon.errors() == [], daemon.tail()
    return figures

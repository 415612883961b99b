"""How long does a lookup take while 64 sessions keep 512 full batches under way?

A batch is 512 keys; the sessions send lookups, acquires with their releases, and reservations of what is present, eight
at a time each, as fast as they are answered. The lookups that are timed are those of another session, one at a time, as
an engine's scheduler makes them; their reference is the same lookup in the same run with nobody beside it.
Run: ``python -m terracekv.bench.load``.
"""

import argparse
import contextlib
import random
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from terracekv.bench.figures import percentile, report
from terracekv.bench.served import BLOCK_TOKENS, Served, client_of, served
from terracekv.connector.client import Client
from terracekv.daemon import protocol
from terracekv.daemon.protocol import LENGTH

BLOCK = 16 << 10
BATCH = 512
SESSIONS = 64
AT_ONCE = 8
BAR = 10.0


def nothing(index: int, payload: memoryview) -> None:
    """Copies nothing: presence is what counts here."""


class Caller:
    """A session that keeps ``AT_ONCE`` batches under way."""

    def __init__(self, path: Path, hello: protocol.Hello, keys: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.sendall(protocol.frame(hello))
        self.keys = keys
        self.served = self.wrong = 0
        self._id = 0
        self._buffer = b""

    def ask(self) -> None:
        """One more batch."""
        self._id += 1
        kind = self._id % 4
        if kind == 0:
            self._send(protocol.Acquire(self._id, self.keys, 1000))
        elif kind == 1:
            self._send(protocol.Reserve(self._id, self.keys))
        else:
            self._send(protocol.Lookup(self._id, self.keys, 1000))

    def read(self) -> None:
        """Count what has come, and ask anew for each."""
        self._buffer += self.socket.recv(1 << 20)
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            answer = protocol.answer_decoder.decode(self._buffer[LENGTH.size : end])
            self._buffer = self._buffer[end:]
            self._came(answer)

    def _came(self, answer: protocol.Answer) -> None:
        match answer:
            case protocol.Welcome():
                for _ in range(AT_ONCE):
                    self.ask()
                return
            case protocol.Found(blocks=blocks):
                good = blocks == BATCH
            case protocol.Leased(blocks=blocks, lease=lease):
                good = blocks == BATCH
                self._send(protocol.Release(lease))
            case protocol.Reserved(present=present):
                good = len(present) == BATCH
            case _:
                good = False
        self.served += 1
        self.wrong += not good
        self.ask()

    def _send(self, message: protocol.Request) -> None:
        self.socket.sendall(protocol.frame(message))


def crowd(path: Path, seconds: float) -> None:
    """All sessions, in a process of their own; prints what they were served when the time is over."""
    with contextlib.closing(client_of(path, BLOCK)) as client:
        keys = b"".join(client.keys(prompt()))
        hello = client._hello
    callers = [Caller(path, hello, keys) for _ in range(SESSIONS)]
    by_socket = {caller.socket: caller for caller in callers}
    print("calling", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select.select(by_socket, [], [], 0.1)
        for each in ready:
            by_socket[each].read()
    print(sum(caller.served for caller in callers), sum(caller.wrong for caller in callers))
    for caller in callers:
        caller.socket.close()


def prompt() -> list[int]:
    """The tokens of a batch."""
    dice = random.Random(7)
    return [dice.randrange(1 << 16) for _ in range(BATCH * BLOCK_TOKENS)]


def timed(client: Client, keys: list[bytes], until: float) -> list[float]:
    """Seconds of lookups, one after the other until a moment, with a pause as an engine makes between two."""
    took = []
    while time.monotonic() < until:
        start = time.perf_counter()
        found = client.lookup(keys)
        took.append(time.perf_counter() - start)
        assert found.blocks == BATCH, found
        time.sleep(0.002)
    return took


def settled(daemon: Served) -> None:
    """All that the sessions held is let go: the whole arena can be reserved again."""
    with contextlib.closing(client_of(daemon.socket, BLOCK)) as client:
        fresh = client.keys([random.randrange(1 << 16) for _ in range(BATCH * BLOCK_TOKENS)])
        stored = client.store(fresh, nothing)
        assert stored.stored == BATCH, stored


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--crowd", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.crowd:
        crowd(asked.crowd, asked.seconds)
        return 0
    with served(host__size="64MiB", host__slab="4MiB", disk__size="256MiB", disk__segment="16MiB") as daemon:
        with contextlib.closing(daemon.client(BLOCK)) as client:
            keys = client.keys(prompt())
            assert client.store(keys, nothing).stored == BATCH
            timed(client, keys, time.monotonic() + 1)
            idle = percentile(timed(client, keys, time.monotonic() + asked.seconds), 99) * 1e3
            command = [sys.executable, "-m", "terracekv.bench.load", "--crowd", str(daemon.socket)]
            command += ["--seconds", str(asked.seconds + 2)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as calling:
                assert calling.stdout is not None and calling.stdout.readline() == "calling\n"
                time.sleep(1)
                loaded = timed(client, keys, time.monotonic() + asked.seconds)
                answered, wrong = map(int, calling.stdout.readline().split())
            p99 = percentile(loaded, 99) * 1e3
        settled(daemon)
        rss = daemon.rss_anon() / 2**20
    report("load_batches", answered / (asked.seconds + 2), "1/s", sessions=SESSIONS, at_once=SESSIONS * AT_ONCE)
    report("load_lookup_p99", p99, "ms", "the same, idle", idle, len(loaded), refused=wrong, daemon_mib=round(rss))
    return int(wrong > 0 or p99 > BAR * idle)


if __name__ == "__main__":
    sys.exit(main())

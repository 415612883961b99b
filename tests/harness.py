"""A daemon as a process of its own, for tests that start, stop, freeze and kill it; and clients whose blocks say whose
they are.

Owns the processes that it starts: they end with the ``with`` block, however that is left. Called by tests and benches.
Imports ``connector``, ``daemon.protocol`` and ``tiers.block``.
"""

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from terracekv.connector.client import Client, Loaded, Stored
from terracekv.connector.connection import after
from terracekv.daemon import protocol
from terracekv.daemon.protocol import LENGTH, LayerGroup, Layout, dense_strides

MIB = 1 << 20
TOKENS = 4
"""Tokens in a block."""
START_S = 30.0
JOIN_S = 30.0
SETTINGS = {
    "daemon.http": "",
    "daemon.drain_s": "5",
    "host.size": "4MiB",
    "host.slab": "1MiB",
    "disk.size": "32MiB",
    "disk.segment": "1MiB",
    "disk.free_floor": "0",
}


def layout_of(block_bytes: int) -> Layout:
    """A layout whose blocks have this many bytes, a multiple of ``TOKENS``."""
    shape = (TOKENS, block_bytes // TOKENS)
    return Layout("ND", "latent", 1, (LayerGroup(1, shape, dense_strides(shape, 1)),))


def payload_of(key: bytes, size: int, shard: int = 0) -> bytes:
    """Bytes that no other block has, from the first to the last."""
    return hashlib.shake_128(key + bytes([shard])).digest(size)


def until(true: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for something that must come; AssertionError names what did not."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"did not come within {seconds} s: {what}"
        time.sleep(0.005)


class Daemon:
    """``python -m terracekv.daemon`` on two folders. Starts on entry, is killed on exit if it still runs then."""

    def __init__(self, runtime: Path, state: Path, **settings: str) -> None:
        """``settings`` are ``section__key``; ``failpoints`` arms them."""
        self.runtime = runtime
        self.state = state
        self.failpoints = settings.pop("failpoints", "")
        folders = {"daemon.runtime_dir": str(runtime), "daemon.state_dir": str(state / "state")}
        self.settings = SETTINGS | folders | {key.replace("__", "."): value for key, value in settings.items()}
        self.log = state / "daemon.log"
        self.program = ["-m", "terracekv.daemon"]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.runtime / "engine.sock"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "Daemon":
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        if error is not None:
            error.add_note(f"the daemon's log ends:\n{self.tail()}")

    def start(self) -> "Daemon":
        """Start, and wait until both doors answer: the people's door opens a moment after the engines'."""
        self.launch()
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.alive, f"the daemon ended at its start with {self.wait()}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the daemon did not start:\n{self.tail()}"
            time.sleep(0.005)
        return self

    def launch(self) -> None:
        """Start without waiting."""
        assert not self.alive
        self.state.mkdir(exist_ok=True)
        flags = [part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TERRACEKV_")}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program, *flags],
                cwd=self.state,
                env=kept | {"TERRACEKV_FAILPOINTS": self.failpoints},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit status; -9 when it was killed."""
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped one. Idempotent."""
        if self.alive:
            self.signal(signal.SIGKILL)
            self.wait()

    def term(self, seconds: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def stop(self) -> None:
        """SIGSTOP, and wait until no thread of it runs any more."""
        self.signal(signal.SIGSTOP)

        def stopped() -> bool:
            assert self.alive, f"the daemon had ended with {self.wait()}:\n{self.tail()}"
            return _state(self.pid) == "T"

        until(stopped, "the daemon stops")

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def restart(self, **settings: str) -> None:
        """Kill and start again on the same folders."""
        self.kill()
        self.failpoints = settings.pop("failpoints", "")
        self.settings |= {key.replace("__", "."): value for key, value in settings.items()}
        self.start()

    def http(self, route: str) -> tuple[int, Any]:
        """Status and JSON of a GET at the people's door."""
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)

        def connected() -> bool:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                connection.sock.connect(str(self.runtime / "http.sock"))
                return True
            return False

        until(connected, "the second door is open")
        with contextlib.closing(connection):
            connection.request("GET", route)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def errors(self) -> list[str]:
        """Lines of the log that no run should have."""
        return [line for line in self.log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_bytes(self) -> dict[str, int]:
        """``anonymous`` (heap and stacks) and ``shared`` (the arena) resident bytes."""
        fields = dict(line.split(":") for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        kib = {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}
        return {"anonymous": kib["RssAnon"], "shared": kib["RssShmem"]}

    def client(self, block_bytes: int = 4096, **changes: Any) -> "Blocks":
        """A client of this daemon, generous with its deadlines, since test machines are slow."""
        wanted: dict[str, Any] = {
            "model": "m",
            "revision": "r",
            "dtype": "u8",
            "block_tokens": TOKENS,
            "layout": layout_of(block_bytes),
            "lookup_budget_ms": 10_000,
            "load_deadline_ms": 30_000,
            "store_deadline_ms": 30_000,
        }
        return Blocks(self.socket, **(wanted | changes))

    def wire(self, hello: protocol.Hello | None = None) -> "Wire":
        """A connection on which any bytes can be sent; with ``hello``, a session."""
        return Wire(self.socket, hello)

    def _answers(self) -> bool:
        for door in (self.socket, self.runtime / "http.sock"):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(door))
                except (FileNotFoundError, ConnectionRefusedError):
                    return False
        return True


class Blocks(Client):
    """A client whose blocks are filled by ``payload_of`` their keys, and compared with it when they come back."""

    @property
    def space(self) -> bytes:
        """The id of its namespace, once it has joined."""
        assert self.namespace_id is not None
        return self.namespace_id

    def chain(self, seed: int, blocks: int) -> list[bytes]:
        """Keys of a prompt that no other seed shares a block with."""
        first = (seed * 7919 + 1) % (1 << 32)
        return self.keys([first, *range(1, blocks * TOKENS)])

    def put(self, keys: Sequence[bytes], durable: bool = False, shard: int = 0) -> Stored:
        def gather(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(keys[index], self.block_bytes, shard)

        return self.store(keys, gather, durable)

    def get(self, keys: Sequence[bytes], shard: int = 0) -> Loaded:
        """AssertionError when a block that counts as loaded has other bytes than it should."""
        into = [b""] * len(keys)

        def scatter(index: int, payload: memoryview) -> None:
            into[index] = bytes(payload)

        loaded = self.load(keys, scatter)
        for key, found in zip(keys[: loaded.blocks], into, strict=False):
            assert found == payload_of(key, self.block_bytes, shard), f"{key.hex()} came back with other bytes"
        return loaded

    def _join(self, deadline: float) -> None:
        """With more time than an engine has for it: a busy machine may need more than a second to note a namespace."""
        super()._join(max(deadline, after(JOIN_S * 1e3)))

    def rejoin(self) -> None:
        """Notice that the daemon went away, and wait until it is joined again."""
        until(lambda: self.lookup([]).reason != "no_daemon", "the client joins by itself")

    def __enter__(self) -> "Blocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Wire:
    """The engine door's protocol by hand."""

    def __init__(self, path: Path, hello: protocol.Hello | None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30.0)
        self.socket.connect(str(path))
        self._buffer = b""
        self.welcome = None
        if hello is not None:
            welcome = self.ask(hello)
            assert isinstance(welcome, protocol.Welcome), welcome
            self.welcome = welcome

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def tell(self, message: protocol.Request) -> None:
        self.send(protocol.frame(message))

    def read(self) -> protocol.Answer:
        """The next answer; EOFError when the daemon closed the connection."""
        while True:
            if len(self._buffer) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    body, self._buffer = self._buffer[LENGTH.size : end], self._buffer[end:]
                    return protocol.answer_decoder.decode(body)
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError("the daemon closed the connection")
            self._buffer += data

    def ask(self, message: protocol.Request) -> protocol.Answer:
        self.tell(message)
        return self.read()

    def closed(self) -> bool:
        """Wait for the daemon to close the connection; False when it answers instead."""
        try:
            self.read()
        except (EOFError, ConnectionResetError):
            return True
        return False

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def hello(block_bytes: int = 4096, **changes: Any) -> protocol.Hello:
    """A Hello that is welcome."""
    wanted: dict[str, Any] = {
        "version": protocol.VERSION,
        "probe": protocol.PROBE,
        "model": "m",
        "revision": "r",
        "dtype": "u8",
        "block_tokens": TOKENS,
        "layout": layout_of(block_bytes),
        "shards": 1,
        "shard": 0,
        "pid": os.getpid(),
    }
    return protocol.Hello(**(wanted | changes))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

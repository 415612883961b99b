"""A daemon that answers at a Unix socket as a real one would, over a real arena and slot table, and lies when it is
told to.

Owns its socket, its files and its threads: ``close`` ends them. Called by tests. Imports ``daemon.protocol`` and the
harness.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terracekv.daemon import protocol
from terracekv.daemon.protocol import (
    Acquire,
    Commit,
    Committed,
    Error,
    Failed,
    Found,
    GpuMemory,
    Hello,
    Leased,
    Lookup,
    Opened,
    Ready,
    Reserve,
    Reserved,
    Slot,
    Welcome,
    split_keys,
)

BLOCK = 4096
SLOTS = 16
ARENA_BYTES = SLOTS * BLOCK
SLOTS_BYTES = 4096
GPU = "GPU-01010101-0101-0101-0101-010101010101"
GENERATION = 100
LOCK_BYTE = (1 << 40) + 1
LEASE, RESERVATION = 7, 8

Lie = Callable[[Any], Any]
"""Makes of a true answer the one that is sent: another, its bytes, or None for none."""


class LyingDaemon:
    """Of any chain it has six blocks: of those the first two in host, the third on a GPU where that is asked for, two
    on their way up and one that fails. It stores four of six: the first is present, and for the last it has no room."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine.sock"
        self.arena, self.slots = folder / "arena", folder / "slots"
        self.arena.write_bytes(bytes(ARENA_BYTES))
        table = bytearray(SLOTS_BYTES)
        for number in range(SLOTS):
            struct.pack_into("<Q", table, _record(number), GENERATION + number)
        self.slots.write_bytes(table)
        self.lie: Lie | None = None
        self.refuses = False
        """Whether a lookup is answered with an Error."""
        self.shut = False
        """Whether who introduces itself is told Refused."""
        self.told = 0
        """Lies that were told."""
        self.open = 0
        """Sessions that there are."""
        self.sessions = 0
        """Sessions that there ever were."""
        self._threads: list[threading.Thread] = []
        self._peers: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "LyingDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
                self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        self.open += 1
        self.sessions += 1
        buffer = b""
        with contextlib.suppress(OSError), peer:
            hello, near = None, False
            while data := peer.recv(1 << 16):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("<I", buffer)[0]):
                    request, buffer = protocol.request_decoder.decode(buffer[4:end]), buffer[end:]
                    hello = request if isinstance(request, Hello) else hello
                    near = near or (isinstance(request, Opened) and request.why is None)
                    assert hello is not None
                    for answer in self._answers(hello, near, request):
                        self._send(peer, answer)
        self.open -= 1

    def _send(self, peer: socket.socket, answer: Any) -> None:
        said = self.lie(answer) if self.lie is not None else answer
        self.told += said is not answer
        if said is not None:
            peer.sendall(said if isinstance(said, bytes) else protocol.frame(said))

    def _answers(self, hello: Hello, near: bool, request: Any) -> list[Any]:
        size = hello.layout.block_bytes
        keys = split_keys(request.keys) if hasattr(request, "keys") else []
        count = len(keys)

        def slot(number: int) -> Slot:
            return Slot(number * size, _record(number), GENERATION + number)

        match request:
            case Hello() if self.shut:
                return [protocol.Refused("model", "is not welcome")]
            case Hello():
                gpu = GpuMemory(GPU, b"h" * 64, size, b"made") if request.gpu else None
                paths = str(self.arena), ARENA_BYTES, str(self.slots), SLOTS_BYTES
                return [Welcome(1, bytes(32), 0, size, *paths, LOCK_BYTE, gpu)]
            case Lookup() if self.refuses:
                return [Error(request.id, "bad_request", "the daemon is tired", "ask later")]
            case Lookup():
                return [Found(request.id, count, {"host": min(count, 3), "disk": count}, None, None, 1.0)]
            case Acquire() if hello.shard is None:
                pending = [index for index in (3, 4, 5) if index < count]
                said = [Failed(LEASE, [5], "failed") if index == 5 else Ready(LEASE, [index], []) for index in pending]
                return [Leased(request.id, LEASE, count, [], pending), *said]
            case Acquire():
                slots: list[Slot | None] = [slot(0), slot(1), slot(2), None, None, None]
                if request.gpu and near:
                    slots[2] = Slot(0, 0, 0, True)
                pending = [index for index in (3, 4, 5) if index < count]
                said = [
                    Failed(LEASE, [5], "failed") if index == 5 else Ready(LEASE, [index], [slot(index)])
                    for index in pending
                ]
                return [Leased(request.id, LEASE, count, slots[:count], pending), *said]
            case Reserve():
                reserved: list[Slot | None] = [None, slot(6), slot(7), slot(8), slot(9), None]
                refused = {5: "full"} if count > 5 else {}
                return [Reserved(request.id, RESERVATION, reserved[:count], [0] if count else [], refused)]
            case Commit():
                return [Committed(request.id, request.indices, request.indices if request.durable else [])]
        return []


def _record(number: int) -> int:
    return 64 + 64 * number

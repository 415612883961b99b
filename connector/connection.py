"""One connection to the daemon's engine door: the socket and its frames.

Owns the socket. Used by ``client.py`` under its lock, never by two threads at once. Imports ``daemon.protocol``.
Deadlines are points in ``time.monotonic()``; one that has passed raises TimeoutError.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH, Found, Welcome

JOIN_S = 1.0
"""Time for a daemon to answer Hello."""
HANDED_MAX = 8
"""Descriptors that are taken from a daemon; it sends two."""

Kind = TypeVar("Kind", Found, protocol.Leased, protocol.Reserved, protocol.Committed)


class Trouble(Exception):
    """The daemon did not do what was asked, or did not answer. ``why`` is short and stable."""

    def __init__(self, why: str, message: str = "") -> None:
        super().__init__(f"{why}: {message}" if message else why)
        self.why = why


class Connection:
    """The socket and its frames. Not thread-safe; any exception leaves it out of step, to be closed."""

    def __init__(self, path: str, deadline: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = bytearray()
        self._next = 0
        self.notices: list[protocol.Ready | protocol.Failed] | None = None
        """What came unasked while an answer was waited for; None, the default, forgets it."""
        self._early: dict[int, protocol.Answer] = {}
        self._handed: list[int] = []
        try:
            self._socket.settimeout(left(deadline))
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def hello(self, hello: protocol.Hello, deadline: float) -> Welcome:
        """Open the session."""
        self.tell(hello, deadline)
        answer = self._read(deadline, self._receive)
        if isinstance(answer, protocol.Refused):
            raise Trouble("refused", f"{answer.field}: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise Trouble("protocol", f"{type(answer).__name__} in answer to Hello")
        return answer

    def take_handed(self) -> list[int]:
        """The descriptors that came with Welcome: the caller's from now on, to be closed."""
        handed, self._handed = self._handed, []
        return handed

    def ask(self, make: Callable[[int], protocol.Request], kind: type[Kind], deadline: float) -> Kind:
        """Send a request and wait for its answer. Trouble("refused") when the answer is an Error.

        Answers to earlier requests that nobody waited for any more are forgotten."""
        self._early.clear()
        return self.answer_to(self.send(make, deadline), kind, deadline)

    def send(self, make: Callable[[int], protocol.Request], deadline: float) -> int:
        """Send a request; its id, to wait for later."""
        self._next += 1
        self.tell(make(self._next), deadline)
        return self._next

    def tell(self, message: protocol.Request, deadline: float) -> None:
        """Send what is not answered. Trouble("refused") when the message has no bytes, or more than the daemon reads
        before it hangs up: then nothing was sent."""
        try:
            framed = protocol.frame(message)
        except (OverflowError, ValueError, struct.error) as error:
            raise Trouble("refused", f"{type(message).__name__} cannot be sent: {error}") from None
        if (size := len(framed) - LENGTH.size) > FRAME_BYTES_MAX:
            most = f"more than {FRAME_BYTES_MAX}: ask for fewer keys at once, or make blocks larger"
            raise Trouble("refused", f"{type(message).__name__} of {size} bytes, {most}")
        self._socket.settimeout(left(deadline))
        self._socket.sendall(framed)

    def answer_to(self, id: int, kind: type[Kind], deadline: float) -> Kind:
        """The answer to an earlier request; answers come in any order."""
        while True:
            answer = self._early.pop(id, None) or self._read(deadline)
            if isinstance(answer, protocol.Error) and answer.id in (id, 0):
                raise Trouble("refused", f"{answer.message} ({answer.hint})")
            if isinstance(answer, kind) and answer.id == id:
                return answer
            if getattr(answer, "id", 0) == id:
                raise Trouble("protocol", f"{type(answer).__name__} where {kind.__name__} was asked for")
            if isinstance(answer, (Found, protocol.Leased, protocol.Reserved, protocol.Committed, protocol.Error)):
                self._early[answer.id] = answer
            elif self.notices is not None and isinstance(answer, (protocol.Ready, protocol.Failed)):
                self.notices.append(answer)

    def read_notices(self) -> None:
        """Take what has come unasked by now into ``notices``, without waiting."""
        assert self.notices is not None
        while True:
            self._socket.settimeout(0.0)
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                data = None
            if data == b"":
                raise Trouble("no_daemon", "the daemon closed the connection")
            self._buffer += data or b""
            while (answer := self._take()) is not None:
                if isinstance(answer, (protocol.Ready, protocol.Failed)):
                    self.notices.append(answer)
            if data is None:
                return

    def arrivals(
        self, leased: protocol.Leased, count: int, deadline: float, missed: list[str]
    ) -> Iterator[tuple[int, protocol.Slot]]:
        """The lease's blocks from the first on, each as soon as it is there. Ends before ``count`` at the first that
        will not come, and then says in ``missed`` why."""
        slots = dict(enumerate(leased.slots))
        failed: dict[int, str] = {}
        for index in range(count):
            slot = slots[index]
            while slot is None and index in leased.pending and index not in failed:
                answer = self._read(deadline)
                if isinstance(answer, protocol.Ready) and answer.lease == leased.lease:
                    slots.update(zip(answer.indices, answer.slots, strict=True))
                elif isinstance(answer, protocol.Failed) and answer.lease == leased.lease:
                    failed.update(dict.fromkeys(answer.indices, answer.why))
                slot = slots[index]
            if slot is None:
                missed.append(failed.get(index, "absent"))
                return
            yield index, slot

    def hung_up(self) -> bool:
        """Whether the daemon has closed its end; asks the kernel only."""
        try:
            self._socket.settimeout(0.0)  # under any other, Python waits for data before it asks the kernel
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the session: its leases and reservations end with it."""
        self._socket.close()
        for file in self.take_handed():
            os.close(file)

    def _receive(self, size: int) -> bytes:
        """What has come, with descriptors, if any came along."""
        data, handed, _, _ = socket.recv_fds(self._socket, size, HANDED_MAX, socket.MSG_CMSG_CLOEXEC)
        self._handed += handed
        return data

    def _read(self, deadline: float, receive: Callable[[int], bytes] | None = None) -> protocol.Answer:
        receive = receive or self._socket.recv
        while True:
            answer = self._take()
            if answer is not None:
                return answer
            self._socket.settimeout(left(deadline))
            data = receive(1 << 18)
            if not data:
                raise Trouble("no_daemon", "the daemon closed the connection")
            self._buffer += data

    def _take(self) -> protocol.Answer | None:
        """The first answer that has come whole."""
        buffer = self._buffer
        if len(buffer) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return None
        body = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        try:
            return protocol.answer_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise Trouble("protocol", str(error)) from None


def after(ms: float) -> float:
    return time.monotonic() + ms / 1e3


def left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left

"""One connection to the daemon's engine door: the socket and its frames.

Owns the socket, and what was asked until it is answered. Used by ``client.py`` under its lock, never by two threads at
once. Imports ``answers``, ``daemon.protocol`` and ``tiers.block``. What cannot be true is Trouble("protocol").
Deadlines are points in ``time.monotonic()``; one that has passed raises TimeoutError.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from terracekv.connector.answers import Terms, wrong_welcome
from terracekv.daemon import protocol
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH, Found, Welcome
from terracekv.tiers.block import KEY_BYTES

JOIN_S = 1.0
"""Time for a daemon to answer Hello."""
HANDED_MAX = 8
"""Descriptors that are taken from a daemon; it sends two."""
ANSWER_BYTES_MAX = 4 * FRAME_BYTES_MAX
"""More than the answer to the longest request has: it is not read."""
MS_MAX = (1 << 31) - 1
"""24 days: more the kernel does not wait at once."""
TEXT_MAX = 1000
"""Characters of what the daemon says that go into an error, and so into the log."""

Kind = TypeVar("Kind", Found, protocol.Leased, protocol.Reserved, protocol.Committed)


class Trouble(Exception):
    """The daemon did not do what was asked, or did not answer. ``why`` is short and stable."""

    def __init__(self, why: str, message: str = "") -> None:
        shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in message[:TEXT_MAX])
        super().__init__(f"{why}: {shown}" if message else why)
        self.why = why


class Connection:
    """The socket and its frames. Not thread-safe; any exception leaves it out of step, to be closed."""

    def __init__(self, path: str, deadline: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = bytearray()
        self._next = 0
        self.notices: list[protocol.Ready | protocol.Failed] | None = None
        """What came unasked while an answer was waited for; None, the default, forgets it."""
        self._terms = Terms()
        self._asked: dict[int, protocol.Request] = {}
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
        _believe(answer, wrong_welcome(answer, hello))
        self._terms = Terms.of(hello, answer)
        return answer

    def take_handed(self) -> list[int]:
        """The descriptors that came with Welcome: the caller's from now on, to be closed."""
        handed, self._handed = self._handed, []
        return handed

    def ask(self, make: Callable[[int], protocol.Request], kind: type[Kind], deadline: float) -> Kind:
        """Send a request and wait for its answer. Trouble("refused") when the answer is an Error.

        Answers to earlier requests that nobody waited for any more are forgotten."""
        self._asked.clear()
        self._early.clear()
        return self.answer_to(self.send(make, deadline), kind, deadline)

    def send(self, make: Callable[[int], protocol.Request], deadline: float) -> int:
        """Send a request; its id, to wait for later."""
        self._next += 1
        request = self._asked[self._next] = make(self._next)
        self.tell(request, deadline)
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
                _believe(answer, self._terms.wrong_answer(answer, self._asked.pop(id)))
                return answer
            if getattr(answer, "id", 0) == id:
                raise Trouble("protocol", f"{type(answer).__name__} where {kind.__name__} was asked for")
            if isinstance(answer, (Found, protocol.Leased, protocol.Reserved, protocol.Committed, protocol.Error)):
                if not 0 < answer.id <= self._next:
                    raise Trouble("protocol", f"{type(answer).__name__} to a request that was never made")
                if answer.id in self._asked:  # else nobody waits for it any more
                    self._early[answer.id] = answer
            elif self.notices is not None and isinstance(answer, (protocol.Ready, protocol.Failed)):
                self.notices.append(answer)

    def check(self, notice: protocol.Ready | protocol.Failed, pending: set[int], failed: Iterable[int] = ()) -> None:
        """Trouble when it cannot be true of a lease of which these are pending, and these have failed."""
        _believe(notice, self._terms.wrong_notice(notice, pending, failed))

    def read_notices(self, deadline: float) -> None:
        """Take what has come unasked by now into ``notices``, without waiting. The rest, if there is no end to it by
        the deadline, the next time."""
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
            if data is None or time.monotonic() >= deadline:
                return

    def arrivals(
        self, leased: protocol.Leased, count: int, deadline: float, missed: list[str]
    ) -> Iterator[tuple[int, protocol.Slot]]:
        """The lease's blocks from the first on, each as soon as it is there. Ends before ``count`` at the first that
        will not come, and then says in ``missed`` why."""
        slots = dict(enumerate(leased.slots))
        pending, failed = set(leased.pending), dict[int, str]()
        for index in range(count):
            while index in pending:
                notice = self._read(deadline)
                if not isinstance(notice, (protocol.Ready, protocol.Failed)) or notice.lease != leased.lease:
                    continue
                self.check(notice, pending)
                pending.difference_update(notice.indices)
                if isinstance(notice, protocol.Ready):
                    slots.update(zip(notice.indices, notice.slots, strict=True))
                else:
                    failed.update(dict.fromkeys(notice.indices, notice.why))
            if (slot := slots.get(index)) is None:
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
        if len(self._handed) > HANDED_MAX:
            raise Trouble("protocol", "more descriptors than anybody asked for")
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
        if end > ANSWER_BYTES_MAX:
            raise Trouble("protocol", f"an answer of {end} bytes, and {ANSWER_BYTES_MAX} are the most")
        if len(buffer) < end:
            return None
        body = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        try:
            return protocol.answer_decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:  # the last: nested too deep
            raise Trouble("protocol", str(error)) from None


def _believe(answer: protocol.Answer, wrong: str | None) -> None:
    if wrong is not None:
        raise Trouble("protocol", f"{type(answer).__name__}: {wrong}")


def joined(keys: Sequence[bytes], each: bool = True) -> bytes:
    """Keys as they are sent. Trouble("refused") for what is none. A lookup has thousands and copies nothing: it has not
    ``each`` looked at, but their sum."""
    sent = b"".join(keys)
    if len(sent) != KEY_BYTES * len(keys) or (each and not set(map(len, keys)) <= {KEY_BYTES}):
        raise Trouble("refused", f"keys: each has {KEY_BYTES} bytes, and one has not")
    return sent


def checked_ms(name: str, ms: int) -> int:
    """ValueError for what is no number of milliseconds that one can wait, whatever its type."""
    if not isinstance(ms, int) or isinstance(ms, bool) or not 0 <= ms <= MS_MAX:
        raise ValueError(f"{name} is {ms!r:.80}, and should be a whole number of milliseconds from 0 to {MS_MAX}")
    return ms


def after(ms: float) -> float:
    return time.monotonic() + min(ms, MS_MAX) / 1e3


def left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left

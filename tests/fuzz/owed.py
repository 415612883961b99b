"""What the engine door owes a connection for the bytes that were sent, and whether it paid.

Owns the account of one connection. Called by the fuzzers of the door. Imports ``daemon.protocol``.
"""

from collections import Counter, deque

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH
from terracekv.tests.fuzz.frames import Handle

ASKS = (protocol.Lookup, protocol.Acquire, protocol.Reserve, protocol.Commit)
COMES_ONCE = (protocol.Found, protocol.Leased, protocol.Reserved, protocol.Committed, protocol.Error)


class Owed:
    """Each complete frame that asks is owed one answer with its id. A frame that cannot be read, or does not ask and is
    wrong, has no id, nor has a request whose id is 0: of those answers only the number can be compared."""

    def __init__(self) -> None:
        self.last: protocol.Answer | None = None
        self.handles: deque[Handle] = deque([(1, []), (2, [0])], maxlen=8)
        """Leases and reservations that it was given, so that its frames hit some."""
        self.answered: Counter[str] = Counter()
        self._stream = b""
        self._owed: Counter[int] = Counter()
        self._got: Counter[int] = Counter()
        self._owed_nameless = self._got_nameless = 0
        self._greeted = False

    def sent(self, data: bytes) -> None:
        """Note what the frames that ``data`` completes are owed."""
        self._stream += data
        while len(self._stream) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._stream)
            if length > FRAME_BYTES_MAX or len(self._stream) < LENGTH.size + length:
                return
            self._owe(self._stream[LENGTH.size : LENGTH.size + length])
            self._stream = self._stream[LENGTH.size + length :]

    def came(self, answer: protocol.Answer) -> None:
        """Note an answer, and the handles in it."""
        assert not (isinstance(answer, protocol.Error) and "the daemon failed" in answer.message), answer
        self.last = answer
        self.answered[type(answer).__name__] += 1
        if isinstance(answer, COMES_ONCE):
            self._got[answer.id] += bool(answer.id)
            self._got_nameless += not answer.id
        if isinstance(answer, protocol.Leased):
            self.handles.append((answer.lease, []))
        elif isinstance(answer, protocol.Reserved):
            written = [index for index, slot in enumerate(answer.slots) if slot is not None]
            self.handles.append((answer.reservation, written))
        elif isinstance(answer, protocol.Committed):
            self.answered["stored"] += len(answer.stored)

    @property
    def due(self) -> bool:
        """Whether something is still to come."""
        return bool(self._owed - self._got) or self._got_nameless < self._owed_nameless

    def wrong(self, closed: bool) -> str | None:
        """What is wrong with the answers once nothing is under way, or the door has ``closed`` the connection; None
        when they are what was owed."""
        if closed:
            told = isinstance(self.last, protocol.Refused | protocol.Error)
            return None if told else f"closed without a reason after {self.last}"
        if missing := self._owed - self._got:
            return f"not answered: ids {dict(missing)}"
        if extra := self._got - self._owed:
            return f"answered too often: ids {dict(extra)}"
        if self._got_nameless < self._owed_nameless:
            return f"{self._owed_nameless} frames without an id are owed an answer, {self._got_nameless} came"
        return None

    def _owe(self, body: bytes) -> None:
        try:
            request = protocol.request_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._owed_nameless += 1
            return
        if isinstance(request, ASKS):
            self._owed[request.id] += bool(request.id)
            self._owed_nameless += not request.id
        elif isinstance(request, protocol.Hello):
            self._owed_nameless += self._greeted
            self._greeted = True

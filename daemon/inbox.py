"""What a connection of the engine door has sent and is not served yet.

Owns the connection's buffer, the count of what its requests that wait keep, and whether its transport is read. Called
by the connection and the door's line, on the event loop. Imports ``line``, ``protocol`` and ``unfinished``.

One frame is served as it comes; the others of a connection that sends several at once wait for their turn in the line.
A connection is not read while it waits with much, nor while it does not read its answers, nor served while its requests
that were begun and not ended (those that wait for a tier) keep much: they are bounded in time, so it goes on.
"""

import asyncio
from collections.abc import Callable

from terracekv.daemon.line import Line
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH
from terracekv.daemon.unfinished import BYTES_MAX, SMALL_BYTES, Unfinished

WAITING_BYTES_MAX = 4 << 20
"""Kept by a connection's requests that wait, before the next one is served: as much as the longest frame has."""
WAITING_BYTES_MIN = 1 << 10
"""What a request is counted for at the least: it takes about that much however little it asks for."""


class Inbox:
    """``serve`` is given each frame's body, ``break_off`` why the connection cannot go on, and what to do about it."""

    def __init__(
        self,
        transport: asyncio.Transport,
        line: Line,
        unfinished: Unfinished,
        serve: Callable[[bytes], None],
        break_off: Callable[[str, str], None],
    ) -> None:
        self._transport = transport
        self._line = line
        self._unfinished = unfinished
        self._serve = serve
        self._break_off = break_off
        self._buffer = bytearray()
        self._waits = False
        self._full = False
        self._waiting_bytes = 0

    def take(self, data: bytes) -> None:
        """More bytes have come."""
        self._buffer += data
        if not self._waits and self.serve_one():
            self._waits = True
            self._line.join(self)
        if self._waits and len(self._buffer) > SMALL_BYTES:
            self._transport.pause_reading()

    def hold(self, size_bytes: int) -> Callable[[object], None]:
        """A request waits, and keeps so much until what is returned is called, once, with whatever."""
        size_bytes = max(size_bytes, WAITING_BYTES_MIN)
        self._waiting_bytes += size_bytes
        if self._stuffed:
            self._transport.pause_reading()

        def let_go(_: object) -> None:
            stuffed = self._stuffed
            self._waiting_bytes -= size_bytes
            if stuffed and not self._stuffed and not self._waits:
                if self._whole():
                    self._waits = True
                    self._line.join(self)
                else:
                    self._listen()

        return let_go

    def full(self, full: bool) -> None:
        """Whether answers pile up on their way out."""
        self._full = full
        if full:
            self._transport.pause_reading()
        else:
            self._listen()

    def end(self) -> None:
        """The connection is over."""
        self._unfinished.keep(self, 0)

    def serve_one(self) -> bool:
        """Serve the first frame, if it is whole and may be served now; whether another one is."""
        if end := self._next():
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            self._serve(body)
        if self._next():
            return True
        if self._waits:
            self._waits = False
            self._listen()
        if not self._unfinished.keep(self, len(self._buffer)):
            text = f"frames that have not ended, or are not served yet, take {BYTES_MAX} bytes already"
            self._break_off(text, "send frames without a pause, and fewer ahead of their answers")
            self._buffer.clear()
        return False

    @property
    def _stuffed(self) -> bool:
        return self._waiting_bytes >= WAITING_BYTES_MAX

    def _next(self) -> int:
        """Where the first frame ends; 0 when it is not whole or has to wait for requests before it."""
        return 0 if self._stuffed else self._whole()

    def _whole(self) -> int:
        """Where the first frame ends; 0 when it has not, or when it, or the connection, will not be served."""
        if self._transport.is_closing():
            self._buffer.clear()
        if len(self._buffer) < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > FRAME_BYTES_MAX:
            self._break_off(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}", "split the keys")
            self._buffer.clear()
            return 0
        return LENGTH.size + length if len(self._buffer) >= LENGTH.size + length else 0

    def _listen(self) -> None:
        """Take requests again, unless there is still a reason not to."""
        if not (self._full or self._waits or self._stuffed or self._transport.is_closing()):
            self._transport.resume_reading()

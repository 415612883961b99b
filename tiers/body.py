"""What a server says of an object, and the object's bytes on their way to us.

``Body`` owns a connection until it is finished. Made by ``bucket``; read by the s3 tier and ``s3_audit``, each in one
thread. Imports ``errors`` and ``s3_errors``.
"""

import http.client
import threading
import time
from dataclasses import dataclass
from typing import Any

from terracekv.tiers.errors import TierDown
from terracekv.tiers.s3_errors import Unreachable, answer_of

PIECE_BYTES = 256 << 10
"""Sent or received between two looks at the clock."""
CUT_OFF = "cut off, as the daemon stops"


@dataclass(frozen=True, slots=True)
class Object:
    """What a server says of an object. ``age_s`` is by the server's own clock."""

    key: str
    size: int
    age_s: float
    etag: str = ""


class Body:
    """An object's bytes on their way. One thread's; only within ``Bucket.get``."""

    def __init__(self, about: Object, stream: Any, deadline: float, timeout_s: float, closed: threading.Event) -> None:
        self.about = about
        self.waited_s = 0.0
        """Time spent in reading, so without what the reader did in between."""
        self._stream = stream
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._closed = closed
        raw = getattr(stream, "_raw_stream", None)
        reader = getattr(raw, "_fp", None)
        # urllib3 and botocore would copy every byte twice more, under the interpreter lock.
        straight = isinstance(reader, http.client.HTTPResponse) and not reader.chunked and reader.length is not None
        self._http: Any = reader if straight else None
        self._raw: Any = raw

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``, and never a byte beside it. Unreachable when the body ends before or the time is over,
        TierDown when the bucket is closed meanwhile."""
        started = time.monotonic()
        with answer_of(self.about.key):
            self._fill(view)
        self.waited_s += time.monotonic() - started

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            if self._closed.is_set():
                raise TierDown(f"{self.about.key}: {CUT_OFF}")
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise Unreachable(f"{self.about.key}: not read in time")
            if left_s < self._timeout_s:
                self._stream.set_socket_timeout(left_s)
            count = self._receive(view[done:])
            if not count:
                raise Unreachable(f"{self.about.key}: the body ends before its length")
            done += count

    def _receive(self, view: memoryview) -> int:
        reader = self._http
        if reader is None:
            part = self._stream.read(min(len(view), PIECE_BYTES))
            view[: len(part)] = part
            return len(part)
        if not reader.length:
            return 0
        # One recv at most: a server that trickles cannot keep us past the deadline.
        count = int(reader.fp.readinto1(view[: reader.length]))
        reader.length -= count
        return count

    def finish(self) -> None:
        """Give the connection back for reuse when all was read, else end it."""
        with answer_of(self.about.key):
            if self._http is not None and self._http.length == 0:
                self._http.close()
                self._raw.release_conn()
            else:
                self._stream.close()

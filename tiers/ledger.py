"""The counts of one tier and its last error.

Owns both, under a lock of its own. Written by the parts of a tier from any thread. Imports ``tier``.
"""

import logging
import threading
import time
from dataclasses import replace

from terracekv.tiers.tier import Counters, Outcome

log = logging.getLogger(__name__)

REPEATED_S = 60.0
"""The same words are logged once in so many seconds; all are counted."""
SAID_MAX = 64


class Ledger:
    """Thread-safe ``Counters`` with the message of what went wrong last."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._counters = Counters()
        self._last_error: str | None = None
        self.last_error_at: float | None = None
        self._said: dict[str, float] = {}
        """What was logged of late, and when."""

    @property
    def last_error(self) -> str | None:
        """What went wrong last; setting it notes the time."""
        return self._last_error

    @last_error.setter
    def last_error(self, why: str) -> None:
        self._last_error = why
        self.last_error_at = time.time()

    def put(self, size: int) -> None:
        """A block of ``size`` bytes was stored."""
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += size

    def got(self, outcome: Outcome, size: int) -> None:
        """A get of ``size`` bytes ended."""
        with self._lock:
            if outcome is Outcome.HIT:
                self._counters.hits += 1
                self._counters.get_bytes += size
            else:
                self._counters.misses += 1

    def left(self, reason: str, blocks: int) -> None:
        """Blocks are not listed any more."""
        if not blocks:
            return
        with self._lock:
            self._counters.evictions[reason] = self._counters.evictions.get(reason, 0) + blocks

    def damaged(self, why: str) -> None:
        """Stored bytes were wrong."""
        log.warning("%s tier: %s; it is forgotten", self._tier, why)
        with self._lock:
            self._counters.checksum_failures += 1
            self.last_error = why

    def failed(self, error: Exception) -> None:
        """The medium raised an error."""
        # Its text only: whoever keeps the record would keep the frames of its traceback, and the sockets in them.
        text, now = str(error), time.monotonic()
        with self._lock:
            self._counters.io_errors += 1
            self.last_error = text
            new = now - self._said.get(text, float("-inf")) >= REPEATED_S
            if new:
                if len(self._said) >= SAID_MAX:
                    self._said.clear()
                self._said[text] = now
        if new:
            log.warning("%s tier: %s", self._tier, text)

    def counters(self) -> Counters:
        """A copy."""
        with self._lock:
            return replace(self._counters, evictions=dict(self._counters.evictions))

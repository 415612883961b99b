"""The counts of one tier and its last error.

Owns both, under a lock of its own. Written by the parts of a tier from any thread. Imports ``errors``, ``journal`` and
``tier``.
"""

import threading
import time
from dataclasses import replace

from terracekv.tiers.errors import Damaged, TierFull, event_and_advice
from terracekv.tiers.journal import Journal
from terracekv.tiers.tier import Counters, Outcome

journal = Journal(__name__)

REPEATED_S = 60.0
"""The same words are logged once in so many seconds; all are counted."""
SAID_MAX = 64


class Ledger:
    """Thread-safe ``Counters`` with the message of what went wrong last."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._counters = Counters()
        self.last_error: str | None = None
        """What went wrong last: in words, when, under which id, and what to do about it."""
        self.last_error_at: float | None = None
        self.last_event: str | None = None
        self.advice: str | None = None
        self._said: dict[str, float] = {}
        """What was logged of late, and when."""

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
        advice = "it is forgotten, and stored anew when it is computed; if it goes on, suspect the medium"
        error = Damaged(why, f"{advice}, or, of what is sealed, encryption.key_file")
        journal.warning(error.event, f"{self._tier} tier: {why}; it is forgotten", tier=self._tier)
        with self._lock:
            self._counters.checksum_failures += 1
        self.noted(error)

    def noted(self, error: Exception) -> None:
        """What went wrong last was this; it is neither counted nor logged."""
        self._note(getattr(error, "message", "") or str(error), *event_and_advice(error))

    def full(self, why: str, advice: str) -> None:
        """A block was refused for want of room."""
        self._note(why, TierFull.own_event, advice)

    def _note(self, text: str, event: str, advice: str) -> None:
        with self._lock:
            self.last_error, self.last_error_at, self.last_event, self.advice = text, time.monotonic(), event, advice

    def failed(self, error: Exception) -> None:
        """The medium raised an error."""
        # Its text only: whoever keeps the record would keep the frames of its traceback, and the sockets in them.
        text, now = str(error), time.monotonic()
        self.noted(error)
        with self._lock:
            self._counters.io_errors += 1
            self.last_error = text
            new = now - self._said.get(text, float("-inf")) >= REPEATED_S
            if new:
                if len(self._said) >= SAID_MAX:
                    self._said.clear()
                self._said[text] = now
        if new:
            journal.warning(event_and_advice(error)[0], f"{self._tier} tier: {text}", tier=self._tier)

    def counters(self) -> Counters:
        """A copy."""
        with self._lock:
            return replace(self._counters, evictions=dict(self._counters.evictions))

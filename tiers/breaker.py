"""What stands between a failing server and its callers: a circuit breaker, and a limit on calls at once.

``Breaker`` and ``Throttle`` each own their state under a lock of their own. Called by ``caller`` from any thread.
Imports ``errors``.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from terracekv.tiers.errors import TierDown

UNTRIED = "it has not answered yet"


class NotTried(TierDown):
    """The breaker is open: the call was not made."""

    own_event = "TKV-S3-NOT-TRIED"


class State(StrEnum):
    """CLOSED lets calls through, OPEN refuses them, HALF_OPEN refuses them while one trial is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Open until a first trial has succeeded: nothing is known of a server that nobody has asked. Opens again after
    ``failures_max`` failures in a row. Only a trial closes it, and trials after the first are made by whoever waits on
    ``opened``: no caller ever pays for one. Seconds everywhere."""

    def __init__(self, failures_max: int = 3, pause_s_min: float = 0.5, pause_s_max: float = 4.0) -> None:
        self._failures_max = failures_max
        self._pause_s_min = pause_s_min
        self._pause_s_max = pause_s_max
        self._lock = threading.Lock()
        self._failures = 0
        self.state = State.OPEN
        self.reason: str | None = UNTRIED
        """Why it is not closed."""
        self.opened = threading.Event()
        """A call or trial has failed, and no trial has succeeded since."""
        self.pause_s = pause_s_min
        """Time to the next trial."""
        self.times_opened = 0
        self.refused = 0

    def check(self) -> None:
        """Raises NotTried, at once, unless calls are let through."""
        if self.state is not State.CLOSED:
            with self._lock:
                self.refused += 1
            raise NotTried(f"not tried: {self.reason}", "it is tried again by itself within seconds")

    def worked(self) -> None:
        """A call was answered."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self, why: Exception) -> None:
        """A call was not answered, or with an error of the server."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._failures_max:
                self._open(str(why))

    def trip(self, why: Exception) -> None:
        """No call can succeed: open at once."""
        with self._lock:
            self._open(str(why))

    def begin_trial(self) -> None:
        """One call is about to be made whatever the state says; ``end_trial`` must follow."""
        with self._lock:
            assert self.state is State.OPEN
            self.state = State.HALF_OPEN

    def end_trial(self, why: Exception | None) -> None:
        """The trial's outcome: None closes the breaker, anything else opens it for twice as long as before."""
        with self._lock:
            assert self.state is State.HALF_OPEN
            if why is None:
                self.state = State.CLOSED
                self.reason = None
                self._failures = 0
                self.pause_s = self._pause_s_min
                self.opened.clear()
            else:
                self.state = State.OPEN
                self.reason = str(why)
                if self.opened.is_set():
                    self.pause_s = min(2 * self.pause_s, self._pause_s_max)
                else:
                    self.times_opened += 1
                    self.opened.set()

    def _open(self, why: str) -> None:
        if self.state is State.CLOSED:
            self.state = State.OPEN
            self.times_opened += 1
            self.reason = why
            self.opened.set()


class Throttle:
    """At most ``limit`` calls at once: halved when the server asks for less, raised by one for each round that it does
    not, up to ``limit_max``."""

    def __init__(self, limit_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_max = limit_max
        self._limit = float(limit_max)
        self._clock = clock
        self._changed = threading.Condition()
        self._halved_at = float("-inf")
        self.running = 0

    @property
    def limit(self) -> int:
        """Calls that may run at once now."""
        return int(self._limit)

    @contextmanager
    def slot(self, deadline: float) -> Iterator[None]:
        """Be one of the calls that run; TierDown when none ends before ``deadline`` (of ``clock``)."""
        with self._changed:
            while self.running >= self.limit:
                left = deadline - self._clock()
                if left <= 0 or not self._changed.wait(left):
                    raise TierDown(f"no turn in time: {self.limit} calls at once are allowed", "the server is slow")
            self.running += 1
        try:
            yield
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify()

    def slow(self) -> None:
        """The server asked for less. All calls of one burst hear it; only the first in a second counts."""
        with self._changed:
            if self._clock() - self._halved_at >= 1.0:
                self._halved_at = self._clock()
                self._limit = max(1.0, self._limit // 2)

    def worked(self) -> None:
        """A call was answered."""
        if self._limit < self._limit_max:
            with self._changed:
                self._limit = min(float(self._limit_max), self._limit + 1 / self._limit)
                self._changed.notify()

"""The mover: worker threads behind bounded queues, the one place where the event loop meets blocking work.

Owns the threads and both queues. ``load`` and ``store`` are called on the event loop; the work runs in a worker and
its result comes back to the loop as a future. Imports ``tiers.journal``, ``tiers.steady`` and ``errors``.

Loads (somebody waits for them) go before stores. Stores are bounded in bytes: over the bound they are refused, and the
caller counts what it drops. One worker is always left to loads, so a slow disk never keeps a reader from starting.

Each thing that can hang has a mover of its own, and a mover knows how long each of its workers has been at its job: so
one that does not come back is seen (``stalled_s``), and what waits behind it is let go (``shed``).
"""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from terracekv.tiers.errors import TierDown, TierStuck
from terracekv.tiers.journal import INTERNAL, Journal
from terracekv.tiers.steady import Steady

T = TypeVar("T")
STUCK_S = 10.0
"""A call that takes longer has got stuck, if whoever made it does not say how long it may take."""
LOADS_MAX = 1 << 16
"""Loads that may wait: far more than a daemon at work ever has, and an end for one whose tier does not move."""

journal = Journal(__name__)


class Meter:
    """Measured throughput of something that several threads do at once: bytes over the time when any was at it.

    Thread-safe. It starts from an assumption that weighs as much as ``PRIOR_S`` of busy time, so that a first tiny
    transfer does not decide; old measurements fade: after ``WINDOW_S`` of busy time their weight is halved.
    """

    WINDOW_S = 2.0
    PRIOR_S = 0.02

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._busy_s = self.PRIOR_S
        self._bytes = assumed_bytes_per_s * self.PRIOR_S
        self.measured = False
        self.total_s = 0.0
        self.total_bytes = 0
        """Since start, and never faded: whoever reads them twice has the rate between."""

    def __enter__(self) -> "Meter":
        with self._lock:
            if not self._active:
                self._since = time.monotonic()
            self._active += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            now = time.monotonic()
            self._busy_s += now - self._since
            self.total_s += now - self._since
            self._since = now
            self._active -= 1
            if self._busy_s > self.WINDOW_S:
                self._busy_s /= 2
                self._bytes /= 2

    def moved(self, size_bytes: int) -> None:
        """Count bytes that went through; called inside the ``with``."""
        with self._lock:
            self._bytes += size_bytes
            self.total_bytes += size_bytes
            self.measured = True

    @property
    def bytes_per_s(self) -> float:
        """The present estimate."""
        return self._bytes / self._busy_s


@dataclass(slots=True, eq=False)
class Job:
    """``shed``: it may be let go while it waits, since whoever waits for it can do without."""

    work: Callable[[], Any]
    future: "asyncio.Future[Any]"
    store_bytes: int = 0
    limit_s: float | None = None
    shed: bool = False


class Mover:
    """``threads`` workers, whose names begin with ``name``. At most ``queue_bytes`` of stores wait or run at any time.
    A job that runs for longer than ``stuck_s``, or than it was said to take, has got stuck."""

    def __init__(self, *, threads: int, queue_bytes: int, name: str = "mover", stuck_s: float = STUCK_S) -> None:
        assert threads >= 1
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._stores_running = 0
        self._stores_running_max = max(1, threads - 1)
        self._stopping = False
        self._running: dict[int, tuple[float, float]] = {}
        """By worker: since when its job runs, and how long it may."""
        self.stuck_s = stuck_s
        self.queue_bytes_max = queue_bytes
        self.queue_bytes = 0
        self.failures = 0
        self._threads = [Steady(f"{name}-{n}", partial(self._work, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def load(self, work: Callable[[], T], *, limit_s: float | None = None, shed: bool = False) -> "asyncio.Future[T]":
        """Run ``work`` ahead of all stores. The future has its result or its exception.

        ``limit_s``: how long it may run before it counts as stuck, if not ``stuck_s``; ``shed``: see ``Job``."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            assert not self._stopping
            if len(self._loads) >= LOADS_MAX:
                future.set_exception(TierDown(f"{LOADS_MAX} jobs wait already", "look at what does not move"))
                return future
            self._loads.append(Job(work, future, 0, limit_s, shed))
            self._wake.notify()
        return future

    async def ask(self, work: Callable[[], T], within_s: float, what: str) -> T:
        """As ``load``, for whoever waits no longer than ``within_s``. TierStuck names ``what``; the work goes on."""
        future = self.load(work)
        future.add_done_callback(heard)
        if not (await asyncio.wait([future], timeout=within_s))[0]:
            raise TierStuck(f"{what} did not answer within {within_s:g} s", "it goes on; see the daemon's log for why")
        return future.result()

    def store(self, size_bytes: int, work: Callable[[], T]) -> "asyncio.Future[T] | None":
        """Run ``work`` when no load waits; None when ``size_bytes`` more would pass the bound."""
        if self.queue_bytes + size_bytes > self.queue_bytes_max or self._stopping:
            return None
        future: asyncio.Future[T] = self._loop.create_future()
        self.queue_bytes += size_bytes
        with self._wake:
            self._stores.append(Job(work, future, size_bytes, shed=True))
            self._wake.notify()
        return future

    def room(self, size_bytes: int) -> int:
        """How many stores of so many bytes are taken now."""
        return max(0, (self.queue_bytes_max - self.queue_bytes) // size_bytes)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest job runs that is past its limit; 0 when none is. For any thread."""
        now = time.monotonic()
        ages = [(now - since, limit) for since, limit in [*self._running.values()]]
        return max((age for age, limit in ages if age > limit), default=0.0)

    @property
    def idle(self) -> bool:
        """Whether no job waits or runs."""
        with self._wake:
            return not (self._loads or self._stores or self._running)

    def shed(self, why: TierStuck) -> int:
        """Let go of what waits and may be let go: its futures raise ``why``. How many. On the event loop."""
        with self._wake:
            gone = [job for job in (*self._loads, *self._stores) if job.shed]
            self._loads = deque(job for job in self._loads if not job.shed)
            self._stores = deque(job for job in self._stores if not job.shed)
        for job in gone:
            self._settle(job, None, why)
        return len(gone)

    async def drain(self) -> None:
        """Wait until no store is queued or running."""
        while self.queue_bytes:
            await asyncio.sleep(0.01)

    def close(self, wait_s: float | None = None) -> bool:
        """End the workers after what they are doing now; queued work is dropped, its futures cancelled. False when one
        has not ended within ``wait_s``."""
        with self._wake:
            self._stopping = True
            dropped = [job.future for job in (*self._loads, *self._stores)]
            self._loads.clear()
            self._stores.clear()
            self._wake.notify_all()
        until = None if wait_s is None else time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        for future in dropped:
            future.cancel()
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        with contextlib.suppress(OSError):
            # Woken by an engine's message, a worker must not push that engine, in the middle of a copy, off its
            # processor: as a batch thread it takes an idle one, or waits for its turn.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (job := self._next(number)) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.work()
            except OSError as caught:  # of the machine, not of ours: whoever waits for it says what it means
                self.failures += 1
                error = caught
            except BaseException as caught:
                self.failures += 1
                journal.failed(INTERNAL, "a job of the mover failed", caught)
                error = caught if isinstance(caught, Exception) else RuntimeError(f"the worker was left by {caught!r}")
            with self._wake:
                del self._running[number]
                if job.store_bytes:
                    self._stores_running -= 1
                    self._wake.notify()
            try:
                self._loop.call_soon_threadsafe(self._settle, job, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody is left to tell

    def _next(self, number: int) -> Job | None:
        with self._wake:
            while True:
                if self._stopping:
                    return None
                job = None
                if self._loads:
                    job = self._loads.popleft()
                elif self._stores and self._stores_running < self._stores_running_max:
                    self._stores_running += 1
                    job = self._stores.popleft()
                if job is not None:
                    self._running[number] = time.monotonic(), self.stuck_s if job.limit_s is None else job.limit_s
                    return job
                self._wake.wait()

    def _settle(self, job: Job, result: Any, error: BaseException | None) -> None:
        self.queue_bytes -= job.store_bytes
        if job.future.cancelled():
            return
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)


def heard(done: "asyncio.Future[Any]") -> None:
    """Nobody need hear of an error of it: the mover has logged and counted it."""
    if not done.cancelled():
        done.exception()

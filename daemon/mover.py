"""The mover: worker threads behind bounded queues, the one place where the event loop meets blocking work.

Owns the threads and both queues. ``load`` and ``store`` are called on the event loop; the work runs in a worker and
its result comes back to the loop as a future. Imports nothing of us.

Loads (somebody waits for them) go before stores. Stores are bounded in bytes: over the bound they are refused, and the
caller counts what it drops. One worker is always left to loads, so a slow disk never keeps a reader from starting.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


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
            self._since = now
            self._active -= 1
            if self._busy_s > self.WINDOW_S:
                self._busy_s /= 2
                self._bytes /= 2

    def moved(self, size_bytes: int) -> None:
        """Count bytes that went through; called inside the ``with``."""
        with self._lock:
            self._bytes += size_bytes
            self.measured = True

    @property
    def bytes_per_s(self) -> float:
        """The present estimate."""
        return self._bytes / self._busy_s


class Mover:
    """``threads`` workers. At most ``queue_bytes`` of stores wait or run at any time."""

    def __init__(self, *, threads: int, queue_bytes: int) -> None:
        assert threads >= 1
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._loads: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._stores: deque[tuple[Callable[[], Any], asyncio.Future[Any], int]] = deque()
        self._stores_running = 0
        self._stores_running_max = max(1, threads - 1)
        self._stopping = False
        self.queue_bytes_max = queue_bytes
        self.queue_bytes = 0
        self.failures = 0
        self._threads = [threading.Thread(target=self._work, name=f"mover-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def load(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run ``work`` ahead of all stores. The future has its result or its exception."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            assert not self._stopping
            self._loads.append((work, future))
            self._wake.notify()
        return future

    def store(self, size_bytes: int, work: Callable[[], T]) -> "asyncio.Future[T] | None":
        """Run ``work`` when no load waits; None when ``size_bytes`` more would pass the bound."""
        if self.queue_bytes + size_bytes > self.queue_bytes_max or self._stopping:
            return None
        future: asyncio.Future[T] = self._loop.create_future()
        self.queue_bytes += size_bytes
        with self._wake:
            self._stores.append((work, future, size_bytes))
            self._wake.notify()
        return future

    async def drain(self) -> None:
        """Wait until no store is queued or running."""
        while self.queue_bytes:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """End the workers after what they are doing now; queued work is dropped, its futures cancelled."""
        with self._wake:
            self._stopping = True
            dropped = [future for _, future in self._loads] + [future for _, future, _ in self._stores]
            self._loads.clear()
            self._stores.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        for future in dropped:
            future.cancel()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            # Woken by an engine's message, a worker must not push that engine, in the middle of a copy, off its
            # processor: as a batch thread it takes an idle one, or waits for its turn.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (job := self._next()) is not None:
            work, future, store_bytes = job
            result: Any = None
            error: Exception | None = None
            try:
                result = work()
            except OSError as caught:  # of the machine, not of ours: whoever waits for it says what it means
                self.failures += 1
                error = caught
            except Exception as caught:
                self.failures += 1
                log.exception("a job of the mover failed")
                error = caught
            with self._wake:
                if store_bytes:
                    self._stores_running -= 1
                    self._wake.notify()
            try:
                self._loop.call_soon_threadsafe(self._settle, future, result, error, store_bytes)
            except RuntimeError:
                return  # the loop is closed: nobody is left to tell

    def _next(self) -> "tuple[Callable[[], Any], asyncio.Future[Any], int] | None":
        with self._wake:
            while True:
                if self._stopping:
                    return None
                if self._loads:
                    return *self._loads.popleft(), 0
                if self._stores and self._stores_running < self._stores_running_max:
                    self._stores_running += 1
                    return self._stores.popleft()
                self._wake.wait()

    def _settle(self, future: "asyncio.Future[Any]", result: Any, error: Exception | None, store_bytes: int) -> None:
        self.queue_bytes -= store_bytes
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

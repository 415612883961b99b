"""The line of those who have asked more than one thing at once, so that nobody who asks one thing waits behind them.

Owns the order. Called by connections of the engine door on the event loop. Imports nothing of us.

The first request of a connection is served when it comes. What else is in its buffer then is served in turns: one
request of each that waits, for a short time, and then whoever has come meanwhile. A lookup of an engine that waits for
its answer is so delayed by a request or two, however many others have sent ahead.
"""

import asyncio
import time
from collections import deque
from typing import Protocol

SLICE_S = 0.0005


class Waiter(Protocol):
    """Somebody with requests that are not served yet."""

    def serve_one(self) -> bool:
        """Serve the first of them; whether there is another."""
        ...


class Line:
    """One for the door."""

    def __init__(self) -> None:
        self._waiting: deque[Waiter] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def join(self, waiter: Waiter) -> None:
        """Wait for a turn; once at a time."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(waiter)

    def _turn(self) -> None:
        end = time.perf_counter() + SLICE_S
        while self._waiting:
            if self._waiting[0].serve_one():
                self._waiting.rotate(-1)
            else:
                self._waiting.popleft()
            if time.perf_counter() >= end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)

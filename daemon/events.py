"""What happened to blocks, for those who listen: a numbered stream with a bounded memory.

Owns the ring of recent events and the listeners' queues. ``publish`` may be called from any thread and must be quick;
``listen`` runs on the event loop. Imports the standard library only.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

KEPT = 4096
"""Events a late or slow listener can still be given; beyond that it is told that it missed some."""


class Events:
    """A listener whose queue falls more than ``KEPT`` events behind gets a ``gap`` event and goes on from there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._news = asyncio.Event()
        self.listeners = 0
        self.last = 0

    def publish(self, kind: str, **fields: Any) -> None:
        """``kind`` is ``stored``, ``removed`` or ``flushed``; keys are hex, ``tier`` says where."""
        event = {"seq": next(self._numbers), "event": kind, **fields}
        self._kept.append(event)
        self.last = event["seq"]
        if self.listeners:
            self._loop.call_soon_threadsafe(self._news.set)

    def skip(self, count: int) -> None:
        """Number events that nobody listens to without making them; who asks for them later is told of the gap."""
        for _ in range(count):
            self.last = next(self._numbers)

    async def listen(self, after: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Events with numbers above ``after`` (default: from now on), for ever."""
        seen = self.last if after is None else after
        self.listeners += 1
        try:
            while True:
                self._news.clear()
                fresh = [event for event in list(self._kept) if event["seq"] > seen]
                first = fresh[0]["seq"] if fresh else self.last + 1
                if first > seen + 1:
                    yield {"seq": first - 1, "event": "gap", "missed": first - seen - 1}
                    seen = first - 1
                for event in fresh:
                    yield event
                    seen = event["seq"]
                if not fresh:
                    await self._news.wait()
        finally:
            self.listeners -= 1

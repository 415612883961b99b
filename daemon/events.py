"""What happened to blocks, for those who listen: a numbered stream with a bounded memory.

Owns the ring of recent events and the listeners' queues. ``publish`` may be called from any thread and must be quick;
``listen`` runs on the event loop. Imports the standard library only.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

KEPT = 4096
"""Events a late or slow listener can still be given; beyond that it is told that it missed some."""


class Events:
    """A listener for whom events were not kept gets a ``gap`` event in their place, and goes on behind it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._numbering = threading.Lock()  # what is kept is in the order of its numbers
        self._news = asyncio.Event()
        self.listeners = 0
        self.last = 0

    def publish(self, kind: str, **fields: Any) -> None:
        """``kind`` is ``stored``, ``removed`` or ``flushed``; keys are hex, ``tier`` says where."""
        with self._numbering:
            self.last = next(self._numbers)
            self._kept.append({"seq": self.last, "event": kind, **fields})
        if self.listeners:
            self._loop.call_soon_threadsafe(self._news.set)

    def skip(self, count: int) -> None:
        """Number events that nobody listens to without making them; who asks for them later is told of the gap."""
        with self._numbering:
            for _ in range(count):
                self.last = next(self._numbers)

    async def listen(self, after: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Events with numbers above ``after`` (default: from now on), for ever. A number that is still to come was
        given by a daemon before this one: how many were missed since is not known, and all of this one's are told."""
        seen = self.last if after is None else after
        self.listeners += 1
        try:
            if seen > self.last:
                seen = 0
                yield {"seq": 0, "event": "gap", "missed": None}
            while True:
                self._news.clear()
                with self._numbering:
                    fresh, last = [event for event in self._kept if event["seq"] > seen], self.last
                for event in fresh:
                    if event["seq"] > seen + 1:
                        yield _gap(seen, event["seq"] - 1)
                    yield event
                    seen = event["seq"]
                if not fresh and last > seen:
                    yield _gap(seen, last)
                    seen = last
                elif not fresh:
                    await self._news.wait()
        finally:
            self.listeners -= 1


def _gap(seen: int, last: int) -> dict[str, Any]:
    return {"seq": last, "event": "gap", "missed": last - seen}

"""Who listens to a stream of the people's door: how many there may be, and when one is told to end.

Owns the set of listeners, of all streams together. Called by ``http_door``, ``http_queries`` and ``http_live`` on the
event loop. Imports aiohttp, ``access_file``, ``http_gate`` and ``http_messages``.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from aiohttp import web

from terracekv.daemon.access_file import Caller
from terracekv.daemon.http_gate import caller_of
from terracekv.daemon.http_messages import Problem

LISTENERS_MAX = 64
LISTENERS_OF_TENANT_MAX = 16
LISTENER_IDLE_S = 60.0
EVENTS_TYPE = "text/event-stream"


@dataclass(eq=False)
class Listener:
    """One stream. ``ended`` is set when it is to end; ``news`` wakes it for that, or for whatever else there is."""

    caller: Caller
    connection: web.RequestHandler
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    writing: bool = False

    def end(self) -> None:
        """End the stream; one that waits for its reader is cut off."""
        self.ended = True
        self.news.set()
        if self.writing and self.connection.transport is not None:
            self.connection.transport.abort()

    async def send(self, response: web.StreamResponse, data: bytes) -> None:
        """ConnectionResetError when the reader takes nothing, or is not there any more."""
        self.writing = True
        try:
            async with asyncio.timeout(LISTENER_IDLE_S):
                await response.write(data)
        except TimeoutError:
            self.end()
            raise ConnectionResetError(f"the listener took nothing for {LISTENER_IDLE_S:g} s") from None
        finally:
            self.writing = False


class Listeners:
    """All who listen now."""

    def __init__(self) -> None:
        self._all: dict[web.RequestHandler, Listener] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._all)

    @contextlib.contextmanager
    def join(self, request: web.BaseRequest) -> Iterator[Listener]:
        """A place for who asks, for as long as the stream lasts. Problem 503 when there is none."""
        caller = caller_of(request)
        if len(self._all) >= LISTENERS_MAX:
            raise Problem(503, "busy", f"{LISTENERS_MAX} clients listen to events already", "close one of them")
        of_tenant = sum(each.caller.tenant == caller.tenant for each in self._all.values()) if caller.tenant else 0
        if of_tenant >= LISTENERS_OF_TENANT_MAX:
            text = f"{LISTENERS_OF_TENANT_MAX} clients of tenant {caller.tenant} listen to events already"
            raise Problem(503, "busy", text, "close one of them")
        listener = self._all[request.protocol] = Listener(caller, request.protocol)
        if self._closing or request.transport is None:
            listener.end()
        try:
            yield listener
        finally:
            del self._all[request.protocol]

    def left(self, connection: web.RequestHandler) -> None:
        """Whoever listened on this connection has gone: its place is free at once."""
        if connection in self._all:
            self._all[connection].end()

    def close(self) -> None:
        """End all streams, and begin none."""
        self._closing = True
        for listener in list(self._all.values()):
            listener.end()

    def end_unknown(self, knows: Callable[[Caller], bool]) -> None:
        """End the streams of callers that the access file does not have any more, or has with other rights."""
        for listener in list(self._all.values()):
            if not knows(listener.caller):
                listener.end()


def stream() -> web.StreamResponse:
    """The head of an answer that goes on."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    response.content_type = EVENTS_TYPE
    return response

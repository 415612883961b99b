"""How the body of a request over HTTP is read: piece by piece, within limits of size, time and memory.

Owns the memory that bodies may take at once. Called by the other ``http_`` modules on the event loop. Imports aiohttp,
msgspec, ``http_messages`` and ``errors``.
"""

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from terracekv.daemon.http_messages import BODY_BYTES_MAX, PACK_TYPES, Problem, too_large
from terracekv.tiers.errors import BadRequest

T = TypeVar("T")

BODY_S_MAX = 30.0
BODIES_BYTES_MAX = 64 << 20
"""Bodies being read at one time, together; the rest wait on their connections."""
SMALL_BODY_BYTES = 64 << 10
"""Never waits: a connection may buffer as much anyway."""


class Bodies:
    """Reads bodies of requests within the limits above. One for all connections."""

    def __init__(self) -> None:
        self._reading_bytes = 0
        self._room = asyncio.Condition()

    async def read(self, request: web.BaseRequest, kind: type[T]) -> T:
        """The request's body as a ``kind``; BadRequest names the field that is wrong."""
        packed = _is_packed(request)
        length = request.content_length
        if length is not None and length > BODY_BYTES_MAX:
            raise too_large("the body", length, BODY_BYTES_MAX, "send keys instead of tokens, or split the request")
        expected = BODY_BYTES_MAX if length is None else length
        if expected <= SMALL_BODY_BYTES:
            return _decode(await _collect(request), kind, packed)
        async with self._room:
            await self._room.wait_for(lambda: self._reading_bytes + expected <= BODIES_BYTES_MAX)
            self._reading_bytes += expected
        try:
            return _decode(await _collect(request), kind, packed)
        finally:
            async with self._room:
                self._reading_bytes -= expected
                self._room.notify_all()


def waits_for_leave(request: web.BaseRequest) -> bool:
    """Whether the client sends no body before it is told to, or has its answer."""
    return request.headers.get("Expect", "").lower() == "100-continue"


async def go_ahead(request: web.BaseRequest) -> None:
    """Give leave to send the body."""
    if waits_for_leave(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def next_piece(request: web.BaseRequest, idle_s: float) -> bytes:
    """The next part of a body, empty after the last. 408 when nothing comes for ``idle_s`` seconds."""
    try:
        async with asyncio.timeout(idle_s):
            return await request.content.readany()
    except TimeoutError:
        raise Problem(
            408, "timeout", f"nothing of the body came for {idle_s:g} s", "send the body without pauses"
        ) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}", "check Content-Length and chunk sizes") from None


async def _collect(request: web.BaseRequest) -> bytes:
    body = bytearray()
    await go_ahead(request)
    try:
        async with asyncio.timeout(BODY_S_MAX):
            while piece := await next_piece(request, BODY_S_MAX):
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    raise too_large("the body", len(body), BODY_BYTES_MAX, "send keys instead of tokens")
    except TimeoutError:
        raise Problem(408, "timeout", f"the body took more than {BODY_S_MAX:g} s", "send it faster") from None
    return bytes(body)


def refuse_encoded(request: web.BaseRequest) -> None:
    """A body is read as the bytes that it is sent as, so one that is compressed must not be taken for what it holds."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Problem(
            415,
            "unsupported_media_type",
            f"Content-Encoding: {encoding[:40]!r}: encoded bodies are not read",
            "send the body as it is, without Content-Encoding",
        )


def _is_packed(request: web.BaseRequest) -> bool:
    refuse_encoded(request)
    if request.content_type in PACK_TYPES:
        return True
    # Asked for by name, so that no web page can make a browser send it to a daemon on the same machine.
    if request.content_type != "application/json":
        raise Problem(
            415,
            "unsupported_media_type",
            f"the body is said to be {request.headers.get('Content-Type', 'of no type')}",
            "send Content-Type: application/json, or application/msgpack",
        )
    return False


def _decode(body: bytes, kind: type[T], packed: bool) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind) if packed else msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last: too deep
        raise BadRequest(
            f"the body is not a {kind.__name__} request: {error}", "GET /openapi.json has its shape"
        ) from None

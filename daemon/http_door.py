"""The people's door: HTTP on a Unix socket and, where configured, TCP.

Owns both listeners, the table of routes, who may ask, and how errors look. Runs on the event loop and never blocks it.
Imports aiohttp, the other ``http_`` modules, ``access``, ``metrics``, ``status``, ``config``, ``descriptors``,
``gpus``, ``handshakes``, ``heartbeat``, ``sessions``, ``store``, ``errors``.

Every answer to a request that was not done is ``{"error": {"kind", "message", "hint"}}``. The Unix socket is protected
by the permissions of its file and by who is at its other end; TCP by tokens, or by being reachable from this machine
only.
"""

import asyncio
import errno
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from aiohttp import web

from terracekv.daemon.access import Access
from terracekv.daemon.access_file import Right
from terracekv.daemon.config import Config, tcp_address, version
from terracekv.daemon.descriptors import most
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.handshakes import Handshakes, listening
from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.http_blocks import CHECKSUM, Blocks
from terracekv.daemon.http_gate import admit, tenant_of
from terracekv.daemon.http_listeners import EVENTS_TYPE, Listeners
from terracekv.daemon.http_live import Live
from terracekv.daemon.http_messages import (
    Alive,
    Done,
    Explain,
    Explained,
    Flush,
    Found,
    Lookup,
    Pin,
    Prefetch,
    Problem,
    Ready,
    Stored,
    Synced,
    Unpin,
    Verified,
    Verify,
    failure,
    no_room,
    reply,
)
from terracekv.daemon.http_page import ASSET_TYPE, HTML_TYPE, Page
from terracekv.daemon.http_queries import Queries
from terracekv.daemon.http_routes import Route, Routes, openapi
from terracekv.daemon.metrics import CONTENT_TYPE, UNMATCHED, Metrics
from terracekv.daemon.own_socket import bind
from terracekv.daemon.sessions import Sessions
from terracekv.daemon.status import namespaces_document, status_document, tenant_document
from terracekv.daemon.store import Store
from terracekv.tiers.errors import InUse, TerraceError
from terracekv.tiers.journal import INTERNAL, Journal

journal = Journal(__name__)

SOCKET = "http.sock"
REQUESTS_MAX = 1024
"""Requests under way at one time, transfers and event streams included; one more is answered 503."""
CONNECTIONS_MAX = 4096
"""Idle ones included, of each listener; one more is closed at once."""
BACKLOG = 512
KEEPALIVE_S = 75.0
LINGER_S = 10.0
"""How long what is left of a refused body is read, so that the client gets to see the refusal."""
READ_BYTES = 64 << 10
CANCEL_S = 0.5
UNREADABLE = {
    "bytes when reading": "the request line and each header may have 8190 bytes: send tokens and keys in the body",
    "too many headers": "send fewer headers",
    "transfer-encoding": "send either Content-Length or Transfer-Encoding: chunked, not both",
    "content-length": "send one Content-Length, a decimal number of bytes, or Transfer-Encoding: chunked",
    "header": "send headers as NAME: VALUE, one a line",
}
"""By words of the library's message: what to do about a request that cannot be read."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
BYTES_TYPE = "application/octet-stream"
TEXT_TYPE = "text/plain"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Connection: close\r\nRetry-After: 1\r\n\r\n%b"
)
_BUSY = b'{"error": {"kind": "busy", "message": "too many connections", "hint": "close some, then try again"}}'
TOO_MANY %= len(_BUSY), _BUSY


class HttpDoor:
    """``started`` is of ``time.monotonic``; ``access`` is that of the engine door too. Raises ConfigError when a token
    file is configured and cannot be used."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        config: Config,
        started: float,
        gpus: Gpus | None = None,
        heart: Heartbeat | None = None,
        access: Access | None = None,
    ) -> None:
        self.path = config.daemon.runtime_dir / SOCKET
        self.port: int | None = None
        """The TCP port that was really bound."""
        self.not_ready: dict[str, str] = {}
        """Reasons, by part, why ``/readyz`` says no; whoever puts one in takes it out."""
        self.errors = 0
        """Requests that failed by our own fault."""
        self._store = store
        self._sessions = sessions
        self._config = config
        self._started = started
        self._gpus = gpus or Gpus()
        self._access = access or Access(config)
        self._busy: dict[asyncio.Task[Any], web.RequestHandler] = {}
        self._open: list[tuple[web.Server, asyncio.Server | Handshakes]] = []
        self._closing = False
        self._listeners = Listeners()
        self._queries = Queries(store, self._listeners)
        self._live = Live(store, self._about, self._listeners)
        self.routes = Routes(self._table(Blocks(store), self._queries, self._live, Page()))
        watched = [(route.method, route.path) for route in self.routes.all]
        self.heart = heart or Heartbeat(store)
        self._metrics = Metrics(store, sessions, watched, started, self._gpus, self.heart)

    async def listen(self) -> None:
        """Open the doors. A socket that a dead daemon left is replaced; one that answers, or a TCP port that is taken,
        is InUse."""
        loop = asyncio.get_running_loop()
        with bind(self.path, self._access.socket_owner) as bound:
            server = self._server(tcp=False)
            listener = await loop.create_unix_server(server, sock=bound.dup(), backlog=BACKLOG)
        self._open.append((server, listener))
        address = tcp_address(self._config.daemon.http)
        if address is not None:
            server = self._server(tcp=True)
            over_tcp: asyncio.Server | Handshakes
            try:
                if (context := self._access.tls.context) is None:
                    over_tcp = await loop.create_server(server, *address, backlog=BACKLOG)
                else:
                    over_tcp = Handshakes(await listening(address, BACKLOG), server, context)
            except OSError as error:
                await self.close(0)
                raise InUse(
                    f"daemon.http: {self._config.daemon.http} cannot be bound: {error.strerror}",
                    'stop what listens there, set daemon.http to another port, or to "" for no TCP',
                ) from None
            self._open.append((server, over_tcp))
            self.port = over_tcp.sockets[0].getsockname()[1]
        self.heart.start()

    async def close(self, grace_s: float) -> None:
        """Take no more connections, end idle ones and event streams at once, give requests ``grace_s`` to finish."""
        self._closing = True
        self._listeners.close()
        self.heart.stop()
        for _, listener in self._open:
            listener.close()
        self.path.unlink(missing_ok=True)
        await asyncio.sleep(0)  # requests that have just come in start
        # Only idle connections: to close one under way would make the library ignore the rest of an upload's body.
        busy = set(self._busy.values())
        for server, _ in self._open:
            for connection in server.connections:
                if connection not in busy:
                    connection.force_close()
        until = time.monotonic() + grace_s
        while self._busy and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for task in list(self._busy):
            task.cancel()
        await asyncio.gather(*(server.shutdown(CANCEL_S) for server, _ in self._open))
        self._open.clear()

    def end_unknown(self) -> None:
        """End the event streams of callers that the access file does not have any more, or has with other rights."""
        self._listeners.end_unknown(self._access.knows)

    def _server(self, *, tcp: bool) -> web.Server:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(request, tcp)

        return _Server(
            handle,
            lost=self._listeners.left,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            read_bufsize=READ_BYTES,
        )

    async def _handle(self, request: web.BaseRequest, tcp: bool) -> web.StreamResponse:
        """The outermost frame of a request."""
        task = asyncio.current_task()
        assert task is not None
        started = time.perf_counter()
        method, label = "", UNMATCHED
        self._busy[task] = request.protocol
        try:
            route, names = self.routes.match(request.method, request.rel_url.raw_path)
            method, label = route.method, route.path
            self._admit(request, route, tcp)
            response = await route.handler(request, names)
        except TerraceError as error:
            response = failure(request, error)
        except ConnectionError:
            raise  # the client has gone: there is nobody to answer
        except Exception as error:
            response = failure(request, self._failed(error, f"a request failed: {request.method} {label}", label))
        finally:
            del self._busy[task]
        if self._closing:
            response.force_close()
        self._metrics.observe(method, label, response.status, time.perf_counter() - started)
        return response

    def _failed(self, error: Exception, what: str, route: str) -> Problem:
        """What to answer to an error that nobody foresaw, once it is logged: a file system's, or our own fault."""
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            problem = no_room(error, f"{self._config.daemon.state_dir} or {self._config.disk.path}")
            journal.error("TKV-NO-ROOM", f"{what}: {problem.message}", route=route)
            return problem
        self.errors += 1
        journal.failed(INTERNAL, what, error, route=route)
        return Problem(500, "internal", f"the daemon failed on this request: {error}", "see its log")

    def _admit(self, request: web.BaseRequest, route: Route, tcp: bool) -> None:
        """Whether this request may be answered at all."""
        if self._closing:
            raise Problem(
                503, "closing", "the daemon is going down", "treat it as a miss", headers={"Connection": "close"}
            )
        if route.right is not None and len(self._busy) > REQUESTS_MAX:
            raise Problem(
                503, "busy", f"{REQUESTS_MAX} requests are under way", "try again", headers={"Retry-After": "1"}
            )
        admit(self._access, request, route, tcp=tcp)

    def _table(self, blocks: Blocks, queries: Queries, live: Live, page: Page) -> list[Route]:
        read, write, admin = Right.READ, Right.WRITE, Right.ADMIN
        return [
            Route("POST", "/v1/lookup", read, queries.lookup, "How much of a chain is here", {200: Found}, Lookup),
            Route("POST", "/v1/explain", read, queries.explain, "Why it is not", {200: Explained}, Explain),
            *_block_routes(blocks),
            Route("POST", "/v1/prefetch", read, queries.prefetch, "Bring a chain up into host", {200: Done}, Prefetch),
            Route("POST", "/v1/pin", write, queries.pin, "Keep a chain in host for a while", {200: Done}, Pin),
            Route("POST", "/v1/unpin", write, queries.unpin, "Let go of a pinned chain", {200: Done}, Unpin),
            Route("POST", "/v1/flush", admin, queries.flush, "Forget a namespace's blocks", {200: Done}, Flush),
            Route("POST", "/v1/verify", admin, queries.verify, "Check stored blocks", {200: Verified}, Verify),
            Route("POST", "/v1/sync", admin, queries.sync, "Bring what is stored on disk to the medium", {200: Synced}),
            Route("GET", "/v1/status", read, self._status, "All that the daemon knows about itself", {200: dict}),
            Route(
                "GET",
                "/v1/whatif",
                Right.METRICS,
                self._whatif,
                "Hits by capacity: what more memory would buy",
                {200: dict},
            ),
            Route("GET", "/v1/namespaces", read, self._namespaces, "All namespaces", {200: dict}),
            Route("GET", "/v1/live", read, live.stream, "Server-sent events: past, now", {200: EVENTS_TYPE}),
            Route(
                "GET",
                "/v1/events",
                read,
                queries.events,
                "Server-sent events: stored, removed, flushed, gap",
                {200: EVENTS_TYPE},
                query=["after"],
                headers=["Last-Event-ID"],
            ),
            Route(
                "GET", "/metrics", Right.METRICS, self._metrics_text, "Figures in Prometheus' format", {200: TEXT_TYPE}
            ),
            Route("GET", "/healthz", None, self._healthz, "Whether the daemon answers", {200: Alive}),
            Route("GET", "/readyz", None, self._readyz, "Whether the daemon is ready", {200: Ready, 503: Ready}),
            Route("GET", "/openapi.json", read, self._openapi_json, "This document", {200: dict}),
            Route("GET", "/", None, page.index, "The status page", {200: HTML_TYPE}),
            Route("GET", "/page/{file}", None, page.asset, "What the status page loads", {200: ASSET_TYPE}),
        ]

    async def _status(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return reply(request, self._about(tenant_of(request)))

    def _about(self, tenant: str) -> dict[str, Any]:
        if tenant:
            return tenant_document(self._store, self._sessions, tenant, not_ready=self._reasons())
        return status_document(
            self._store,
            self._sessions,
            self._config,
            started=self._started,
            heart=self.heart,
            not_ready=self._reasons(),
            requests=len(self._busy),
            gpus=self._gpus,
            access=self._access,
        )

    async def _whatif(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return reply(request, self._sessions.demand.whatif())

    async def _namespaces(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return reply(request, {"namespaces": namespaces_document(self._store, tenant_of(request))})

    async def _metrics_text(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return reply(request, Alive(True))

    async def _readyz(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        reasons = self._reasons()
        return reply(request, Ready(not reasons, reasons, self.heart.degraded), 503 if reasons else 200)

    async def _openapi_json(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        return reply(request, openapi(self.routes, version()))

    def _reasons(self) -> list[str]:
        return [f"{part}: {reason}" for part, reason in self.not_ready.items()]


class _Connection(web.RequestHandler):
    """Answers what is not HTTP at all in the same form as everything else, and says when it is gone."""

    lost: Callable[[web.RequestHandler], None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._manager is not None and len(self._manager.connections) > most(CONNECTIONS_MAX):
            cast(asyncio.Transport, transport).write(TOO_MANY)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.lost(self)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        kind = "bad_request" if status < 500 else "internal"
        text = (message or str(exc) or "the request cannot be read").partition("\n")[0].rstrip(": ")
        hint = next((hint for part, hint in UNREADABLE.items() if part in text.lower()), "send HTTP/1.1")
        response = failure(request, Problem(status, kind, text[:200], hint))
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, handler: Any, *, lost: Callable[[web.RequestHandler], None], **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options
        self._lost = lost

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=asyncio.get_running_loop(), **self._options)
        connection.lost = self._lost
        return connection


def _block_routes(blocks: Blocks) -> list[Route]:
    shard = "/v1/namespaces/{ns}/blocks/{key}"
    return [
        route
        for path in (shard, shard + "/{shard}")
        for route in (
            Route(
                "GET",
                path,
                Right.READ,
                blocks.get,
                "Bytes of a block",
                {200: BYTES_TYPE, 206: BYTES_TYPE},
                headers=["Range"],
            ),
            Route("HEAD", path, Right.READ, blocks.head, "Whether a block is here, and in which tier", {200: None}),
            Route(
                "PUT",
                path,
                Right.WRITE,
                blocks.put,
                "Store a block",
                {201: Stored, 200: Stored},
                request=BYTES_TYPE,
                query=["durable"],
                headers=[CHECKSUM],
            ),
            Route("DELETE", path, Right.WRITE, blocks.delete, "Forget a block in every tier", {200: Done}),
        )
    ]

"""A small S3 server in memory, with a switch for each way in which real ones fail. For tests of the s3 tier.

Owns its threads and sockets; loopback only. Signatures are not checked, the access key in them is looked at. The
switches may be changed at any time, from any thread. Standard library only.
"""

import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BUCKET = "blocks"


@dataclass
class Switches:
    """All off: a server that does what it should."""

    reject_checksums: bool = False
    """Refuse requests with checksum headers, trailers or chunk framing, as servers did that do not know them."""
    store_framing: bool = False
    """Keep bodies as if the framing of a signed chunk were part of them."""
    forbid_missing: bool = False
    """403 instead of 404, as without s3:ListBucket."""
    forbid_writes: bool = False
    slow_down: float = 0.0
    """Every so-manieth request is told to slow down: 1 for all, 0.5 for every second one."""
    slow_above: int = 0
    """More requests at once than this are told to slow down; 0 for no limit."""
    expired: set[str] = field(default_factory=set)
    """Access keys whose time is over."""
    unknown: set[str] = field(default_factory=set)
    """Access keys that the server does not know."""
    skewed: bool = False
    """Refuse requests because of the date in their signature."""
    forbid_all: bool = False
    """Know who asks, and allow nothing."""
    stall: bool = False
    """Take requests and never answer them, until switched off."""
    stall_body: bool = False
    """Send half of a body, then nothing."""
    trickle: bool = False
    """Send a body a byte at a time."""
    cut_body: bool = False
    """Close the connection after half of a body."""
    longer_by: int = 0
    """Bytes more in bodies of GETs than were stored; lengths in the headers agree with the bodies."""
    shorter_by: int = 0
    no_conditions: bool = False
    """Conditional writes are not implemented."""
    bytes_per_s: float = 0.0
    """Speed of the link in both directions; 0 for as fast as may be."""
    delay_s: float = 0.0
    """Before each answer: the way there and back."""
    unheeded: str = ""
    """A parameter of lists that is not looked at: prefix, start-after or continuation-token; or ``end``: lists are
    pages of nothing, one after the other."""
    by_folder: bool = False
    """Lists go folder by folder: what is in ``a/`` comes before ``a-b``, as of a server that keeps names as paths."""
    strange: bytes | None = None
    """What is sent instead of any answer, as it is; the connection is closed after it."""
    strange_where: str = ""
    """Only to requests with this in their path."""


@dataclass
class Kept:
    """One object."""

    content: bytes
    modified: datetime

    @property
    def etag(self) -> str:
        return f'"{md5(self.content).hexdigest()}"'


class S3Stub:
    """``objects`` maps keys to what is kept; ``asked`` counts requests by method; ``requests`` has (method, key, header
    names) of all."""

    def __init__(self, folder: Path) -> None:
        self.switches = Switches()
        self.objects: dict[str, Kept] = {}
        self.buckets = {BUCKET}
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.at_once = self.at_once_max = 0
        self.receiving = 0
        """Requests with a large body that is still to come."""
        self.lock = threading.Lock()
        self.connections = set[socket.socket]()
        self.credentials = folder / "credentials"
        self.login("first")
        self._server = _Server(self, 0)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self._port = self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return "http" + f"://127.0.0.1:{self._port}"

    def login(self, access_key: str) -> None:
        """Write the credentials file that clients read."""
        self.credentials.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = secret\n")

    def age(self, key: str, seconds: float) -> None:
        """Make an object older."""
        self.objects[key].modified -= timedelta(seconds=seconds)

    def blocks(self) -> list[str]:
        """Keys of blocks, in order."""
        return sorted(key for key in self.objects if re.search(r"\.\d+$", key))

    def go(self) -> None:
        """Stop serving: connections are closed, new ones refused. Objects stay."""
        self._server.shutdown()
        self._thread.join()
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._server.server_close()

    def come_back(self) -> None:
        """Serve again, at the same address."""
        self._server = _Server(self, self._port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()


@contextmanager
def s3_stub(folder: Path) -> Iterator[S3Stub]:
    """A server for the length of the context."""
    stub = S3Stub(folder)
    try:
        yield stub
    finally:
        stub.switches.stall = stub.switches.stall_body = stub.switches.trickle = False
        stub.go()


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, stub: S3Stub, port: int) -> None:
        self.stub = stub
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        self.stub.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self.stub.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def switches(self) -> Switches:
        return self.server.stub.switches

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        stub = self.server.stub
        path, _, query = self.path.partition("?")
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        body = self._body()
        if len(body) < int(self.headers.get("Content-Length", 0)):  # cut off: no server keeps half an object
            self.close_connection = True
            return
        with stub.lock:
            stub.asked[self.command] += 1
            stub.requests.append((self.command, key, {name.lower(): value for name, value in self.headers.items()}))
            stub.at_once += 1
            stub.at_once_max = max(stub.at_once_max, stub.at_once)
            number, at_once = stub.asked.total(), stub.at_once
        try:
            if self.switches.delay_s:
                time.sleep(self.switches.delay_s)
            while self.switches.stall:
                time.sleep(0.01)
            if self.switches.strange is not None and self.switches.strange_where in path:
                self.close_connection = True
                self.wfile.write(self.switches.strange)
            elif not self._refused(bucket, number, at_once):
                self._answer(bucket, key, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), body)
        finally:
            with stub.lock:
                stub.at_once -= 1

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        parts = []
        large = size > 1 << 20
        with self.server.stub.lock:
            self.server.stub.receiving += large
        while size:
            part = self.rfile.read(min(size, 64 << 10))
            if not part:
                break
            if self.switches.bytes_per_s:
                time.sleep(len(part) / self.switches.bytes_per_s)
            size -= len(part)
            parts.append(part)
        with self.server.stub.lock:
            self.server.stub.receiving -= large
        return b"".join(parts)

    def _refused(self, bucket: str, number: int, at_once: int) -> bool:
        """Whether a switch has answered the request."""
        switches = self.switches
        names = {name.lower() for name in self.headers}
        framing = "aws-chunked" in self.headers.get("Content-Encoding", "")
        if switches.reject_checksums and (
            framing or any(n.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer")) for n in names)
        ):
            return self._error(400, "InvalidArgument")
        match = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        access_key = match.group(1) if match else ""
        if access_key in switches.expired:
            return self._error(400, "ExpiredToken")
        if access_key in switches.unknown or not access_key:
            return self._error(403, "InvalidAccessKeyId")
        if switches.skewed:
            return self._error(403, "RequestTimeTooSkewed")
        if switches.forbid_all:
            return self._error(403, "AccessDenied")
        if switches.slow_down and number % max(1, round(1 / switches.slow_down)) == 0:
            return self._error(503, "SlowDown")
        if switches.slow_above and at_once > switches.slow_above:
            return self._error(503, "SlowDown")
        creates = self.command == "PUT" and self.path.partition("?")[0].count("/") == 1
        if bucket not in self.server.stub.buckets and not creates:
            return self._error(404, "NoSuchBucket")
        return False

    def _answer(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        stub = self.server.stub
        match self.command:
            case "HEAD" if not key:
                self._reply(200)
            case "GET" if not key:
                self._list(query)
            case "HEAD" | "GET":
                kept = stub.objects.get(key)
                if kept is not None:
                    self._send(kept)
                elif self.switches.forbid_missing:
                    self._error(403, "AccessDenied")
                else:
                    self._error(404, "NoSuchKey")
            case "PUT" if not key:
                stub.buckets.add(bucket)
                self._reply(200)
            case "PUT" if self.switches.forbid_writes:
                self._error(403, "AccessDenied")
            case "PUT":
                self._put(key, body)
            case _:
                stub.objects.pop(key, None)
                self._reply(204)

    def _put(self, key: str, body: bytes) -> None:
        stub = self.server.stub
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            kept = stub.objects.get(urllib.parse.unquote(source).partition("/")[2])
            if kept is None:
                self._error(404, "NoSuchKey")
                return
            stub.objects[key] = Kept(kept.content, datetime.now(UTC))
            self._reply(200, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
            return
        wanted = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if self.switches.no_conditions and any(wanted):
            self._error(501, "NotImplemented")
            return
        if self.switches.store_framing:
            body = b"%x;chunk-signature=%s\r\n" % (len(body), b"0" * 64) + body + b"\r\n0;chunk-signature=0\r\n\r\n"
        with stub.lock:
            kept = stub.objects.get(key)
            met = (wanted[0] is None or (kept is not None and kept.etag == wanted[0])) and not (wanted[1] and kept)
            if met:
                stub.objects[key] = Kept(body, datetime.now(UTC))
        if met:
            self._reply(200)
        else:
            self._error(412, "PreconditionFailed")

    def _list(self, query: dict[str, str]) -> None:
        query.pop(self.switches.unheeded, None)
        prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        order: Callable[[str], Any] = (lambda key: key.split("/")) if self.switches.by_folder else str
        mine = [key for key in list(self.server.stub.objects) if key.startswith(prefix) and order(key) > order(after)]
        keys = sorted(mine, key=order)
        page = keys[: min(100, int(query.get("max-keys", 1000)))]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(kept.content)}</Size>"
            f"<LastModified>{kept.modified.strftime('%Y-%m-%dT%H:%M:%S.%fZ')}</LastModified></Contents>"
            for key in page
            if (kept := self.server.stub.objects.get(key))
        )
        more = len(page) < len(keys)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        if self.switches.unheeded == "end":
            more, rows, token = True, "", f"<NextContinuationToken>{after}a</NextContinuationToken>"
        self._reply(
            200,
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>".encode(),
        )

    def _send(self, kept: Kept) -> None:
        switches = self.switches
        content = kept.content + bytes(switches.longer_by)
        content = content[: len(content) - switches.shorter_by]
        headers = {"ETag": kept.etag, "Last-Modified": format_datetime(kept.modified, usegmt=True)}
        if self.command == "HEAD":
            self._head(200, len(content), headers)
            return
        status = 200
        if "Range" in self.headers:
            status, content = 206, content[:1]
        self._head(status, len(content), headers)
        if switches.trickle:
            for start in range(len(content)):
                if not self.switches.trickle:
                    break
                self.wfile.write(content[start : start + 1])
                time.sleep(0.02)
            return
        half = len(content) // 2
        for start in range(0, len(content), 16 << 10):
            if switches.cut_body and start >= half:
                self.close_connection = True
                return
            while self.switches.stall_body and start >= half:
                time.sleep(0.01)
            part = content[start : start + (16 << 10)]
            self.wfile.write(part)
            if switches.bytes_per_s:
                time.sleep(len(part) / switches.bytes_per_s)

    def _error(self, status: int, code: str) -> bool:
        self._reply(status, f"<Error><Code>{code}</Code><Message>a switch is on</Message></Error>".encode())
        return True

    def _reply(self, status: int, content: bytes = b"") -> None:
        self._head(status, len(content), {})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()

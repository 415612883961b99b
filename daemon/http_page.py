"""The status page's files, as they are sent.

Owns them: read when the door is made, compressed when a browser first asks for that. Called by ``http_door`` on the
event loop. Imports aiohttp and ``http_messages``.

They ask for no token, since whoever opens the page has none to send yet, and they say nothing about this daemon. What
they show the page fetches, with the reader's token.
"""

import gzip
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from aiohttp import web

from terracekv.daemon.http_messages import Problem

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
HTML_TYPE = "text/html"
ASSET_TYPE = "text/*"
TYPES = {".html": HTML_TYPE, ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
"""Nothing from elsewhere, nothing inline, and no text that becomes markup."""


class _File:
    def __init__(self, path: Path) -> None:
        self.plain = path.read_bytes()
        self.tag = hashlib.sha256(self.plain).hexdigest()[:32]
        self._type = f"{TYPES[path.suffix]}; charset=utf-8"

    @cached_property
    def small(self) -> bytes:
        return gzip.compress(self.plain, mtime=0)

    def answer(self, request: web.BaseRequest) -> web.Response:
        """The file, compressed where that is asked for; 304 to whoever has it."""
        zipped = "gzip" in request.headers.get("Accept-Encoding", "")
        tag = f'"{self.tag}-gzip"' if zipped else f'"{self.tag}"'
        headers = {
            "ETag": tag,
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        known = request.headers.get("If-None-Match", "")
        if tag in [each.strip().removeprefix("W/") for each in known.split(",")] or known.strip() == "*":
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = self._type
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=self.small if zipped else self.plain, headers=headers)


class Page:
    """One method for each route."""

    def __init__(self) -> None:
        self._files = {path.name: _File(path) for path in FOLDER.iterdir() if path.suffix in TYPES}

    async def index(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """The page itself."""
        return self._files[INDEX].answer(request)

    async def asset(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """What it loads, by name: no path leads out of the folder."""
        file = self._files.get(names["file"])
        if file is None:
            raise Problem(404, "not_found", f"the page has no {names['file'][:80]!r}", "open /")
        return file.answer(request)

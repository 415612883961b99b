"""The command line's way to a running daemon: the people's door, over its Unix socket.

Owns one connection at a time and no state. Called by ``cli`` and ``doctor`` in their own process, never by the daemon.
Imports the standard library and ``errors``.
"""

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terracekv.tiers.errors import TerraceError

SOCKET = "http.sock"
TIMEOUT_S = 30.0


class NotRunning(TerraceError):
    """Nobody answers at the socket."""

    kind = "not_running"


class Answered(TerraceError):
    """The daemon answered with an error; ``kind``, message and hint are its own, ``status`` is that of HTTP."""

    def __init__(self, status: int, kind: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status = status
        self.kind = kind


class Door:
    """The people's door of the daemon whose sockets are in ``runtime_dir``."""

    def __init__(self, runtime_dir: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = runtime_dir / SOCKET
        self._timeout_s = timeout_s

    def ask(self, method: str, route: str, body: object = None) -> dict[str, Any]:
        """A JSON answer to a JSON question. Raises NotRunning or Answered."""
        content = None if body is None else json.dumps(body).encode()
        answer = self.exchange(method, route, content, {"Content-Type": "application/json"})
        try:
            decoded = json.loads(answer) if answer else {}
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise NotRunning(f"what answers at {self.path} is no TerraceKV daemon", "check daemon.runtime_dir")
        return decoded

    def exchange(
        self, method: str, route: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Bytes for bytes; see ``ask``."""
        connection = _UnixConnection(self.path, self._timeout_s)
        try:
            connection.request(method, route, body, dict(headers or {}))
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            hint = "start one with: terracekv serve; or check daemon.runtime_dir with: terracekv config"
            raise NotRunning(f"no daemon answers at {self.path}: {error}", hint) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise _error(response.status, answer)
        return answer


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _error(status: int, answer: bytes) -> Answered:
    try:
        error = json.loads(answer)["error"]
        return Answered(status, str(error["kind"]), str(error["message"]), str(error.get("hint", "")))
    except (ValueError, KeyError, TypeError):
        return Answered(status, "http", f"the daemon answered {status}: {answer[:200]!r}", "")

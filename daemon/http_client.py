"""The command line's way to a running daemon: the people's door, over its Unix socket.

Owns one connection at a time and no state. Called by ``cli`` and ``doctor`` in their own process, never by the daemon.
Imports ``config``, ``own_socket``, ``errors`` and ``folder``.

Three things are told apart: no daemon, a daemon that does not answer, and one that answers with an error.
"""

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terracekv.daemon.config import TOKEN_FILE, own_token
from terracekv.daemon.own_socket import listener_of
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.folder import holder

SOCKET = "http.sock"
LOCK = "owner.lock"
PROMPT_S = 3.0
"""A daemon answers within this what it need not work for, or it hangs."""
ORDER_S = 75.0
"""An order may wait for blocks to come up from disk."""
START_HINT = "start one with: terracekv serve; or check daemon.runtime_dir with: terracekv config"
NO_TOKEN_HINT = (
    f"name a file with a token that is in force in {TOKEN_FILE}, or run this as a user whom access.file names"
)


class NotRunning(TerraceError):
    """There is no daemon."""

    kind = "not_running"


class Silent(TerraceError):
    """There is a daemon, or something else that has its socket, but no answer can be had of it."""

    kind = "silent"


class Partial(TerraceError):
    """The daemon tells this user less than is needed."""

    kind = "partial"


class Answered(TerraceError):
    """The daemon answered with an error; ``kind``, message and hint are its own, ``status`` is that of HTTP."""

    def __init__(self, status: int, kind: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status = status
        self.kind = kind


class Door:
    """The people's door of the daemon whose sockets are in ``runtime_dir``. Every call raises NotRunning, Silent or
    Answered when it cannot be done."""

    def __init__(self, runtime_dir: Path, timeout_s: float = ORDER_S) -> None:
        self.path = runtime_dir / SOCKET
        self._lock = runtime_dir / LOCK
        self._timeout_s = timeout_s

    def greet(self) -> None:
        """Whether the daemon answers, before it is asked what may take long."""
        self.ask("GET", "/healthz", timeout_s=PROMPT_S)

    def ask(self, method: str, route: str, body: object = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """A JSON answer to a JSON question."""
        content = None if body is None else json.dumps(body).encode()
        answer = self.exchange(method, route, content, {"Content-Type": "application/json"}, timeout_s=timeout_s)
        try:
            decoded = json.loads(answer) if answer else {}
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise Silent(f"what answers at {self.path} is no TerraceKV daemon", "check daemon.runtime_dir")
        return decoded

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """All that the daemon knows about itself. Partial where it tells this user of one tenant only."""
        answer = self.ask("GET", "/v1/status", timeout_s=timeout_s)
        if "tenant" in answer:
            raise Partial(
                f"this user is of tenant {answer['tenant']}, and a tenant is told of nothing but its own",
                "terracekv status shows that; for all of it, run this as the daemon's user",
            )
        return answer

    def exchange(
        self,
        method: str,
        route: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Bytes for bytes."""
        connection = _UnixConnection(self.path, timeout_s or self._timeout_s)
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if (token := own_token()) else {})
        try:
            connection.request(method, route, body, sent)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._trouble(error, connection) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise _error(response.status, answer)
        return answer

    def _trouble(self, error: Exception, connection: "_UnixConnection") -> TerraceError:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)):
            pid = holder(self._lock)
            if pid is None or isinstance(error, ConnectionRefusedError):
                return NotRunning(f"no daemon answers at {self.path}: {error.strerror}", START_HINT)
            return Silent(
                f"a daemon runs (process {pid}), but there is no socket at {self.path}",
                "it is starting (terracekv status --wait 30), or somebody removed the socket: then restart it, it "
                "adopts what it holds",
            )
        if isinstance(error, PermissionError):
            return Silent(f"{self.path} may not be opened by this user", "run this as the user of the daemon")
        # A stopped process still has its connections taken by the kernel, until so many wait that it refuses more.
        if isinstance(error, (TimeoutError, BlockingIOError)):
            pid = listener_of(connection.sock) or holder(self._lock)
            who = f"process {pid}" if pid else "of which no process can be seen here"
            says = f"a daemon is there ({who}) but does not answer within {connection.timeout:g} s at {self.path}"
            if pid and _is_stopped(pid):
                return Silent(says, f"its process is stopped: let it go on with: kill -CONT {pid}")
            return Silent(says, "see its log; if it stays so, kill and restart it: it adopts what it holds")
        return Silent(
            f"a daemon is there, but the connection to {self.path} ended: {error!r}", "try again; see its log"
        )


class _UnixConnection(http.client.HTTPConnection):
    timeout: float

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _error(status: int, answer: bytes) -> Answered:
    try:
        error = json.loads(answer)["error"]
        hint = NO_TOKEN_HINT if status == 401 else str(error.get("hint", ""))
        return Answered(status, str(error["kind"]), str(error["message"]), hint)
    except (ValueError, KeyError, TypeError):
        return Answered(status, "http", f"the daemon answered {status}: {answer[:200]!r}", "")

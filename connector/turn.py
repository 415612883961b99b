"""Whose turn it is to use a client's session: one request at a time.

Owns nothing but the client's lock while it lasts. Used by ``client.py`` and ``leases.py`` only, from any thread of the
engine. Imports ``connection``.
"""

import threading
import time
from typing import Protocol

from terracekv.connector.connection import Connection, Trouble


class Holder(Protocol):
    """What is used of a client."""

    path: str
    last_trouble: str | None
    _lock: threading.Lock
    _session: Connection | None
    _closing: threading.Event
    _turn_of: int | None

    def _join_at_once(self, deadline: float) -> None: ...
    def _join_later(self, what: str = "") -> None: ...
    def _leave(self) -> None: ...
    def _end(self) -> None: ...


class Turn:
    """One request at a time has the session; a failure that leaves it out of step ends it and starts the joiner."""

    def __init__(self, client: Holder, deadline: float) -> None:
        self._client = client
        self._began = time.monotonic()
        self._deadline = deadline

    def __enter__(self) -> Connection:
        client = self._client
        if not client._lock.acquire(timeout=max(0.0, self._deadline - time.monotonic())):
            raise Trouble("deadline", "another request holds the session")
        client._turn_of = threading.get_ident()
        try:
            session = self._joined()
        except BaseException:  # Ctrl-C, or an error of the engine's own: nobody else would let go of the lock
            self._let_go()
            raise
        if session is None:
            self._let_go()
            client._join_later()  # normally under way already
            raise Trouble("no_daemon", client.last_trouble or "not joined")
        return session

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        client = self._client
        in_step = error is None or (isinstance(error, Trouble) and error.why == "refused")
        try:
            if not in_step:
                client.last_trouble = str(error) or type(error).__name__
                client._leave()
        finally:
            self._let_go()
        if in_step or client._closing.is_set():
            return
        if isinstance(error, TimeoutError):
            late = f"did not answer within {(self._deadline - self._began) * 1e3:.0f} ms"
            client._join_later(f"the daemon at {client.path} {late}, so this session and its leases end")
        elif isinstance(error, OSError) or (isinstance(error, Trouble) and error.why == "no_daemon"):
            client._join_later()
        else:
            client._join_later(f"the session with the daemon at {client.path} has failed ({client.last_trouble})")

    def _let_go(self) -> None:
        """The turn is over, and with it the client where it was closed meanwhile, perhaps from within the turn."""
        try:
            if self._client._closing.is_set():
                self._client._end()
        finally:
            self._client._turn_of = None
            self._client._lock.release()

    def _joined(self) -> Connection | None:
        """Under the lock: the session, a new one where the daemon has hung up and another is there already."""
        client = self._client
        if client._session is not None and client._session.hung_up():
            try:
                client._join_at_once(self._deadline)
            except (OSError, Trouble) as error:
                client.last_trouble = str(error)
        return client._session

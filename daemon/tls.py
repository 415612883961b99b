"""TLS of the people's door over TCP: certificate and key, and another pair once their files have changed.

Owns the contexts. Made before the doors open; called on the event loop. Imports ``config_access``, ``watched``,
``errors`` and ``journal``.

Each connection takes the pair that is in force when it begins. A pair that cannot be used, as when only one of its
files has been renewed yet, leaves the one before in force. At the start either may be a pipe, which gives what it has
once; later nobody waits for the other end of one.
"""

import errno
import os
import ssl
import stat

from terracekv.daemon.config_access import Access
from terracekv.daemon.watched import Watched
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.journal import Journal

journal = Journal(__name__)

HANDSHAKE_S = 10.0
_Side = ssl.SSLObject | ssl.SSLSocket


class Tls:
    """Raises ConfigError when certificate and key are configured and cannot be used."""

    def __init__(self, access: Access) -> None:
        self._cert, self._key = access.tls_cert, access.tls_key
        self._watched = Watched((self._cert, self._key))
        self.last_error: str | None = None
        """What is wrong with the files now; the pair in force is the one before."""
        self.context = self._load() if self._cert else None
        """What a listener is opened with; None for none."""
        self._current = self.context
        if self.context is not None:
            self.context.sni_callback = self._choose

    def refresh(self, *, force: bool = False) -> bool:
        """Take the pair of now if the files have changed, or with ``force``; whether another is in force."""
        if self._current is None or not (self._watched.changed() or force):
            return False
        try:
            self._current = self._load(again=True)
        except ConfigError as error:
            self.last_error = str(error)
            journal.error("TKV-TLS-KEPT", f"the certificate stays as it was: {error}")
            return False
        self.last_error = None
        journal.info("TKV-TLS-CHANGED", f"the certificate of {self._cert} is in force")
        return True

    def _choose(self, connection: _Side, name: str | None, first: ssl.SSLContext) -> None:
        """As a handshake begins, with or without a name asked for."""
        assert self._current is not None
        connection.context = self._current

    def _load(self, again: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            for path in (self._cert, self._key) if again else ():
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise OSError(errno.EINVAL, "it is no plain file", path)
            # Without a password given, the library would ask for one at the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(
                f"access.tls_cert {self._cert} and access.tls_key {self._key} cannot be used: {error}",
                "name a chain and its key as PEM, without a password, readable by the daemon",
            ) from None
        return context

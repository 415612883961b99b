"""Who may do what: tokens, tenants and the daemon's own user.

Owns the table of the access file and of the token file, read anew whenever they change. One for both doors; called on
the event loop. Imports ``access_file``, ``config``, ``config_access``, ``peers``, ``sessions``,
``tls``, ``watched``, ``errors`` and ``journal``.

With neither file, whoever reaches a door may do everything, as the sockets' modes and loopback are the guard. A file
that cannot be used stops a daemon that starts; one that is broken later leaves the table before it in force.
"""

import hmac
import os
import time
from dataclasses import replace
from typing import Any

from terracekv.daemon.access_file import Caller, Right, Table, digest_of, read_table, read_token
from terracekv.daemon.config import Config
from terracekv.daemon.config_access import owner_of
from terracekv.daemon.peers import Admission, Peer
from terracekv.daemon.sessions import salt_of_tenant, tenant_salt
from terracekv.daemon.tls import Tls
from terracekv.daemon.watched import Watched
from terracekv.tiers.errors import ConfigError, TerraceError
from terracekv.tiers.journal import Journal

journal = Journal(__name__)

OPERATOR = Caller("operator", "", frozenset(Right))


class Denied(TerraceError):
    """The caller may not. ``known`` tells whether it was recognised at all."""

    kind = "forbidden"

    def __init__(self, message: str, hint: str, *, known: bool) -> None:
        super().__init__(message, hint)
        self.known = known


class Access:
    """Raises ConfigError when a file is configured and cannot be used."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.admission = Admission(config.access)
        self.socket_owner = owner_of(config.access)
        """Uid, gid and mode of both Unix sockets."""
        self.table = Table()
        self._token: bytes | None = None
        self._watched = Watched((config.daemon.token_file, config.access.file))
        self.loaded_at = time.time()
        self.tls = Tls(config.access)
        self.last_error: str | None = None
        """What is wrong with the files now; the table in force is the one before."""
        self.refused = 0
        """Requests and sessions that were not let in."""
        self._read(again=False)

    @property
    def asks_peers(self) -> bool:
        """Whether it matters who is at the other end of a Unix socket."""
        return bool(self._config.access.file) or not self.admission.all

    @property
    def guarded(self) -> bool:
        """Whether there is any file of tokens."""
        return bool(self._config.daemon.token_file or self._config.access.file)

    def refresh(self, *, force: bool = False) -> bool:
        """Read the files anew if they have changed, or with ``force``; whether another table is in force now."""
        if not (self._watched.changed() or force):
            return False
        try:
            self._read(again=True)
        except ConfigError as error:
            self.last_error = str(error)
            journal.error("TKV-ACCESS-KEPT", f"tokens and tenants stay as they were: {error}")
            return False
        self.last_error, self.loaded_at = None, time.time()
        tokens, tenants = len(self.table.tokens), len(self.table.tenants)
        journal.info("TKV-ACCESS-CHANGED", f"{tokens} tokens and {tenants} tenants are in force")
        return True

    def of_token(self, given: bytes) -> Caller | None:
        """Whose secret this is. Takes as long for any secret: all are compared, each to its end."""
        found, digest = None, digest_of(given)
        for each, caller in self.table.tokens:
            if hmac.compare_digest(each, digest):
                found = caller
        if self._token is not None and hmac.compare_digest(self._token, digest):
            found = found or replace(OPERATOR, digest=digest)
        return found

    def at_http(self, token: bytes | None, peer: Peer | None, *, tcp: bool) -> Caller:
        """Who asks over HTTP; ``token`` as it was sent. Denied."""
        if not self.guarded or (not tcp and not self._config.access.file):
            return OPERATOR
        if token is not None:
            caller = self.of_token(token)
            if caller is None:
                raise self._denied("this door asks for a token, and this is none", "send one that is in force")
            return caller
        if not tcp and (caller := self._of_peer(peer)) is not None:
            return caller
        raise self._denied("this door asks for a token", "send Authorization: Bearer with a token of the daemon's")

    def at_engine_door(
        self, credential: bytes, peer: Peer | None, *, write: bool, secret: bytes
    ) -> tuple[Caller, bytes]:
        """Whose session this would be, and the salt of its namespaces. Denied."""
        if not self._config.access.file:
            return OPERATOR, tenant_salt(secret, credential)
        caller = self.of_token(credential) if credential else self._of_peer(peer)
        if caller is None:
            who = "a credential that is no token in force" if credential else "no credential"
            raise self._denied(f"{who}, and this daemon asks for one", "set it to the secret of one of its tokens")
        for right in (Right.READ, Right.WRITE) if write else (Right.READ,):
            if right not in caller.rights:
                hint = "ask for access: read" if right is Right.WRITE else "use another token"
                raise self._denied(f"{caller.name} has not the right {right}", hint, known=True)
        return caller, salt_of_tenant(secret, caller.tenant)

    def require(self, caller: Caller, right: Right) -> None:
        """Denied unless the caller has the right."""
        if right not in caller.rights:
            raise self._denied(f"{caller.name} has not the right {right}", "use a token that has it", known=True)

    def knows(self, caller: Caller) -> bool:
        """Whether the files in force have this caller, with the same secret, tenant and rights."""
        if not caller.digest:
            return caller in (OPERATOR, *self.table.uids.values())
        return dict(self.table.tokens).get(caller.digest, OPERATOR if caller.digest == self._token else None) == caller

    def report(self) -> dict[str, Any]:
        """For the status; names, never secrets."""
        return {
            "file": self._config.access.file or None,
            "tokens": [caller.name for _, caller in self.table.tokens],
            "tenants": list(self.table.tenants),
            "loaded_age_s": round(time.time() - self.loaded_at, 3),
            "last_error": self.last_error,
            "tls": {"certificate": self._config.access.tls_cert or None, "last_error": self.tls.last_error},
            "refused": self.refused,
        }

    def _of_peer(self, peer: Peer | None) -> Caller | None:
        if peer is None:
            return None
        caller = self.table.uids.get(peer.uid)
        if caller is None and self._config.access.own_user and peer.uid == os.getuid():
            return OPERATOR
        return caller

    def _denied(self, message: str, hint: str, *, known: bool = False) -> Denied:
        self.refused += 1
        return Denied(message, hint, known=known)

    def _read(self, again: bool) -> None:
        """All or nothing: no table of which the one half is new."""
        file, token_file = self._config.access.file, self._config.daemon.token_file
        token = read_token(token_file, again) if token_file else None
        table = read_table(file, again) if file else Table()
        self.table = table
        self._token = None if token is None else digest_of(token.encode())

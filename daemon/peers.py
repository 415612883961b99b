"""Who is at the other end of a Unix socket, as the kernel says.

Owns nothing. Called by both doors on the event loop, once for each connection or request. Imports ``config_access``
and ``own_socket``.

The kernel notes a peer's credentials when it connects, in the daemon's namespaces of users and processes: nobody can
choose them, and a process of another container may show as pid 0.
"""

import asyncio
import os
import socket
import struct
from dataclasses import dataclass

from terracekv.daemon import config_access
from terracekv.daemon.own_socket import credentials_of

_PEERGROUPS = 59
"""SO_PEERGROUPS of asm-generic/socket.h, which Python's socket module does not name."""
_GROUPS_BYTES = 1024
"""What Python lets a socket option have: 256 groups. Of a peer with more only the first one counts."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the moment at which it connected. ``gids`` has its effective group and all others that it is in."""

    pid: int
    uid: int
    gid: int
    gids: frozenset[int]


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    """The peer of a connection; None when it is not one of a Unix socket, or is over."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    try:
        pid, uid, gid = credentials_of(connection)
        return Peer(pid, uid, gid, frozenset({gid}) | _groups(connection))
    except OSError:
        return None


def _groups(connection: socket.socket) -> frozenset[int]:
    try:
        listed = connection.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return frozenset()
    return frozenset(struct.unpack(f"{len(listed) // 4}I", listed))


class Admission:
    """Whom the Unix sockets let in: ``refusal`` says why not, None for who may."""

    def __init__(self, access: config_access.Access) -> None:
        self._uids = config_access.users(access)
        self._gids = config_access.groups(access)
        self.all = not access.uids and not access.gids

    def refusal(self, peer: Peer | None) -> str | None:
        """Why this peer may not come in."""
        if self.all:
            return None
        if peer is None:
            return "the kernel does not say who is at the other end"
        if peer.uid == os.getuid() or peer.uid in self._uids or peer.gids & self._gids:
            return None
        return f"uid {peer.uid} (gid {peer.gid}) is not among access.uids and access.gids"

"""Connections that begin with a TLS handshake: so many at a time, the others wait in the kernel.

Owns the listening sockets of the people's door over TLS and the connections whose handshake is not over. Called by
``http_door`` on the event loop. Imports ``descriptors``, ``tasks`` and ``tls``.

Until its handshake is over nobody knows who a connection is, and no door counts it; each keeps a descriptor. Left to
the event loop's own server, whoever connects and says nothing would take them all.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from terracekv.daemon import tasks
from terracekv.daemon.descriptors import most
from terracekv.daemon.tls import HANDSHAKE_S

AT_ONCE = 64
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The machine has nothing left for another connection."""
REST_S = 1.0


class Handshakes:
    """``sockets`` listen already. ``make`` is the protocol of a connection that has come through."""

    def __init__(
        self, sockets: list[socket.socket], make: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext
    ) -> None:
        self.sockets = tuple(sockets)
        self._make = make
        self._context = context
        self._under_way = set[asyncio.Task[None]]()
        self._taking = False
        self._take(True)

    def close(self) -> None:
        """Listen no more, and end what is not through."""
        self._take(False)
        for listening in self.sockets:
            listening.close()
        self.sockets = ()
        for task in self._under_way:
            task.cancel()

    def _take(self, wanted: bool) -> None:
        """Whether connections are taken; those that are not wait in the kernel's queue."""
        loop = asyncio.get_running_loop()
        for listening in self.sockets:
            if wanted and not self._taking:
                loop.add_reader(listening, self._accept, listening)
            elif self._taking and not wanted:
                loop.remove_reader(listening)
        self._taking = wanted

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in SHORT:  # it would be tried again at once, and again
                self._take(False)
                asyncio.get_running_loop().call_later(REST_S, self._go_on)
            return  # else who came is gone again
        task = tasks.begin(self._shake(connection), "handshake")
        self._under_way.add(task)
        task.add_done_callback(self._over)
        if len(self._under_way) >= most(AT_ONCE):
            self._take(False)

    async def _shake(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connect = asyncio.get_running_loop().connect_accepted_socket
        try:
            await connect(self._make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError:
            connection.close()  # no TLS, none in time, or gone
        except asyncio.CancelledError:
            connection.close()
            raise

    def _over(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._go_on()

    def _go_on(self) -> None:
        if self.sockets:
            self._take(True)


async def listening(address: tuple[str, int], backlog: int) -> list[socket.socket]:
    """Sockets for all that ``address`` stands for. OSError when one cannot be bound."""
    with contextlib.ExitStack() as undo:
        host, port = address
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        made = []
        for family, where in dict.fromkeys((info[0], info[4]) for info in infos):
            one = undo.enter_context(socket.create_server(where[:2], family=family, backlog=backlog))
            one.setblocking(False)
            made.append(one)
        undo.pop_all()
        return made

"""Commits of one reservation, sent ahead: the daemon checks some blocks while the next are copied.

``Commits`` owns the answers that are still to come. Used by the client for one store, under its lock. Imports
``connection`` and ``daemon.protocol``.
"""

from terracekv.connector.connection import Connection
from terracekv.daemon import protocol

IN_FLIGHT = 64
"""Commits sent ahead of their answers: more would only fill the socket."""
COMMIT_BYTES = 8 << 20
"""Blocks are committed when so many bytes were copied: enough that the message costs little beside the copy, few enough
that the daemon finds them in the processor's cache when it checks them, while the next are copied."""


class Commits:
    """``stored`` and ``on_disk`` are the indices that the daemon has answered for."""

    def __init__(self, session: Connection, reservation: int, block_bytes: int, durable: bool, deadline: float) -> None:
        self.stored: list[int] = []
        self.on_disk: list[int] = []
        self._session = session
        self._reservation = reservation
        self._block_bytes = block_bytes
        self._durable = durable
        self._deadline = deadline
        self._copied: list[int] = []
        self._asked: list[int] = []

    def add(self, index: int) -> None:
        """A block is whole in its slot."""
        self._copied.append(index)
        if len(self._copied) * self._block_bytes >= COMMIT_BYTES:
            self._send()
            self._settle(IN_FLIGHT)

    def finish(self) -> None:
        """Commit the rest and wait for all answers. OSError or Trouble when they do not come."""
        if self._copied:
            self._send()
        self._settle(0)

    def _send(self) -> None:
        indices, self._copied = self._copied, []
        commit = protocol.Commit
        sent = self._session.send(lambda id: commit(id, self._reservation, indices, self._durable), self._deadline)
        self._asked.append(sent)

    def _settle(self, left: int) -> None:
        while len(self._asked) > left:
            answer = self._session.answer_to(self._asked.pop(0), protocol.Committed, self._deadline)
            self.stored.extend(answer.stored)
            self.on_disk.extend(set(answer.durable).intersection(answer.stored))

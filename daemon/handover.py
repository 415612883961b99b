"""Handing the arena over: the files that a session maps, opened for exactly what it may do with them.

Owns nothing for longer than a call. Called by the engine door on the event loop, once for each session. Imports
``protocol``, ``sessions`` and ``tiers.slots``.

The descriptors go with Welcome. A session that reads gets the arena opened for reading: no mapping of it can be made
writable. So neither the folder's nor the files' modes need let any other user in.
"""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from terracekv.daemon import protocol
from terracekv.daemon.sessions import Session
from terracekv.tiers.slots import LOCK_BASE, SlotTable


class Handover:
    """Of one arena and its slot table."""

    def __init__(self, arena: Path, arena_bytes: int, table: SlotTable) -> None:
        self._arena = arena
        self._arena_bytes = arena_bytes
        self._table = table

    def welcome(self, session: Session, offer: protocol.GpuMemory | None) -> protocol.Welcome:
        """What a session is told."""
        return protocol.Welcome(
            session=session.number,
            namespace_id=session.namespace.id,
            epoch=session.namespace.epoch,
            block_bytes=session.namespace.block_bytes,
            arena=str(self._arena),
            arena_bytes=self._arena_bytes,
            slots=str(self._table.path),
            slots_bytes=self._table.size_bytes,
            lock_byte=LOCK_BASE + session.number,
            gpu=offer,
            no_gpu=session.not_near if offer is None else None,
        )

    def send(self, transport: asyncio.Transport, session: Session, welcome: protocol.Welcome) -> None:
        """Welcome with the descriptors of ``arena`` and ``slots``, in this order; without, where they cannot go: the
        client then opens the files by their names, if it may."""
        frame, sent = protocol.frame(welcome), 0
        if not transport.get_write_buffer_size():  # else what waits there would come after it
            with contextlib.suppress(OSError):
                sent = self._send(transport, session, frame)
        if sent < len(frame):
            transport.write(frame[sent:])

    def _send(self, transport: asyncio.Transport, session: Session, frame: bytes) -> int:
        connection = transport.get_extra_info("socket")
        with contextlib.ExitStack() as opened:
            # Opened anew for each session: the lock on the slot table belongs to the open file, not to who has it.
            files = []
            for path, flags in ((self._arena, os.O_RDWR if session.may_write else os.O_RDONLY), (self._table.path, 0)):
                files.append(os.open(path, flags | os.O_CLOEXEC))
                opened.callback(os.close, files[-1])
            own = opened.enter_context(socket.socket(fileno=os.dup(connection.fileno())))
            return socket.send_fds(own, [frame], files, socket.MSG_DONTWAIT)

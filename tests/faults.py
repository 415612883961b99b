"""The fault layer: each call that a tier makes of its medium passes a failpoint of the call's name first.

Owns the wrappers and the list of what fired. Put in place by a test, for as long as its ``MonkeyPatch`` lasts, or by
``faulty_daemon`` for the life of a process; where nobody does so the tiers call their media directly, and it costs
nothing. What happens is armed as for any other failpoint: ``os.pwritev%0.01=errno:EIO``. Imports ``tiers``.
"""

import mmap
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lmdb

from terracekv.kernels.pages import populate
from terracekv.tiers import arena
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.catalog_tables import Change
from terracekv.tiers.failpoint import failpoint

Replace = Callable[[Any, str, Any], None]
"""``setattr``, or a test's that is undone."""

WHOLE = (
    "open", "fsync", "fdatasync", "posix_fallocate", "ftruncate", "truncate", "unlink", "rename", "replace", "statvfs",
)  # fmt: skip
"""Calls of ``os`` that are done or not."""
DISK = tuple(f"os.{name}" for name in ("preadv", "pwritev", *WHOLE) if name != "ftruncate")
CATALOG = ("lmdb.read", "lmdb.commit", "lmdb.sync")
HOST = ("host.map", "os.ftruncate")
S3 = ("s3.connect", "s3.send", "s3.receive")
CALLS = (*DISK, *CATALOG, *HOST, *S3)
"""All that can be armed."""
BODY_BYTES = 2048
"""Received bytes are spoiled only in pieces so large that their last byte is a body's: a spoiled status line may say
anything, and be believed."""


class FaultLayer:
    """Stands before the media. ``fired`` has the name of each call that something was done to, with what."""

    def __init__(self, replace: Replace = setattr, calls: Sequence[str] = CALLS) -> None:
        self.fired: list[str] = []
        self.asleep = False
        """While the test itself looks at the files."""
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._before_os(replace, calls)
        if set(CATALOG) & set(calls):
            self._before_lmdb(replace)
        if set(HOST) & set(calls):
            replace(arena, "populate", self._whole("host.map", populate))
        if set(S3) & set(calls):
            self._before_sockets(replace)

    def _pass(self, name: str) -> str:
        """Through the failpoint."""
        if self.asleep:
            return ""
        try:
            verb = failpoint(name)
        except OSError:
            self.fired.append(f"{name} error")
            raise
        if verb:
            self.fired.append(f"{name} {verb}")
        return verb

    def _whole(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pass(name)
            return real(*args, **kwargs)

        return call

    def _before_os(self, replace: Replace, calls: Sequence[str]) -> None:
        read, write = os.preadv, os.pwritev

        def preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
            verb = self._pass("os.preadv")
            got = read(file, buffers, offset)
            if verb == "flip":
                buffers[-1][0] ^= 1
            return got // 2 if verb == "short" else got

        def pwritev(file: int, buffers: Sequence[memoryview], offset: int) -> int:
            verb = self._pass("os.pwritev")
            if verb == "short":  # whole buffers, since direct I/O takes nothing less
                return write(file, buffers[:1], offset)
            if verb == "flip":
                buffers = [*buffers[:-1], _spoiled(buffers[-1])]
            return write(file, buffers, offset)

        ours = {f"os.{name}": self._whole(f"os.{name}", getattr(os, name)) for name in WHOLE}
        for name, call in {**ours, "os.preadv": preadv, "os.pwritev": pwritev}.items():
            if name in calls:
                replace(os, name.removeprefix("os."), call)

    def _before_lmdb(self, replace: Replace) -> None:
        """LMDB writes by itself: its errors are raised where it would raise them, before anything was changed."""
        reading, commit, sync = Catalog._reading, Catalog._commit, Catalog.sync

        @contextmanager
        def read(catalog: Catalog) -> Iterator[lmdb.Transaction]:
            with reading(catalog) as transaction:
                self._lmdb("lmdb.read")
                yield transaction

        def committing(catalog: Catalog, change: Callable[[Change], Any]) -> Any:
            self._lmdb("lmdb.commit")
            return commit(catalog, change)

        def syncing(catalog: Catalog) -> None:
            with catalog._errors():
                self._lmdb("lmdb.sync")
            sync(catalog)

        for name, call in {"_reading": read, "_commit": committing, "sync": syncing}.items():
            replace(Catalog, name, call)

    def _lmdb(self, name: str) -> None:
        try:
            self._pass(name)
        except OSError as error:
            raise lmdb.DiskError(str(error)) from error

    def _before_sockets(self, replace: Replace) -> None:
        """Of this process's own connections to others, over TCP: those of the s3 tier."""
        connect, send, receive = socket.socket.connect, socket.socket.sendall, socket.socket.recv_into

        def connecting(self_: socket.socket, address: Any) -> None:
            if self_.family in (socket.AF_INET, socket.AF_INET6):
                self._sockets.add(self_)
                self._pass("s3.connect")
            connect(self_, address)

        def sending(self_: socket.socket, data: Any, *flags: int) -> None:
            verb = self._pass("s3.send") if self_ in self._sockets else ""
            if verb == "short":
                send(self_, memoryview(data)[: len(data) // 2], *flags)
                raise ConnectionResetError("the connection was cut by the fault layer")
            send(self_, _spoiled(data) if verb == "flip" else data, *flags)

        def receiving(self_: socket.socket, into: Any, *rest: int) -> int:
            verb = self._pass("s3.receive") if self_ in self._sockets else ""
            if verb == "short":  # the other side closed the connection
                return 0
            got = receive(self_, into, *rest)
            if verb == "flip" and got >= BODY_BYTES:
                memoryview(into)[got - 1] ^= 1
            return got

        for name, call in {"connect": connecting, "sendall": sending, "recv_into": receiving}.items():
            replace(socket.socket, name, call)


def _spoiled(data: Any) -> memoryview:
    """A copy with one wrong bit, in memory that direct I/O can use."""
    copy = memoryview(mmap.mmap(-1, max(1, len(data))))
    copy[: len(data)] = data
    copy[len(data) // 2] ^= 1
    return copy[: len(data)]

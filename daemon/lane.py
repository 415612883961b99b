"""A lane: work on one namespace after the other, beside all loads and stores.

Owns one thread and who waits for it. Called on the event loop by ``distant``; the work runs in the thread. Imports
``mover`` and ``tiers.namespace``.

What takes long and nobody waits for (a sweep of the bucket) must neither take a worker from loads and stores, nor pile
up: of each namespace at most one turn waits, and whoever asks meanwhile shares it.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from terracekv.daemon.mover import Mover
from terracekv.tiers.namespace import Namespace

T = TypeVar("T")


class Lane(Generic[T]):
    """``work`` is done once for all that ask before it begins, with the highest epoch that one of them named."""

    def __init__(self, work: Callable[[Namespace], T], name: str) -> None:
        self._work = work
        self._mover = Mover(threads=1, queue_bytes=1, name=name)
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[Namespace, asyncio.Future[T]]] = {}
        self._turns = set[asyncio.Future[T]]()

    def turn(self, namespace: Namespace) -> "asyncio.Future[T]":
        """What comes of the work; cancelled when the lane is closed before."""
        with self._lock:
            if namespace.id in self._waiting:
                before, turn = self._waiting[namespace.id]
                self._waiting[namespace.id] = max(before, namespace, key=lambda snapshot: snapshot.epoch), turn
                return turn
            turn = self._mover.load(partial(self._begin, namespace.id))
            self._waiting[namespace.id] = namespace, turn
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        return turn

    @property
    def turns(self) -> int:
        """Turns that wait or are under way."""
        return len(self._turns)

    def close(self, wait_s: float | None = None) -> bool:
        """End the thread after what it does now; see ``Mover.close``."""
        return self._mover.close(wait_s)

    def _begin(self, id: bytes) -> T:
        with self._lock:
            namespace, _ = self._waiting.pop(id)
        return self._work(namespace)

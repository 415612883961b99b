"""How a worker's pages are copied: at once where they are in host memory, begun and settled where they are on a GPU.

``InHost`` owns nothing; ``InGpu`` owns the copier of the GPU and the events that say from when on pages may be copied.
Made once, when the KV is registered. The engine's thread calls ``due``, the worker half's threads ``load`` and
``store``. Imports ``client``, ``connection``, ``device``, ``paged``, ``vllm_layout`` and ``kernels``; knows no vLLM and
no torch.

A GPU does later what it is told now, so the engine's thread records an event in its own stream when pages are due, and
the copies of a load or store come after it: behind those that used the pages before, or computed what is in them, and
not behind what the stream is given since.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from terracekv.connector.arena import Attach
from terracekv.connector.client import Client, Loaded, Stored
from terracekv.connector.connection import Trouble
from terracekv.connector.device import COPY_FAILED
from terracekv.connector.paged import PagedCopier, Tables
from terracekv.connector.vllm_layout import NULL_PAGE, Pages, Unfit
from terracekv.kernels.cuda import Device
from terracekv.kernels.pool import Pool
from terracekv.kernels.transfer import PART_BYTES, Event

Source = Callable[[int], Tables]
"""The pages of block ``index``, all of them."""
Target = Callable[[int], tuple[Tables, int]]
"""The pages to load of block ``index``, and its first token that they hold."""


class Due(NamedTuple):
    """The moment from which on pages may be copied; ``failed`` is why it could not be recorded."""

    event: int | None = None
    failed: str | None = None


class Memory(Protocol):
    """What the worker half needs of either."""

    pages: Pages
    device: Device | None
    attach: Attach | None

    def due(self) -> Due: ...
    def load(self, client: Client, keys: Sequence[bytes], target: Target, due: Due) -> Loaded: ...
    def store(self, client: Client, keys: Sequence[bytes], source: Source, first: int, due: Due) -> Stored: ...
    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class InHost:
    """The forward of a CPU is synchronous: what is due is due now."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.device: Device | None = None
        self.attach: Attach | None = None

    def due(self) -> Due:
        return Due()

    def load(self, client: Client, keys: Sequence[bytes], target: Target, due: Due) -> Loaded:
        return client.load(keys, lambda index, payload: self.pages.scatter(*target(index), payload))

    def store(self, client: Client, keys: Sequence[bytes], source: Source, first: int, due: Due) -> Stored:
        return client.store(keys, lambda index, payload: self.pages.gather(source(index), payload), first=first)

    def report(self) -> dict[str, Any]:
        return {"device": "cpu"}

    def close(self) -> None:
        pass


class InGpu:
    """``stream`` is the engine's own, of the thread that asks. NoCuda without CUDA or CuPy; ValueError when the pages
    are not a GPU's; RuntimeError when it has no room for staging buffers."""

    def __init__(self, pages: Pages, stream: Callable[[], int], device: Device | None = None) -> None:
        self.pages = pages
        self._stream = stream
        self._copier = PagedCopier(
            pages.groups,
            pages.block_tokens,
            null_page=NULL_PAGE,
            device=device,
            part_bytes=PART_BYTES // len(pages.groups),  # each group has buffers of its own
        )
        self.device: Device | None = self._copier.device
        self.attach: Attach | None = self._copier.attach
        self._events = Pool(self._copier.device)
        self._lock = threading.Lock()

    def due(self) -> Due:
        """Of all that the stream was given until now. No error: what was promised to be copied must be answered for,
        and is by the copy, which fails."""
        try:
            with self._lock:
                return Due(self._events.mark(self._stream()))
        except RuntimeError as error:
            return Due(failed=f"the engine's stream could not be marked: {error}")

    def load(self, client: Client, keys: Sequence[bytes], target: Target, due: Due) -> Loaded:
        copies = self._copier.begin(_event(due))
        try:
            return client.load(
                keys,
                lambda index, payload: copies.scatter(index, *target(index), payload),
                copies.settle,
                lambda index, *slot: copies.fetch(index, *target(index), *slot),
            )
        finally:
            self._over(due)

    def store(self, client: Client, keys: Sequence[bytes], source: Source, first: int, due: Due) -> Stored:
        copies = self._copier.begin(_event(due))
        try:
            return client.store(
                keys,
                lambda index, payload: copies.gather(index, source(index), payload),
                settle=copies.settle,
                first=first,
            )
        finally:
            self._over(due)

    def report(self) -> dict[str, Any]:
        return self._copier.report()

    def close(self) -> None:
        """After the clients. Idempotent."""
        self._copier.close()
        self._events.close()

    def _over(self, due: Due) -> None:
        """Nothing that waits for it is begun any more: the event may be recorded anew."""
        assert due.event is not None
        with self._lock:
            self._events.give_back(due.event)


def memory_of(kind: str, pages: Pages, stream: Callable[[], int]) -> Memory:
    """``kind`` is torch's name of what the KV is on. Raises Unfit."""
    if kind == "cpu":
        return InHost(pages)
    if kind != "cuda":
        raise Unfit(f"KV on {kind}: what is copied is host memory and that of NVIDIA's GPUs")
    try:
        return InGpu(pages, stream)
    except (RuntimeError, ValueError) as error:
        raise Unfit(f"KV in GPU memory, which cannot be copied here: {error}") from error


def _event(due: Due) -> Event:
    if due.event is None:
        raise Trouble(COPY_FAILED, due.failed or "nothing says from when on the pages may be copied")
    return Event(due.event)

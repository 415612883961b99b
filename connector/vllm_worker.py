"""The worker half: copies loads and stores between the arena and one rank's pages, and says what has become of them.

``WorkerHalf`` owns two sessions and a thread for each: loads never wait behind stores. Called by vLLM's worker thread,
which it never holds up for a load. Imports ``connector.client``, ``vllm_layout``, ``vllm_memory``, ``vllm_plan`` and
``daemon.protocol``.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from terracekv.connector.client import Client
from terracekv.connector.paged import Tables
from terracekv.connector.vllm_layout import NULL_PAGE
from terracekv.connector.vllm_memory import Due, Memory
from terracekv.connector.vllm_options import Options
from terracekv.connector.vllm_plan import Load, Results, Step, Store
from terracekv.daemon.protocol import split_keys

log = logging.getLogger(__name__)


BYTES_PER_MS = 1_000_000
"""A copy is given so much time beside its deadline."""


class WorkerHalf:
    """Of one rank. ``session`` makes a client of this rank's shard; ``writer`` is False where another rank has the same
    bytes and stores them. ``memory`` is closed with it."""

    def __init__(self, session: Callable[[], Client], memory: Memory, options: Options, *, writer: bool = True) -> None:
        self.stats: Counter[str] = Counter()
        self._memory = memory
        self._pages = memory.pages
        self._options = options
        self._writer = writer
        self._lock = threading.Lock()
        """Of what the threads have done and nobody has fetched yet."""
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._results = Results()
        self._stores: list[Store] = []
        self._loader = _Copier(session(), "terracekv-loads")
        self._storer = _Copier(session(), "terracekv-stores")

    def load(self, step: Step) -> None:
        """Begin a step's loads. What the engine's thread has begun to do with their pages is done before."""
        now = time.monotonic()
        for load in step.loads:
            if not load.keys:
                self._loaded(load, 0, "lost")
                continue
            size_bytes = (load.end - load.start) * self._pages.block_bytes // self._pages.block_tokens
            deadline = now + (self._options.load_deadline_ms + size_bytes / BYTES_PER_MS) / 1e3
            self._loader.put(
                partial(self._load, load, deadline, self._memory.due()), partial(self._loaded, load, 0, "error")
            )

    def store(self, step: Step, *, wait: bool = False) -> None:
        """Begin a step's stores, once its tokens are computed. With ``wait`` they are done when this returns: nobody
        keeps their pages from being reused."""
        for store in step.stores:
            if self._writer:
                self._storer.put(partial(self._store, store, self._memory.due()), partial(self._stored, store, "error"))
            else:
                self._stored(store, None)
        if wait and step.stores:
            self._storer.settle()

    def finished(self) -> tuple[set[str], set[str]]:
        """(requests whose load is over, those of them of which not all came) since the last call."""
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
            return received, failed

    def bad_pages(self) -> set[int]:
        """Pages that were to be loaded and were not, since the last call."""
        with self._lock:
            bad, self._bad_pages = self._bad_pages, set()
            return bad

    def results(self) -> Results | None:
        """For the scheduler half, since the last call."""
        with self._lock:
            if not self._results:
                return None
            results, self._results = self._results, Results()
            return results

    def take_stats(self) -> Counter[str]:
        """Counts since the last call."""
        with self._lock:
            taken, self.stats = self.stats, Counter()
            return taken

    def close(self) -> None:
        """Finish the copies under way, end the sessions. Idempotent."""
        self._loader.close()
        self._storer.close()
        self._memory.close()

    def _load(self, load: Load, deadline: float, due: Due, client: Client) -> None:
        pages, size = self._pages, self._pages.block_tokens
        keys = split_keys(load.keys)
        first = load.start // size
        left_ms = int((deadline - time.monotonic()) * 1e3)
        began = time.monotonic()

        def target(index: int) -> tuple[Tables, int]:
            begin = (first + index) * size
            low, high = max(load.start, begin), min(load.end, begin + size)
            tables = [
                table[(low - load.start) // group.page_tokens : -(-(high - load.start) // group.page_tokens)]
                for table, group in zip(load.tables, pages.groups, strict=True)
            ]
            return tables, low - begin

        client.load_deadline_ms = max(left_ms, 1)
        loaded = self._memory.load(client, keys, target, due)
        self._loaded(
            load, loaded.blocks if loaded.blocks < len(keys) else None, loaded.why or "failed", time.monotonic() - began
        )

    def _loaded(self, load: Load, blocks: int | None, why: str, took_s: float = 0.0) -> None:
        """``blocks`` is None when all came."""
        size = self._pages.block_tokens
        with self._lock:
            self._received.add(load.request)
            good = load.end if blocks is None else max(load.start, (load.start // size + blocks) * size)
            if blocks is not None:
                self._failed.add(load.request)
                self._results.failed[load.request] = (blocks, why)
                for table, group in zip(load.tables, self._pages.groups, strict=True):
                    self._bad_pages.update(table[(good - load.start) // group.page_tokens :])
                self._bad_pages.discard(NULL_PAGE)
            self.stats["loads"] += 1
            self.stats["load_tokens"] += good - load.start
            self.stats["load_bytes"] += (good - load.start) * self._pages.block_bytes // size
            self.stats["load_us"] += int(took_s * 1e6)

    def _store(self, store: Store, due: Due, client: Client) -> None:
        pages = self._pages
        began = time.monotonic()

        def source(index: int) -> Tables:
            number = index - store.first
            return [
                table[number * (per := pages.block_tokens // group.page_tokens) : (number + 1) * per]
                for table, group in zip(store.tables, pages.groups, strict=True)
            ]

        keys = split_keys(store.keys)
        size_bytes = (len(keys) - store.first) * pages.block_bytes
        client.store_deadline_ms = self._options.store_deadline_ms + size_bytes // BYTES_PER_MS
        stored = self._memory.store(client, keys, source, store.first, due)
        whole = stored.stored + stored.present == len(keys)
        with self._lock:
            self.stats["stores"] += 1
            self.stats["store_tokens"] += stored.stored * pages.block_tokens
            self.stats["store_bytes"] += stored.stored * pages.block_bytes
            self.stats["store_us"] += int((time.monotonic() - began) * 1e6)
        self._stored(store, None if whole else stored.why or "incomplete")

    def _stored(self, store: Store, why: str | None) -> None:
        with self._lock:
            self._results.stored[store.job] += 1
            if why is not None:
                self._results.incomplete[store.job] = why


class _Copier:
    """A session and the thread that uses it. Every piece of work is done, or its ``failed`` is called."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._work: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[Client], None], failed: Callable[[], None]) -> None:
        self._work.put((work, failed))

    def settle(self) -> None:
        """Wait until all that was put is done."""
        self._work.join()

    def close(self) -> None:
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        _off_the_engines_cores()
        while (item := self._work.get()) is not None:
            work, failed = item
            try:
                work(self._client)
            except Exception:
                log.exception("a copy failed: its blocks count as not copied")
                failed()
            finally:
                self._work.task_done()


def _off_the_engines_cores() -> None:
    """A CPU worker binds the thread that starts us to the cores that compute. We may run wherever its parent may."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()))

"""The stores under way: which pages they read, and that nobody reuses those meanwhile.

``Stores`` owns the jobs and, through vLLM's pool, one reference on each of their pages. Called by the scheduler half,
on the scheduler's thread. Imports ``vllm_plan`` and ``vllm_layout``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terracekv.connector.vllm_layout import NULL_PAGE
from terracekv.connector.vllm_plan import Results, Store, pages

if TYPE_CHECKING:
    from terracekv.connector.vllm_scheduler import Shape


PAGES_HELD = "pages_held"
"""Stores under way hold too many pages already."""
NO_PAGES = "no_pages"
"""vLLM has not got pages for all of these tokens."""
BEHIND_WINDOW = "behind_window"
"""A sliding window has passed over pages of the last block: nothing is left that is whole."""


@dataclass(frozen=True, slots=True)
class Done:
    """A store that every rank is done with. ``why`` not all of it was stored; None when it was."""

    request: str
    keys: list[bytes]
    first: int
    ttl_s: float
    why: str | None


@dataclass(slots=True)
class _Job:
    request: str
    keys: list[bytes]
    first: int
    pages: list[int]
    ttl_s: float
    left: int


class Stores:
    """``share`` of the engine's pages may be held by stores."""

    def __init__(self, shape: "Shape", share: float) -> None:
        self.follows_tables = False
        """Whether requests' pages must be remembered here, since vLLM does not tell them with each step."""
        self._shape = shape
        self._share = share
        self._pool: Any = None
        self._jobs: dict[int, _Job] = {}
        self._held = 0
        self._next = 0
        self._why: dict[int, str] = {}

    @property
    def protects(self) -> bool:
        """Whether pages are kept from being reused; if not, workers must copy before the step ends."""
        return self._pool is not None

    @property
    def under_way(self) -> int:
        """Jobs that some rank is not done with."""
        return len(self._jobs)

    @property
    def frees(self) -> bool:
        """Whether a page becomes free when the stores under way are done: nobody else holds it."""
        if self._pool is None:
            return False
        holds = Counter(number for job in self._jobs.values() for number in job.pages)
        return any(self._pool.blocks[number].ref_cnt <= count for number, count in holds.items())

    def bind(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool

    def plan(
        self, request: str, keys: list[bytes], first: int, tables: Sequence[Sequence[int]], ttl_s: float
    ) -> Store | str:
        """A store of blocks ``first`` to the last of ``keys``, from the first on of which all pages are there; or why
        there is none."""
        size = self._shape.block_tokens
        end = len(keys)
        per_block = [size // page for page in self._shape.page_tokens]
        if any(len(table) < end * count for table, count in zip(tables, per_block, strict=True)):
            return NO_PAGES
        for table, count in zip(tables, per_block, strict=True):
            cut = list(table[first * count : end * count])
            if NULL_PAGE in cut:
                first = end - cut[::-1].index(NULL_PAGE) // count
        if first == end:
            return BEHIND_WINDOW
        cuts = [list(table[first * count : end * count]) for table, count in zip(tables, per_block, strict=True)]
        held = [number for cut in cuts for number in cut]
        if self._pool is not None:
            if self._held and self._held + len(held) > self._share * len(self._pool.blocks):
                return PAGES_HELD
            self._pool.touch([self._pool.blocks[number] for number in held])
            self._held += len(held)
        self._next += 1
        self._jobs[self._next] = _Job(request, keys, first, held, ttl_s, self._shape.ranks)
        return Store(self._next, b"".join(keys), first, tuple(pages(cut) for cut in cuts))

    def done(self, results: Results) -> Iterable[Done]:
        """Take in what ranks report; the jobs that are over now."""
        self._why.update(results.incomplete)
        for number, ranks in results.stored.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.left -= ranks
            if job.left <= 0:
                del self._jobs[number]
                self._let_go(job)
                yield Done(job.request, job.keys, job.first, job.ttl_s, self._why.pop(number, None))

    def _let_go(self, job: _Job) -> None:
        if self._pool is not None:
            # The tail first, as vLLM frees a request's own pages: a prefix without its head is useless.
            self._pool.free_blocks([self._pool.blocks[number] for number in reversed(job.pages)])
            self._held -= len(job.pages)

"""The scheduler half: offers what can be loaded, plans loads and stores, keeps pages from being reused meanwhile.

``SchedulerHalf`` owns one ``Tracked`` for each request, the answers of its lookups and the stores under way. Called by
vLLM's scheduler thread only, through ``connector.vllm``, and never waits for the daemon. Imports ``vllm_*`` modules
that know no vLLM; of its requests and outputs it reads attributes.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from terracekv.connector.report import leading_tokens, tokens_between
from terracekv.connector.vllm_chain import Chain
from terracekv.connector.vllm_lookups import UNREADABLE, Answer, Lookups
from terracekv.connector.vllm_options import Misunderstood, Options, Wish
from terracekv.connector.vllm_plan import Load, Results, Store, pages
from terracekv.connector.vllm_stores import PAGES_HELD, Stores
from terracekv.connector.vllm_worth import Prefill

log = logging.getLogger(__name__)

Tables = Sequence[Sequence[int]]
HEAD_ABSENT = "head_absent"
RETRIES_MAX = 3
"""A request's blocks are stored anew from the first one so often, when the daemon has lost their head."""


class Blocks(Protocol):
    """vLLM's ``KVCacheBlocks``."""

    def get_block_ids(self) -> Tables: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the engine: tokens in a page of each KV group, in a block, and after which all groups end a page."""

    page_tokens: tuple[int, ...]
    block_tokens: int
    align: int
    ranks: int = 1
    """Workers, each of which reports every store."""
    eagle: bool = False
    items_named: bool = True
    """Whether two multimodal items of one name are the same."""
    lag_tokens: int = 0
    """How far behind the drafter's KV may be of the model's."""


@dataclass(slots=True, eq=False)
class Tracked:
    """A request from its arrival to its end. ``stored`` blocks were planned to be stored, or need not be."""

    chain: Chain
    read: bool
    write: bool
    ttl_s: float = 0.0
    answer: Answer | None = None
    offered: tuple[int, int] = (0, 0)
    """(tokens that vLLM had, tokens offered beyond them)."""
    waits_until: float | None = None
    """When it was told to ask again: the time to which that goes on."""
    load: Load | None = None
    loaded: dict[str, int] = field(default_factory=dict)
    """Tokens of the load by the tier they were in."""
    stored: int = 0
    retries: int = 0
    """How often storing began anew from the first block."""
    tables: list[list[int]] | None = None
    """The request's pages where vLLM does not tell them with each step."""


class SchedulerHalf:
    """``reads`` and ``writes`` are what the role of this engine allows."""

    def __init__(
        self,
        options: Options,
        shape: Shape,
        lookups: Lookups,
        prefill: Prefill,
        *,
        reads: bool = True,
        writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats: Counter[str] = Counter()
        self.stores = Stores(shape, options.pages_held)
        self._options = options
        self._shape = shape
        self._lookups = lookups
        self._prefill = prefill
        self._reads = reads
        self._writes = writes
        self._clock = clock
        self._weights = b""
        self._requests: dict[str, Tracked] = {}
        self._leaving: dict[str, Tracked] = {}
        """Those that are over while a load of theirs goes on."""
        self._loads: list[Load] = []
        self._told: set[str] = set()
        """Kinds of wishes not understood that the log has had."""
        self._joined: bool | None = None
        """As it was told last."""

    def arrived(self, request: Any) -> None:
        """A new request: begin to look for its prompt at once, before it is its turn."""
        self._track(request)

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that can be loaded beyond ``computed``; None: ask again, it is worth it. Idempotent."""
        tracked = self._requests.get(request.request_id) or self._track(request)
        if not tracked.read:
            # Its keys are waited for: a step later it may be over, or a window may have passed over its pages.
            return None if tracked.write and tracked.answer is not None and self._awaited(tracked.answer) else 0
        tokens = self._found(tracked, request, computed)
        now = self._clock()
        if tokens is not None:
            tracked.waits_until = None
        elif tracked.waits_until is None:
            tracked.waits_until = now + (self._options.lookup_budget_ms + self._options.wait_ms) / 1e3
        elif now >= tracked.waits_until:  # however often the answer was lost and asked for anew
            tracked.waits_until = None
            return self._offer(tracked, computed, 0, "deadline")
        return tokens

    def _found(self, tracked: Tracked, request: Any, computed: int) -> int | None:
        """As ``matched``, as long as the answer lasts."""
        answer = tracked.answer
        if answer is None or not self._lookups.lasts(answer):
            self._drop(tracked)
            answer = tracked.answer = self._lookups.ask(tracked.chain, self._most(request))
        if self._awaited(answer):
            return None
        if answer.found is None:
            return self._offer(tracked, computed, 0, "deadline")
        most = min(answer.blocks * self._shape.block_tokens, self._most(request))
        ready = min(answer.ready * self._shape.block_tokens, self._most(request))
        if ready < most and most > computed:
            failed = answer.held is not None and answer.ready not in answer.held.pending
            if not failed and self._clock() < answer.found + self._options.wait_ms / 1e3:
                return None
            answer.why = "failed" if failed else "deadline"
        return self._offer(tracked, computed, ready, answer.why)

    def allocated(self, request: Any, blocks: Blocks, external: int) -> None:
        """vLLM has pages for the request, ``external`` tokens of which are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tables = blocks.get_block_ids()
        if tracked.tables is not None:
            tracked.tables[:] = [list(table) for table in tables]
        if not external:
            if tracked.load is None:
                self._drop(tracked)
            return
        start = tracked.offered[0]
        end = start + external
        size = self._shape.block_tokens
        keys = tracked.chain.keys[start // size : -(-end // size)]
        load = Load(
            request.request_id,
            b"".join(keys),
            start,
            end,
            tuple(
                pages(list(table[start // page : -(-end // page)]))
                for table, page in zip(tables, self._shape.page_tokens, strict=True)
            ),
        )
        tracked.load = load
        self._loads.append(load)
        answer = tracked.answer
        per_tier = answer.per_tier if answer is not None else {}
        tracked.loaded = tokens_between(per_tier, start, end, size)

    def give_up(self, request: Any, blocks: Any) -> None:
        """Tokens were promised that can be loaded no more, by an error of ours: let the workers say so, or the request
        would wait for ever."""
        tables = tuple(
            pages([block.block_id for block in group if block.block_hash is None and not block.is_null])
            for group in blocks.blocks
        )
        self._loads.append(Load(request.request_id, b"", 0, 0, tables))
        if request.request_id in self._requests:
            self._requests[request.request_id].read = False

    def take_loads(self) -> list[Load]:
        """The loads to begin in this step."""
        taken, self._loads = self._loads, []
        return taken

    def plan_stores(self, output: Any) -> list[Store]:
        """The stores to make in the step that ``output`` describes."""
        stores = list[Store]()
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        self._prefill.begin(dict(scheduled), self._clock())
        self._follow_tables(output)
        state = getattr(output, "kv_connector_block_state", None)
        for id, tokens in scheduled.items():
            tracked = self._requests.get(id)
            if tracked is None or not tracked.write:
                continue
            request = tracked.chain.request
            valid = min(request.num_computed_tokens + tokens, request.num_tokens) - self._shape.lag_tokens
            blocks = valid // self._shape.block_tokens
            if not self._options.store_output:
                blocks = min(blocks, request.num_prompt_tokens // self._shape.block_tokens)
            if blocks <= tracked.stored:
                continue
            if tracked.chain.namespace is None:
                if tracked.answer is not None and tracked.answer.why == UNREADABLE:
                    tracked.write = False
                elif self._lookups.namespace is not None and (tracked.answer is None or tracked.answer.found):
                    tracked.answer = self._lookups.ask(tracked.chain, 0)
                continue
            tables = state.get_block_ids(id) if state is not None else tracked.tables
            if tables is None:
                continue
            tracked.chain.extend(blocks)
            store = self.stores.plan(id, tracked.chain.keys[:blocks], tracked.stored, tables, tracked.ttl_s)
            if isinstance(store, Store):
                stores.append(store)
            else:
                self.stats[f"skipped/store_{store}"] += 1
            if store != PAGES_HELD:  # then another step may have room for it
                tracked.stored = blocks
        return stores

    def results(self, results: Results | None, received: Sequence[str]) -> None:
        """What the workers report at the end of a step."""
        self._prefill.end(self._clock())
        for id, (blocks, why) in (results.failed if results is not None else {}).items():
            self._failed(id, blocks, why)
        for id in received:
            tracked = self._leaving.pop(id, None) or self._requests.get(id)
            if tracked is not None:
                for tier, tokens in tracked.loaded.items() if tracked.load is not None else ():
                    self.stats[f"hit_tokens/{tier}"] += tokens
                self._drop(tracked)
                tracked.load = None
        if results is not None:
            for done in self.stores.done(results):
                tracked = self._requests.get(done.request)
                if done.why is None:
                    self._lookups.stored(done.keys, done.ttl_s)
                else:
                    self.stats[f"skipped/store_{done.why}"] += 1
                    if tracked is not None and done.why == HEAD_ABSENT:
                        tracked.stored = 0
                        tracked.retries += 1
                        tracked.write = tracked.write and tracked.retries <= RETRIES_MAX

    def finished(self, request: Any) -> None:
        """The request is over, in whatever way. A load under way goes on: vLLM keeps its pages until it is reported."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.load is not None:
            self._leaving[request.request_id] = tracked
        else:
            self._drop(tracked)

    def loaded(self, request: Any) -> dict[str, int]:
        """Tokens of the request's load by tier."""
        tracked = self._requests.get(request.request_id)
        return tracked.loaded if tracked is not None else {}

    def weights_changed(self, weights: bytes) -> None:
        """From here on nothing that was computed before is found, in any tier, by whatever request."""
        if self._options.reset != "forget":
            return
        self._weights = weights
        for tracked in self._requests.values():
            if tracked.load is None:  # or the workers still need its lease
                self._drop(tracked)
            request = tracked.chain.request
            if tracked.load is not None or request.num_computed_tokens:
                tracked.read = tracked.write = False  # vLLM goes on with KV of before: no key names the mixture
            else:
                tracked.chain, tracked.stored = Chain(request, self._shape.block_tokens, weights), 0
                self._ask(tracked)

    def take_stats(self) -> Counter[str]:
        """Counts since the last call."""
        taken, self.stats = self.stats, Counter()
        if errors := self._lookups.take_errors():
            taken["errors/lookup"] += errors
        if self._joined != self._lookups.joined:
            self._joined = self._lookups.joined
            taken["joined"] = int(self._joined)
        return taken

    def close(self) -> None:
        """The engine ends."""
        self._lookups.close()

    def _track(self, request: Any) -> Tracked:
        chain = Chain(request, self._shape.block_tokens, self._weights)
        wish, why = Wish(), None
        try:
            wish = Wish.read_from(request.kv_transfer_params)
        except Misunderstood as error:
            why, wish = "params", Wish(read=False, write=False)
            if error.kind not in self._told:
                self._told.add(error.kind)
                log.warning("request %.80r is not cached, nor are others like it: %s", request.request_id, error)
        if getattr(request, "resumable", False):
            why, wish = "streaming_input", Wish(read=False, write=False)
        if getattr(request, "mm_features", None) and not self._shape.items_named:
            why, wish = "unnamed_items", Wish(read=False, write=False)
        if why is not None:
            self.stats[f"skipped/{why}"] += 1
        no_reuse = bool(getattr(request, "skip_reading_prefix_cache", False))
        tracked = Tracked(chain, wish.read and self._reads and not no_reuse, wish.write and self._writes, wish.ttl_s)
        if self.stores.follows_tables:
            tracked.tables = []
        self._requests[request.request_id] = tracked
        self._ask(tracked)
        return tracked

    def _ask(self, tracked: Tracked) -> None:
        """Begin to look, or where nothing may be loaded to compute the keys of what is to be stored."""
        if tracked.read or tracked.write:
            tokens = self._most(tracked.chain.request) if tracked.read else 0
            tracked.answer = self._lookups.ask(tracked.chain, tokens)

    def _most(self, request: Any) -> int:
        """Never the last token, whole pages, and one page less where a drafter needs the model's hidden states."""
        most: int = (request.num_tokens - 1) // self._shape.align * self._shape.align
        return max(0, most - self._shape.align) if self._shape.eagle else most

    def _awaited(self, answer: Answer) -> bool:
        """Whether a lookup may still come back in time."""
        return answer.found is None and self._clock() < answer.asked + self._options.lookup_budget_ms / 1e3

    def _offer(self, tracked: Tracked, computed: int, reach: int, why: str | None) -> int:
        tokens = reach - computed
        if 0 < tokens < self._options.min_tokens:
            why, tokens = "too_few", 0
        tokens = max(tokens, 0)
        if why is not None:
            self._skip(tracked, why)
        tracked.offered = (computed, tokens)
        return tokens

    def _skip(self, tracked: Tracked, why: str) -> None:
        """Count, once for each answer, why no more is offered."""
        answer = tracked.answer
        if answer is not None and not answer.counted:
            answer.counted = True
            self.stats[f"skipped/{why}"] += 1

    def _failed(self, id: str, blocks: int, why: str) -> None:
        tracked = self._leaving.get(id) or self._requests.get(id)
        if tracked is None or tracked.load is None:
            return
        if tracked.read:  # the first rank that says so
            self.stats[f"failed/{why}"] += 1
        first = tracked.load.start // self._shape.block_tokens
        keys = tracked.chain.keys[first + blocks : -(-tracked.load.end // self._shape.block_tokens)]
        self._lookups.forget(keys)
        tracked.read = False  # or it would be loaded again, and fail again
        tracked.stored = min(tracked.stored, first + blocks)
        # With several KV groups vLLM begins such a request anew and uses nothing of it.
        good = (first + blocks) * self._shape.block_tokens if len(self._shape.page_tokens) == 1 else 0
        tracked.loaded = leading_tokens(tracked.loaded, good - tracked.load.start)

    def _drop(self, tracked: Tracked) -> None:
        if tracked.answer is not None:
            self._lookups.end(tracked.answer)
            tracked.answer = None

    def _follow_tables(self, output: Any) -> None:
        """Older vLLM tells pages once, when they are added."""
        if not self.stores.follows_tables:
            return
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.tables = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        resumed: set[str] = getattr(cached, "resumed_req_ids", set())
        for id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._requests.get(id)
            if tracked is None or added is None:
                continue
            if id in resumed or not tracked.tables:
                tracked.tables = [list(table) for table in added]
            else:
                for table, more in zip(tracked.tables, added, strict=True):
                    table.extend(more)

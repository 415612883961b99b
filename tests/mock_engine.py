"""vLLM in miniature: a scheduler with a small pool of pages, ranks that compute KV into memory, and the real halves of
the connector between them, called in the order in which vLLM calls them.

Called by tests from one thread. Imports the connector.
"""

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from terracekv.connector import vllm_start
from terracekv.connector.vllm_layout import alignment
from terracekv.connector.vllm_options import Options
from terracekv.connector.vllm_plan import Results, Step
from terracekv.connector.vllm_scheduler import SchedulerHalf
from terracekv.connector.vllm_start import Introduction
from terracekv.tests.mock_pages import BLOCK, PAGE, Pool, Rank, Request, lacking, specs_of

STEPS_MAX = 20_000


class Engine:
    """``windows`` has a group for each entry: None for full attention, else the tokens of its sliding window. Without
    ``socket`` there is no connector: that is the run that others are compared with. ``older`` is a vLLM before 0.30: it
    tells pages once, and here it lends no block pool either, so stores are done before a step ends."""

    def __init__(
        self,
        socket: Path | None,
        *,
        ranks: int = 1,
        replicas: int = 1,
        windows: Sequence[int | None] = (None,),
        pages: int = 200,
        chunk: int = 64,
        model: str = "m",
        revision: str = "r",
        policy: str = "recompute",
        eagle: bool = False,
        older: bool = False,
        items_cache_gb: float = 4.0,
        prefix_caching: bool = True,
        weights: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        make: Callable[..., Rank] = Rank,
        **options: Any,
    ) -> None:
        self.windows = list(windows)
        self.page_count = pages
        self.chunk = chunk
        self.policy = policy
        self.older, self.weights = older, weights
        self.told: dict[str, list[int]] = {}
        """Pages of each group that an older vLLM has told by now."""
        self.pool = Pool(pages)
        self.specs = specs_of(windows)
        # Generous, since test machines are slow; tests of deadlines give their own.
        patient = {"lookup_budget_ms": 10_000, "wait_ms": 10_000, "load_deadline_ms": 10_000, "pages_held": 1.0}
        self.options = Options.read({"socket": str(socket), "store_deadline_ms": 10_000} | patient | options)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.finished: list[Request] = []
        self.errors: list[Request] = []
        self.half: SchedulerHalf | None = None
        self.asked: list[int | None] = []
        self.reported: list[str] = []
        """Ids of loads as ranks reported them."""
        self.ranks = [
            make(
                self.specs,
                pages,
                Introduction(
                    model=model, revision=revision, dtype="u8", block_tokens=BLOCK, shards=ranks // replicas,
                    page_tokens=(PAGE,) * len(self.windows), shard=number // replicas, writer=number % replicas == 0,
                ),
                self.options if socket is not None else None,
            )
            for number in range(ranks)
        ]  # fmt: skip
        if socket is None:
            return
        self.half = vllm_start.scheduler_half(
            [rank.introduction for rank in self.ranks],
            _config(eagle, items_cache_gb, prefix_caching),
            self.options,
            reads=True,
            writes=True,
        )
        assert self.half is not None
        self.half._clock = clock
        self.half.stores.follows_tables = older
        if not older:
            self.half.stores.bind(self.pool)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.half is not None:
            if kind is None:
                self.idle()
            self.half.close()
            for rank in self.ranks:
                rank.close()

    def add(self, request: Request) -> Request:
        """A request arrives."""
        if self.half is not None:
            self.half.arrived(request)
        self.waiting.append(request)
        return request

    def ask(self, *requests: Request) -> list[list[int]]:
        """Add, run to the end, answer."""
        for request in requests:
            self.add(request)
        self.run()
        return [request.answer for request in requests]

    def run(self) -> None:
        """Step until there is nothing left to do."""
        for _ in range(STEPS_MAX):
            if not (self.waiting or self.running or self.loading):
                return
            self.step()
        raise AssertionError(f"hangs: {self.waiting} {self.running} {self.loading}")

    def idle(self) -> None:
        """Run to the end, and until all that is to be stored is; then no page may be held by anybody."""
        self.run()
        for _ in range(STEPS_MAX):
            if self.half is None or not self.half.stores.under_way:
                break
            self.step()
        held = [block.number for block in self.pool.blocks[1:] if block.ref_cnt]
        assert not held, f"pages {held} are held for ever"
        assert sorted(self.pool.free) == list(range(1, self.page_count))
        for rank in self.ranks:
            rank.wait()
        assert not any(memory[:, 0].any() for rank in self.ranks for memory in rank.memory), "written into no page"

    def abort(self, request: Request) -> None:
        """A client went away. Pages of a load under way stay until every rank has reported it."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if self.half is not None:
            self.half.finished(request)
        request.status = "aborted"
        if request not in self.loading:
            self._free(request)

    def preempt(self, request: Request) -> None:
        """Its pages are taken from a request: it begins anew."""
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.status = "preempted"
        request.resumed = True
        self.waiting.insert(0, request)

    def reset(self, weights: bytes, *, running: bool = True) -> None:
        """New weights, and a reset of the prefix cache: with ``running`` all that runs begins anew."""
        while running and self.running:
            self.preempt(self.running[-1])
        self.weights = weights
        if self.half is not None:
            self.half.weights_changed(weights)

    def step(self) -> dict[str, int]:
        """One step of the engine: tokens computed by request."""
        scheduled = self._schedule()
        output = self._output(scheduled)
        step = Step(self.half.take_loads(), self.half.plan_stores(output)) if self.half is not None else Step()
        step = pickle.loads(pickle.dumps(step))
        connected = self.ranks if self.half is not None else []
        for rank in connected:
            rank.half.load(step)
        for id, tokens in scheduled.items():
            request = self._by_id(id)
            seeds = request.seeds(request.num_computed_tokens + tokens, self.weights)
            for rank in self.ranks:
                rank.write(request, request.num_computed_tokens, request.num_computed_tokens + tokens, seeds)
        for rank in connected:
            rank.half.store(step, wait=self.older)
        self._update(scheduled)
        if not scheduled:
            time.sleep(0.0005)  # as vLLM does when it has nothing to compute
        return scheduled

    def _output(self, scheduled: dict[str, int]) -> Any:
        """vLLM's ``SchedulerOutput``."""
        output = SimpleNamespace(num_scheduled_tokens=scheduled)
        if not self.older:
            output.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda id: self._by_id(id).tables)
            return output
        output.scheduled_new_reqs = []
        output.scheduled_cached_reqs = cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        for id in scheduled:
            request = self._by_id(id)
            told = self.told.get(id)
            self.told[id] = [len(table) for table in request.tables]
            if told is None:
                output.scheduled_new_reqs.append(SimpleNamespace(req_id=id, block_ids=request.tables))
                continue
            if request.resumed:
                cached.resumed_req_ids.add(id)
                told = [0] * len(told)
            request.resumed = False
            cached.req_ids.append(id)
            added = [table[count:] for table, count in zip(request.tables, told, strict=True)]
            cached.new_block_ids.append(added if any(added) else None)
        return output

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        left = self.chunk
        for request in list(self.running):
            tokens = min(left, request.num_tokens - request.num_computed_tokens)
            while request in self.running and not self._grow(request, request.num_computed_tokens + tokens):
                self.preempt(self.running[-1])
                scheduled.pop(self.waiting[0].request_id, None)
            if request in self.running and tokens:
                scheduled[request.request_id] = tokens
                left -= tokens
        for request in list(self.waiting):
            if left <= 0 or not self._admit(request):
                continue
            if request.status == "loading":
                continue
            tokens = min(left, request.num_tokens - request.num_computed_tokens)
            if not self._grow(request, request.num_computed_tokens + tokens):
                continue
            if self.half is not None:
                self.half.allocated(request, _blocks(request), 0)
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            scheduled[request.request_id] = tokens
            left -= tokens
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Whether a waiting request may go on: to be computed, or to be loaded."""
        if self.half is None or request.num_computed_tokens:
            return True
        local = request.local
        if not self._grow(request, local):
            return False
        for rank in self.ranks:
            rank.write(request, 0, local, request.seeds(local, self.weights))
        request.num_computed_tokens = local
        found = self.half.matched(request, local)
        assert found == self.half.matched(request, local) or found is None, "asked twice, answered twice"
        self.asked.append(found)
        if found is None:
            request.num_computed_tokens = 0
            return False
        if found:
            align = alignment(self.specs)
            reach = local + found
            assert found % align == 0 and reach < request.num_tokens
            request.num_computed_tokens = 0
            begun = [other for other in (*self.loading, *self.waiting) if other.num_computed_tokens]
            if lacking(request, *begun) > len(self.pool.free) or not self._grow(request, reach):
                return False
            request.num_computed_tokens, request.loaded_tokens = reach, found
            self._grow(request, reach)  # gives back what is behind a window already
            self.half.allocated(request, _blocks(request), found)
            request.received = 0
            request.status = "loading"
            self.waiting.remove(request)
            self.loading.append(request)
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        """Pages for the first ``tokens`` tokens; those behind a window are given back. False: there are none."""
        tables = request.tables or [[] for _ in self.windows]
        wanted = [-(-tokens // PAGE) - len(table) for table in tables]
        for table, window in zip(tables, self.windows, strict=True):
            behind = max(0, request.num_computed_tokens - window + 1) // PAGE if window else 0
            for number, page in enumerate(table[:behind]):
                if page:
                    self.pool.free_blocks([self.pool.blocks[page]])
                    table[number] = 0
        if sum(max(0, more) for more in wanted) > len(self.pool.free):
            return False
        for table, more in zip(tables, wanted, strict=True):
            table.extend(self.pool.take(max(0, more)) or [])
        request.tables = tables
        return True

    def _update(self, scheduled: dict[str, int]) -> None:
        received: list[str] = []
        bad: set[int] = set()
        failed: set[str] = set()
        results: Results | None = None
        for rank in self.ranks if self.half is not None else []:
            mine, mine_failed = rank.half.finished()
            bad |= rank.half.bad_pages()
            failed |= mine_failed
            self.reported += sorted(mine)
            received += sorted(mine)
            found = rank.half.results()
            found = pickle.loads(pickle.dumps(found))
            results = found if results is None else results.add(found) if found is not None else results
        self._invalidate(bad, failed)
        for id, tokens in scheduled.items():
            request = self._by_id(id)
            request.num_computed_tokens += tokens
            request.computed_tokens += tokens
            if request.num_computed_tokens == request.num_tokens:
                self._sample(request)
        over = []
        for id in received:
            request = next(request for request in self.loading if request.request_id == id)
            request.received += 1
            if request.received == len(self.ranks):
                over.append(request)
        if self.half is not None:
            self.half.results(results, [request.request_id for request in over])
        for request in over:
            self.loading.remove(request)
            if request.status == "aborted":
                self._free(request)
            elif request.status == "error":
                self.errors.append(request)
                self._free(request)
            else:
                request.status = "waiting"
                if request.num_computed_tokens == 0:
                    self._free(request)
                self.waiting.insert(0, request)

    def _invalidate(self, bad: set[int], failed: set[str]) -> None:
        for request in self.loading:
            if request.status == "aborted":
                continue
            first = None
            if len(self.windows) > 1:
                first = 0 if request.request_id in failed else None
            else:
                first = next((n for n, page in enumerate(request.tables[0]) if page in bad), None)
            if first is None:
                continue
            if self.policy == "fail":
                request.status = "error"
                assert self.half is not None
                self.half.finished(request)
            else:
                request.num_computed_tokens = min(request.num_computed_tokens, first * PAGE)
                request.loaded_tokens = max(0, request.num_computed_tokens - request.local)

    def _sample(self, request: Request) -> None:
        digest = hashlib.sha256(request.identity)
        for rank in self.ranks:
            digest.update(rank.read(request, request.num_tokens, self.windows))
        request.all_token_ids.append(int.from_bytes(digest.digest()[:2], "little"))
        if len(request.answer) == request.answer_tokens:
            self.running.remove(request)
            self.finished.append(request)
            if self.half is not None:
                self.half.finished(request)
            request.status = "finished"
            self._free(request)

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.pool.free_blocks([self.pool.blocks[page] for page in reversed(table) if page])
        request.tables = []

    def _by_id(self, id: str) -> Request:
        return next(r for r in (*self.running, *self.waiting, *self.loading) if r.request_id == id)


def truth(request: Request, *, weights: bytes = b"", said: int = 0, **settings: Any) -> list[int]:
    """The answer of a run without a connector. ``request`` is as it arrived, or as it was ``said`` tokens later."""
    settings = {key: value for key, value in settings.items() if key in ("ranks", "replicas", "windows")}
    copy = Request(
        request.request_id, request.all_token_ids[: request.num_prompt_tokens + said], request.answer_tokens - said,
        lora_request=request.lora_request, mm_features=request.mm_features,
    )  # fmt: skip
    return Engine(None, weights=weights, **settings).ask(copy)[0]


def _blocks(request: Request) -> Any:
    return SimpleNamespace(get_block_ids=lambda: tuple(list(table) for table in request.tables))


def _config(eagle: bool, items_cache_gb: float, prefix_caching: bool) -> Any:
    """What the scheduler half reads of vLLM's configuration."""
    drafter = SimpleNamespace(use_eagle=lambda: True, num_speculative_tokens=0) if eagle else None
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=items_cache_gb))
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    return SimpleNamespace(speculative_config=drafter, model_config=model, cache_config=cache)

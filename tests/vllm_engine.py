"""vLLM's engine inside the test's own process, stepped by the test: an abort, a preemption or a stopped daemon comes
between two steps that the test chose, and a second engine starts in half a second.

Owns its engines, which end with the ``with`` block. Called from the test's one thread. Imports vLLM and torch.
"""

import contextlib
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import torch
from vllm import EngineArgs, RequestOutput, SamplingParams, envs
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core
from vllm.v1.engine.llm_engine import LLMEngine

from terracekv.bench.tiny_llama import VOCABULARY, tiny_llama
from terracekv.bench.vllm_flags import environment, transfer

PAGE = 32
"""Tokens in a page of vLLM: the fewest that its CPU backend takes."""
BLOCK = 64
"""Tokens in a block of ours: two pages, so that both kinds of rounding are seen."""
ANSWER = 12
CONTEXT = 4096
PAGES = 512
SETTLE_S = 30.0

_ids = itertools.count()
_truth: dict[tuple[tuple[int, ...], int], list[int]] = {}

torch.set_num_threads(1)  # vLLM would set it for a worker's process
core.cleanup_dist_env_and_memory = lambda: None
"""An engine that ends would end the process groups of all: here they end with the process."""


class Answer(NamedTuple):
    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed: from the engine's own cache or from ours."""
    finish: str | None


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids; two seeds share no block."""
    numbers = Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(tokens)]


@functools.cache
def plain() -> "Engine":
    """The engine without a connector that all others are compared with, for the whole session: what the first engine
    of a process leaves in it, a test must not be blamed for."""
    return Engine()


def expected(tokens: Sequence[int], new: int = ANSWER) -> list[int]:
    """What vLLM answers without us."""
    return expected_of([tokens], new)[0]


def expected_of(prompts: Sequence[Sequence[int]], new: int = ANSWER) -> list[list[int]]:
    """What vLLM answers without us to each of these, computed once in the session."""
    unknown = [tokens for tokens in prompts if (tuple(tokens), new) not in _truth]
    answers = plain().finish(*(plain().ask(tokens, new) for tokens in unknown))
    _truth.update({(tuple(t), new): answer.tokens for t, answer in zip(unknown, answers, strict=True)})
    return [_truth[tuple(tokens), new] for tokens in prompts]


OPTIONS = {"block_tokens": BLOCK, "lookup_budget_ms": 5000, "wait_ms": 10_000, "prefill_tokens_per_s": 1.0}
"""Patient, and sure that loading pays: on a busy machine, too, a test sees hits."""


class Engine:
    """One vLLM engine with the tiny Llama in float32. Without ``socket`` it has no connector."""

    def __init__(self, socket: Path | None = None, *, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        """``options`` go to the connector, ``arguments`` to vLLM."""
        envs.disable_envs_cache()  # an engine before this one has it read once and for all
        os.environ.update(environment(arguments.get("tensor_parallel_size", 1)), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        settings: dict[str, Any] = {
            "model": str(tiny_llama()),
            "dtype": "float32",
            "block_size": PAGE,
            "num_gpu_blocks_override": PAGES,
            "max_model_len": CONTEXT,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": True,
        }
        if socket is not None:
            settings["kv_transfer_config"] = transfer(socket, **(OPTIONS | (options or {})))
        self.worker: Any = None
        """The worker's half of the connector; None where workers have processes of their own."""
        with self._at_work():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**(settings | arguments)))
        self.core = self._engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.preemptions = 0
        self.offers: list[tuple[int | None, bool]] = []
        """What the connector answered whenever it was asked how much it has."""
        self.on_load: Callable[[], None] = lambda: None
        """Called when the scheduler has given pages to a load and no worker knows of it yet."""
        if self.connector is not None:
            self._watch()
        self.finished: dict[str, Answer] = {}

    def ask(
        self,
        tokens: Sequence[int],
        new: int = ANSWER,
        *,
        salt: str | None = None,
        lora: tuple[int, Path] | None = None,
        params: dict[str, Any] | None = None,
    ) -> str:
        """Hand the engine a request; its name. Nothing is computed before ``step``."""
        given: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt is not None:
            given["cache_salt"] = salt
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **extra)
        adapted = None if lora is None else LoRARequest(f"adapter-{lora[0]}", lora[0], str(lora[1]))
        name = f"request-{next(_ids)}"
        self._engine.add_request(name, given, sampling, lora_request=adapted)
        return name

    def step(self) -> None:
        """One turn of the engine: schedule, compute, store. Waits a millisecond where nothing could be computed, as
        vLLM's own loop does."""
        before = {request.request_id: request.num_preemptions for request in self.scheduler.running}
        with self._at_work():
            outputs = self._engine.step()
        for request in self.scheduler.waiting:
            self.preemptions += request.num_preemptions - before.get(request.request_id, request.num_preemptions)
        for output in outputs:
            assert isinstance(output, RequestOutput)
            if output.finished:
                only = output.outputs[0]
                self.finished[output.request_id] = Answer(
                    list(only.token_ids), output.num_cached_tokens or 0, only.finish_reason
                )
        if not outputs:
            time.sleep(0.001)

    def finish(self, *names: str) -> list[Answer]:
        """Step until all of these are answered."""
        while any(name not in self.finished for name in names):
            assert self._engine.has_unfinished_requests(), f"lost one of {names}"
            self.step()
        return [self.finished[name] for name in names]

    def answer(self, tokens: Sequence[int], new: int = ANSWER, **given: Any) -> Answer:
        """Ask, and step until it is answered and what it leaves to store is stored."""
        answered = self.finish(self.ask(tokens, new, **given))[0]
        self.settle()
        return answered

    def abort(self, name: str) -> None:
        self._engine.abort_request([name], internal=False)

    def settle(self) -> None:
        """Step until nothing is left to do, stores and abandoned loads included."""
        until = time.monotonic() + SETTLE_S
        while self.scheduler.has_requests():
            assert time.monotonic() < until, "the engine never comes to rest"
            self.step()

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that the next hit can only be ours."""
        self.settle()
        assert self._engine.reset_prefix_cache(), "pages are still in use"

    @property
    def pages_free(self) -> int:
        """Pages that no request and no copy holds."""
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """vLLM keeps a worker's connector in a variable of the process. Here several engines share one."""
        assert kv_transfer_state._KV_CONNECTOR_AGENT is None
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            yield
        finally:
            self.worker, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None

    def _watch(self) -> None:
        offered, allocated = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc

        def offer(request: Any, computed: int) -> tuple[int | None, bool]:
            self.offers.append(offered(request, computed))
            return self.offers[-1]

        def allocate(request: Any, blocks: Any, external: int) -> None:
            allocated(request, blocks, external)
            if external:
                self.on_load()

        self.connector.get_num_new_matched_tokens = offer
        self.connector.update_state_after_alloc = allocate

    def close(self) -> None:
        """End it, and give back all that it held. Idempotent."""
        if self.connector is not None:  # the two watchers are a cycle
            vars(self.connector).pop("get_num_new_matched_tokens", None)
            vars(self.connector).pop("update_state_after_alloc", None)
        with self._at_work():
            self._engine.engine_core.shutdown()
        del self._engine, self.core, self.scheduler, self.connector
        gc.collect()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

"""What does the connector cost an engine whose prompts nobody has asked before?

Two engines in one process, one without and one with the connector, take turns with the same new prompts; a small real
model, everything is stored and nothing is loaded. Also the time that the connector takes of the scheduler's thread.
Run: ``python -m terracekv.bench.cost_vllm``.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from terracekv.bench.figures import median, note, report, seconds
from terracekv.bench.models import MODELS
from terracekv.bench.served import served
from terracekv.bench.small_model import NAME
from terracekv.daemon.http_client import Door
from terracekv.tests.vllm_engine import PAGE, Engine, prompt

REQUESTS = 16
PROMPT_TOKENS = 256
NEW_TOKENS = 32
BLOCKS = (PROMPT_TOKENS + NEW_TOKENS - 1) // PAGE
"""Full ones of a request; the last token has no KV."""
BAR_RATIO = 0.97
BAR_MS = 0.5
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "has_pending_push_work",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
)
"""What vLLM calls on the scheduler's thread."""
ARGUMENTS: dict[str, Any] = {"model": str(MODELS / NAME), "num_gpu_blocks_override": 1024, "max_model_len": 2048}
DEFAULTS: dict[str, Any] = {"block_tokens": 0, "lookup_budget_ms": 20, "wait_ms": 2000, "prefill_tokens_per_s": 0.0}
"""The connector's own, which the tests' engine would change."""


class Clock:
    """Seconds spent in a half of the connector: ``spent`` in all calls of its hooks, ``longest`` in one."""

    def __init__(self, connector: Any, hooks: Sequence[str]) -> None:
        self.spent = 0.0
        self.longest = 0.0
        for name in hooks:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                took_s = time.perf_counter() - started
                self.spent += took_s
                self.longest = max(self.longest, took_s)

        return timed


def serve(engine: Engine, seed: int) -> None:
    """A batch of prompts that share nothing, all at once."""
    names = [engine.ask(prompt(PROMPT_TOKENS, seed + number), NEW_TOKENS) for number in range(REQUESTS)]
    assert all(answer.cached == 0 for answer in engine.finish(*names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with served(host__size="2GiB", disk__size="2GiB") as daemon, Engine(**ARGUMENTS) as alone:
        with Engine(daemon.socket, options=DEFAULTS, **ARGUMENTS) as with_store:
            clock = Clock(with_store.connector, HOOKS)
            plain, stored, scheduler, cpu = list[float](), list[float](), list[float](), list[float]()
            for turn in range(rounds + 1):
                seed = 1000 * turn
                order = (alone, with_store) if turn % 2 else (with_store, alone)
                clock.spent = 0.0
                times, used = dict[int, float](), dict[int, float]()
                for engine in order:
                    before = time.process_time()
                    times[id(engine)] = seconds(partial(serve, engine, seed))
                    used[id(engine)] = time.process_time() - before
                cpu.append(used[id(alone)] / used[id(with_store)])
                scheduler.append(clock.spent / REQUESTS)
                plain.append(times[id(alone)])
                stored.append(times[id(with_store)])
                with_store.settle()
            blocks = Door(daemon.runtime).ask("GET", "/v1/status")["tiers"]["host"]["counters"]["puts"]
    plain, stored, scheduler = plain[1:], stored[1:], scheduler[1:]  # the first warms both
    tokens = REQUESTS * (PROMPT_TOKENS + NEW_TOKENS)
    ratio = median([a / b for a, b in zip(plain, stored, strict=True)])
    report(
        "vllm_throughput_no_reuse",
        tokens / median(stored),
        "tokens/s",
        "vLLM without a connector, in turn",
        tokens / median(plain),
        rounds,
        ratio=ratio,
        cpu_ratio=round(median(cpu[1:]), 4),
        stored_share=round(blocks / ((rounds + 1) * REQUESTS * BLOCKS), 4),
    )
    report("vllm_scheduler_thread_per_request", median(scheduler) * 1e3, "ms", "bar", BAR_MS, rounds)
    if ratio < BAR_RATIO:
        note(f"below the bar of {BAR_RATIO}: {ratio:.3f}")


if __name__ == "__main__":
    main()

"""What do an engine's steps cost while its daemon is up, killed, and stopped (SIGSTOP)?

Two engines in one process, one without and one with the connector, take turns with the same new prompts; a tiny model,
whose steps are short enough to show the budget. In each round the daemon goes away under a connector that has joined
it, and comes back. Each step is timed whole, and within it what the connector takes, on the scheduler's and on the
worker's side; then the time to the first token of prompts that come alone. What an outage adds to a step may be the
lookup budget. Run: ``python -m terracekv.bench.outage_vllm``.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from terracekv.bench.cost_vllm import DEFAULTS, HOOKS, Clock
from terracekv.bench.figures import median, note, percentile, report, seconds
from terracekv.bench.served import Served, served
from terracekv.tests.vllm_engine import Engine, prompt

REQUESTS = 6
EVERY_STEPS = 4
"""A request comes in so often, so both engines compute the same batches."""
PROMPT_TOKENS = 256
NEW_TOKENS = 24
ALONE = 5
"""Requests of a round that come one after the other, for one token each."""
WORKER_HOOKS = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
"""What vLLM calls on the worker's thread, within a step."""
BUDGET_MS = DEFAULTS["lookup_budget_ms"]
REFERENCE = "vLLM without a connector"
JOIN_S = 10.0


def stream(engine: Engine, seed: int) -> list[float]:
    """Seconds of each step that computes, while requests come in one after the other."""
    steps, names = list[float](), list[str]()
    while len(names) < REQUESTS or any(name not in engine.finished for name in names):
        if len(names) < REQUESTS and len(steps) >= EVERY_STEPS * len(names):
            names.append(engine.ask(prompt(PROMPT_TOKENS, seed + len(names)), NEW_TOKENS))
        took_s = seconds(engine.step)
        if engine.scheduler.running:  # else a lone request waits for its lookup
            steps.append(took_s)
    assert all(engine.finished[name].cached == 0 for name in names)
    return steps


def first_token(engine: Engine, seed: int) -> float:
    """Seconds to the first token of a prompt that comes alone."""
    return seconds(lambda: engine.finish(engine.ask(prompt(PROMPT_TOKENS, seed), 1)))


@dataclass(frozen=True)
class State:
    """What becomes of the daemon in a round."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]


def hits_again(engine: Engine) -> None:
    """Wait until the connector has joined the daemon and blocks are hit."""
    until = time.monotonic() + JOIN_S
    known = prompt(PROMPT_TOKENS, 0)
    while not engine.answer(known, 1).cached:
        assert time.monotonic() < until, "the connector does not join again"
        engine.forget()
    engine.forget()


def measure(state: State, alone: Engine, with_store: Engine, clocks: list[Clock], rounds: int, seed: int) -> None:
    """One state of the daemon."""
    steps: dict[int, list[float]] = {id(alone): [], id(with_store): []}
    firsts: dict[int, list[float]] = {id(alone): [], id(with_store): []}
    longest = 0.0
    for turn in range(rounds):
        hits_again(with_store)
        for clock in clocks:
            clock.longest = 0.0
        state.begin()
        for engine in (alone, with_store) if turn % 2 else (with_store, alone):
            steps[id(engine)] += stream(engine, seed + 1000 * turn)
            firsts[id(engine)] += [first_token(engine, seed + 1000 * turn + 500 + n) for n in range(ALONE)]
        longest = max(longest, *(clock.longest for clock in clocks))
        state.end()
    for percent in (50, 99):
        ours, plain = (percentile(steps[id(engine)], percent) * 1e3 for engine in (with_store, alone))
        figure = partial(report, f"vllm_step_p{percent}_daemon_{state.name}", ours, "ms", REFERENCE, plain)
        figure(len(steps[id(with_store)]), rise_ms=round(ours - plain, 2), longest_hook_ms=round(longest * 1e3, 2))
        if ours - plain > BUDGET_MS:
            note(f"{state.name}: steps rise by {ours - plain:.1f} ms at p{percent}, the budget is {BUDGET_MS} ms")
    ours, plain = (median(firsts[id(engine)]) * 1e3 for engine in (with_store, alone))
    figure = partial(report, f"vllm_first_token_daemon_{state.name}", ours, "ms", REFERENCE, plain)
    figure(len(firsts[id(with_store)]), rise_ms=round(ours - plain, 2))


def send(daemon: Served, number: int) -> None:
    """A signal to the daemon."""
    assert daemon.process is not None
    os.kill(daemon.process.pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with served(host__size="1GiB", disk__size="2GiB") as daemon, Engine() as alone:
        with Engine(daemon.socket, options=DEFAULTS) as with_store:
            clocks = [Clock(with_store.connector, HOOKS), Clock(with_store.worker, WORKER_HOOKS)]
            for engine in (alone, with_store):
                stream(engine, 0)  # warms it
            states = [
                State("up", lambda: None, lambda: None),
                State("stopped", partial(send, daemon, signal.SIGSTOP), partial(send, daemon, signal.SIGCONT)),
                State("killed", partial(daemon.stop, kill=True), daemon.start),
            ]
            for number, state in enumerate(states, 1):
                measure(state, alone, with_store, clocks, rounds, 100_000 * number)


if __name__ == "__main__":
    main()

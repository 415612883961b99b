"""How long until the first token of a question about a long document, from wherever the document's KV is?

A small real model behind vLLM's OpenAI API, its answer streamed; several documents and several questions about each.
Without the store, and with it: computed, from the engine's own prefix cache, from each tier, after a restart of the
engine and of the daemon. All servers have one core, so that they compute alike. Every answer must be, word for word,
the one without the store. Run: ``python -m terracekv.bench.ttft_vllm``.
"""

import argparse
import http.client
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from terracekv.bench.demo import DOCUMENT, QUESTIONS
from terracekv.bench.figures import break_even_tokens, median, note, report
from terracekv.bench.models import MODELS
from terracekv.bench.served import Served, served
from terracekv.bench.small_model import NAME
from terracekv.bench.vllm_server import Server
from terracekv.daemon.http_client import Door
from terracekv.tests.seaweed import program, seaweed

CHARACTERS = 9000
DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the route that empties the engine's prefix cache."""
OPTIONS = {"wait_ms": 20_000, "lookup_budget_ms": 500}
"""Patient: what is below host is to be seen, even where it is slow."""
HEADROOM_TOKENS = 64
PERSIST_S = 120.0
JOIN_S = 60.0
BAR_RATIO = 1.25
"""Of the engine's own prefix cache, after an engine restart."""


class Bench:
    """The prompts, what each must be answered, and the daemon that is asked to forget."""

    def __init__(self, rounds: int) -> None:
        text = DOCUMENT.read_text()
        step = (len(text) - CHARACTERS) // max(1, rounds - 1)
        documents = [text[number * step :][:CHARACTERS] for number in range(rounds)]
        self.first = [f"{document}\n\n{QUESTIONS[0]}" for document in documents]
        self.second = [f"{document}\n\n{QUESTIONS[1]}" for document in documents]
        self.texts: dict[str, str] = {}
        self.cold_s = 0.0
        self.tokens = 0
        """Of a prompt."""

    def ask(self, server: Server, prompt: str, hit: bool) -> float:
        """Seconds to the first token of an answer that must be the one that was given before."""
        reply = server.ask(prompt)
        assert self.texts.setdefault(prompt, reply.text) == reply.text, "another answer"
        self.tokens = reply.prompt_tokens
        missing = reply.prompt_tokens - reply.cached_tokens
        assert hit == (missing <= HEADROOM_TOKENS), f"{missing} tokens computed"
        return reply.ttft_s

    def cold(self, name: str, server: Server) -> None:
        """Every document for the first time."""
        self._report(name, [self.ask(server, prompt, False) for prompt in self.first])

    def own(self, name: str, server: Server) -> None:
        """A question about each document, asked again: the engine's own prefix cache."""
        for prompt in self.second:
            self.ask(server, prompt, True)
        self._report(name, [self.ask(server, prompt, True) for prompt in self.second])

    def warm(self, name: str, server: Server, before: Callable[[], None] = lambda: None) -> float:
        """A question about each document from where ``before`` left its KV, and at once again from the engine's own
        prefix cache, which holds as much of it now; the median of the ratios."""
        times, own = [], []
        for prompt in self.second:
            before()
            times.append(self.ask(server, prompt, True))
            own.append(self.ask(server, prompt, True))
        return self._report(name, times, own)

    def _report(self, name: str, times: Sequence[float], own: Sequence[float] = ()) -> float:
        middle = median(times)
        self.cold_s = self.cold_s or middle
        ratio = median([a / b for a, b in zip(times, own, strict=True)]) if own else None
        more = {"break_even_tokens": break_even_tokens(self.cold_s, median(own), middle, self.tokens)} if own else {}
        report(
            name,
            middle * 1e3,
            "ms",
            "the engine's own prefix cache, asked at once again" if own else "",
            median(own) * 1e3 if own else None,
            len(times),
            ratio=ratio,
            of_cold=round(middle / self.cold_s, 4),
            **more,
        )
        return ratio or 0.0


def forget(server: Server) -> None:
    """Empty the engine's own prefix cache."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().status == 200
    connection.close()


@contextmanager
def node(folder: Path) -> Iterator[tuple[Served, bool]]:
    """A daemon with host and disk, and a real bucket below where there is one; whether there is."""
    with ExitStack() as stack:
        settings = {"host__size": "2GiB", "disk__size": "4GiB"}
        if program() is not None:
            bucket = stack.enter_context(seaweed(folder, "blocks"))
            settings |= {"s3__enabled": "true", "s3__endpoint": bucket.endpoint, "s3__bucket": "blocks"}
            settings |= {"s3__credentials_file": str(bucket.credentials), "s3__codec": "off"}
        yield stack.enter_context(served(**settings)), "s3__enabled" in settings


def empty(daemon: Served, *tiers: str) -> None:
    """Drop all blocks from these tiers."""
    door = Door(daemon.runtime)
    for namespace in door.ask("GET", "/v1/namespaces")["namespaces"]:
        for tier in tiers:
            door.ask("POST", "/v1/flush", {"namespace": namespace["namespace_id"], "tier": tier})


def persisted(daemon: Served, lowest: str) -> None:
    """Wait until the lowest tier has all that host has."""
    until, door = time.monotonic() + PERSIST_S, Door(daemon.runtime)
    while True:
        tiers = door.ask("GET", "/v1/status")["tiers"]
        if tiers[lowest]["blocks"] >= tiers["host"]["blocks"] > 0:
            return
        assert time.monotonic() < until, f"{lowest} never had all: {tiers}"
        time.sleep(0.2)


def rejoined(server: Server) -> float:
    """Wait until an engine with an emptied cache hits again; seconds."""
    started, probe = time.monotonic(), "Say hello. " * 60
    while True:
        forget(server)
        if server.ask(probe, 1).cached_tokens:
            return time.monotonic() - started
        assert time.monotonic() < started + JOIN_S, "the engine does not join"


def alone(bench: Bench, folder: Path) -> None:
    """What there is to compare with: vLLM without a connector."""
    with Server(MODELS / NAME, folder / "alone.log", environment=DEV) as server:
        server.ask("Hello")
        bench.cold("ttft_cold_without_store", server)
        bench.own("ttft_prefix_cache_without_store", server)


def with_store(bench: Bench, folder: Path, daemon: Served, bucket: bool) -> None:
    """One engine, and the one after it, beside a daemon."""

    def engine(number: int) -> Server:
        return Server(MODELS / NAME, folder / f"{number}.log", daemon.socket, options=OPTIONS, environment=DEV)

    with engine(1) as server:
        server.ask("Hello")
        bench.cold("ttft_cold", server)
        bench.own("ttft_prefix_cache", server)
    with engine(2) as server:
        server.ask("Hello")
        ratio = bench.warm("ttft_engine_restarted", server)
        if ratio > BAR_RATIO:
            note(f"over the bar of {BAR_RATIO}: {ratio:.2f} of the engine's own prefix cache")
        bench.warm("ttft_host", server, lambda: forget(server))
        for tier in ("disk", "s3") if bucket else ("disk",):
            persisted(daemon, tier)
        daemon.stop()
        daemon.start()
        report("engine_rejoins", rejoined(server), "s", "bar", 5.0)
        bench.warm("ttft_daemon_restarted", server, lambda: forget(server))

        def below(*tiers: str) -> Callable[[], None]:
            def only() -> None:
                forget(server)
                empty(daemon, *tiers)

            return only

        bench.warm("ttft_disk", server, below("host"))
        if bucket:
            bench.warm("ttft_s3", server, below("host", "disk"))
        else:
            note("SeaweedFS is not installed: nothing is measured from s3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5)
    bench = Bench(parser.parse_args().documents)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as s3:
        alone(bench, Path(logs))
        with node(Path(s3)) as (daemon, bucket):
            with_store(bench, Path(logs), daemon, bucket)


if __name__ == "__main__":
    main()

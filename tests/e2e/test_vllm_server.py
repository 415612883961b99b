"""A small real model behind vLLM's OpenAI API: what one engine stored the next answers from, word for word.

Servers start in half a minute, so they start two at a time and one test asks them everything.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from terracekv.bench.small_model import fetched
from terracekv.bench.vllm_server import Reply, Server
from terracekv.tests.harness import Daemon, until

DOCUMENT = (Path(__file__).resolve().parent.parent.parent / "docs" / "design.md").read_text()[:8000]
QUESTIONS = ("What is a lease?", "Which tiers are there, and what is each of them for?")
BLOCK = 32
NEW = 24
OPTIONS = {"lookup_budget_ms": 2000, "wait_ms": 10_000}
"""Patient: on a busy machine, too, a test sees hits."""

pytestmark = pytest.mark.timeout(600)


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start them all at once; end them all."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        for server in servers:
            stack.callback(server.stop)
        for start in [threads.submit(server.start) for server in servers]:
            start.result()
        yield


def ask(server: Server, question: str) -> Reply:
    return server.ask(f"{DOCUMENT}\n\n{question}", NEW)


def hits(reply: Reply) -> bool:
    """All that is common to the two questions, at least, was not computed."""
    return reply.cached_tokens > reply.prompt_tokens - 2 * BLOCK


@pytest.mark.fault(7)
def test_engines_that_come_and_go_beside_a_daemon_give_the_text_of_one_without_it(
    shm_dir: Path, tmp_path: Path
) -> None:
    with Daemon(shm_dir, tmp_path, host__size="512MiB", host__slab="32MiB", disk__enabled="false") as daemon:

        def server(name: str, socket: Path | None) -> Server:
            return Server(fetched(), tmp_path / f"{name}.log", socket, options=OPTIONS)

        alone, first = server("alone", None), server("first", daemon.socket)
        with running(alone, first):
            texts = {question: ask(alone, question).text for question in QUESTIONS}
            cold = ask(first, QUESTIONS[0])
            assert (cold.text, cold.cached_tokens) == (texts[QUESTIONS[0]], 0)
            assert cold.prompt_tokens > 2000

        other = server("other", daemon.socket)
        with running(first, other):
            for restarted in (first, other):
                for question in QUESTIONS:
                    reply = ask(restarted, question)
                    assert reply.text == texts[question]
                    assert hits(reply), f"of {reply.prompt_tokens} tokens only {reply.cached_tokens} were not computed"
            assert first.metrics()["vllm:external_prefix_cache_hits_total"] >= cold.prompt_tokens - 2 * BLOCK

            daemon.kill()
            assert in_turn(first, other, "while there is no daemon").cached_tokens == 0
            daemon.start()
            tries = itertools.count()
            until(lambda: hits(in_turn(first, other, f"try {next(tries)}")), "both engines join by themselves", 120)


def in_turn(first: Server, second: Server, about: str) -> Reply:
    """Ask both the same, about something that no engine has seen before: the first may store it for the second."""
    content = f"This is about {about}. {DOCUMENT[:1500]}"
    one, two = first.ask(content, NEW), second.ask(content, NEW)
    assert one.text == two.text
    return two

"""The demo: what the store does for a small model that is asked several questions about one long document.

Run as ``make demo`` or ``python -m terracekv.bench.demo``. Starts a daemon on folders of its own and engines as
processes of their own, prints one table, and leaves nothing behind. The exit status is 0 when every answer is, word
for word, the one without a store, every row is what it says, and the first token comes ``--times`` times sooner.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from terracekv.bench.served import Ended, Served, served
from terracekv.daemon.http_client import Door

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "design.md"
QUESTIONS = (
    "What is a lease?",
    "Which tiers are there, and what is each of them for?",
    "Why is every key chained to the one before it?",
)
NAMESPACE = "SmolLM2-135M-Instruct"
SHOWN = ("ttft_ms", "lookup_ms", "load_ms", "computed")
COLD = "without the store"
EMPTY = "with it, while it is empty"
WARM = "from host"
PERSIST_S = 60.0
MIB = 1 << 20
ENGINE_MAIN = "from terracekv.bench.demo_engine import main; main()"
ENVIRONMENT = {
    # Both with and without the store. Threads that wait leave the core to whoever works.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Attention reads grouped K and V as they are, instead of copying them for every head.
    "TRANSFORMERS_SDPA_FORCE_GQA": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}

Answer = dict[str, Any]


class Engine:
    """A process with the model."""

    def __init__(self, socket: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE_MAIN, str(socket), str(DOCUMENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )

    def ready(self) -> Answer:
        """What the engine says of itself once its model is loaded."""
        return self._read()

    def ask(self, verb: str, *arguments: str) -> Answer:
        """One line out, one line back. Ended when the engine has."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([verb, *arguments]), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Ended(f"an engine ended with status {self._process.wait()}: its own words above say why")
        answer: Answer = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill it: it has nothing that is worth a farewell."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def engine(daemon: Served) -> Iterator[Engine]:
    """An engine beside the daemon, for as long as the ``with`` lasts. Its model may still be loading."""
    running = Engine(daemon.socket)
    try:
        yield running
    finally:
        running.end()


class Table:
    """The rows as they come, and what they amount to."""

    WIDTHS = (42, 12, 12, 9)
    TIER_WIDTH = 10

    def __init__(
        self, expected: dict[str, str], tiers: Sequence[str] = ("host", "disk"), token_bytes: int | None = None
    ) -> None:
        """``expected`` are the answers by question. With ``token_bytes``, tokens of a tier are shown as bytes too."""
        self._expected = expected
        self._tiers = tiers
        self._token_bytes = token_bytes
        self._tier_width = self.TIER_WIDTH if token_bytes is None else 2 * self.TIER_WIDTH
        self.ttft_ms: dict[str, float] = {}
        self.wrong: list[str] = []
        head = [f"from {tier}" for tier in tiers]
        self._line("", "first token", "lookup+load", "computed", *head, "answers")

    def row(self, title: str, answers: Sequence[tuple[str, Answer]], tier: str | None) -> None:
        """Medians over the answers to questions. ``tier`` is where the document's tokens must have come from."""
        same = all(answer["text"] == self._expected[question] for question, answer in answers)
        if not same:
            self.wrong.append(f"{title}: an answer differs from the one without a store")
        for _, answer in answers:
            if list(answer.get("loaded", {})) != ([tier] if tier else []):
                self.wrong.append(f"{title}: tokens loaded {answer['loaded']}, the miss: {answer['why']}")
        middle = {key: median(answer.get(key, 0) for _, answer in answers) for key in SHOWN}
        loaded = [median(answer.get("loaded", {}).get(t, 0) for _, answer in answers) for t in self._tiers]
        self.ttft_ms[title] = middle["ttft_ms"]
        self._line(
            title,
            f"{middle['ttft_ms']:,.0f} ms",
            f"{middle['lookup_ms'] + middle['load_ms']:,.1f} ms" if tier else "-",
            f"{middle['computed']:,.0f}",
            *(self._tokens(count) for count in loaded),
            "-" if title == COLD else "same" if same else "DIFFER",
        )

    def _tokens(self, count: float) -> str:
        bytes = count * (self._token_bytes or 0)
        return f"{count:,.0f}, {bytes / MIB:,.0f} MiB" if bytes else f"{count:,.0f}"

    def _line(self, first: str, *rest: str) -> None:
        widths = (*self.WIDTHS[1:], *(self._tier_width for _ in self._tiers), 9)
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths, strict=True))
        print(f"{first:<{self.WIDTHS[0]}}" + "".join(cells), flush=True)

    def gain(self, title: str, times: float, cold: str = COLD) -> float:
        """How many times sooner the first token comes than in the row ``cold``; fewer than ``times`` are wrong."""
        gain = self.ttft_ms[cold] / self.ttft_ms[title]
        if gain < times:
            self.wrong.append(f"{title}: the first token comes {gain:.1f} times sooner, not {times:g}")
        return gain

    def verdict(self, well: str) -> int:
        """Say what is wrong, or ``well``; the exit status."""
        for wrong in self.wrong:
            print(f"\n{wrong}", file=sys.stderr)
        if not self.wrong:
            print(f"\nEvery answer is word for word the one without the store; {well}.")
        return 1 if self.wrong else 0


def demo(times: float) -> int:
    """All rows; the exit status."""
    with served(host__size="2GiB", disk__size="4GiB") as daemon, engine(daemon) as first:
        threads = first.ready()["threads"]
        plain = [(question, first.ask("plain", question)) for question in QUESTIONS]
        print(
            f"{len(QUESTIONS)} questions about one document, {plain[0][1]['prompt']:,} tokens with the first of them; "
            f"{NAMESPACE} in float32, {threads} threads.\nTimes and tokens are medians over the questions.\n"
        )
        table = Table({question: answer["text"] for question, answer in plain})

        def asked(of: Engine, before: Callable[[], object] = lambda: None) -> list[tuple[str, Answer]]:
            return [(question, (before(), of.ask("cached", question))[1]) for question in QUESTIONS]

        table.row(COLD, plain, None)
        table.row(EMPTY, [(QUESTIONS[0], first.ask("cached", QUESTIONS[0]))], None)
        table.row(WARM, asked(first), "host")
        with engine(daemon) as second:
            second.ready()
            table.row("from host, in another engine process", asked(second), "host")
        daemon.stop(kill=True)
        daemon.start()
        first.ask("join")
        table.row("from host, after kill -9 of the daemon", asked(first), "host")
        door = Door(daemon.runtime)
        persisted(door)
        flush = {"namespace": NAMESPACE, "tier": "host"}
        table.row(
            "from disk, host emptied each time", asked(first, lambda: door.ask("POST", "/v1/flush", flush)), "disk"
        )

    # Both cold rows compute all of the prompt. On a busy machine one is slower by chance, which is nobody's gain.
    gain = min(table.gain(WARM, times), table.gain(WARM, times, EMPTY))
    return table.verdict(f"the first token comes {gain:.0f} times sooner")


def persisted(door: Door) -> None:
    """Wait until disk has every block that host has."""
    until = time.monotonic() + PERSIST_S
    while True:
        status = door.ask("GET", "/v1/status")
        if status["queue"]["bytes"] == 0 and status["tiers"]["disk"]["blocks"] >= status["tiers"]["host"]["blocks"]:
            return
        if time.monotonic() > until:
            raise TimeoutError(f"blocks are not on disk after {PERSIST_S} s: {status['tiers']}")
        time.sleep(0.05)


def main(show: Callable[[float], int], about: str | None, times: float) -> int:
    """The command line of a demo. However it ends, what was started is ended and what was written is removed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=times, help="how many times sooner the first token has to come")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return show(arguments.times)
    except Ended as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(demo, __doc__, 10))

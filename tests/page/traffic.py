"""Real traffic for the page: engines that look up, load and store, of several models and prompts of every kind.

Owns the clients until ``close``. Called by the page's tests and by ``screenshots``. Imports the harness and the client.
"""

import random
import threading
from typing import Any

from terracekv.tests.harness import Blocks, Daemon

KIB = 1 << 10
MODELS = {"meta-llama/Llama-3.1-8B-Instruct": 16 * KIB, "Qwen/Qwen3-4B": 8 * KIB}
PROMPT_BLOCKS = 24


class Traffic:
    """Prompts share a system prompt of half their length; some are asked again, some never were, some are too short."""

    def __init__(self, daemon: Daemon, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.engines = [
            daemon.client(block_bytes, model=model, revision="main", engine=f"vLLM 0.32.0 ({number})")
            for model, block_bytes in MODELS.items()
            for number in range(2)
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._known = list[tuple[Blocks, list[bytes]]]()

    def prompt(self, engine: Blocks) -> list[bytes]:
        """Keys of a prompt of which the first half is shared."""
        system = self._random.randrange(3)
        shared = [system, *range(1, PROMPT_BLOCKS // 2 * engine.block_tokens)]
        return engine.keys(shared + [self._random.randrange(1 << 31) for _ in shared])

    def step(self) -> None:
        """One request of one engine: look up, load what is here, store the rest."""
        if self._known and self._random.random() < 0.75:
            back = min(len(self._known), 1 + int(self._random.expovariate(1 / 60)))
            engine, keys = self._known[-back]
        else:
            engine = self._random.choice(self.engines)
            keys = self.prompt(engine) if self._random.random() < 0.93 else []
        found = engine.lookup(keys)
        if found.blocks:
            engine.get(keys[: found.blocks])
        if found.blocks < len(keys):
            engine.put(keys)
            self._known.append((engine, keys))

    def begin(self, every_s: float) -> None:
        """Go on with it in a thread of its own until ``close``."""

        def steps() -> None:
            while not self._stop.wait(every_s):
                self.step()

        self._thread = threading.Thread(target=steps, name="traffic")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> "Traffic":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

"""vLLM with two ranks, each a process with its shard: what it answers without a connector, storing, and loading.

Run by a test as a process of its own, with the daemon's socket: vLLM keeps pipes to its workers for the life of the
process that starts them. Prints one line of JSON, the last. Imports the engine of the tests.
"""

import json
import sys
from pathlib import Path

from terracekv.tests.vllm_engine import Answer, Engine, prompt

RANKS = 2
TOKENS = 1000


def answers(engine: Engine) -> list[Answer]:
    """To two prompts at once."""
    found = engine.finish(*(engine.ask(prompt(TOKENS, seed)) for seed in (1, 2)))
    engine.settle()
    return found


def main() -> None:
    with Engine(tensor_parallel_size=RANKS) as engine:
        alone = answers(engine)
    with Engine(Path(sys.argv[1]), tensor_parallel_size=RANKS) as engine:
        cold = answers(engine)
        engine.forget()
        warm = answers(engine)
        free = engine.pages_free
    print(json.dumps({"alone": alone, "cold": cold, "warm": warm, "free": free}))


if __name__ == "__main__":
    main()

"""Traces for tests: a small one of our own, and the published ones where they lie beside the project.

Owns nothing. Called by tests. Imports ``daemon.traces``.
"""

import hashlib
import random
from pathlib import Path

import pytest

from terracekv.daemon.traces import Trace, read_trace

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
FRACTIONS = (0.5, 1, 2, 5, 10, 20)
"""Capacities, in percent of the different blocks."""


def key_of(*path: object) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def conversations(seed: int, requests: int = 1500, users: int = 300) -> list[list[bytes]]:
    """Chains as of people who chat: one system prompt for all, some popular documents, conversations that grow and
    are left."""
    dice = random.Random(seed)
    system = [key_of(seed, "system")]
    texts = {user: system.copy() for user in range(users)}
    chains = []
    for number in range(requests):
        user = min(int(dice.expovariate(1 / (users / 6))), users - 1)
        if len(texts[user]) > 30 or dice.random() < 0.05:
            document = min(int(dice.paretovariate(1.1)), 40)
            texts[user] = system + [key_of(seed, "document", document, page) for page in range(document % 7)]
        texts[user] = texts[user] + [key_of(seed, number, page) for page in range(dice.randint(1, 5))]
        chains.append(texts[user])
    return chains


def zipf(seed: int, requests: int, prompts: int, skew: float) -> list[list[bytes]]:
    """Chains of 1 to 12 blocks below 8 shared heads, asked for again by Zipf's law."""
    dice = random.Random(seed)
    lengths = [dice.randint(1, 12) for _ in range(prompts)]
    weights = [1 / (rank + 1) ** skew for rank in range(prompts)]
    picked = dice.choices(range(prompts), weights, k=requests)
    return [
        [key_of(seed, prompt % 8)] + [key_of(seed, prompt, page) for page in range(lengths[prompt])]
        for prompt in picked
    ]


def published(name: str) -> Trace:
    """A trace of Mooncake's; the test is skipped where it is not there."""
    path = SHARED / f"mooncake_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name} beside the project: put Mooncake's traces into ../shared/traces")
    return read_trace(path)

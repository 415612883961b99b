"""Adapters and the store, on a real vLLM: whoever adapts the weights adapts the KV."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.bench.tiny_llama import RANK, adapter
from terracekv.tests.harness import Daemon
from terracekv.tests.vllm_engine import BLOCK, Engine, plain, prompt

pytestmark = pytest.mark.timeout(300)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
TOKENS = 500
CACHED = (TOKENS - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    plain()
    with Engine(**LORA) as engine:
        yield engine


@pytest.mark.fault(23)
def test_the_base_and_two_adapters_never_load_each_others_blocks(
    reference: Engine, shm_dir: Path, tmp_path: Path
) -> None:
    tokens = prompt(TOKENS, 1)
    variants = {"base": None, "one": (1, adapter(1)), "two": (2, adapter(2))}
    truth = {name: reference.answer(tokens, lora=lora).tokens for name, lora in variants.items()}
    assert len({tuple(answer) for answer in truth.values()}) == 3, "the adapters change nothing"
    with Daemon(shm_dir, tmp_path, host__size="64MiB", host__slab="8MiB") as daemon:
        for cached in (0, CACHED):
            with Engine(daemon.socket, **LORA) as engine:
                for name, lora in variants.items():
                    assert engine.answer(tokens, lora=lora)[:2] == (truth[name], cached), name


@pytest.mark.fault(24)
def test_an_adapter_is_known_by_its_weights_and_not_by_its_name_or_number(
    reference: Engine, shm_dir: Path, tmp_path: Path
) -> None:
    tokens = prompt(TOKENS, 2)
    truth = {seed: reference.answer(tokens, lora=(10 + seed, adapter(seed))).tokens for seed in (1, 2)}
    with Daemon(shm_dir, tmp_path, host__size="64MiB", host__slab="8MiB") as daemon:
        for seed, number, cached in ((1, 1, 0), (2, 1, 0), (1, 2, CACHED)):
            with Engine(daemon.socket, **LORA) as engine:
                answer = engine.answer(tokens, lora=(number, adapter(seed)))
                assert answer[:2] == (truth[seed], cached), (seed, number)

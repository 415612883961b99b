"""Two ranks that share a model, each with its shard of every block: vLLM's tensor parallelism on two cores."""

from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon
from terracekv.tests.vllm_engine import BLOCK, Engine, plain, prompt

pytestmark = pytest.mark.timeout(300)
TOKENS = 1000
CACHED = (TOKENS - 1) // BLOCK * BLOCK


@pytest.mark.fault(30)
@pytest.mark.fault(126)
def test_two_ranks_store_and_load_their_shards_and_answer_as_without_us(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tensor_parallel_size=2) as alone:
        prompts = [prompt(TOKENS, seed) for seed in (1, 2)]
        truth = [alone.answer(tokens).tokens for tokens in prompts]
    with Daemon(shm_dir, tmp_path, host__size="128MiB", host__slab="8MiB") as daemon:
        with Engine(daemon.socket, tensor_parallel_size=2) as engine:
            for cached in (0, CACHED):
                answers = engine.finish(*(engine.ask(tokens) for tokens in prompts))
                assert [answer.tokens for answer in answers] == truth
                assert [answer.cached for answer in answers] == [cached, cached]
                engine.forget()
        sessions = daemon.http("/v1/status")[1]["namespaces"]
    assert sessions
    plain()

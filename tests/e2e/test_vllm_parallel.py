"""Two ranks that share a model, each with its shard of every block: vLLM's tensor parallelism on two cores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon
from terracekv.tests.vllm_engine import BLOCK
from terracekv.tests.vllm_ranks import RANKS, TOKENS

CACHED = (TOKENS - 1) // BLOCK * BLOCK
PROMPTS = 2


@pytest.mark.timeout(300)
@pytest.mark.fault(30)
@pytest.mark.fault(126)
def test_two_ranks_store_and_load_their_shards_and_answer_as_without_us(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path, host__size="128MiB", host__slab="8MiB") as daemon:
        command = [sys.executable, "-m", "terracekv.tests.vllm_ranks", str(daemon.socket)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        status = daemon.http("/v1/status")[1]
    said = json.loads(ended.stdout.splitlines()[-1])
    truth = [tokens for tokens, _, _ in said["alone"]]
    assert [(tokens, cached) for tokens, cached, _ in said["cold"]] == [(tokens, 0) for tokens in truth]
    assert [(tokens, cached) for tokens, cached, _ in said["warm"]] == [(tokens, CACHED) for tokens in truth]
    assert status["tiers"]["host"]["blocks"] == PROMPTS * RANKS * CACHED // BLOCK

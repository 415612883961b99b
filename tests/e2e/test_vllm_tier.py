"""TerraceKV below vLLM's own host tier: what vLLM asks of a secondary tier, kept with a real daemon."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402

from terracekv.connector.vllm_tier import TerraceTier  # noqa: E402
from terracekv.tests.harness import Daemon, until  # noqa: E402

CHUNK = 4096
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as daemon:
        yield daemon


def tier(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]",
    socket: Path,
    *,
    dcp_size: int = 1,
    canonical_layout: bool = False,
    **changes: Any,
) -> Any:
    config = SimpleNamespace(
        model=SimpleNamespace(name="org/model", dtype="bfloat16"),
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a",))],
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=dcp_size),
        kv_cache_layout="LBNHC",
        canonical_layout=canonical_layout,
        replicated_layout=False,
    )
    wanted = {"type": "TerraceTier", "module_path": TerraceTier.__module__, "socket": str(socket), "revision": "r"}
    return SecondaryTierFactory.create_secondary_tier(wanted | changes, memory.data, SimpleNamespace(config=config))


def job(number: int, chunks: list[int], promotion: bool = False) -> TransferJob:
    keys = [KEYS[chunk] for chunk in chunks]
    return TransferJob(number, keys, np.array(chunks), promotion, req_context=None)


def done(tier: SecondaryTierManager) -> list[JobResult]:
    tier.drain_jobs()
    return list(tier.get_finished_jobs())


def found(tier: SecondaryTierManager, number: int) -> LookupResult:
    until(lambda: tier.lookup(KEYS[number], None) is not LookupResult.RETRY, "the daemon has answered")
    return tier.lookup(KEYS[number], None)


def test_chunks_of_one_engine_are_found_by_the_next(daemon: Daemon) -> None:
    memory = np.random.default_rng(0).integers(0, 256, (4, CHUNK), np.uint8)
    one = tier(memory, daemon.socket)
    assert one.lookup(KEYS[0], None) is LookupResult.RETRY, "it does not wait for the daemon"
    assert found(one, 0) is LookupResult.MISS
    one.submit_store(job(7, [0, 1, 2]))
    assert [(result.job_id, result.success) for result in done(one)] == [(7, True)]
    assert found(one, 0) is LookupResult.HIT and not one.has_pending_work()
    one.shutdown()
    empty = np.zeros((4, CHUNK), np.uint8)
    other = tier(empty, daemon.socket)
    assert [found(other, number) for number in range(4)] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    other.submit_load(job(8, [0, 1, 2], promotion=True))
    assert [(result.job_id, result.success) for result in done(other)] == [(8, True)]
    assert (empty[:3] == memory[:3]).all() and not empty[3].any()
    other.shutdown()


def test_a_chunk_that_does_not_come_fails_alone_once_and_is_no_longer_offered(daemon: Daemon) -> None:
    memory = np.ones((4, CHUNK), np.uint8)
    one = tier(memory, daemon.socket)
    one.submit_store(job(1, [0]))
    assert done(one)[0].success
    one.submit_load(job(2, [0, 3], promotion=True))
    (result,) = done(one)
    assert not result.success and list(result.successful_keys or ()) == [KEYS[0]]
    assert found(one, 3) is LookupResult.MISS
    daemon.kill()
    one.submit_load(job(3, [0], promotion=True))
    (result,) = done(one)
    assert not result.success and list(one.get_finished_jobs()) == []
    one.shutdown()


@pytest.mark.parametrize("other", [{"canonical_layout": True}, {"dcp_size": 2}])
def test_chunks_of_one_size_that_are_laid_out_differently_are_not_shared(daemon: Daemon, other: Any) -> None:
    memory = np.ones((4, CHUNK), np.uint8)
    one, another = tier(memory, daemon.socket), tier(memory, daemon.socket, **other)
    one.submit_store(job(1, [0]))
    assert done(one)[0].success
    assert found(another, 0) is LookupResult.MISS
    one.shutdown()
    another.shutdown()


def test_weights_that_have_no_name_are_refused(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="set `revision`"):
        tier(np.zeros((1, CHUNK), np.uint8), daemon.socket, revision="")

"""The installed vLLM's contract for connectors, against what TerraceConnector keeps of it: whatever is new or has
changed is named here, before it fails in an engine.
"""

import importlib
import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole  # noqa: E402

from terracekv.connector import vllm as module  # noqa: E402
from terracekv.connector.vllm import Handshake, StepMetadata, TerraceConnector, WorkerMetadata  # noqa: E402
from terracekv.connector.vllm_metrics import TerraceStats  # noqa: E402
from terracekv.connector.vllm_plan import Load, Results, Step, pages  # noqa: E402

KNOWN = {
    "bind_connector_metadata": "self, connector_metadata",
    "bind_gpu_block_pool": "self, gpu_block_pool",
    "bind_kv_cache_manager": "self, kv_cache_manager",
    "build_connector_meta": "self, scheduler_output",
    "build_connector_worker_meta": "self",
    "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config, metric_types, labelnames, per_engine_labelvalues",
    "clear_connector_metadata": "self",
    "finish_forward": "self",
    "get_block_ids_with_load_errors": "self",
    "get_external_cache_hit_sources": "self, request, num_external_tokens",
    "get_finished": "self, finished_req_ids",
    "get_finished_count": "self",
    "get_handshake_metadata": "self",
    "get_kv_connector_kv_cache_events": "self",
    "get_kv_connector_stats": "self",
    "get_loaded_kv_cache_group_ids": "self, request",
    "get_mem_pool_context": "self",
    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config",
    "get_transfer_results": "self, finished_req_ids",
    "handle_preemptions": "self, kv_connector_metadata",
    "has_connector_metadata": "self",
    "has_pending_block_frees": "self",
    "has_pending_push_work": "self",
    "on_new_request": "self, request",
    "register_finished_partial_tail": "self, request, block_ids, partial_tail_offloads",
    "register_kv_caches": "self, kv_caches",
    "request_finished": "self, request, block_ids",
    "requires_piecewise_for_cudagraph": "extra_config",
    "reset_cache": "self",
    "reset_capture_state": "self",
    "save_kv_layer": "self, layer_name, kv_layer, attn_metadata, kwargs",
    "set_host_xfer_buffer_ops": "self, copy_operation",
    "set_xfer_handshake_metadata": "self, metadata",
    "set_xfer_handshake_metadata_pp_aware": "self, metadata",
    "shutdown": "self",
    "start_load_kv": "self, forward_context, kwargs",
    "take_events": "self",
    "update_connector_output": "self, connector_output",
    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
    "wait_for_layer_load": "self, layer_name",
    "wait_for_save": "self",
}
"""Every method of a connector that vLLM 0.32 has, and its parameters."""
PROPERTIES = {"role", "requires_kv_delivery", "supports_divergent_local_hybrid_hits"}


def parameters(method: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(method).parameters)


def public(kind: type) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.fault(96)
def test_every_method_that_vllm_may_call_is_known_by_its_parameters() -> None:
    found = {name: parameters(method) for name, method in public(KVConnectorBase_V1).items() if callable(method)}
    assert found == KNOWN, "look at what is new, decide what it means here, and then name it in KNOWN"
    assert {name for name, what in public(KVConnectorBase_V1).items() if isinstance(what, property)} == PROPERTIES


@pytest.mark.fault(96)
def test_what_is_overridden_takes_what_vllm_gives() -> None:
    for name, method in public(TerraceConnector).items():
        if name in KNOWN:
            assert parameters(method) == KNOWN[name], name
    assert not TerraceConnector.__abstractmethods__
    assert parameters(TerraceConnector.__init__) == "self, vllm_config, role, kv_cache_config"
    assert {"finished_recving", "failed_recving"} <= {
        name for name in base.KVConnectorTransferResults.__dataclass_fields__
    }


@pytest.mark.fault(96)
def test_a_vllm_that_is_too_old_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work")
    with pytest.raises(ImportError, match="TerraceKV needs vLLM 0.24 or later"):
        importlib.reload(module)
    monkeypatch.undo()


def connector(role: KVConnectorRole, **options: Any) -> TerraceConnector:
    transfer = SimpleNamespace(
        kv_connector_extra_config=options, kv_load_failure_policy="recompute", is_kv_consumer=True, is_kv_producer=True
    )
    config = SimpleNamespace(kv_transfer_config=transfer, speculative_config=None)
    return TerraceConnector(
        config, role, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))])
    )


class Broken:
    """Both halves, of which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda c: c.on_new_request(None), None),
        (lambda c: c.get_num_new_matched_tokens(None, 0), (0, False)),
        (lambda c: c.update_state_after_alloc(None, None, 0), None),
        (lambda c: c.get_external_cache_hit_sources(None, 8), {}),
        (lambda c: c.build_connector_meta(None), StepMetadata()),
        (lambda c: c.update_connector_output(None), None),
        (lambda c: c.request_finished(None, []), (False, None)),
        (lambda c: c.request_finished_all_groups(None, ([],)), (False, None)),
        (lambda c: c.has_pending_push_work(), False),
        (lambda c: c.has_pending_block_frees(), False),
        (lambda c: c.reset_cache(), False),
        (lambda c: c.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(None)}), None),
        (lambda c: c.bind_gpu_block_pool(None), None),
        (lambda c: c.register_kv_caches({}), None),
        (lambda c: c.bind_connector_metadata(StepMetadata(Step(loads=[Load("a", b"", 0, 8, ())]))), None),
        (lambda c: c.wait_for_save(), None),
        (lambda c: c.get_finished(set()), (None, None)),
        (lambda c: c.get_transfer_results(set()), base.KVConnectorTransferResults()),
        (lambda c: c.get_block_ids_with_load_errors(), set()),
        (lambda c: c.build_connector_worker_meta(), None),
        (lambda c: c.get_kv_connector_stats(), None),
        (lambda c: c.shutdown(), None),
    ],
)
def test_no_error_of_ours_reaches_the_engine(call: Callable[[TerraceConnector], Any], answer: Any) -> None:
    broken = connector(KVConnectorRole.SCHEDULER)
    broken._scheduler = broken._worker = Broken()  # type: ignore[assignment]
    assert call(broken) == answer
    assert sum(broken.errors.values()) >= 1


@pytest.mark.fault(59)
def test_what_was_promised_goes_out_even_when_planning_fails() -> None:
    class Half(Broken):
        stores = SimpleNamespace(protects=True)
        given_up: list[Any] = []

        def take_loads(self) -> list[Load]:
            return [Load("a", b"", 0, 0, ())]

        def give_up(self, request: Any, blocks: Any) -> None:
            self.given_up.append(request)

    broken = connector(KVConnectorRole.SCHEDULER)
    broken._scheduler = half = Half()  # type: ignore[assignment]
    assert broken.build_connector_meta(None).step == Step(loads=half.take_loads())
    broken.update_state_after_alloc("a", None, 0)
    broken.update_state_after_alloc("b", None, 8)
    assert half.given_up == ["b"] and broken.errors["_allocated"] == 2 and broken.errors["_stores"] == 1


@pytest.mark.parametrize("idle", [None, SimpleNamespace(finished=lambda: (set(), set()))])
def test_what_has_been_transferred_is_told_in_sets_even_where_it_is_nothing(idle: Any) -> None:
    worker = connector(KVConnectorRole.WORKER)
    worker._worker = idle
    assert worker.get_transfer_results(set()) == base.KVConnectorTransferResults()


def test_an_unknown_setting_stops_the_engine_at_its_start() -> None:
    with pytest.raises(ValueError, match="unknown key 'sockets'; did you mean 'socket'?"):
        connector(KVConnectorRole.WORKER, sockets="x")


def test_a_connector_that_was_never_told_its_workers_caches_nothing() -> None:
    alone = connector(KVConnectorRole.SCHEDULER)
    assert alone.get_num_new_matched_tokens(None, 0) == (0, False)
    assert alone.build_connector_meta(None) == StepMetadata()
    assert alone.get_kv_connector_stats() is None and not alone.errors
    alone.shutdown()


def test_what_travels_between_the_processes_can_be_pickled() -> None:
    step = StepMetadata(Step(loads=[Load("a", b"k" * 32, 0, 8, (pages([1, 2]),))]))
    assert pickle.loads(pickle.dumps(step)) == step
    results = Results()
    results.stored[3] += 1
    both = WorkerMetadata(results).aggregate(pickle.loads(pickle.dumps(WorkerMetadata(results))))
    assert both.results.stored == {3: 2}


def test_the_workers_introductions_come_together_with_their_first_results() -> None:
    workers = [connector(KVConnectorRole.WORKER) for _ in range(2)]
    first, second = (worker.build_connector_worker_meta() for worker in workers)
    assert first is not None and second is not None
    assert len(first.aggregate(pickle.loads(pickle.dumps(second))).introductions) == 2
    assert [worker.build_connector_worker_meta() for worker in workers] == [None, None]


def test_counts_reach_prometheus_by_tier_and_reason() -> None:
    registry = CollectorRegistry()

    def into(kind: type) -> Any:
        return lambda **fields: kind(**fields, registry=registry)

    types = {kind: into(kind) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = TerraceConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    stats = TerraceStats({"joined": 1, "hit_tokens/host": 64, "loads": 1})
    stats = stats.aggregate(TerraceStats({"joined": 0, "hit_tokens/host": 32, "skipped/too_slow": 2}))
    metrics.observe(stats.to_dict() if hasattr(stats, "to_dict") else stats.data)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:terracekv_{name}", {"engine": "0"} | labels)

    assert value("hit_tokens_total", tier="host") == 96
    assert value("skipped_total", reason="too_slow") == 2
    assert value("loads_total") == 1 and value("joined") == 0
    assert stats.reduce()["hit_tokens/host"] == 96 and not stats.is_empty()

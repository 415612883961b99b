"""TerraceKV in vLLM: ``kv_connector_module_path="terracekv.connector.vllm"``, ``kv_connector="TerraceConnector"``.

``TerraceConnector`` owns one half: the scheduler's in the engine core, the worker's in each worker. Called by vLLM's
threads; imported in the API server's process too, so importing it connects to nothing. Imports vllm, which only
this module, ``vllm_metrics`` and ``vllm_tier`` do, and torch for its current stream; whatever decides anything is in
modules that know neither.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput

from terracekv.connector.vllm_guard import guarded
from terracekv.connector.vllm_metrics import TerraceMetrics, TerraceStats
from terracekv.connector.vllm_options import Options
from terracekv.connector.vllm_plan import Results, Step, Store
from terracekv.connector.vllm_scheduler import SchedulerHalf
from terracekv.connector.vllm_start import Introduction, introduce, scheduler_half, worker_half
from terracekv.connector.vllm_worker import WorkerHalf

log = logging.getLogger("vllm.terracekv")
NOTHING = lambda: None  # noqa: E731

if not hasattr(KVConnectorBase_V1, "has_pending_push_work"):
    raise ImportError(
        f"TerraceKV needs vLLM 0.24 or later (0.30 for models with several KV groups); this is {vllm.__version__}."
        " In older versions a connector cannot keep the engine running until its stores are done."
    )


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step as vLLM carries it to the workers."""

    step: Step = field(default_factory=Step)
    wait: bool = False
    """Nobody keeps pages from being reused: copy before the step ends."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Results as vLLM carries them to the scheduler, those of all ranks added up; with the first come the ranks'
    introductions, for a scheduler that the handshakes of another connector have reached."""

    results: Results
    introductions: tuple[Introduction, ...] = ()

    def aggregate(self, other: "WorkerMetadata") -> "WorkerMetadata":
        return WorkerMetadata(self.results.add(other.results), self.introductions + other.introductions)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker says when the engine starts."""

    introduction: Introduction


class TerraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Asynchronous loads only, stores that hold up no step, and nothing that the daemon does can hurt the engine."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.errors: Counter[str] = Counter()
        self._options = Options.read(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._introduction: Introduction | None = None
        self._introduced = False
        """A worker has sent its introduction with its results; a scheduler has heard all."""
        self._pool: Any = None
        self._reported: Counter[str] = Counter()
        self._options.suit(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        if role is KVConnectorRole.SCHEDULER and getattr(transfer, "kv_load_failure_policy", "") == "fail":
            log.error(
                "kv_load_failure_policy is 'fail': a block that cannot be loaded ends its request with an error."
                " Set it to 'recompute'."
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what was not stored is computed again."""
        return False

    # The worker's side, in the order of a step.

    @guarded(NOTHING)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        introduction, memory = introduce(
            self._vllm_config, self._kv_cache_config, self._options, kv_caches, vllm.__version__, _stream
        )
        if memory is not None:
            self._worker = worker_half(introduction, memory, self._options)
        self._introduction = introduction  # only now: who cannot load must not let the scheduler promise it

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self._who())

    def _who(self) -> Introduction:
        return self._introduction or Introduction(unfit="the KV caches could not be registered: see the log")

    @guarded(NOTHING)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Loads begun here run beside the forward instead of after it. The pages that they fill are nobody else's, and
        # those that this step clears are clear by now (on a GPU: by what its stream was given so far).
        if self._worker is not None:
            self._worker.load(self._metadata().step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    @guarded(NOTHING)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            metadata = self._metadata()
            self._worker.store(metadata.step, wait=metadata.wait)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, _ = self._worker.finished() if self._worker is not None else (set(), set())
        return None, received or None

    @guarded(lambda: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        received, failed = self._worker.finished() if self._worker is not None else (set(), set())
        return base.KVConnectorTransferResults(
            finished_recving=received, failed_recving=failed if self._several_groups else set()
        )

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self._worker.bad_pages() if self._worker is not None else set()
        return set() if self._several_groups else bad

    @guarded(NOTHING)
    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        results = self._worker.results() if self._worker is not None else None
        if self._introduced:
            return WorkerMetadata(results) if results is not None else None
        self._introduced = True
        return WorkerMetadata(results or Results(), (self._who(),))

    # The scheduler's side.

    @guarded(NOTHING)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._meet(list(metadata.values()))

    @guarded(NOTHING)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._meet(list(metadata.values()))

    @guarded(NOTHING)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.stores.bind(gpu_block_pool)

    @guarded(NOTHING)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched(request, num_computed_tokens) if self._scheduler is not None else 0
        return tokens, bool(tokens)

    @guarded(NOTHING)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and not self._allocated(request, blocks, num_external_tokens):
            if num_external_tokens:
                self._scheduler.give_up(request, blocks)

    @guarded(lambda: False)
    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)
        return True

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource as Source  # 0.32 and later, which call this

        if self._scheduler is None or not num_external_tokens:
            return {}
        names = {"gpu": Source.DEVICE, "host": Source.HOST, "disk": Source.DISK}
        found: Counter[Any] = Counter()
        for tier, tokens in self._scheduler.loaded(request).items():
            found[names.get(tier, Source.EXTERNAL_UNSPECIFIED)] += tokens
        return dict(found)

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata()
        loads = self._scheduler.take_loads()  # promised: they go out even if planning the stores fails
        return StepMetadata(Step(loads, self._stores(scheduler_output)), wait=not self._scheduler.stores.protects)

    @guarded(list)
    def _stores(self, scheduler_output: SchedulerOutput) -> list[Store]:
        return self._scheduler.plan_stores(scheduler_output) if self._scheduler is not None else []

    @guarded(NOTHING)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        if not self._introduced and isinstance(metadata, WorkerMetadata) and metadata.introductions:
            self._open(metadata.introductions)
        if self._scheduler is not None:
            results = metadata.results if isinstance(metadata, WorkerMetadata) else None
            self._scheduler.results(results, sorted(connector_output.finished_recving or ()))

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None  # pages of stores under way are kept by the pool, those of loads by vLLM

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.under_way > 0

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.stores.frees

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.weights_changed(os.urandom(16))
        return True

    def take_events(self) -> Iterable[Any]:
        return ()  # the daemon tells what it has and loses: GET /v1/events

    # Both sides.

    @guarded(NOTHING)
    def get_kv_connector_stats(self) -> TerraceStats | None:
        half = self._scheduler or self._worker
        counts = half.take_stats() if half is not None else Counter()
        for name, count in (self.errors - self._reported).items():
            counts[f"errors/{name}"] += count
        self._reported = self.errors.copy()
        return TerraceStats(dict(counts)) if counts else None

    @guarded(NOTHING)
    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TerraceStats:
        return TerraceStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TerraceMetrics:
        return TerraceMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _meet(self, handshakes: list[Any]) -> None:
        """MultiConnector gives all of its children what the first of them that says anything has said."""
        if all(isinstance(handshake, Handshake) for handshake in handshakes):
            self._open([handshake.introduction for handshake in handshakes])
        else:
            log.info("TerraceKV: another connector's workers have introduced themselves; ours do in the first step")

    def _open(self, introductions: Sequence[Introduction]) -> None:
        self._introduced = True
        transfer = self._vllm_config.kv_transfer_config
        self._scheduler = scheduler_half(
            introductions,
            self._vllm_config,
            self._options,
            reads=transfer.is_kv_consumer,
            writes=transfer.is_kv_producer,
        )
        if self._scheduler is not None:
            fields = getattr(SchedulerOutput, "__dataclass_fields__", {})
            self._scheduler.stores.follows_tables = "kv_connector_block_state" not in fields
            if self._pool is not None:
                self._scheduler.stores.bind(self._pool)


def _stream() -> int:
    """The stream that this thread's work on the GPU goes to, as CUDA knows it."""
    return int(torch.cuda.current_stream().cuda_stream)

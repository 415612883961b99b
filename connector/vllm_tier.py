"""A second way in: vLLM keeps its own host tier, and the daemon stands below it.

``TerraceTier`` owns a session and two threads: one that only asks, one that copies. vLLM's scheduler thread calls it
(``TieringOffloadingSpec`` with ``{"type": "TerraceTier", "module_path": "terracekv.connector.vllm_tier"}``) and never
waits. Imports vllm, ``connector.client``, ``vllm_identity`` and ``daemon.protocol``.

Chunks are named by vLLM's own block hashes, which the daemon's tokens lookup does not know: what is stored here is
found here only.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import vllm
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from terracekv.connector.client import Client
from terracekv.connector.vllm_identity import cpu_flags, fingerprint
from terracekv.connector.vllm_log import log_beside_vllm
from terracekv.connector.vllm_options import SOCKET, credential
from terracekv.connector.vllm_weights import weights_digest
from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides

log = logging.getLogger("vllm.terracekv")
KNOWN_MAX = 1 << 16
KNOWN_S = 5.0
"""So long an answer of the daemon is believed; a chunk that then does not come is a failed job, and no longer known."""


class TerraceTier(SecondaryTierManager):  # type: ignore[misc]
    """``revision`` names the weights when the model is not a folder here."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str = SOCKET,
        revision: str = "",
        credential_file: str = "",
        lookup_budget_ms: int = 20,
        load_deadline_ms: int = 5000,
        store_deadline_ms: int = 5000,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_beside_vllm()
        config = offloading_spec.config
        name = config.model.name
        if not revision and not Path(name).is_dir():
            raise ValueError(f"the revision of {name!r} is not known: set `revision` in the tier's configuration")
        facts = {
            "vllm": ".".join(vllm.__version__.split(".")[:2]),
            "groups": [(group.tokens_per_block, sorted(group.layer_names)) for group in config.groups],
            "chunk": (config.cache.tokens_per_hash, config.cache.blocks_per_chunk),
            "ranks": [getattr(config.parallel, f"{kind}_size", 1) for kind in ("tp", "pp", "pcp", "dcp")],
            "order": [getattr(config, name, False) for name in ("canonical_layout", "replicated_layout")],
            "cache_layout": str(config.kv_cache_layout),
            "isa": cpu_flags(),
        }
        shape = (1, self.block_size_bytes)
        self._client = Client(
            socket, model=Path(name).name if Path(name).is_dir() else name, dtype=config.model.dtype, block_tokens=1,
            revision=f"{revision or weights_digest(Path(name))}+{fingerprint(facts)}", engine="vllm-tiering",
            layout=Layout("ND", "pages", 1, (LayerGroup(1, shape, dense_strides(shape, 1)),)),
            credential=credential(credential_file), lookup_budget_ms=lookup_budget_ms,
            load_deadline_ms=load_deadline_ms, store_deadline_ms=store_deadline_ms,
        )  # fmt: skip
        self._known: dict[OffloadKey, tuple[LookupResult, float]] = {}
        self._done: SimpleQueue[JobResult] = SimpleQueue()
        self._asks = ThreadPoolExecutor(1, "terracekv-tier-asks")
        self._copies = ThreadPoolExecutor(1, "terracekv-tier-copies")
        self._jobs: set[Any] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        known, since = self._known.get(key, (None, 0.0))
        if known is None or (known is not LookupResult.RETRY and time.monotonic() - since > KNOWN_S):
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            known = LookupResult.RETRY
            self._known[key] = known, time.monotonic()
            self._asks.submit(self._ask, key)
        return known

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._jobs = {job for job in self._jobs if not job.done()}
        while not self._done.empty():
            yield self._done.get()

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or not self._done.empty()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        wait(self._jobs)

    def shutdown(self) -> None:
        self._asks.shutdown()
        self._copies.shutdown()
        self._client.close()

    def _submit(self, copy: Any, job: TransferJob) -> None:
        self._jobs.add(self._copies.submit(self._do, copy, job.job_id, list(job.keys), [int(i) for i in job.chunk_ids]))

    def _do(self, copy: Any, job: int, keys: Sequence[OffloadKey], chunks: Sequence[int]) -> None:
        """Every job is reported once, whatever happens to it."""
        good: list[OffloadKey] = []
        try:
            good = [key for key, chunk in zip(keys, chunks, strict=True) if copy(_name(key), self._chunk(chunk))]
        except Exception:
            log.exception("a transfer failed")
        now = time.monotonic()
        for key in keys:
            self._known[key] = (LookupResult.HIT if key in good else LookupResult.MISS), now
        self._done.put(JobResult(job_id=job, success=len(good) == len(keys), successful_keys=good))

    def _ask(self, key: OffloadKey) -> None:
        found = self._client.lookup([_name(key)]).blocks
        self._known[key] = (LookupResult.HIT if found else LookupResult.MISS), time.monotonic()

    def _store(self, key: bytes, chunk: memoryview) -> bool:
        stored = self._client.store([key], lambda _, payload: _copy(payload, chunk))
        return stored.stored + stored.present == 1

    def _load(self, key: bytes, chunk: memoryview) -> bool:
        return self._client.load([key], lambda _, payload: _copy(chunk, payload)).blocks == 1

    def _chunk(self, number: int) -> memoryview:
        flat: memoryview = self._primary_kv_view.cast("B")
        return flat[number * self.block_size_bytes : (number + 1) * self.block_size_bytes]


def _name(key: OffloadKey) -> bytes:
    return hashlib.sha256(b"terracekv/offload/1\0" + key).digest()


def _copy(into: memoryview, source: memoryview) -> None:
    into[:] = source

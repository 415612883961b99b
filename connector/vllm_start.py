"""How the halves begin: a worker looks at its KV tensors and introduces itself, the scheduler takes over what it says.

Owns nothing. Called once in each process, when the engine starts. Imports ``connector.client``, ``leases`` and the
``vllm_*`` modules that know no vLLM; of vLLM's configuration it reads attributes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from terracekv.connector.client import Client
from terracekv.connector.leases import Leases
from terracekv.connector.vllm_identity import facts, fingerprint, items_named, kv_dtype, model_name, revision
from terracekv.connector.vllm_layout import GroupSpec, Pages, Unfit, alignment, block_tokens_for, page_shapes
from terracekv.connector.vllm_log import log_beside_vllm
from terracekv.connector.vllm_lookups import Lookups
from terracekv.connector.vllm_memory import Memory, memory_of
from terracekv.connector.vllm_options import Options, credential
from terracekv.connector.vllm_scheduler import SchedulerHalf, Shape
from terracekv.connector.vllm_worker import WorkerHalf
from terracekv.connector.vllm_worth import Prefill, Worth
from terracekv.daemon.protocol import Layout

log = logging.getLogger("vllm.terracekv")
ENGINE = "vllm"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says of itself. All ranks must say the same but for ``shard`` and ``writer``. ``unfit`` is why this
    engine is not cached; then the rest means nothing."""

    unfit: str | None = None
    model: str = ""
    revision: str = ""
    dtype: str = ""
    block_tokens: int = 0
    page_tokens: tuple[int, ...] = ()
    layout: Layout | None = None
    shards: int = 1
    shard: int = 0
    writer: bool = True

    def names(self) -> dict[str, Any]:
        """What a client says in Hello, but for the shard."""
        return {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "layout": self.layout,
            "shards": self.shards,
            "engine": ENGINE,
        }


def introduce(
    config: Any, kv: Any, options: Options, tensors: Mapping[str, Any], version: str, stream: Callable[[], int]
) -> tuple[Introduction, Memory | None]:
    """Who this worker is and where its pages are; an engine that is not cached says why and has none. ``stream`` is
    the one of the GPU that the calling thread gives its work to."""
    log_beside_vllm()
    try:
        return _introduce(config, kv, options, tensors, version, stream)
    except ValueError as error:
        log.error("TerraceKV caches nothing for this engine: %s", error)
        return Introduction(unfit=str(error)), None


def worker_half(mine: Introduction, memory: Memory, options: Options) -> WorkerHalf:
    """Joins the daemon, or goes on trying."""
    session = partial(
        Client,
        options.socket,
        shard=mine.shard,
        credential=credential(options.credential_file),
        load_deadline_ms=options.load_deadline_ms,
        store_deadline_ms=options.store_deadline_ms,
        attach=memory.attach,
        device=memory.device,
        **mine.names(),
    )
    return WorkerHalf(session, memory, options, writer=mine.writer)


def scheduler_half(
    ranks: Sequence[Introduction], config: Any, options: Options, *, reads: bool, writes: bool
) -> SchedulerHalf | None:
    """None, logged, when the engine is not cached or its ranks contradict each other."""
    log_beside_vllm()
    unfit = next((rank.unfit for rank in ranks if rank.unfit is not None), None)
    if unfit is not None or not ranks:
        log.error("TerraceKV caches nothing for this engine: %s", unfit or "no worker introduced itself")
        return None
    first = ranks[0]
    if any(rank.names() != first.names() for rank in ranks):
        log.error("TerraceKV caches nothing for this engine: its workers keep KV of different shapes")
        return None
    speculative = getattr(config, "speculative_config", None)
    eagle = speculative is not None and bool(getattr(speculative, "use_eagle", lambda: False)())
    align = alignment([GroupSpec("", tokens, ()) for tokens in first.page_tokens])
    shape = Shape(
        page_tokens=first.page_tokens,
        block_tokens=first.block_tokens,
        align=align,
        ranks=len(ranks),
        eagle=eagle,
        items_named=items_named(config),
        lag_tokens=1 + int(getattr(speculative, "num_speculative_tokens", 0) or 0) if eagle else 0,
    )
    session = partial(
        Leases,
        options.socket,
        credential=credential(options.credential_file),
        lookup_budget_ms=options.lookup_budget_ms,
        load_deadline_ms=options.wait_ms,
        **first.names(),
    )
    prefill = Prefill(options.prefill_tokens_per_s)
    lookups = Lookups(session, options, Worth(prefill))
    return SchedulerHalf(options, shape, lookups, prefill, reads=reads, writes=writes)


def _introduce(
    config: Any, kv: Any, options: Options, tensors: Mapping[str, Any], version: str, stream: Callable[[], int]
) -> tuple[Introduction, Memory]:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unfit(f"{name} is {getattr(parallel, name)}: KV that is spread token by token is not cached")
    device = next(iter(tensors.values())).device.type
    specs = [_spec(number, group) for number, group in enumerate(kv.kv_cache_groups)]
    block_tokens = block_tokens_for(options.block_tokens, alignment(specs), device == "cpu")
    pages = Pages.of(tensors, specs, kv.num_blocks, block_tokens)
    found = facts(
        config,
        version=version,
        backends=_backends(config, tensors),
        cache_layout=getattr(kv, "kv_cache_layout", None),
        pages=page_shapes(tensors, specs, kv.num_blocks),
    )
    log.info("TerraceKV: what KV depends on besides the model: %s", found)
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    replicas = max(1, getattr(kv, "kv_tp_replicas", 1))
    rank = parallel.rank % ranks
    memory = memory_of(device, pages, stream)
    log.info("TerraceKV copies KV of %s", memory.report())
    return Introduction(
        model=model_name(config, options.model),
        revision=f"{revision(config, options.revision)}+{fingerprint(found)}",
        dtype=kv_dtype(config),
        block_tokens=block_tokens,
        page_tokens=tuple(spec.page_tokens for spec in specs),
        layout=pages.layout,
        shards=ranks // replicas,
        shard=rank // replicas,
        writer=rank % replicas == 0,
    ), memory


def _spec(number: int, group: Any) -> GroupSpec:
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)  # layers that differ in size and share a table
    kinds = {type(one).__name__ for one in inner.values()} if inner else {type(spec).__name__}
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise Unfit(f"KV group {number} is one that vLLM rebuilds or keeps on the host itself")
    if not getattr(spec, "prefix_cacheable", True):
        raise Unfit(f"KV group {number} ({', '.join(sorted(kinds))}) cannot be cached by prefix")
    return GroupSpec(" and ".join(sorted(kinds)), spec.block_size, tuple(group.layer_names))


def _backends(config: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The attention backend of each layer, by name."""
    layers = config.compilation_config.static_forward_context
    found = {}
    for name in tensors:
        layer = layers.get(name)
        backend = (
            layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else getattr(layer, "attn_backend", None)
        )
        found[name] = backend.get_name() if backend is not None else "unknown"
    return found

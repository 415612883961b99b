"""What vLLM shows of the cache in its log and on its own /metrics.

``TerraceStats`` carries counts from the halves to the API server, ``TerraceMetrics`` owns the Prometheus counters
there. Called by vLLM's threads. Imports vllm and prometheus_client.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PLAIN = {
    "loads": "Loads from TerraceKV into the engine, by request and rank",
    "load_tokens": "Tokens loaded, by rank",
    "load_bytes": "Bytes loaded",
    "load_us": "Microseconds that loads took",
    "stores": "Stores into TerraceKV, by rank",
    "store_tokens": "Tokens stored, by rank",
    "store_bytes": "Bytes stored",
    "store_us": "Microseconds that stores took",
}
JOINED = "joined"
"""A state and no count: what was said last holds."""
BY_LABEL = {
    "hit_tokens": ("tier", "Prompt tokens that were loaded instead of computed, by the tier that had them"),
    "skipped": ("reason", "Prompts of which no more was offered, and stores that were not made, by reason"),
    "failed": ("reason", "Loads of which not all came, by reason"),
    "errors": ("where", "Errors of the connector itself; each cost a miss"),
}


class TerraceStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name; ``name/label`` where they are told apart."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = count if name == JOINED else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))


class TerraceMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:terracekv_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._joined = metric_types[Gauge](
            name=f"vllm:terracekv_{JOINED}",
            documentation="Whether the engine has a session with the daemon: 0 means that nothing is cached",
            labelnames=labelnames,
        )
        self._plain = {
            name: counter(name=f"vllm:terracekv_{name}", documentation=text, labelnames=labelnames)
            for name, text in PLAIN.items()
        }
        self._labelled = {
            name: counter(name=f"vllm:terracekv_{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in BY_LABEL.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for full, count in transfer_stats_data.items():
            name, _, label = full.partition("/")
            if name == JOINED:
                self._joined.labels(*values).set(count)
            elif name in self._plain:
                self._plain[name].labels(*values).inc(count)
            elif name in self._labelled:
                self._labelled[name].labels(*values, label).inc(count)

"""Metrics in Prometheus' format. The only ``import prometheus_client``.

Owns the counts of HTTP requests; all else is read from the store, the tiers and the sessions when it is asked for, so
nothing is counted twice. Called by the people's door on the event loop. Imports ``gpus``, ``heartbeat``,
``hot``, ``logs``, ``sessions``, ``store`` and ``tasks``.

Every series is there from the start, at zero. Labels are tiers, reasons, routes and kinds of status: a fixed number of
values each, and never a key, a namespace or a token; and the UUIDs of this node's GPUs.
"""

import bisect
import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from terracekv.daemon import logs, tasks
from terracekv.daemon.config import version
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.hot import Moves
from terracekv.daemon.sessions import Sessions
from terracekv.daemon.store import Store
from terracekv.tiers.steady import deaths
from terracekv.tiers.tier import TierStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
EVICTION_REASONS = ("capacity", "quota", "flush", "delete", "damaged")
STATUS_KINDS = ("2xx", "3xx", "4xx", "5xx")
UNMATCHED = "unmatched"
P = "terracekv_"

COUNTERS = {
    "lookups": "Lookups answered.",
    "asked_blocks": "Blocks that lookups asked for.",
    "asked_tokens": "Tokens that lookups asked for.",
    "matched_blocks": "Blocks that lookups found; the sum of terracekv_lookup_matched_blocks_total over the tiers.",
    "matched_tokens": "Tokens that lookups found.",
    "promoted": "Blocks brought up from lower tiers.",
    "promotions_failed": "Blocks that were to be brought up and were not.",
    "written": "Blocks written through to lower tiers.",
    "not_admitted": "Blocks that admission kept from lower tiers.",
    "writes_failed": "Blocks whose write to a lower tier failed.",
    "writes_dropped": "Blocks not written to a lower tier because its queue was full or it was down.",
    "writes_dropped_bytes": "Bytes not written to a lower tier because its queue was full or it was down.",
    "evicted_before_persist": "Blocks that left host although no lower tier had them.",
    "stale_commits": "Blocks refused at commit because their namespace had been flushed.",
    "refused_reservations": "Blocks for which there was no slot.",
}
"""Fields of ``Stats``; the metric bears the field's name, with its unit where the field does not say it."""
NAMES = {
    "lookups": "lookups",
    "asked_blocks": "lookup_asked_blocks",
    "asked_tokens": "lookup_asked_tokens",
    "matched_blocks": "lookup_found_blocks",
    "matched_tokens": "lookup_found_tokens",
    "promoted": "promoted_blocks",
    "promotions_failed": "promotion_failed_blocks",
    "written": "written_blocks",
    "not_admitted": "not_admitted_blocks",
    "writes_failed": "write_failed_blocks",
    "writes_dropped": "write_dropped_blocks",
    "writes_dropped_bytes": "write_dropped_bytes",
    "evicted_before_persist": "evicted_before_persist_blocks",
    "stale_commits": "stale_commit_blocks",
    "refused_reservations": "refused_reservation_blocks",
}
FLOWS = {
    "promoted": "Blocks brought up from the tier.",
    "promotions_failed": "Blocks that were to be brought up from the tier and were not.",
    "vanished": "Blocks that the tier was believed to have and had not.",
    "written": "Blocks written to the tier.",
    "not_admitted": "Blocks that admission kept from the tier.",
    "writes_failed": "Blocks whose write to the tier failed.",
    "writes_dropped": "Blocks not written to the tier because its queue was full or it was down.",
    "writes_dropped_bytes": "Bytes not written to the tier because its queue was full or it was down.",
}
"""Fields of ``Flow``; their sums over the tiers are ``COUNTERS``, and the metrics bear the same names."""
TIER_GAUGES = {
    "capacity_bytes": "Size of the tier.",
    "used_bytes": "Bytes of the tier's medium in use.",
    "blocks": "Blocks in the tier.",
}
HOST_GAUGES = {
    "leased_blocks": "Blocks under a lease.",
    "reserved_blocks": "Slots being written.",
    "unverified_blocks": "Blocks taken over from an earlier daemon and not checked since.",
}
TIER_COUNTERS = {
    "hits": "Reads by the daemon that found their block.",
    "misses": "Reads by the daemon that did not find their block.",
    "puts": "Blocks stored.",
    "put_bytes": "Bytes stored.",
    "get_bytes": "Bytes read by the daemon.",
    "checksum_failures": "Blocks whose bytes were not what they should be.",
    "io_errors": "Errors of the medium.",
}


CODEC_COUNTERS = {
    "coded_blocks": "Blocks that were compressed on their way to the tier.",
    "raw_blocks": "Blocks that went to the tier as they are.",
}
CODEC_GAUGES = {
    "codec_ratio": "Payload bytes for each byte that the codec makes of them; 0 before the first block.",
    "codec_chosen_namespaces": "Namespaces whose blocks are compressed for the tier.",
}
"""Details of the tiers that have a codec."""

GPU_MOVES = {
    "promoted": "Hot blocks copied to the GPU.",
    "failed": "Hot blocks whose copy to the GPU failed.",
    "over_share": "Hot blocks left out because the share of the bus was used up.",
    "over_queue": "Hot blocks left out because the queue was full.",
}
"""Fields of ``Moves``."""
TRANSPORTS = ("arena", "ipc")
GPU_STATES = ("off", "no_gpu", "no_room", "copy", "ipc")
GPU_READINGS = {
    "memory_used_bytes": ("memory_used_bytes", "Bytes of the GPU's memory in use, whoever uses them."),
    "memory_total_bytes": ("memory_total_bytes", "Bytes of the GPU's memory."),
    "utilisation_percent": ("utilisation_percent", "Part of the time in which a kernel ran."),
    "temperature_c": ("temperature_celsius", "Temperature of the GPU."),
    "pcie_generation": ("pcie_generation", "Present generation of the GPU's link."),
    "pcie_width": ("pcie_lanes", "Present lanes of the GPU's link."),
    "pcie_rx_bytes_per_s": ("pcie_rx_bytes_per_second", "Bytes over the link to the GPU."),
    "pcie_tx_bytes_per_s": ("pcie_tx_bytes_per_second", "Bytes over the link from the GPU."),
}
"""Readings of NVML, and the metrics that show them; a reading that is null has no sample, and its reason is in the
status."""


class Metrics(Collector):
    """``routes`` are all ``(method, path template)`` pairs that can be observed."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        routes: Iterable[tuple[str, str]],
        started: float,
        gpus: Gpus,
        heart: Heartbeat,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._started = started
        self._gpus = gpus
        self._requests = {
            (method, path, kind): 0 for method, path in (*routes, ("", UNMATCHED)) for kind in STATUS_KINDS
        }
        self._seconds = {path: [0] * (len(BUCKETS_S) + 1) for _, path, _ in self._requests}
        self._seconds_sum = dict.fromkeys(self._seconds, 0.0)
        self._heart = heart
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """One HTTP request was answered. A request that no route matched goes under ``("", UNMATCHED)``."""
        self._requests[method, path, f"{status // 100}xx"] += 1
        self._seconds[path][bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds_sum[path] += seconds

    def text(self) -> bytes:
        """All series, in the text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not compare names, there is one collector."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for ``text``."""
        yield _gauge("uptime_seconds", "Seconds since the daemon started.", time.monotonic() - self._started)
        info = GaugeMetricFamily(P + "build_info", "Version of the daemon; always 1.", labels=["version"])
        info.add_metric([version()], 1)
        yield info
        yield from self._store_metrics()
        yield from self._tier_metrics()
        yield from self._gpu_metrics()
        yield from self._http_metrics()

    def _store_metrics(self) -> Iterator[Metric]:
        store, stats = self._store, self._store.stats
        for field, documentation in COUNTERS.items():
            yield CounterMetricFamily(P + NAMES[field], documentation, value=getattr(stats, field))
        yield _labelled(
            "lookup_matched_blocks",
            "Blocks that lookups found, by the tier that would serve them.",
            "tier",
            stats.matched,
        )
        yield _labelled(
            "lookup_matched_tokens", "Tokens of these blocks, by the tier that would serve them.", "tier", stats.tokens
        )
        yield _labelled("lookup_misses", "Lookups by the reason of their first miss.", "reason", stats.misses)
        yield _labelled(
            "loaded_blocks", "Blocks leased to engines and downloads, by the tier they came from.", "tier", stats.loaded
        )
        yield _gauge("sessions", "Engines connected.", len(self._sessions.open))
        yield _gauge("namespaces", "Namespaces known.", sum(1 for _ in store.namespaces))
        yield _gauge("pinned_blocks", "Blocks pinned.", len(store.pins))
        yield _gauge("pinned_bytes", "Bytes pinned.", store.pins.bytes)
        yield _gauge("promoting_blocks", "Blocks on their way up.", store.promoter.coming)
        yield _gauge(
            "write_queue_bytes", "Bytes that wait for disk or are being written.", store.disk_mover.queue_bytes
        )
        yield _gauge("write_queue_limit_bytes", "Bound of the queue.", store.disk_mover.queue_bytes_max)
        yield CounterMetricFamily(P + "worker_failures", "Jobs that raised in a worker.", value=store.mover.failures)
        yield CounterMetricFamily(P + "events", "Events numbered.", value=store.events.last)
        yield _gauge("event_listeners", "Clients that listen to events.", store.events.listeners)
        yield _gauge("loop_lag_seconds", "How late the event loop lately was, at worst.", self._heart.lag_s)
        yield _gauge(
            "stuck_tiers",
            "Tiers that are left out because a call of theirs does not come back.",
            len(self._heart.standing),
        )
        yield CounterMetricFamily(
            P + "task_failures", "Tasks, or steps of them, that ended by an error.", value=sum(tasks.failures.values())
        )
        yield CounterMetricFamily(
            P + "thread_deaths", "Threads that died and were started again.", value=sum(deaths().values())
        )

    def _tier_metrics(self) -> Iterator[Metric]:
        tiers = self._store.statuses()
        for field, documentation in TIER_GAUGES.items():
            yield _by_tier(GaugeMetricFamily(P + "tier_" + field, documentation, labels=["tier"]), tiers, field)
        for field, documentation in HOST_GAUGES.items():
            yield _gauge("host_" + field, documentation, float(tiers["host"].details[field] or 0))
        for field, documentation in TIER_COUNTERS.items():
            family = CounterMetricFamily(P + "tier_" + field, documentation, labels=["tier"])
            for name, status in tiers.items():
                family.add_metric([name], getattr(status.counters, field))
            yield family
        evictions = CounterMetricFamily(P + "tier_evictions", "Blocks that left, by reason.", labels=["tier", "reason"])
        for name, status in tiers.items():
            for reason in (*EVICTION_REASONS, *(status.counters.evictions.keys() - set(EVICTION_REASONS))):
                evictions.add_metric([name, reason], status.counters.evictions.get(reason, 0))
        yield evictions
        modes = GaugeMetricFamily(P + "tier_mode", "How the tier works now; always 1.", labels=["tier", "mode"])
        for name, status in tiers.items():
            modes.add_metric([name, status.mode], 1)
        yield modes
        yield from _codecs(tiers)
        yield from self._flows()
        yield from self._bandwidth()
        yield _labelled("log_lines", "Warnings and errors, with those that were not written.", "level", logs.counts)

    def _gpu_metrics(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(P + "gpu_tier_state", "What became of the gpu tier; 1 for one.", labels=["state"])
        for name in GPU_STATES:
            state.add_metric([name], float(self._gpus.state == name))
        yield state
        sessions = self._sessions.open.values()
        by_transport = GaugeMetricFamily(
            P + "session_transports", "Engines by how blocks reach them.", labels=["transport"]
        )
        for transport in TRANSPORTS:
            by_transport.add_metric([transport], sum(session.transport == transport for session in sessions))
        yield by_transport
        on_gpus = sum(session.gpu != "" and not session.near and session.shard is not None for session in sessions)
        yield _gauge("session_transport_downgrades", "Engines on a GPU that cannot read the gpu tier.", on_gpus)
        for field, (name, documentation) in GPU_READINGS.items():
            family = GaugeMetricFamily(f"{P}gpu_{name}", documentation, labels=["gpu"])
            for gpu in self._gpus.survey.gpus:
                if (value := gpu.readings[field]) is not None:
                    family.add_metric([gpu.uuid], float(value))
            yield family
        moves = near.hot.moves if (near := self._store.near) is not None else Moves()
        for field, documentation in GPU_MOVES.items():
            yield CounterMetricFamily(f"{P}gpu_{field}_blocks", documentation, value=getattr(moves, field))

    def _flows(self) -> Iterator[Metric]:
        below = self._store.below
        for field, documentation in FLOWS.items():
            family = CounterMetricFamily(
                P + "tier_" + NAMES.get(field, f"{field}_blocks"), documentation, labels=["tier"]
            )
            for lower in self._store.sources:
                family.add_metric([lower.name], getattr(lower.flow, field))
            yield family
        queue = GaugeMetricFamily(P + "tier_write_queue_bytes", "Bytes that wait for the tier.", labels=["tier"])
        for lower in below:
            queue.add_metric([lower.name], lower.mover.queue_bytes)
        yield queue
        up = GaugeMetricFamily(P + "tier_up", "1 when blocks can be had from the tier.", labels=["tier"])
        for lower in below:
            up.add_metric([lower.name], float(lower.up))
        yield up

    def _bandwidth(self) -> Iterator[Metric]:
        labels = ["tier", "direction"]
        rate = GaugeMetricFamily(
            P + "tier_bandwidth_bytes_per_second", "Throughput of the tier when busy.", labels=labels
        )
        known = GaugeMetricFamily(P + "tier_bandwidth_measured", "0 while the throughput is assumed.", labels=labels)
        moved = CounterMetricFamily(P + "tier_moved_bytes", "Bytes read from the tier or written.", labels=labels)
        busy = CounterMetricFamily(P + "tier_busy_seconds", "Time in which any were under way.", labels=labels)
        for lower in self._store.below:
            for direction, meter in {"read": lower.read, "write": lower.write}.items():
                rate.add_metric([lower.name, direction], meter.bytes_per_s)
                known.add_metric([lower.name, direction], float(meter.measured))
                moved.add_metric([lower.name, direction], meter.total_bytes)
                busy.add_metric([lower.name, direction], meter.total_s)
        yield from (rate, known, moved, busy)

    def _http_metrics(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(P + "http_requests", "HTTP requests.", labels=["method", "route", "status"])
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        seconds = HistogramMetricFamily(
            P + "http_request_seconds", "Time to answer, transfers included.", labels=["route"]
        )
        for path, counts in self._seconds.items():
            so_far, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                so_far += count
                buckets.append((bound, so_far))
            seconds.add_metric([path], buckets=buckets, sum_value=self._seconds_sum[path])
        yield seconds


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(P + name, documentation, value=value)


def _labelled(name: str, documentation: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(P + name, documentation, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _codecs(tiers: dict[str, TierStatus]) -> Iterator[Metric]:
    details = {name: status.details for name, status in tiers.items() if "codec" in status.details}
    for field, documentation in CODEC_COUNTERS.items():
        counter = CounterMetricFamily(f"{P}tier_{field}", documentation, labels=["tier"])
        for name, known in details.items():
            counter.add_metric([name], float(known[field] or 0))
        yield counter
    for field, documentation in CODEC_GAUGES.items():
        gauge = GaugeMetricFamily(f"{P}tier_{field}", documentation, labels=["tier"])
        for name, known in details.items():
            gauge.add_metric([name], float(known[field] or 0))
        yield gauge
    rate = GaugeMetricFamily(
        P + "tier_codec_bytes_per_second",
        "Payload bytes that one thread codes or decodes in a second; 0 before the first block.",
        labels=["tier", "direction"],
    )
    for name, known in details.items():
        for direction in ("encode", "decode"):
            rate.add_metric([name, direction], float(known[f"codec_{direction}_bytes_per_s"] or 0))
    yield rate


def _by_tier(family: GaugeMetricFamily, tiers: dict[str, TierStatus], field: str) -> Metric:
    for name, status in tiers.items():
        family.add_metric([name], getattr(status, field))
    return family

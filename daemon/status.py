"""The status document: everything that the daemon knows about itself, as plain data.

Owns nothing; reads the store, the sessions and the settings. Called by the people's door on the event loop; no call in
here waits for I/O. Imports ``access``, ``config``, ``sessions``, ``store`` and ``tiers``.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from terracekv.daemon import tasks
from terracekv.daemon.access import Access
from terracekv.daemon.below import Lower
from terracekv.daemon.config import Config, describe, version
from terracekv.daemon.distant import Distant
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.mover import Meter
from terracekv.daemon.near import Near
from terracekv.daemon.sessions import Session, Sessions
from terracekv.daemon.store import HOST_BYTES_PER_S, Store
from terracekv.tiers.steady import deaths
from terracekv.tiers.tier import TierStatus


def status_document(
    store: Store,
    sessions: Sessions,
    config: Config,
    *,
    started: float,
    heart: Heartbeat,
    not_ready: list[str],
    requests: int,
    gpus: Gpus,
    access: Access,
) -> dict[str, Any]:
    """All of it. ``started`` is of ``time.monotonic``; ``requests`` are those under way over HTTP."""
    return {
        "version": version(),
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - started, 3),
        "ready": not not_ready,
        "not_ready": not_ready,
        "requests": requests,
        "degraded": heart.degraded,
        "loop_lag_ms": round(heart.lag_s * 1e3, 3),
        "died": {"threads": deaths(), "tasks": dict(tasks.failures)},
        "tiers": {name: _tier(name, status, store) for name, status in store.statuses().items()},
        "queue": {
            "bytes": store.disk_mover.queue_bytes,
            "bytes_max": store.disk_mover.queue_bytes_max,
            "failures": store.mover.failures
            + (store.disk_mover.failures if store.disk_mover is not store.mover else 0),
        },
        "lookups": asdict(store.stats),
        "pins": {"blocks": len(store.pins), "bytes": store.pins.bytes, "bytes_max": store.pins.bytes_max},
        "policies": sessions.demand.policies(),
        "events": {"last": store.events.last, "listeners": store.events.listeners},
        "namespaces": namespaces_document(store),
        "gpu_tier": {"state": gpus.state, "reason": gpus.reason},
        "gpus": [{"uuid": gpu.uuid, **gpu.readings, "reasons": gpu.reasons} for gpu in gpus.survey.gpus],
        "gpus_reason": gpus.survey.reason,
        "sessions": [_session(session) for session in sessions.open.values()],
        "tenants": tenants_document(store, access.table.tenants),
        "access": access.report(),
        "config": describe(config),
    }


def tenant_document(store: Store, sessions: Sessions, tenant: str, *, not_ready: list[str]) -> dict[str, Any]:
    """What a tenant may know: its own part of it, and whether the daemon is ready."""
    mine = [session for session in sessions.open.values() if session.namespace.tenant == tenant]
    return {
        "version": version(),
        "ready": not not_ready,
        "tenant": tenant,
        "tiers": tenants_document(store, (tenant,))[0]["tiers"],
        "namespaces": namespaces_document(store, tenant),
        "sessions": [_session(session) for session in mine],
    }


def tenants_document(store: Store, tenants: Sequence[str]) -> list[dict[str, Any]]:
    """What each tenant's blocks take of the tiers that can be shared out, and how much they may; None is no limit."""
    held = {name: shares.by_tenant() for name, shares in store.shares.items()}
    limits = {name: shares.limits for name, shares in store.shares.items()}
    return [
        {
            "tenant": tenant,
            "tiers": {
                name: {"used_bytes": held[name].get(tenant, 0), "limit_bytes": limits[name].get(tenant)}
                for name in held
            },
        }
        for tenant in tenants
    ]


def namespaces_document(store: Store, tenant: str = "") -> list[dict[str, Any]]:
    """Every namespace ever met here, or those of a tenant. ``registered`` is false for one known from stored blocks
    only."""
    return [
        {
            "namespace_id": namespace.id.hex(),
            "epoch": namespace.epoch,
            "registered": namespace.registered,
            "model": namespace.model,
            "revision": namespace.revision,
            "dtype": namespace.dtype,
            "layout": namespace.layout.hex(),
            "block_tokens": namespace.block_tokens,
            "block_bytes": namespace.block_bytes,
            "shards": namespace.shards,
            "tenant": namespace.tenant or None,
        }
        for namespace in store.namespaces
        if tenant in ("", namespace.tenant)
    ]


def _tier(name: str, status: TierStatus, store: Store) -> dict[str, Any]:
    details: dict[str, Any] = dict(status.details)
    through = next((through for through in store.through if through.lower.name == name), None)
    lower = next((lower for lower in store.sources if lower.name == name), None)
    if isinstance(lower, Distant):
        details |= lower.report()
    if isinstance(lower, Near):
        details |= asdict(lower.hot.moves)
    shown: dict[str, Any] = {
        "mode": status.mode,
        "capacity_bytes": status.capacity_bytes,
        "used_bytes": status.used_bytes,
        "blocks": status.blocks,
        "leased_blocks": details.pop("leased_blocks", 0),
        "reserved_blocks": details.pop("reserved_blocks", 0),
        "in_flight_blocks": through.blocks_under_way if through else 0 if lower else store.promoter.coming,
        "in_flight_bytes": lower.mover.queue_bytes if lower else 0,
        "in_flight_bytes_max": lower.mover.queue_bytes_max if lower else 0,
        "counters": asdict(status.counters),
        "last_error": status.last_error,
        "last_event": status.last_event,
        "advice": status.advice,
        "stalled_s": round(lower.stalled_s, 3) if lower else 0,
        "last_error_age_s": None if status.last_error_at is None else round(time.monotonic() - status.last_error_at, 3),
        "bandwidth": _bandwidth(lower),
        "admission": lower.admission if lower else None,
        "flow": asdict(lower.flow) if lower else None,
        "details": details,
    }
    return shown


def _bandwidth(lower: Lower | None) -> Mapping[str, Any]:
    """Measured rates; what is not measured yet, or cannot be, is the assumption that estimates are made with."""
    if lower is not None:
        return {"read": _meter(lower.read), "write": _meter(lower.write)}
    return {"read": {"bytes_per_s": HOST_BYTES_PER_S, "measured": False}}


def _meter(meter: Meter) -> dict[str, Any]:
    return {"bytes_per_s": round(meter.bytes_per_s), "measured": meter.measured}


def _session(session: Session) -> dict[str, Any]:
    return {
        "session": session.number,
        "engine": session.engine,
        "pid": session.pid,
        "peer": {"pid": peer.pid, "uid": peer.uid, "gid": peer.gid} if (peer := session.peer) else None,
        "caller": session.caller.name if session.caller else None,
        "tenant": session.namespace.tenant or None,
        "access": "write" if session.may_write else "read",
        "age_s": round(time.monotonic() - session.since, 3),
        "namespace_id": session.namespace.id.hex(),
        "model": session.namespace.model,
        "shard": session.shard,
        "gpu": session.gpu or None,
        "transport": session.transport,
        "transport_reason": session.not_near,
        "leases": len(session.leases),
        "leased_blocks": sum(len(lease.slots) + len(lease.near) for lease in session.leases.values()),
        "pending_blocks": sum(len(lease.pending) for lease in session.leases.values()),
        "reservations": len(session.reservations),
        "reserved_blocks": sum(len(reservation.slots) for reservation in session.reservations.values()),
    }

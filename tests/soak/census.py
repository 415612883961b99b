"""What must be true of a daemon that nobody uses any more, and of the folders of one that has ended.

Owns nothing. Called by the soak in one thread. Imports ``daemon`` and ``tiers``.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb

from terracekv.daemon.config import load_config, resolve, survey
from terracekv.daemon.recovery import open_tiers
from terracekv.tests.disks import du
from terracekv.tests.harness import Daemon

MINUTE_S = 60.0


def counts(daemon: Daemon) -> dict[str, int]:
    """Of an idle daemon: what grows when something leaks. Its connections to the bucket are counted apart: as many
    stay open as were last used at once."""
    process = Path(f"/proc/{daemon.pid}")
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    tcp = {f"socket:[{row[9]}]" for row in rows}
    connections = sum(os.readlink(each) in tcp for each in (process / "fd").iterdir())
    return {
        "threads": len(os.listdir(process / "task")),
        "descriptors": daemon.descriptors() - connections,
        "connections": connections,
    }


def idle_faults(status: dict[str, Any]) -> list[str]:
    """What an idle daemon still holds."""
    host = status["tiers"]["host"]
    held = {
        "sessions": len(status["sessions"]),
        "leased blocks": host["leased_blocks"],
        "reserved blocks": host["reserved_blocks"],
        "pins": status["pins"]["blocks"],
    }
    for name, tier in status["tiers"].items():
        held |= {f"blocks on their way to or from {name}": tier["in_flight_blocks"]}
        held |= {f"bytes that wait for {name}": tier["in_flight_bytes"]}
        if 0 < tier["capacity_bytes"] < tier["used_bytes"]:
            held |= {f"bytes over the cap of {name}": tier["used_bytes"] - tier["capacity_bytes"]}
    return [f"{count} {what}" for what, count in held.items() if count]


def reader_faults(catalog: Path, pid: int) -> list[str]:
    """Readers of the catalog that are nobody's, or that keep its pages from being reused while all is idle."""
    with lmdb.open(str(catalog), readonly=True, max_readers=256, create=False) as environment:
        rows = [line.split() for line in environment.readers().splitlines()[1:]]
    faults = [
        f"a reader of the catalog of process {row[0]}, which is not the daemon" for row in rows if row[0] != str(pid)
    ]
    return faults + [f"a reader of the catalog holds transaction {row[2]}" for row in rows if row[-1] != "-"]


def books_faults(daemon: Daemon) -> list[str]:
    """Of a daemon that has ended: whether what it left adds up, opened as its next life would open it."""
    config = load_config(None, daemon.settings, {})
    tiers = open_tiers(resolve(config, survey(config)))
    checks: dict[str, Callable[[], None]] = {"host": tiers.host.check}
    if tiers.disk is not None:
        checks["disk"] = tiers.disk.check
    faults = []
    try:
        for name, check in checks.items():
            try:
                check()
            except AssertionError as error:
                faults.append(f"books of {name}: {error}")
        if tiers.disk is not None and (taken := du(tiers.disk.folder)) > tiers.disk.capacity_bytes:
            faults.append(f"the disk tier's folder takes {taken} bytes of {tiers.disk.capacity_bytes}")
    finally:
        tiers.close()
    return faults


def slope_per_min(samples: Sequence[tuple[float, float]]) -> float:
    """Of a line through (seconds, value) by least squares."""
    if len(samples) < 2:
        return 0.0
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean = sum(value for _, value in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return sum((t - mean_t) * (value - mean) for t, value in samples) / spread * MINUTE_S

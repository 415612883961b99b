"""Lies that a daemon can tell an engine: some for each field of each answer, well-formed and plausible.

Owns the table of lies, and nothing that runs. Called by ``test_lying_daemon``. Imports ``daemon.protocol`` and
``lying_daemon``.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from terracekv.daemon.protocol import (
    Committed,
    Error,
    Failed,
    Found,
    GpuMemory,
    Leased,
    Ready,
    Refused,
    Reserved,
    Slot,
    Welcome,
)
from terracekv.tests.lying_daemon import ARENA_BYTES, BLOCK, SLOTS_BYTES

FAR, HUGE = 2**62, 2**64 - 1
PROTOCOL, DEADLINE, REFUSED, FENCED, TRUTH = "protocol", "deadline", "refused", "fenced", "truth"
NO_SESSION = "no session"
FORGED = "r\n2026-01-01T00:00:00.000Z ERROR TKV-INTERNAL forged"


@dataclass(frozen=True)
class Lie:
    """``value`` of a field where the truth is another, and ``why`` what was asked for is a miss then; TRUTH where it is
    none. ``held``: the same for a scheduler, where that differs."""

    value: Callable[[Any], Any]
    why: str = PROTOCOL
    held: str | None = None


def values(*values: Any, why: str = PROTOCOL, held: str | None = None) -> list[Lie]:
    return [Lie(lambda truth, value=value: value, why, held) for value in values]  # type: ignore[misc]


def more(truth: Any) -> Any:
    return [*truth, truth[-1] if truth else Slot(0, 64, 100)]


IDS = [
    *values(-1, -FAR, HUGE),
    Lie(lambda id: id + 1),
    *values(0),
]
SIZES = values(0, -1, FAR, 2**63, HUGE, why=NO_SESSION)
REASONS = values("", "two words", "r" * 65, FORGED, "\u00e9")
PATHS = [
    *values("", "\0", "/nonexistent/file", "x" * 100_000, why=NO_SESSION),
    Lie(os.path.dirname, NO_SESSION),
    Lie(lambda path: path + ".pipe", NO_SESSION),
]

LIES: dict[tuple[type[msgspec.Struct], str], list[Lie]] = {
    (Welcome, "session"): values(0, -1, HUGE, why=TRUTH),
    (Welcome, "namespace_id"): [*values(b"", bytes(31), bytes(33)), *values(b"n" * 32, why=TRUTH)],
    (Welcome, "epoch"): values(-1, HUGE, why=TRUTH),
    (Welcome, "block_bytes"): values(0, -1, BLOCK // 2, 2 * BLOCK, HUGE),
    (Welcome, "arena"): PATHS,
    (Welcome, "arena_bytes"): [*SIZES, *values(ARENA_BYTES + 1, why=NO_SESSION)],
    (Welcome, "slots"): PATHS,
    (Welcome, "slots_bytes"): [*SIZES, *values(SLOTS_BYTES + 1, why=NO_SESSION)],
    (Welcome, "lock_byte"): [*values(-1, 2**63, HUGE), *values(0, why=TRUTH)],
    (Welcome, "gpu"): values(None, why=TRUTH),
    (Welcome, "no_gpu"): values("w" * 100_000, why=TRUTH),
    (GpuMemory, "uuid"): values("", "GPU-2", FORGED, "g" * 100_000, why=TRUTH),
    (GpuMemory, "handle"): values(b"", b"h" * 63, b"h" * 65, why=TRUTH),
    (GpuMemory, "size_bytes"): values(0, -1, 2**63, HUGE),
    (GpuMemory, "made"): values(b"", b"m" * 1000, why=TRUTH),
    (Refused, "field"): values("", FORGED, "f" * 100_000, why=REFUSED),
    (Refused, "reason"): values("", FORGED, "r" * 100_000, why=REFUSED),
    (Found, "id"): IDS,
    (Found, "blocks"): [*values(7, -1, FAR, HUGE), *values(0, why=TRUTH)],
    (Found, "per_tier"): [
        *values({"host": 7}, {"host": -1}, {"disk": HUGE}, {str(number): 1 for number in range(1000)}),
        *values({"moon": 3}, {}, why=TRUTH),
    ],
    (Found, "first_miss"): values(7, -1, HUGE),
    (Found, "reason"): [*REASONS, *values("unheard_of", why="unheard_of")],
    (Found, "load_ms"): [*values(math.nan, math.inf, -math.inf, -1.0), *values(0.0, 1e300, why=TRUTH)],
    (Leased, "id"): IDS,
    (Leased, "lease"): values(0, -1, HUGE, why=DEADLINE),
    (Leased, "blocks"): values(7, -1, 2, FAR, HUGE),
    (Leased, "slots"): [Lie(more), Lie(lambda slots: slots[:-1] or more(slots)), Lie(lambda slots: [None] * 7)],
    (Leased, "pending"): [
        *(Lie(lambda pending, index=index: [*pending, index]) for index in (-1, 3, 6, FAR, HUGE)),  # type: ignore[misc]
        Lie(lambda pending: [*pending, 0], held=DEADLINE),
    ],
    (Ready, "lease"): values(0, -1, HUGE, why=DEADLINE),
    (Ready, "indices"): [*values([-1], [0], [6], [FAR], [HUGE], [3, 3], [2, 3]), *values([], held=DEADLINE)],
    (Ready, "slots"): [Lie(more), Lie(lambda slots: [None]), Lie(lambda slots: slots[:-1] or more(slots))],
    (Failed, "lease"): values(0, -1, HUGE, why=DEADLINE),
    (Failed, "indices"): [*values([-1], [0], [6], [FAR], [HUGE], [5, 5]), *values([], why=DEADLINE)],
    (Failed, "why"): [*REASONS, *values("unheard_of", why="unheard_of", held=TRUTH)],
    (Reserved, "id"): IDS,
    (Reserved, "reservation"): values(0, -1, HUGE, why=TRUTH),
    (Reserved, "slots"): [
        Lie(more),
        Lie(lambda slots: [*slots, slots[1]]),
        Lie(lambda slots: slots[:-1]),
        Lie(lambda slots: []),
        Lie(lambda slots: [None] * 6),
        Lie(lambda slots: [None, *[slots[1]] * 4, None]),
        Lie(lambda slots: [slots[1], None, *slots[2:]]),
    ],
    (Reserved, "present"): values([], [0, 0], [-1], [6], [1], [0, 1], [HUGE], [5]),
    (Reserved, "refused"): [
        *values({}, {-1: "full"}, {6: "full"}, {1: "full"}, {0: "full", 5: "full"}, {HUGE: "full"}, {5: FORGED}),
        *values({5: "unheard_of"}, why="unheard_of"),
    ],
    (Committed, "id"): IDS,
    (Committed, "stored"): [*values([0], [5], [6], [-1], [1, 1], [1, 2, 3, 4, 4], [HUGE]), *values([], why=TRUTH)],
    (Committed, "durable"): [*values([0], [5], [6], [-1], [1, 1], [1, 2, 3, 4, 4], [HUGE]), *values([], why=TRUTH)],
    (Error, "id"): [*values(-1, HUGE), Lie(lambda id: id + 1), *values(0, why=REFUSED)],
    (Error, "kind"): values("", FORGED, "k" * 100_000, why=REFUSED),
    (Error, "message"): values("", FORGED, "m" * 100_000, why=REFUSED),
    (Error, "hint"): values("", FORGED, "h" * 100_000, why=REFUSED),
    (Slot, "offset"): values(-1, ARENA_BYTES - BLOCK + 1, ARENA_BYTES, FAR, 2**63, HUGE),
    (Slot, "record"): values(-1, SLOTS_BYTES - 7, SLOTS_BYTES, FAR, HUGE),
    (Slot, "generation"): values(0, -1, HUGE, why=FENCED),
    (Slot, "gpu"): values(True),
}
"""Ids that were asked with before are no lies: an answer may be late."""

"""The contract that every tier keeps, and the values it answers with. ``tests/contract`` holds all tiers to it.

Owns nothing. Imports ``block``, ``errors`` and ``namespace``.

A tier is synchronous and thread-safe: any method may be called from any thread. Calls may block on the tier's own
medium and on nothing else. A tier never answers with bytes that are not, checked, the bytes that were put under that
id, namespace and epoch. What fails leaves no trace: after a failed ``put`` the block is as absent as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from terracekv.tiers.namespace import Namespace

PAGE = 4096
"""Slots, records and everything that direct I/O touches are multiples of this many bytes."""


class Outcome(StrEnum):
    """What became of one block. Only STORED, PRESENT and HIT mean that it is readable."""

    STORED = "stored"
    PRESENT = "present"
    HIT = "hit"
    MISS = "miss"
    DAMAGED = "damaged"
    """The stored bytes were wrong: counted, quarantined, a miss from now on; the next put heals it."""
    FULL = "full"
    """No room, and nothing that may be evicted."""
    QUOTA = "quota"
    """No room in the tenant's share of the tier, and nothing of its own that may be evicted."""
    STALE = "stale"
    """The namespace was flushed meanwhile."""
    FAILED = "failed"
    """The medium raised an error; it is in the tier's ``last_error``."""


class Miss(StrEnum):
    """Why a lookup ended where it did."""

    SHORTER_THAN_BLOCK = "shorter_than_block"
    UNKNOWN_NAMESPACE = "unknown_namespace"
    ABSENT = "absent"
    EVICTED = "evicted"
    DAMAGED = "damaged"
    """Its bytes were wrong when they were last read, and it was not stored since."""
    TIER_DOWN = "tier_down"
    DEADLINE = "deadline"
    TOO_SLOW = "too_slow"


@dataclass(slots=True)
class Counters:
    """Counts since start, of one tier. Written under the tier's lock."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    """Blocks that left, by reason: capacity, quota, flush, delete, damaged."""
    checksum_failures: int = 0
    io_errors: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier at one moment. Bytes are bytes of the medium (slots, segments), not of payloads."""

    name: str
    mode: str
    """How the tier really works now (``direct``, ``buffered``, ``tmpfs``), not what was asked for."""
    capacity_bytes: int
    used_bytes: int
    blocks: int
    counters: Counters
    last_error: str | None = None
    last_error_at: float | None = None
    """When that was, of ``time.monotonic``; None when there is none, or it is still so."""
    last_event: str | None = None
    """Its id: a section of ``docs/errors.md``."""
    advice: str | None = None
    """What to do about it."""
    details: dict[str, int | float | str | None] = field(default_factory=dict)


class Tier(Protocol):
    """A place for blocks. ``ids`` are block ids (34 bytes); a ``Namespace`` argument is the caller's fresh snapshot."""

    name: str

    def leading(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """How many of ``ids``, from the first on, are here under the namespace's present epoch. Reads no payload."""
        ...

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, checksum: int) -> Outcome:
        """Store a copy of ``payload`` (``namespace.block_bytes`` bytes, xxh3-64 ``checksum``), evicting if need be.

        The block is visible when this returns STORED, and not before. PRESENT when it was there already.
        """
        ...

    def get(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        """Read a block into ``into`` (at least ``namespace.block_bytes`` bytes): HIT, MISS, DAMAGED or FAILED.

        Only after HIT do the bytes of ``into`` mean anything.
        """
        ...

    def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """Forget blocks; the number that were here. Idempotent."""
        ...

    def status(self) -> TierStatus:
        """Occupancy, counters and effective mode, at any time and without waiting for I/O."""
        ...

    def check(self) -> None:
        """Compare the tier's books with what is really there; AssertionError names the first difference."""
        ...

    def close(self) -> None:
        """Stop, leaving everything stored as adoptable as it is. Idempotent."""
        ...

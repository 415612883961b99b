"""What the store counts since start, and what it answers to a lookup.

Owns nothing but the numbers; written on the event loop, read by the doors. Imports ``tier``.
"""

from dataclasses import dataclass, field

from terracekv.tiers.tier import Miss


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup. ``per_tier[t]``: leading blocks that can be had from tier t or above. ``split[t]``: how many
    of the matched blocks tier t would serve; the values add up to ``blocks``. ``bytes`` are those of all shards."""

    blocks: int
    per_tier: dict[str, int]
    split: dict[str, int]
    bytes: int
    load_ms: float
    first_miss: int | None
    reason: Miss | None


@dataclass(slots=True)
class Stats:
    """Blocks, unless the name says otherwise. ``matched`` splits ``matched_blocks`` by the tier that would serve."""

    lookups: int = 0
    asked_blocks: int = 0
    asked_tokens: int = 0
    matched_blocks: int = 0
    matched_tokens: int = 0
    matched: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    tokens: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    """``matched`` in tokens: it splits ``matched_tokens``."""
    misses: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Miss})
    """Lookups by the reason of their first miss."""
    loaded: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})
    """Blocks leased to engines, by the tier that they came from."""
    promoted: int = 0
    promotions_failed: int = 0
    written: int = 0
    """Blocks written through to a lower tier; these and the following are sums over the tiers, see ``below.Flow``."""
    not_admitted: int = 0
    writes_failed: int = 0
    writes_dropped: int = 0
    """Blocks not written through because the queue was full or the tier down."""
    writes_dropped_bytes: int = 0
    evicted_before_persist: int = 0
    """Blocks that left host although no lower tier had them."""
    stale_commits: int = 0
    """Blocks refused at commit because their namespace had been flushed."""
    refused_reservations: int = 0

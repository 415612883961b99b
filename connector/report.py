"""What the cache did for one prompt, in a connector's words. Owns nothing; standard library only; any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TIERS = ("gpu", "host", "disk", "s3")
"""From the engine downwards."""


@dataclass(slots=True)
class Report:
    """``ttft_ms`` runs from the call to the first token and includes ``lookup_ms`` and ``load_ms``; storing comes
    after the tokens and is no part of it."""

    prompt_tokens: int
    computed_tokens: int
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    """By the tier that held them at lookup."""
    stored_blocks: int = 0
    why: str | None = None
    """Why no more was loaded: the reason of the first miss, or what in this model or call cannot be cached. None when
    all that may be loaded was."""
    lookup_ms: float = 0.0
    load_ms: float = 0.0
    ttft_ms: float = 0.0
    store_ms: float = 0.0


def tokens_by_tier(per_tier: Mapping[str, int], blocks: int, block_tokens: int) -> dict[str, int]:
    """Tokens of the first ``blocks`` blocks by tier, from counts of blocks that each include the tiers above."""
    tokens = {}
    above = 0
    for tier in TIERS:
        reach = min(per_tier.get(tier, above), blocks)
        if reach > above:
            tokens[tier] = (reach - above) * block_tokens
            above = reach
    return tokens

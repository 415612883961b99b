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


def leading_tokens(by_tier: Mapping[str, int], tokens: int) -> dict[str, int]:
    """The first ``tokens`` tokens of these, by tier."""
    found = {}
    for tier, count in by_tier.items():
        if tokens > 0:
            found[tier] = min(count, tokens)
        tokens -= count
    return found


def tokens_between(per_tier: Mapping[str, int], start: int, end: int, block_tokens: int) -> dict[str, int]:
    """Tokens [start, end) by the tier that had them."""
    found = {}
    at = 0
    reach = -(-end // block_tokens)
    for tier, tokens in tokens_by_tier(per_tier, reach, block_tokens).items():
        mine = min(end, at + tokens) - max(start, at)
        if mine > 0:
            found[tier] = mine
        at += tokens
    return found

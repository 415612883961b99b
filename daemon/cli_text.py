"""Words and numbers as a person reads and writes them at a terminal.

Pure, but for the file or standard input that tokens are read from. Called by ``cli`` and
``doctor``. Imports ``budget`` and ``errors``.
"""

import re
import sys
from pathlib import Path
from typing import Any

from terracekv.tiers.budget import show
from terracekv.tiers.errors import BadRequest

NEWS_S = 60.0
DIGITS_MAX = 20
"""Of a token id; the daemon says which numbers are none."""


def short(count: int) -> str:
    """A number that is never wider than its column's name can be."""
    for unit, name in ((10**9, "G"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return f"{count:,}"


def count(number: int, what: str) -> str:
    """1 block, 2,000 blocks."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def sentence(counts: dict[str, Any]) -> str:
    """What lookups found so far."""
    asked, matched = counts["asked_blocks"], counts["matched_blocks"]
    share = f" ({matched / asked:.1%})" if asked else ""
    split = ", ".join(f"{tier} {blocks:,}" for tier, blocks in counts["matched"].items())
    return f"{count(counts['lookups'], 'lookup')} found {matched:,} of {count(asked, 'block')}{share}: {split}"


def queues(tiers: dict[str, Any]) -> list[str]:
    """What waits for each tier below host, and what never got there."""
    return [
        f"write-through to {name}: {show(tier['in_flight_bytes'])} of {show(tier['in_flight_bytes_max'])} queued, "
        f"{tier['flow']['writes_dropped']:,} blocks dropped, {tier['flow']['writes_failed']:,} failed"
        for name, tier in tiers.items()
        if tier.get("flow")
    ]


def policies(tiers: dict[str, Any]) -> list[str]:
    """What each tier that chooses for itself has chosen, and why."""
    lines = []
    for name, tier in tiers.items():
        if contest := tier.get("contest"):
            shares = ", ".join(
                f"{policy} hits {counts['hits']:.1%} and writes {counts['writes']:.1%}"
                for policy, counts in contest["candidates"].items()
            )
            lines.append(f"{name} goes by {contest['policy']}, {contest['switches']} changes; of late {shares}")
    return lines


def last_error(name: str, tier: dict[str, Any]) -> tuple[str, bool]:
    """A tier's last error, and whether it is news."""
    seconds = tier.get("last_error_age_s")
    if seconds is None:
        return f"{name}: last error: {tier['last_error']}", True
    return f"{name}: last error, {age(seconds)} ago: {tier['last_error']}", seconds < NEWS_S


def age(seconds: float) -> str:
    """A time in its two largest units."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s" if minute else f"{second} s"


def read_tokens(source: str) -> list[int]:
    """Token ids as a JSON list, or as numbers between blanks, commas or line ends."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except OSError as error:
        hint = "name a file with token ids, or - for stdin"
        raise BadRequest(f"TOKENS: {source} cannot be read: {error.strerror}", hint) from None
    except UnicodeDecodeError:
        raise BadRequest(f"TOKENS: {source} is no text", "write numbers, or a JSON list of them") from None
    words = re.sub(r"[\[\],]", " ", text).split()
    for word in words:
        if not word.isdecimal() or len(word) > DIGITS_MAX:
            says = f"TOKENS: {source} holds {printable(word[:40])!r}, which is no token id"
            raise BadRequest(says, "write numbers, or a JSON list of them")
    return [int(word) for word in words]


def printable(text: object) -> str:
    """Text with what a terminal would obey, or nobody could see, spelt out: names come from engines."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))

"""What was lately asked: the last lookups, and how much of what was asked for was here, from one moment to the next.

Owns both, each of a size that no traffic changes. Written on the event loop with every lookup, so that is a few steps
and no more; read there by the live status. Imports ``stats`` and ``tiers``.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from terracekv.daemon.stats import Found
from terracekv.tiers.namespace import Namespace

LOOKUPS = 100
"""Kept of all, and as many of each tenant."""
PERIOD_S = 15
PERIODS = 240
"""One hour."""
TENANTS_MAX = 64
"""Who asked longest ago is forgotten first; so with namespaces."""
NAMESPACES_MAX = 1024

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class Asked(NamedTuple):
    """One lookup. A named tuple, since one is made for each."""

    number: int
    at: float
    """Seconds since 1970, by a clock that never goes back."""
    namespace: Namespace
    asked_blocks: int
    found: Found

    def row(self) -> dict[str, Any]:
        """For people and programs; names no key."""
        namespace, found = self.namespace, self.found
        return {
            "number": self.number,
            "at": round(self.at, 3),
            "namespace_id": namespace.id.hex() or None,
            "model": namespace.model,
            "tenant": namespace.tenant or None,
            "block_tokens": namespace.block_tokens,
            "asked_blocks": self.asked_blocks,
            "matched_blocks": found.blocks,
            "split": found.split,
            "load_ms": round(found.load_ms, 3),
            "first_miss": None if found.reason is None else {"index": found.first_miss, "reason": found.reason.value},
        }


@dataclass(slots=True)
class Period:
    """What was asked in ``PERIOD_S`` seconds. ``at`` counts such periods since 1970."""

    at: int
    lookups: int = 0
    asked_blocks: int = 0
    asked_tokens: int = 0
    matched_blocks: dict[str, int] = field(default_factory=dict)
    matched_tokens: dict[str, int] = field(default_factory=dict)
    """Both by the tier that would serve."""

    def row(self) -> dict[str, Any]:
        """With the time at which it began."""
        return asdict(self) | {"at": self.at * PERIOD_S}


@dataclass(slots=True)
class Use:
    """What was asked of one namespace since it was first asked for, or of several together."""

    lookups: int = 0
    asked_tokens: int = 0
    matched_tokens: int = 0

    def __add__(self, other: "Use") -> "Use":
        asked, matched = self.asked_tokens + other.asked_tokens, self.matched_tokens + other.matched_tokens
        return Use(self.lookups + other.lookups, asked, matched)


class Past:
    """What was lately asked by everybody, or by one tenant. Numbers are its own: one that counted everybody's would
    tell a tenant how much others ask."""

    def __init__(self) -> None:
        self.number = 0
        """Of the last lookup; counts from 1."""
        self.lookups = deque[Asked](maxlen=LOOKUPS)
        self.periods = deque[Period](maxlen=PERIODS)

    def add(self, at: float, namespace: Namespace, asked_blocks: int, found: Found) -> None:
        """One more lookup."""
        self.number += 1
        self.lookups.append(Asked(self.number, at, namespace, asked_blocks, found))
        number = int(at) // PERIOD_S
        if not self.periods or self.periods[-1].at != number:
            self.periods.append(Period(number))
        period, tokens = self.periods[-1], namespace.block_tokens
        period.lookups += 1
        period.asked_blocks += asked_blocks
        period.asked_tokens += asked_blocks * tokens
        for tier, blocks in found.split.items():
            if blocks:
                period.matched_blocks[tier] = period.matched_blocks.get(tier, 0) + blocks
                period.matched_tokens[tier] = period.matched_tokens.get(tier, 0) + blocks * tokens

    def since(self, number: int) -> list[dict[str, Any]]:
        """Rows of the lookups after that number, the oldest first. A number that is still to come is of a past that was
        forgotten meanwhile: all are new then."""
        number = number if number <= self.number else 0
        return [asked.row() for asked in takewhile(lambda asked: asked.number > number, reversed(self.lookups))][::-1]

    def history(self, last: int = PERIODS) -> list[dict[str, Any]]:
        """Rows of the last periods in which anything was asked, the oldest first."""
        return [period.row() for period in list(self.periods)[-last:]]


class Recent:
    """``all`` is what everybody asked."""

    def __init__(self) -> None:
        self.all = Past()
        self._tenants = OrderedDict[str, Past]()
        self._uses = OrderedDict[bytes, Use]()
        self._epoch = time.time() - time.monotonic()

    def add(self, namespace: Namespace, asked_blocks: int, found: Found) -> None:
        """A lookup was answered. One without an id is of a namespace that nobody knows, by the name that was asked
        for."""
        at = self.now()
        self.all.add(at, namespace, asked_blocks, found)
        if namespace.tenant:
            _kept(self._tenants, namespace.tenant, TENANTS_MAX, Past).add(at, namespace, asked_blocks, found)
        if namespace.id:
            use = _kept(self._uses, namespace.id, NAMESPACES_MAX, Use)
            use.lookups += 1
            use.asked_tokens += asked_blocks * namespace.block_tokens
            use.matched_tokens += found.blocks * namespace.block_tokens

    def now(self) -> float:
        """Seconds since 1970, by the clock of all that is remembered."""
        return self._epoch + time.monotonic()

    def of(self, tenant: str) -> Past:
        """What a tenant asked; "" for everybody."""
        return self._tenants.get(tenant, Past()) if tenant else self.all

    def use(self, namespace_id: bytes) -> Use:
        """What was asked of a namespace."""
        return self._uses.get(namespace_id, Use())


def _kept(table: "OrderedDict[Key, Kept]", key: Key, limit: int, make: Callable[[], Kept]) -> Kept:
    """The entry of ``key``, made anew in the place of the one that was used longest ago."""
    entry = table.get(key)
    if entry is None:
        if len(table) >= limit:
            table.popitem(last=False)
        entry = table[key] = make()
    else:
        table.move_to_end(key)
    return entry

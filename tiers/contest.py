"""Which policy wins on the traffic of now: candidates run as shadow caches of a sample of the blocks.

Owns the shadows and scores of one tier. Used by the daemon's event loop (``demand``) and by the simulator. Imports
``eviction``, ``replay`` and ``sieve``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from terracekv.tiers.eviction import ADMISSIONS, AUTO, EVICTIONS, Policy
from terracekv.tiers.replay import ModelTier
from terracekv.tiers.sieve import MARK_BYTES, Sieve

SHADOW_BLOCKS = 256
"""What a shadow holds: so much of all blocks is followed that this stands for the whole tier."""
REVIEW_SHARE = 0.25
"""A review is due once so many times of what the shadow holds was asked for,"""
REVIEW_BLOCKS_MIN = 64
"""and no fewer blocks than this."""
FADE = 0.97
"""What a score keeps of the past at each review."""
MARGIN = 0.004
"""Hits, as a share of what was asked, that a candidate must win by."""
PATIENCE = 2
"""A candidate must win so many reviews in a row."""
WRITES_MARGIN = 1.1
"""One that hits as much must write so much less to win."""
CANDIDATES = tuple(Policy(eviction, admission) for admission in ADMISSIONS for eviction in EVICTIONS)


@dataclass(slots=True)
class Entry:
    """A candidate. Scores are of sampled blocks, and fade."""

    policy: Policy
    shadow: ModelTier
    hits: float = 0.0
    writes: float = 0.0


class Contest:
    """Between policies for a tier of ``capacity`` blocks. Begins with the first of ``candidates``."""

    def __init__(self, candidates: Sequence[Policy], capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._sieve = Sieve(min(1.0, SHADOW_BLOCKS / self.capacity))
        size = max(1, round(self.capacity * self._sieve.rate))
        self._entries = [Entry(policy, ModelTier(size, policy)) for policy in candidates]
        self._current = self._rival = self._entries[0]
        self._wins = 0
        self._asked = 0.0
        self._asked_since = 0
        self._review_after = max(REVIEW_BLOCKS_MIN, REVIEW_SHARE * size)
        self.switches = 0

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self._current.policy

    def use(self, keys: bytes) -> bool:
        """A request for a chain of keys, joined; whether another policy is in force from now on."""
        marks = self._sieve.followed(keys)
        if not marks:
            return False
        ids = [mark[MARK_BYTES // 2 :] for mark in marks]
        for entry in self._entries:
            written = entry.shadow.writes
            entry.hits += entry.shadow.use(ids)
            entry.writes += entry.shadow.writes - written
        self._asked_since += len(ids)
        return self._asked_since >= self._review_after and self._review()

    def report(self) -> dict[str, object]:
        """What is in force and why, for the status: shares of the blocks asked for in the near past."""
        asked = max(1.0, self._asked + self._asked_since)
        return {
            "policy": self.policy.name,
            "switches": self.switches,
            "margin": MARGIN,
            "sample_rate": round(self._sieve.rate, 6),
            "candidates": {
                entry.policy.name: {"hits": round(entry.hits / asked, 4), "writes": round(entry.writes / asked, 4)}
                for entry in self._entries
            },
        }

    def _review(self) -> bool:
        self._asked += self._asked_since
        self._asked_since = 0
        best = self._best()
        for entry in self._entries:
            entry.hits *= FADE
            entry.writes *= FADE
        self._asked *= FADE
        self._wins = self._wins + 1 if best is self._rival else 1
        self._rival = best
        if best is self._current or self._wins < PATIENCE:
            return False
        self._current = best
        self.switches += 1
        return True

    def _best(self) -> Entry:
        """Of those that hit as much as any, but for the margin, the one that writes least; the one in force, where it
        is as good."""
        most = max(entry.hits for entry in self._entries)
        equal = [entry for entry in self._entries if entry.hits >= most - MARGIN * self._asked]
        least = min(equal, key=lambda entry: entry.writes)
        as_good = self._current in equal and self._current.writes <= WRITES_MARGIN * least.writes
        return self._current if as_good else least


class AutoTier(ModelTier):
    """A model of a tier that follows a contest."""

    def __init__(self, capacity: int, candidates: Sequence[Policy] = CANDIDATES) -> None:
        super().__init__(capacity, Policy(AUTO, AUTO))
        self.contest = Contest(candidates, capacity)
        self.follow(self.contest.policy)

    def heed(self, keys: bytes) -> None:
        """Tell the contest of a request, and do as it says."""
        if self.contest.use(keys):
            self.follow(self.contest.policy)

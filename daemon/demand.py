"""What engines ask for, watched: what more memory would buy, and which policy is the best for it.

Owns the curve, the contests of the tiers whose policy is ``auto``, and the queue of requests that wait to be looked at.
Called by ``sessions`` and the engine door on the event loop, where a request only joins the queue; it is looked at
later, in slices that together take no more than ``SHARE`` of the loop's time, whatever comes. Imports ``lookup_log``,
``write_through`` and ``tiers``.

A request is what an engine looks up, or what it leases where it never looks up; the same one asked again and again
while it waits counts once. Questions over HTTP are not requests: who asks there uses nothing. Blocks are counted with
all their shards, those of all namespaces together: they share the tiers.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from terracekv.daemon.lookup_log import LookupLog
from terracekv.daemon.write_through import WriteThrough
from terracekv.tiers.contest import Contest
from terracekv.tiers.curve import Curve
from terracekv.tiers.eviction import ADMISSIONS, AUTO, EVICTIONS, Policy
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.sieve import KEY_BYTES

SHARE = 0.01
"""Of the loop's time."""
SLICE_S = 0.0002
PERIOD_S = 0.02
QUEUE_BYTES_MAX = 512 << 10
"""Keys that wait; over it requests are passed over, and fewer blocks are followed from then on,"""
FOLLOWED_MIN = 512
"""but no fewer than these: with them the curve costs little of a slice, and without them it knows nothing any more."""
REPEAT_S = 0.5
"""The same request of the same session within this is the same one."""
RECENT_MAX = 1024
RATE = 1 / 8
"""Blocks followed at first: a request of 128 keys is looked at in some 30 us."""
ENOUGH_BLOCKS = 32
"""Different blocks followed from which on the curve tells anything."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of a tier that are told of, as parts of what it has."""
SIZES = 25
SIZES_PER_DOUBLING = 2


Seen = tuple[int, Namespace, bytes, bool]
"""In the queue: a session, its namespace, keys, joined, and whether they were asked for; else they were stored. A plain
tuple, since one is made for each lookup."""


class Demand:
    """``host`` and ``through`` follow the contests, where they are to."""

    def __init__(self, host: HostTier, through: Sequence[WriteThrough]) -> None:
        self._host = host
        self._through = through
        self._capacities = {"host": host.status().capacity_bytes}
        self._capacities |= {each.lower.name: each.lower.tier.status().capacity_bytes for each in through}
        """Of each tier, in bytes; 0 for one without a bound."""
        self.curve = Curve(RATE)
        self.contests: dict[str, Contest] = {}
        self.log: LookupLog | None = None
        self._queue: deque[Seen] = deque()
        self._queue_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._recent: OrderedDict[tuple[int, int, bytes], float] = OrderedDict()
        self._asking = set[bytes]()
        """Namespaces whose engines look up before they lease."""
        self._blocks = self._bytes = 0
        self.requests = 0
        self.passed_over = 0

    @property
    def waiting(self) -> int:
        """Requests that were not looked at yet."""
        return len(self._queue)

    def asked(self, session: int, namespace: Namespace, keys: bytes) -> None:
        """A session looked up a chain of keys, joined."""
        self._asking.add(namespace.id)
        self._put((session, namespace, keys, True))

    def leased(self, session: int, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """A session leases a chain."""
        if namespace.id not in self._asking:
            self._put((session, namespace, b"".join(keys), True))

    def stored(self, session: int, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """A session stores a chain."""
        self._put((session, namespace, b"".join(keys), False))

    def whatif(self) -> dict[str, Any]:
        """Hits by capacity, and for each bounded tier what they would be were it of another size."""
        block_bytes, followed = self._block_bytes(), len(self.curve)
        largest = max(self._capacities.values())
        sizes = [largest * 8 / 2 ** (step / SIZES_PER_DOUBLING) for step in range(SIZES)][::-1]
        return {
            "scope": "all namespaces of this daemon together; evicted by lru, everything admitted",
            "requests": self.requests,
            "asked_blocks": self._blocks,
            "block_bytes": block_bytes,
            "sample": {
                "rate": float(f"{self.curve.rate:.6g}"),
                "blocks": followed,
                "enough": followed >= ENOUGH_BLOCKS,
            },
            "waiting": self.waiting,
            "passed_over": self.passed_over,
            "log_dropped": None if self.log is None else self.log.dropped,
            "curve": self._points(sizes, block_bytes),
            "tiers": {
                name: self._points([factor * size for factor in FACTORS], block_bytes)
                for name, size in self._capacities.items()
                if size
            },
        }

    def policies(self) -> dict[str, Any]:
        """For the status: the policy of each tier, and of those that are ``auto`` why it is that one."""
        report: dict[str, Any] = {"host": {"eviction": self._host.eviction}}
        report |= {each.lower.name: {"admission": each.rule} for each in self._through}
        for name, contest in self.contests.items():
            report[name]["contest"] = contest.report()
        return report

    def _put(self, seen: Seen) -> None:
        self._queue.append(seen)
        self._queue_bytes += len(seen[2])
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._look)
        elif self._queue_bytes > QUEUE_BYTES_MAX:
            _, _, keys, asked = self._queue.popleft()
            self._queue_bytes -= len(keys)
            self.passed_over += asked  # what was stored is no request

    def _look(self) -> None:
        """One slice."""
        begun = time.perf_counter()
        behind = self._queue_bytes > QUEUE_BYTES_MAX // 2
        spent = 0.0
        while self._queue and spent < SLICE_S:
            seen = self._queue.popleft()
            self._queue_bytes -= len(seen[2])
            self._take(seen)
            spent = time.perf_counter() - begun
        if behind and self._queue and len(self.curve) > FOLLOWED_MIN:
            self.curve.shrink()
        again = max(PERIOD_S, spent / SHARE)
        self._timer = asyncio.get_running_loop().call_later(again, self._look) if self._queue else None

    def _take(self, seen: Seen) -> None:
        session, namespace, keys, asked = seen
        blocks = len(keys) // KEY_BYTES
        if not blocks or (asked and self._repeated(session, keys)):
            return
        if not asked:
            self.curve.stored(keys)
            return
        self.requests += 1
        self._blocks += blocks
        self._bytes += blocks * namespace.block_bytes * max(1, namespace.shards)
        self.curve.asked(keys)
        self._consult(keys)
        if self.log is not None:
            self.log.add(namespace, keys)

    def _repeated(self, session: int, keys: bytes) -> bool:
        now, which = time.monotonic(), (session, len(keys), keys[-KEY_BYTES:])
        last = self._recent.pop(which, float("-inf"))
        self._recent[which] = now
        if len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        return now - last < REPEAT_S

    def _consult(self, keys: bytes) -> None:
        """Let the contests see the request, and do as they say."""
        if self._host.auto:
            contest = self._contest("host", [Policy(eviction, "all") for eviction in EVICTIONS])
            if contest.use(keys):
                self._host.follow(contest.policy.eviction)
        for through in self._through:
            if through.admission == AUTO:
                contest = self._contest(through.lower.name, [Policy("lru", rule) for rule in ADMISSIONS])
                if contest.use(keys):
                    through.follow(contest.policy.admission)

    def _contest(self, name: str, candidates: Sequence[Policy]) -> Contest:
        blocks = max(1, self._capacities[name] // self._block_bytes())
        contest = self.contests.get(name)
        if contest is None or not contest.capacity / 2 < blocks < contest.capacity * 2:
            in_force = contest.policy if contest is not None else candidates[0]
            ordered = sorted(candidates, key=lambda policy: policy != in_force)
            switches = contest.switches if contest is not None else 0
            contest = self.contests[name] = Contest(ordered, blocks)
            contest.switches = switches  # those of the daemon's life, whatever blocks it is asked for
        return contest

    def _block_bytes(self) -> int:
        """Of a block with its shards, on average."""
        return max(1, self._bytes // self._blocks) if self._blocks else 1

    def _points(self, sizes: Sequence[float], block_bytes: int) -> list[dict[str, Any]]:
        shares = self.curve.shares([size / block_bytes for size in sizes])
        return [
            {"bytes": round(size), "blocks": round(size / block_bytes), "hits": round(share, 4)}
            for size, share in zip(sizes, shares, strict=True)
        ]

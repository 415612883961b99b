"""A tier behind a network: what it has is only known after asking, and asking takes time.

``Distant`` owns the questions under way (one for each first unknown block, however many wait), the threads that ask,
the window of reads, and the lanes in which the bucket is told of flushes and swept. Runs on the event loop. Imports
``below``, ``lane``, ``mover`` and ``tiers``; the tier itself is made by ``recovery``, so that nobody loads its library
who has no such tier.

Nothing above waits for it: its threads and its queue are its own, and whoever asks waits as long as it chooses to.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from terracekv.daemon.below import Lower
from terracekv.daemon.lane import Lane
from terracekv.daemon.mover import Mover, heard
from terracekv.tiers.breaker import State
from terracekv.tiers.errors import TierDown, TierStuck
from terracekv.tiers.eviction import Ghosts
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.worth import Worth

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier

S3_BYTES_PER_S = 1e8
S3_LATENCY_S = 0.02
"""Both assumed until measured."""
QUESTION_S = 5.0
"""A question is given up after so long; whoever waits for it has long been answered."""
QUESTIONS_MAX = 64
ASKERS = 4
HORIZON_S = 2.0
"""A read should not share the link with so many others that it takes longer: the link's worth of so many seconds is
read at a time, or a slow link would let all reads run into their deadlines together."""
STALE_S = 60.0
"""A rate that was measured so long ago does not keep a prefix from being offered: the next load measures anew."""
WRITTEN = 1 << 18
REDATED_MAX = 4096
REDATE_S = 60.0

T = TypeVar("T")


class Distant(Lower):
    """``prefill_tokens_per_s``: how fast engines compute; what takes longer to load is not offered. 0: not known."""

    tier: "S3Tier"

    def __init__(self, tier: "S3Tier", mover: Mover, *, admission: str, prefill_tokens_per_s: float = 0.0) -> None:
        super().__init__(tier, mover, admission=admission, bytes_per_s=S3_BYTES_PER_S, latency_s=S3_LATENCY_S)
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._worth: dict[bytes, Worth] = {}
        self._asker = Mover(threads=ASKERS, queue_bytes=1, name="ask-s3", stuck_s=mover.stuck_s)
        self.tells: Lane[TierDown | None] = Lane(self._tell, "tell-s3")
        self.sweeps: Lane[tuple[int, TierDown | None]] = Lane(tier.sweep, "sweep-s3")
        self._questions: dict[tuple[int, bytes], asyncio.Future[int]] = {}
        self._waiting: deque[tuple[int, Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._reading = 0
        self._read_at = float("-inf")
        self._written = Ghosts(WRITTEN)
        self._redated: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._closed = False
        self.used = set[bytes]()
        """Namespaces that somebody looked up or stored in since the last look, and those of connected engines."""
        self.asked = 0
        """Questions asked; each costs the bucket a handful of HEADs."""

    @property
    def latency_s(self) -> float:
        return float(self.status().details["rtt_s"] or self._latency_s)

    @property
    def up(self) -> bool:
        return self.stuck is None and self.tier.breaker.state is State.CLOSED

    @property
    def stalled_s(self) -> float:
        return max(self.mover.stalled_s, self._asker.stalled_s)

    @property
    def writable(self) -> bool:
        return self.up and not self.tier.read_only

    def has(self, namespace: Namespace, id: bytes) -> bool:
        """Whether the bucket is known to have it, or had it when this daemon stored it and nothing else is known."""
        if self.stuck is not None:
            return False
        known = self.tier.knows(namespace, id)
        return self._written.has(namespace.number, id) if known is None else known

    def keeps(self, namespace: Namespace, id: bytes) -> bool:
        """Whether this daemon was told by the bucket that it has the block: what is believed of a chain is not that."""
        return self._written.has(namespace.number, id) and self.tier.knows(namespace, id) is not False

    def wrote(self, namespace: Namespace, id: bytes) -> None:
        """A block was stored, or the bucket said that it is there."""
        self._written.add(namespace.number, id)

    def forget(self, namespace: Namespace, ids: Sequence[bytes] | None = None) -> None:
        """Blocks, or all of a namespace, were deleted: what was once stored may be there no more."""
        if ids is None:
            self._written = Ghosts(WRITTEN)
        for id in ids or ():
            self._written.discard(namespace.number, id)

    def ask(self, namespace: Namespace, ids: Sequence[bytes]) -> "asyncio.Future[int] | None":
        """Find out how many of ``ids``, the first of which is not known, are there. Done when it is known or given up;
        None when it cannot be asked now. Its answers are in ``leading`` from then on."""
        if not ids or not self.up or self._closed or self.tier.knows(namespace, ids[0]) is not None:
            return None
        first = namespace.stamp, ids[0]
        question = self._questions.get(first)
        if question is None:
            if len(self._questions) >= QUESTIONS_MAX:
                return None
            question = self._begin(first, namespace, list(ids))
            self.asked += 1
        return question

    def watch(self, namespaces: Namespaces) -> None:
        """Look whether another node flushed a namespace that was ``used`` since the last look; every second or so.

        Who has all it needs in host, or remembers what the bucket has, would never hear of it."""
        for id in list(self.used) if self.up and not self._closed else ():
            namespace = namespaces.get(id)
            if namespace is not None and (namespace.stamp, b"") not in self._questions:
                self._begin((namespace.stamp, b""), namespace, [])
        self.used.clear()

    def offers(self, namespace: Namespace, blocks: int, size_bytes: int) -> bool:
        """Whether loading so many blocks from here is worth it."""
        if not self._prefill_tokens_per_s:
            return True
        worth = self._worth.setdefault(namespace.id, Worth(self._prefill_tokens_per_s))
        fresh = self.read.measured and time.monotonic() - self._read_at < STALE_S
        rate = self.read.bytes_per_s if fresh else None
        return worth.load(blocks * namespace.block_tokens, size_bytes, rate, self.latency_s)

    def window(self, size_bytes: int) -> int:
        """How many reads of this size run at once: what the link carries in ``HORIZON_S`` and a round trip."""
        workers = self.tier.settings.workers
        if not self.read.measured:
            return workers
        return min(workers, 1 + int(self.read.bytes_per_s * (HORIZON_S + self.latency_s) / size_bytes))

    def load(self, size_bytes: int, work: Callable[[], T]) -> "asyncio.Future[T]":
        """As ``Lower.load``, no more at once than the window has room for."""
        outer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, work, outer))
        self._pump()
        return outer

    def shed(self, why: TierStuck) -> int:
        waiting, self._waiting = self._waiting, deque()
        for _, _, outer in waiting:
            if not outer.done():
                outer.set_exception(why)
        return len(waiting) + super().shed(why)

    def redate(self, namespace: Namespace, chain: Sequence[bytes]) -> None:
        """A chain was read: its objects live on. At most once a minute for a chain, and behind all else."""
        if not chain or not self.tier.settings.ttl_s or not self.writable:
            return
        now, last = time.monotonic(), (namespace.stamp, chain[-1])
        if now - self._redated.get(last, float("-inf")) < min(REDATE_S, self.tier.settings.ttl_s / 8):
            return
        ids = list(chain)
        job = self.mover.store(1, lambda: self.tier.redate(namespace, ids))
        if job is not None:
            job.add_done_callback(heard)
            self._redated[last] = now
            self._redated.move_to_end(last)
            if len(self._redated) > REDATED_MAX:
                self._redated.popitem(last=False)

    def report(self) -> dict[str, int]:
        """For the status."""
        return {
            "questions": self.asked,
            "questions_under_way": len(self._questions),
            "reads_waiting": self.queued,
            "sweeps_under_way": self.sweeps.turns,
        }

    @property
    def queued(self) -> int:
        """Reads that wait for the window."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way."""
        lanes = self.tells.turns + self.sweeps.turns
        return not (self._questions or self._waiting or self._reading or self.mover.queue_bytes or lanes)

    def close(self, wait_s: float | None = None) -> bool:
        """End the threads; questions that nobody has begun to ask are dropped. The tier is closed before. False when
        one has not ended within ``wait_s``."""
        self._closed = True
        ended = [threads.close(wait_s) for threads in (self._asker, self.tells, self.sweeps)]
        for _, _, outer in self._waiting:
            outer.cancel()
        self._waiting.clear()
        return all(ended)

    def _tell(self, namespace: Namespace) -> TierDown | None:
        """Tell the bucket of a flush; the error, when it did not hear."""
        try:
            self.tier.flush(namespace)
        except TierDown as error:
            return error
        return None

    def _begin(self, first: tuple[int, bytes], namespace: Namespace, ids: list[bytes]) -> "asyncio.Future[int]":
        until = time.monotonic() + QUESTION_S
        question = self._asker.load(partial(self.tier.leading_remote, namespace, ids, until))
        self._questions[first] = question
        question.add_done_callback(partial(self._answered, first))
        return question

    def _answered(self, first: tuple[int, bytes], done: "asyncio.Future[int]") -> None:
        del self._questions[first]
        heard(done)

    def _pump(self) -> None:
        while self._waiting and self._reading < self.window(self._waiting[0][0]) and not self._closed:
            _, work, outer = self._waiting.popleft()
            self._reading += 1
            self.mover.load(work, shed=True).add_done_callback(partial(self._came, outer))

    def _came(self, outer: "asyncio.Future[Any]", done: "asyncio.Future[Any]") -> None:
        self._reading -= 1
        self._read_at = time.monotonic()
        if done.cancelled() or outer.cancelled():
            outer.cancel()
        elif (error := done.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())
        self._pump()

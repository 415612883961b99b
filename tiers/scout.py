"""Finds out which blocks a bucket has, how old they are, and keeps their dates young.

``Scout`` owns the threads that ask, what is known of presence and age, and the order of writes to one block. Called
by the s3 tier from any thread. Imports ``body``, ``caller``, ``errors``, ``namespace``, ``presence``, ``s3_errors``,
``s3_record`` and ``tier``.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from terracekv.tiers.body import Object
from terracekv.tiers.caller import Caller
from terracekv.tiers.errors import TerraceError, TierDown
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.presence import PresenceCache, PresenceTable, gallop
from terracekv.tiers.s3_errors import NotOffered
from terracekv.tiers.s3_record import key_of
from terracekv.tiers.tier import PAGE

_STRIPES = 1024


class Stripe:
    """Puts and deletes of the blocks that fall on one stripe take turns. ``writes`` counts their begins and ends,
    ``sent`` the objects that were sent: a put that found one there sends none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writes = 0
        self.sent = 0


class Scout:
    """``failed`` is told of every error that a method does not raise."""

    def __init__(self, caller: Caller, presence: PresenceCache | None, failed: Callable[[TerraceError], None]) -> None:
        self._settings = settings = caller.bucket.settings
        self._caller = caller
        self._failed = failed
        self.presence: PresenceCache = presence or PresenceTable(settings.presence_entries)
        self._young = PresenceTable(settings.presence_entries if settings.ttl_s else 8)
        """Objects that need no new date yet."""
        self._stripes = [Stripe() for _ in range(_STRIPES)]
        self._threads = ThreadPoolExecutor(settings.head_workers, thread_name_prefix="head-s3")
        self._lock = threading.Lock()
        self.heads = 0
        self.redated = 0
        self.aged_out = 0
        """Chains of which a block was gone when its date was to be renewed."""
        self.rtt_s: float | None = None

    def find(self, namespace: Namespace, ids: Sequence[bytes], deadline: float) -> int:
        """How many leading blocks there are, by what is known and as few questions as may be, until ``deadline``."""
        stamp = namespace.stamp
        low = self.presence.leading(stamp, ids)
        absent = (at for at in range(low, len(ids)) if self.presence.get(stamp, ids[at]) is False)
        count, _ = gallop(low, next(absent, len(ids)), lambda at: self._ask(namespace, ids, at, deadline))
        for id in ids[low:count]:
            if self.presence.get(stamp, id) is None:
                self.presence.note(stamp, id, True, self._settings.present_ttl_s)
        return count

    def present(self, namespace: Namespace, id: bytes, deadline: float) -> bool:
        """Whether a block is there: asked, unless it was found absent of late. That it is present may be a guess: of a
        chain only some blocks are asked about, and one in between may be missing, or only one of its shards. TierDown.
        """
        known = self.presence.get(namespace.stamp, id)
        return known is not False and self.head(namespace, id, deadline) is not None

    def head(self, namespace: Namespace, id: bytes, deadline: float) -> Object | None:
        """An object that may be the block; one of a size that no record has is none. TierDown."""
        bucket = self._caller.bucket
        key = key_of(self._settings.root, namespace.id, namespace.epoch, id)
        started = time.monotonic()
        about = self._caller.call(lambda: bucket.head(key, deadline), deadline)
        spent_s = time.monotonic() - started
        with self._lock:
            self.heads += 1
            self.rtt_s = spent_s if self.rtt_s is None else 0.9 * self.rtt_s + 0.1 * spent_s
        if about is None or about.size <= 0 or about.size % PAGE:
            return None
        self.note_age(namespace, id, about.age_s)
        return about

    @contextmanager
    def writing(self, id: bytes) -> Iterator[Stripe]:
        """Be the only one that puts or deletes this block; what others learn of it meanwhile is not noted."""
        stripe = self.stripe(id)
        with stripe.lock:
            stripe.writes += 1
            try:
                yield stripe
            finally:
                stripe.writes += 1  # who asked in the midst of it may have been answered from before it

    def stripe(self, id: bytes) -> Stripe:
        """To ask for ``writes`` before a question whose answer is to be noted with ``learned``."""
        return self._stripes[int.from_bytes(id[:2]) % _STRIPES]

    def learned(self, namespace: Namespace, id: bytes, present: bool, ttl_s: float, writes: int) -> None:
        """Note an answer, unless a put or delete came between the question and now. It is dropped rather than waited
        for when a write is under way, which may be of a neighbour on the stripe."""
        stripe = self.stripe(id)
        if stripe.lock.acquire(blocking=False):
            try:
                if stripe.writes == writes:
                    self.presence.note(namespace.stamp, id, present, ttl_s)
            finally:
                stripe.lock.release()

    def damaged(self, namespace: Namespace, id: bytes, ttl_s: float, sent: int) -> None:
        """Note that an object is of no use, unless one was sent between its reading and now. A put that found it there
        meanwhile knew no better, and must not keep the next one from sending it anew."""
        stripe = self.stripe(id)
        with stripe.lock:
            if stripe.sent == sent:
                self.presence.note(namespace.stamp, id, False, ttl_s)

    def note_age(self, namespace: Namespace, id: bytes, age_s: float) -> None:
        """An object of this age was seen, or stored."""
        left_s = self._settings.ttl_s / 2 - age_s
        if left_s >= 1:
            self._young.note(namespace.stamp, id, True, left_s)

    def redate(self, namespace: Namespace, chain: Sequence[bytes]) -> int:
        """See ``S3Tier.redate``."""
        renewed = 0
        for id in chain if self._settings.ttl_s else ():
            if self._young.get(namespace.stamp, id):
                continue
            writes, known = self.stripe(id).writes, self.presence.get(namespace.stamp, id)
            try:
                there = self._renew(namespace, id)
            except TierDown as error:
                self._failed(error)
                break
            if there is None:
                self.aged_out += bool(known)  # else it may never have been there
                self.learned(namespace, id, False, self._settings.absent_ttl_s, writes)
                break
            renewed += there
        self.redated += renewed
        return renewed

    def check(self) -> None:
        """Counts of the tables are right."""
        for table in (self.presence, self._young):
            if isinstance(table, PresenceTable):
                table.check()

    def close(self) -> None:
        """Questions under way end by their deadlines."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _renew(self, namespace: Namespace, id: bytes) -> bool | None:
        """Whether the object needed a new date and got one; None when it is gone."""
        bucket = self._caller.bucket
        deadline = time.monotonic() + self._settings.timeout_s
        about = self.head(namespace, id, deadline)
        if about is None:
            return None
        if about.age_s < self._settings.ttl_s / 2:
            return False
        try:
            if not self._caller.call(lambda: bucket.renew(about.key, deadline), deadline):
                return None
        except NotOffered:
            bucket.warn_once(
                "TKV-S3-NOT-OFFERED", "s3: objects cannot be copied here, so blocks age out however often they are read"
            )
            self.note_age(namespace, id, 0.0)
            return False
        self.note_age(namespace, id, 0.0)
        return True

    def _ask(
        self, namespace: Namespace, ids: Sequence[bytes], positions: Sequence[int], deadline: float
    ) -> dict[int, bool]:
        """Ask about several blocks at once; those not answered in time are left out, and noted when they come."""

        def ask(id: bytes) -> bool | None:
            writes = self.stripe(id).writes
            try:
                present = self.head(namespace, id, deadline) is not None
            except TerraceError as error:
                self._failed(error)  # told here: nobody looks at an answer that comes late
                return None
            ttl_s = self._settings.present_ttl_s if present else self._settings.absent_ttl_s
            self.learned(namespace, id, present, ttl_s, writes)
            return present

        asked: dict[Future[bool | None], int] = {self._threads.submit(ask, ids[at]): at for at in positions}
        done, late = wait(asked, max(0.0, deadline - time.monotonic()))
        for future in late:
            future.cancel()
        return {asked[future]: answer for future in done if (answer := future.result()) is not None}

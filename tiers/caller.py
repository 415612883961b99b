"""How a call to a distant server is made: refused while it is down, in turn, again when that may help, in time.

``Caller`` owns the breaker and the throttle of one bucket. Called by the s3 tier and its helpers from any thread.
Imports ``breaker``, ``bucket``, ``errors`` and ``s3_errors``.
"""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from terracekv.tiers.breaker import Breaker, State, Throttle
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import TerraceError, TierDown
from terracekv.tiers.s3_errors import Busy, Expired, NoBucket, Refused, Unreachable

BUSY_RETRIES = 6
BUSY_PAUSE_S = 0.05
"""Before the first retry at most; doubled for each one after it."""
LOST_RETRIES = 1
"""A connection that was idle may have been closed by the server meanwhile: one fresh one is tried."""

T = TypeVar("T")


class Caller:
    """Makes calls of one bucket. A call is any work that may be done twice."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.breaker = Breaker()
        self.throttle = Throttle(bucket.settings.workers + bucket.settings.head_workers)
        self._refused = False
        """Whether it was credentials that opened the breaker: a trial then begins by reading them anew."""
        self.busy_answers = 0
        self.retries = 0

    def call(self, work: Callable[[], T], deadline: float) -> T:
        """The work's answer, or the TierDown of its last attempt."""
        busy = lost = 0
        refreshed = False
        while True:
            self.breaker.check()
            generation = self.bucket.generation
            try:
                with self.throttle.slot(deadline):
                    answer = work()
            except Busy as error:
                self.busy_answers += 1
                self.throttle.slow()
                pause_s = random.uniform(0.2, 1.0) * BUSY_PAUSE_S * 2**busy
                busy += 1
                if busy > BUSY_RETRIES or time.monotonic() + pause_s >= deadline:
                    raise error
                time.sleep(pause_s)
            except Expired as error:
                if refreshed:
                    self._refused = True
                    self.breaker.trip(error)
                    raise
                self._refresh(generation)
                refreshed = True
            except (Refused, NoBucket) as error:
                self._refused = isinstance(error, Refused)
                self.breaker.trip(error)
                raise
            except Unreachable as error:
                self.breaker.failed(error)
                lost += 1
                # Who opens the breaker says why: another try would only hear that it is open.
                if lost > LOST_RETRIES or time.monotonic() >= deadline or self.breaker.state is not State.CLOSED:
                    raise
                time.sleep(random.uniform(0, BUSY_PAUSE_S))
            else:
                self.breaker.worked()
                self.throttle.worked()
                return answer
            self.retries += 1

    def _refresh(self, generation: int) -> None:
        try:
            self.bucket.refresh(generation)
        except Refused as error:
            self._refused = True
            self.breaker.trip(error)
            raise

    def trial(self, work: Callable[[], None]) -> TerraceError | None:
        """One attempt while the breaker is open; its outcome closes the breaker or keeps it open. The error."""
        self.breaker.begin_trial()
        why: TerraceError | None = TierDown("the trial was broken off")
        try:
            if self._refused:
                self.bucket.refresh(self.bucket.generation)
            work()
            why = None
        except TerraceError as error:
            self._refused = isinstance(error, (Expired, Refused))
            why = error
        finally:
            self.breaker.end_trial(why)
        return why

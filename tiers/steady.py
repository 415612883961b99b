"""A thread that does not go unseen: when its work ends by an error, that is logged, counted, and the work begun anew.

Owns the list of all such threads, which are all threads that the daemon starts. Made by whoever owns the work, from any
thread; which name belongs to whom is a table in ``docs/design.md``. Imports ``journal``.

Work that can be begun anew takes up where it was: a worker takes the next job, a rebuild the next segment.
"""

import threading
import time
import weakref
from collections.abc import Callable

from terracekv.tiers.journal import Journal

PAUSE_S = 1.0
"""Between a death and the next life, so that work which always dies takes no processor."""

journal = Journal(__name__)

_all: "weakref.WeakSet[Steady]" = weakref.WeakSet()


class Steady(threading.Thread):
    """``work`` is over when it returns; what it raises starts it again."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.deaths = 0
        _all.add(self)

    def run(self) -> None:
        """The outermost frame."""
        while True:
            try:
                self._work()
                return
            except BaseException as error:
                self.deaths += 1
                journal.failed("TKV-THREAD-DIED", f"thread {self.name} died and is started again", error)
            time.sleep(PAUSE_S)


def deaths() -> dict[str, int]:
    """How often each thread that is there died, by its name; those that never did are left out."""
    return {thread.name: thread.deaths for thread in list(_all) if thread.deaths}

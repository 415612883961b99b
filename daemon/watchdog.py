"""The watchdog: where does every thread and every task stand, when one of them stands still or somebody asks?

Owns a thread of its own, since whoever is to say that the event loop hangs must not run on it. Made by ``__main__``.
Imports ``heartbeat``, ``tiers.journal`` and ``tiers.steady``.

``kill -USR1`` writes all stacks to the log: those of the threads first, by ``faulthandler``, which needs no interpreter
that still moves, and then, by name and with the tasks, as the watchdog writes them.
"""

import asyncio
import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from terracekv.daemon.heartbeat import Heartbeat
from terracekv.tiers.journal import Journal
from terracekv.tiers.steady import Steady

LOOK_S = 0.5
LOOP_STUCK_S = 5.0
"""The loop's work is microseconds at a time: one that is so late hangs."""
AGAIN_S = 60.0
"""Stacks are written by themselves once in so many seconds, and once of each trouble."""
STACK_LINES_MAX = 40

journal = Journal(__name__)


class Watchdog:
    """Watches the loop that it is made on, through ``heart``."""

    def __init__(self, heart: Heartbeat) -> None:
        self._heart = heart
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._wrote_at = float("-inf")
        self._wrote_of = ""
        self._was_stuck = False
        self.dumps = 0
        """How often stacks were written."""
        self._thread = Steady("watchdog", self._watch)

    def start(self) -> None:
        """Begin to watch, and answer to SIGUSR1. In the main thread."""
        self._loop.add_signal_handler(signal.SIGUSR1, self.write, "somebody asked")
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            faulthandler.unregister(signal.SIGUSR1)
            self._loop.remove_signal_handler(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # or it would end the process, which still has to close

    def write(self, why: str) -> None:
        """All stacks to the log, whoever asks."""
        self.dumps += 1
        journal.warning("TKV-STACKS", f"stacks, because {why}:\n{stacks(self._loop)}", why=why)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            late_s = time.monotonic() - self._heart.beat_at
            stuck = late_s > LOOP_STUCK_S
            if stuck and not self._was_stuck:
                text = f"the event loop has not moved for {late_s:.1f} s: no request is answered"
                journal.error("TKV-LOOP-STUCK", text, late_s=round(late_s, 1))
            elif self._was_stuck and not stuck:
                journal.info("TKV-LOOP-BACK", "the event loop moves again")
            self._was_stuck = stuck
            self._write_once("the event loop does not move" if stuck else "; ".join(self._heart.standing))

    def _write_once(self, why: str) -> None:
        """Stacks of each trouble once, however long it lasts, and not too often."""
        if not why:
            self._wrote_of = ""
        elif why != self._wrote_of and time.monotonic() - self._wrote_at >= AGAIN_S:
            self._wrote_of, self._wrote_at = why, time.monotonic()
            self.write(why)


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each thread stands, and each task of ``loop`` that waits; for any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-STACK_LINES_MAX:]
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines)}")
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        parts.append(f"task {task.get_name()}:\n{''.join(_frames(task.get_coro()))}")
    return "\n".join(parts)


def _frames(waiting: Any) -> Iterator[str]:
    """From a task's own coroutine to the one that really waits."""
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        waiting = waiting.cr_await

"""The heartbeat: is the event loop on time, and does every tier still move?

Owns the measure of the loop's lag and the verdict on each tier. Beats on the event loop as a task that is kept; the
watchdog reads it from its thread. Imports ``below``, ``store``, ``tasks``, ``errors`` and ``tiers.journal``.

A tier whose oldest call has run for longer than it may is stuck: it is left out of answers, promotion and writes, what
waits for it is let go, and the other tiers go on as if it were not there. It is taken back as soon as it moves again.
"""

import asyncio
import time

from terracekv.daemon import tasks
from terracekv.daemon.below import Lower
from terracekv.daemon.store import Store
from terracekv.tiers.errors import TierStuck
from terracekv.tiers.journal import Journal

BEAT_S = 0.25
LAG_FADES = 0.97
"""In so many beats the worst lag of late has faded to nothing: a few minutes."""

journal = Journal(__name__)


class Heartbeat:
    """Watches the tiers of ``store``, and what else it may have to wait for."""

    def __init__(self, store: Store) -> None:
        self._tiers = list(store.sources)
        self._others = {"host": store.mover, "daemon.state_dir": store.state_mover}
        self._standing: dict[str, TierStuck] = {}
        """Of the others, those that stand still. Nothing can be done without host, and a flush not without state."""
        self._due = time.monotonic()
        self.beat_at = time.monotonic()
        """The last beat, of ``time.monotonic``: what is long ago means that the loop stands still."""
        self.lag_s = 0.0
        """How late the loop lately was, at worst."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to beat."""
        self._due = time.monotonic() + BEAT_S
        self._task = tasks.begin(tasks.keep(self.beat, "heartbeat", BEAT_S), "heartbeat")

    def stop(self) -> None:
        """The loop is going to end."""
        if self._task is not None:
            self._task.cancel()

    async def beat(self) -> None:
        """How late a beat comes is how long other work kept the loop."""
        now = time.monotonic()
        self.lag_s = max(now - self._due, self.lag_s * LAG_FADES)
        self.beat_at, self._due = now, now + BEAT_S
        for tier in self._tiers:
            self._look_at(tier)
        for name, mover in self._others.items():
            stalled_s = mover.stalled_s
            if stalled_s and name not in self._standing:
                hint = "see the stacks in the daemon's log; if it stays so, restart the daemon"
                stuck = self._standing[name] = TierStuck(f"a call has not come back for {stalled_s:.0f} s", hint)
                journal.error(stuck.event, f"{name}: {stuck}", tier=name, stalled_s=round(stalled_s, 1))
            elif not stalled_s and self._standing.pop(name, None) is not None:
                journal.info("TKV-TIER-BACK", f"{name}: it moves again", tier=name)

    def _look_at(self, tier: Lower) -> None:
        stalled_s, before = tier.mover.stalled_s, tier.stuck
        tier.stalled(stalled_s)
        if tier.stuck is not None and before is None:
            let_go = tier.shed(tier.stuck)
            text = f"{tier.name} tier: {tier.stuck}; {let_go} jobs that waited for it are let go"
            journal.error(tier.stuck.event, text, tier=tier.name, stalled_s=round(stalled_s, 1), let_go=let_go)
        elif before is not None and tier.stuck is None:
            journal.info("TKV-TIER-BACK", f"{tier.name} tier: it moves again and is used again", tier=tier.name)

    @property
    def degraded(self) -> list[str]:
        """Which tiers stand still or are down, in words: the daemon serves without them."""
        down = [tier.status() for tier in self._tiers if tier.stuck is None and not tier.up]
        return self.standing + [f"{status.name}: {status.mode}: {status.last_error}" for status in down]

    @property
    def standing(self) -> list[str]:
        """Only those that stand still."""
        stuck = {tier.name: tier.stuck for tier in self._tiers if tier.stuck is not None}
        return [f"{name}: {why.message}" for name, why in {**stuck, **self._standing}.items()]

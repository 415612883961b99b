"""Whether an engine may read the gpu tier's slots by itself: what it is offered, and what came of it.

Owns the warnings given so far. Called by the engine door on the event loop. Imports ``gpus``, ``protocol``,
``sessions`` and ``tiers.journal``.

CUDA opens memory of another process only on the same GPU, and not across every container. So the daemon offers it to
sessions of its own GPU, the engine tries and says how it went, and whoever cannot is served from host, with the reason
in the status and one warning in the log. Under ``gpu.strict`` it is refused instead.
"""

from terracekv.daemon import protocol
from terracekv.daemon.gpus import OFF, Gpus
from terracekv.daemon.sessions import Session
from terracekv.tiers.journal import Journal

journal = Journal(__name__)

REASON_MAX = 400
WARNINGS_MAX = 64


class Sharing:
    """One for the door."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._warned: set[str] = set()

    def offer(self, session: Session, gpu: str) -> protocol.GpuMemory | protocol.Refused | None:
        """What a new session of an engine on ``gpu`` may open; None, with the reason in the session, for nothing."""
        session.gpu = gpu[:64]
        tier = self._gpus.tier
        if not session.gpu or session.shard is None:
            return None  # no memory of its own that a copy could go to
        if tier is None or tier.exported is None:
            return self._not_near(session, self._gpus.reason or "", quiet=self._gpus.state == OFF)
        if tier.exported.uuid != session.gpu:
            return self._not_near(session, f"the gpu tier is on {tier.exported.uuid}, the engine on {session.gpu}")
        session.not_near = "the engine has not opened the memory yet"
        tier.lent = True
        return protocol.GpuMemory(*tier.exported)

    def opened(self, session: Session, why: str | None) -> protocol.Refused | None:
        """An engine tried to open what it was offered: from here on it gets such slots, or never."""
        if why is not None:
            return self._not_near(session, f"the engine cannot open the gpu tier: {why[:REASON_MAX]}")
        tier = self._gpus.tier
        session.near = tier is not None and tier.exported is not None and tier.exported.uuid == session.gpu
        session.not_near = None
        return None

    def _not_near(self, session: Session, why: str, *, quiet: bool = False) -> protocol.Refused | None:
        session.near, session.not_near = False, why
        if self._gpus.strict:
            return protocol.Refused("gpu", f"{why} (gpu.strict is true)")
        if not quiet and why not in self._warned and len(self._warned) < WARNINGS_MAX:
            self._warned.add(why)
            text = f"engine {session.engine} (pid {session.pid}) is served from host: {why}"
            journal.warning("TKV-GPU-NOT-SHARED", text, session=session.number)
        return None

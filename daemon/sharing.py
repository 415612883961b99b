"""Whether an engine may read the gpu tier's slots by itself: what it is offered, and what came of it.

Owns the warnings given so far. Called by the engine door on the event loop. Imports ``gpus``, ``protocol``,
``sessions``, ``wire`` and ``tiers.journal``.

CUDA opens memory of another process only on the same GPU, and not across every container. So the daemon offers it to
sessions of its own GPU that may write, since whoever opens it can; the engine tries and says how it went, and whoever
cannot is served from host, with the reason in the status and one warning in the log for each kind of reason. Under
``gpu.strict`` it is refused instead.
"""

from terracekv.daemon import protocol
from terracekv.daemon.gpus import OFF, Gpus
from terracekv.daemon.sessions import Session
from terracekv.daemon.wire import shown
from terracekv.tiers.journal import Journal

journal = Journal(__name__)

REASON_MAX = 400
NOT_YET = "the engine has not opened the memory yet"
READS = "the session only reads, and whoever opens a GPU's memory can write to it"
ANOTHER_GPU = "another GPU"
SAID_BY_ENGINE = "said by an engine"
CAUSES = (
    "cudaErrorMapBufferObjectFailed",
    "cudaErrorInvalidResourceHandle",
    "cudaErrorDeviceUninitialized",
    "cudaErrorInvalidDevice",
    "cudaErrorMemoryAllocation",
    "cudaErrorPeerAccessUnsupported",
    "cudaErrorNotSupported",
)
"""Why CUDA opens no memory of another process. Whatever else engines say is of one kind, so that no engine uses up the
warnings by making up reasons."""


class Sharing:
    """One for the door."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._warned: set[str] = set()
        """Kinds of reasons: of the daemon itself, and of engines those above."""

    def offer(self, session: Session, gpu: str) -> protocol.GpuMemory | protocol.Refused | None:
        """What a new session of an engine on ``gpu`` may open; None, with the reason in the session, for nothing."""
        session.gpu = shown(gpu, 64)
        tier = self._gpus.tier
        if not session.gpu or session.shard is None:
            return None  # no memory of its own that a copy could go to
        if tier is None or tier.exported is None:
            why = self._gpus.reason or ""
            return self._not_near(session, why, None if self._gpus.state == OFF else why)
        if tier.exported.uuid != session.gpu:
            why = f"the gpu tier is on {tier.exported.uuid}, the engine on {session.gpu}"
            return self._not_near(session, why, ANOTHER_GPU)
        if not session.may_write:
            return self._not_near(session, READS, None)
        session.not_near = NOT_YET
        tier.lent = True
        return protocol.GpuMemory(*tier.exported)

    def opened(self, session: Session, why: str | None) -> protocol.Refused | None:
        """An engine tried to open what it was offered: from here on it gets such slots, or never. Of memory that it
        was not offered it says nothing."""
        if not session.near and session.not_near != NOT_YET:
            return None
        if why is not None:
            why = shown(why, REASON_MAX)
            kind = next((cause for cause in CAUSES if cause in why), SAID_BY_ENGINE)
            return self._not_near(session, f"the engine cannot open the gpu tier: {why}", kind)
        session.near, session.not_near = True, None
        return None

    def _not_near(self, session: Session, why: str, kind: str | None) -> protocol.Refused | None:
        """Reasons without a ``kind`` are no trouble: they are not warned of."""
        session.near, session.not_near = False, why
        if self._gpus.strict:
            return protocol.Refused("gpu", f"{why} (gpu.strict is true)")
        if kind is not None and kind not in self._warned:
            self._warned.add(kind)
            text = f"engine {session.engine} (pid {session.pid}) is served from host: {why}"
            journal.warning("TKV-GPU-NOT-SHARED", text, session=session.number)
        return None

"""What the daemon knows of the GPUs of its node: NVML's last readings, and what has become of the gpu tier.

Owns NVML and the thread that asks it (its answers take 50 ms a GPU, so nobody waits for them). Made by ``__main__``,
read by the status and the metrics on the event loop. Imports ``tiers``.
"""

import threading
from functools import partial

from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.nvml import Nvml, Survey
from terracekv.tiers.steady import Steady

REFRESH_S = 5.0
OFF = "off"
NOT_ASKED = "gpu.enabled is false"


class Gpus:
    """``tier`` is None where none was opened; ``state`` is then ``off``, or the kind of error that ``reason`` tells.
    ``nvml`` is None where nobody asked for GPUs. ``strict`` refuses engines that would share the tier and cannot."""

    def __init__(
        self,
        tier: GpuTier | None = None,
        *,
        state: str = OFF,
        reason: str | None = NOT_ASKED,
        nvml: Nvml | None = None,
        strict: bool = False,
    ) -> None:
        self.tier = tier
        self.strict = strict
        self._state = state
        self._reason = reason
        self._nvml = nvml
        self._stop = threading.Event()
        self._thread: Steady | None = None
        self.survey = Survey([], NOT_ASKED if nvml is None else "NVML has not answered yet")

    @property
    def state(self) -> str:
        """``ipc``: engines of that GPU read its slots; ``copy``: they cannot, and are served from host; ``off``,
        ``no_gpu``, ``no_room``: there is no such tier."""
        return self._state if self.tier is None else self.tier.status().mode

    @property
    def reason(self) -> str | None:
        """Why engines read no slots of a GPU; None when they can."""
        if self.tier is None:
            return self._reason
        return None if self.tier.exported else self.tier.sharing

    def watch(self) -> None:
        """Begin to read NVML every few seconds."""
        if self._nvml is not None:
            self._thread = Steady("nvml", partial(self._watch, self._nvml))
            self._thread.start()

    def close(self) -> None:
        """End the thread, and let go of NVML. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def _watch(self, nvml: Nvml) -> None:
        while True:
            self.survey = nvml.survey()
            if self._stop.wait(REFRESH_S):
                break
        nvml.close()

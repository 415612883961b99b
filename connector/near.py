"""The engine's side of the gpu tier: opens the memory that Welcome offers, and says why not where it cannot.

Owns this process's opening of that memory for one session. Used by ``client.py`` under its lock. Imports ``kernels``
and ``daemon.protocol``; no CUDA is loaded before an engine with a GPU is offered something.
"""

from collections.abc import Callable

from terracekv.daemon.protocol import Opened, Welcome
from terracekv.kernels.cuda import Device
from terracekv.kernels.shared import Exported, NotShared, Shared

Fetch = Callable[[int, Shared, int], None]
"""Begins to copy block ``index`` out of the gpu tier's memory, from an offset on."""


class Near:
    """``device`` is the GPU that the engine's KV is on; None for an engine without one."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self.memory: Shared | None = None
        """What blocks can be copied from; None where they all come from host."""
        self.why: str | None = "the engine has no GPU" if device is None else "there is no session"

    @property
    def uuid(self) -> str:
        """For Hello."""
        return self._device.uuid if self._device is not None else ""

    def meet(self, welcome: Welcome) -> Opened | None:
        """A session begins: open what it offers. What to tell the daemon of it, when it offered something."""
        self.close()
        if self._device is None:
            return None
        if welcome.gpu is None:
            self.why = welcome.no_gpu
            return None
        try:
            offered = welcome.gpu
            exported = Exported(offered.uuid, offered.handle, offered.size_bytes, offered.made)
            self.memory = Shared(self._device, exported)
            self.why = None
        except NotShared as error:
            self.why = str(error)
        return Opened(self.why)

    def close(self) -> None:
        """The session is over, and no copy is under way. Idempotent."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.why = "there is no session"

    def forget(self) -> None:
        """In a forked child, where CUDA is its parent's."""
        self.memory, self._device = None, None
        self.why = "this process was forked from the engine's"

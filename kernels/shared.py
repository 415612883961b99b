"""A GPU's memory in two processes: what the one exports and the other opens, with bounds.

Owns the openings of this process: one per handle, however many use it, because opening the same memory again and again
exhausts addresses. Called by the gpu tier (export) and by connectors (open), from any thread. Imports ``cuda``.
"""

import os
import threading
from contextlib import suppress
from typing import NamedTuple

from terracekv.kernels.cuda import Device

MADE_BYTES = 16


class NotShared(RuntimeError):
    """This memory cannot be reached from this process; the message says why. What it holds can be had by a copy."""


class Exported(NamedTuple):
    """An allocation as another process may open it: GPU (UUID), CUDA's handle, bytes, and what no other allocation has:
    a handle may be that of an earlier process again."""

    uuid: str
    handle: bytes
    size: int
    made: bytes = b""


class _Opening:
    def __init__(self, device: Device, address: int, made: bytes) -> None:
        self.device, self.address, self.made, self.users = device, address, made, 0


_openings: dict[bytes, _Opening] = {}
_lock = threading.Lock()

_HINT = (
    "both processes must see the same whole GPU, under one user, in one container or in containers that share the IPC"
    " namespace; MIG slices and memory of a virtual allocator cannot be shared"
)


def export(device: Device, address: int, size: int) -> Exported:
    """Make the allocation that begins at ``address`` reachable. NotShared where CUDA refuses."""
    try:
        return Exported(device.uuid, device.export(address), size, os.urandom(MADE_BYTES))
    except RuntimeError as error:
        raise NotShared(f"CUDA does not export this memory ({error}): {_HINT}") from None


class Shared:
    """Another process's allocation, seen from here. ``device`` must be the same GPU. NotShared where it cannot be."""

    def __init__(self, device: Device, exported: Exported) -> None:
        self.size = exported.size
        self._handle = exported.handle
        if device.uuid != exported.uuid:
            raise NotShared(f"the memory is on {exported.uuid}, this process works on {device.uuid}")
        with _lock:
            opening = _openings.get(exported.handle)
            if opening is None:
                try:
                    opening = _Opening(device, device.open(exported.handle), exported.made)
                except RuntimeError as error:
                    raise NotShared(f"CUDA does not open memory of the daemon ({error}): {_HINT}") from None
                _openings[exported.handle] = opening
            if opening.made != exported.made:  # and CUDA, asked again, would answer with that memory too
                raise NotShared("this process still has memory of an earlier daemon open under the same handle")
            opening.users += 1
            self._opening: _Opening | None = opening

    def address(self, offset: int, size: int) -> int:
        """Where ``size`` bytes at ``offset`` of the allocation are in this process. ValueError for what leaves it."""
        if self._opening is None:
            raise ValueError("the memory is closed")
        if offset < 0 or size <= 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at {offset} are not inside the {self.size} bytes that were exported")
        return self._opening.address + offset

    def close(self) -> None:
        """No copy from it is under way. Idempotent."""
        with _lock:
            opening, self._opening = self._opening, None
            if opening is None:
                return
            opening.users -= 1
            if not opening.users:
                del _openings[self._handle]
                with suppress(RuntimeError):  # a GPU in error: what is open ends with the process
                    opening.device.close(opening.address)

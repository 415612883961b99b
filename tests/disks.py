"""A disk tier for tests: small segments, opened again and again in the same folder.

Owns the folder that a test gives. Called by tests. Imports ``tiers``.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terracekv.tests.blocks import registered
from terracekv.tiers import failpoint
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.namespace import Namespaces

SEGMENT = 1 << 20
PER_SEGMENT = SEGMENT // (4096 * 6)
"""Blocks of ``blocks.BLOCK_BYTES`` in a segment."""
CAP = 12 << 20


class Disks:
    """The tier of one folder, with a namespace to put blocks in."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self.segments = self.path / "segments"
        self.namespaces = Namespaces(folder / "namespaces.json")
        self.namespace = registered(self.namespaces, 1)

    def open(
        self,
        capacity_bytes: int = CAP,
        *,
        segment_bytes: int = SEGMENT,
        free_floor_bytes: int = 0,
        direct: str = "auto",
        codec: str = "off",
        keys: Any = None,
    ) -> DiskTier:
        return DiskTier(
            self.path,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            direct=direct,
            codec=codec,
            keys=keys,
            namespaces=self.namespaces,
            free_floor_bytes=free_floor_bytes,
        )

    def files(self) -> list[Path]:
        """Its segment files, oldest first."""
        return sorted(self.segments.iterdir())


def du(path: Path) -> int:
    """Bytes that everything below a folder takes, itself included."""
    return sum(512 * item.lstat().st_blocks for item in (path, *path.rglob("*")))


def crash(work: Callable[[], None], specification: str = "") -> None:
    """Do ``work`` in a process that ends by SIGKILL: at an armed failpoint, or after it."""
    child = os.fork()
    if not child:
        try:
            failpoint.arm(specification)
            work()
            if not specification:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

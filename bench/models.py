"""Where models are kept: ``.models/``, each made once and then found there. Standard library only."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / ".models"
HALF_MADE = "half-made-"


class NotFetched(RuntimeError):
    """A model is not here, and could not be had."""


def once(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder of this name. If it is not there, ``make(folder, scratch)`` fills an empty one; nobody sees it half
    full, and a process that wants the same meanwhile waits, and finds it done. What one that was killed had half made
    is removed first: it may be hundreds of megabytes."""
    folder = MODELS / name
    if folder.exists():
        return folder
    MODELS.mkdir(exist_ok=True)
    with open(MODELS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in MODELS.glob(f"{HALF_MADE}*"):
            shutil.rmtree(left)
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix=HALF_MADE, dir=MODELS) as scratch:
                ready = Path(scratch) / "ready"
                ready.mkdir()
                make(ready, Path(scratch))
                os.rename(ready, folder)
    return folder

"""Where models are kept: ``.models/``, each made once and then found there. Standard library only."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / ".models"


def once(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder of this name. If it is not there, ``make(folder, scratch)`` fills an empty one; nobody sees it half
    full, and of two processes that make the same at once one wins."""
    folder = MODELS / name
    if not folder.exists():
        MODELS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as scratch:
            ready = Path(scratch) / "ready"
            ready.mkdir()
            make(ready, Path(scratch))
            try:
                os.rename(ready, folder)
            except OSError:
                if not folder.exists():  # else another process was quicker, and its copy is the same
                    raise
    return folder

"""The file of a Unix socket: whether a daemon listens on it, and taking it over when none does.

Owns nothing. Called by both doors on the event loop and once before it. Imports ``tiers.errors``.
"""

import contextlib
import socket
import stat
from pathlib import Path

from terracekv.tiers.errors import InUse


def nobody_listens(path: Path) -> None:
    """InUse when somebody answers on this socket, or when it is no socket."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InUse(f"{path} exists and is not a socket", "move it away, or choose another daemon.runtime_dir")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(TimeoutError, BlockingIOError):  # one that hangs is one that runs
                probe.connect(str(path))
        raise InUse(f"somebody listens on {path}", "stop that daemon, or choose another daemon.runtime_dir")


def take_over(path: Path) -> None:
    """Remove a socket that a dead daemon left."""
    nobody_listens(path)
    path.unlink(missing_ok=True)

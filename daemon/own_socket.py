"""The file of a Unix socket: which daemon listens on it, taking it over when none does, and whose it is then.

Owns nothing. Called by both doors on the event loop and once before it, and by the command line. Imports
``tiers.errors``.
"""

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from terracekv.tiers.errors import ConfigError, InUse

_CREDENTIALS = struct.Struct("iII")


def credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end of a Unix socket, as the kernel noted them. OSError if over."""
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def listener_of(connection: socket.socket) -> int | None:
    """The process that listens at the other end; None when that cannot be told from here."""
    try:
        return credentials_of(connection)[0] or None
    except OSError:
        return None


def nobody_listens(path: Path) -> None:
    """InUse when somebody answers on this socket, or when it is no socket."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InUse(f"{path} exists and is not a socket", "move it away, or choose another daemon.runtime_dir")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(TimeoutError, BlockingIOError):  # one that hangs is one that runs
                probe.connect(str(path))
            pid = listener_of(probe)
        by = f"process {pid}" if pid else "somebody"
        raise InUse(f"{by} listens on {path}", "stop that daemon, or choose another daemon.runtime_dir")


def take_over(path: Path) -> None:
    """Remove a socket that a dead daemon left."""
    nobody_listens(path)
    path.unlink(missing_ok=True)


def bind(path: Path, owner: tuple[int, int, int]) -> socket.socket:
    """A socket bound to ``path`` that is its owner's (uid, gid, mode) before anybody can connect; -1 leaves a uid or a
    gid as it is. Whomever the mode lets in may pass through the folder, and see nothing else in it.

    ConfigError when this user may not give it away.
    """
    uid, gid, mode = owner
    take_over(path)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        os.chmod(path, 0o600)
        if (uid, gid) != (-1, -1):
            os.chown(path, uid, gid)
            os.chown(path.parent, -1, gid)
        os.chmod(path, mode)
        folder = path.parent.stat().st_mode & 0o7777
        if through := (0o010 * bool(mode & 0o060) | 0o001 * bool(mode & 0o006)) & ~folder:
            os.chmod(path.parent, folder | through)
    except PermissionError as error:
        bound.close()
        raise ConfigError(
            f"access.socket_owner, socket_group: {path} cannot be given away: {error.strerror}",
            "only root gives files to another user, and others only to a group that they are in",
        ) from None
    except BaseException:
        bound.close()
        raise
    return bound

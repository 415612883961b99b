"""A folder with one owner, who remembers how it was left.

Owns ``owner.lock`` (flocked for as long as the owner lives) and ``state.json`` of the folder. Used by a tier when it
opens, syncs and closes; ``claim`` and ``sync_folder`` by whoever else wants a folder for itself, or its names on the
medium; ``holder`` by who wants to know whose it is. Imports ``checksum``, ``errors`` and ``failpoint``.
"""

import fcntl
import json
import os
import threading
from pathlib import Path

from terracekv.tiers.checksum import RunningChecksum
from terracekv.tiers.errors import InUse
from terracekv.tiers.failpoint import failpoint

FORMAT = 2
NAMES = frozenset(("owner.lock", "state.json", "state.new"))
_PART_BYTES = 1 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Differs after each start of the machine; empty when the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def claim(fd: int, folder: Path, setting: str) -> int:
    """Be the one who holds the open file ``fd``, for the life of the process: the kernel lets go when it dies, however
    it dies. InUse while somebody else does; ``setting`` names another folder. ``fd`` is closed when this raises."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = holder(fd)
        os.close(fd)
        by = f" (process {pid})" if pid else ""
        raise InUse(
            f"{folder} belongs to a daemon that is running{by}", f"stop that daemon, or give this one another {setting}"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def holder(lock: Path | int) -> int | None:
    """The process that holds a locked file, read from the kernel's list: to try the lock would be to take it for a
    moment, and a daemon that starts in that moment would find the folder owned. None when nobody is seen."""
    try:
        found = os.stat(lock)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for fields in map(str.split, lines):
        if fields[1:2] == ["FLOCK"] and fields[5:6] == [inode] and fields[4].isdigit():
            return int(fields[4]) or None  # 0 is a process that this container does not see
    return None


def seal_of(path: Path) -> str:
    """The checksum of a file's bytes. A hole in it costs next to nothing, the rest as long as to read it."""
    sum = RunningChecksum()
    with open(path, "rb") as file:
        part = memoryview(bytearray(_PART_BYTES))
        while size := file.readinto(part):
            sum.add(part[:size])
    return f"{sum.value:016x}"


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the medium: files that were made, renamed or removed in it, for power loss."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class OwnedFolder:
    """The right to a folder. The lock is on the inode, so another path or a bind mount leads to the same lock."""

    def __init__(self, folder: Path) -> None:
        """Raises InUse while another process, or another object of this one, owns the folder."""
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(folder.parent)
        self.folder = folder
        self.was_clean = False
        """Whether the last owner synced everything, known after ``trusted``."""
        self.same_boot = False
        """Whether the machine has not been started since, known after ``trusted``."""
        self.synced = 0
        """What the last owner gave for ``synced``, known after ``trusted``."""
        self._writing = threading.Lock()
        """The file is written whole beside the old one, by one thread at a time."""
        lock = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = claim(lock, folder, "disk.path")

    def trusted(self, identity: str, derived: Path) -> bool:
        """Whether ``derived``, a file of the folder, is as its owner left it, for namespaces of this ``identity``.

        After a crash of the process the kernel still has every write. After a crash of the machine only what was
        synced is there, and only a clean close syncs. What was closed cleanly bears a seal, for between then and now
        anything may have happened to it, and a database does not survive every byte that is not its own.
        """
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
            self.same_boot = bool(boot_id()) and state["boot"] == boot_id()
            self.was_clean = state["clean"] is True
            self.synced = int(state.get("synced", 0))
            if state["format"] != FORMAT or state["identity"] != identity:
                return False
            return seal_of(derived) == state["seal"] if self.was_clean else self.same_boot
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def opened(self, identity: str, synced: int) -> None:
        """From here on only this boot of the machine can vouch for the derived data; call it before that is touched.
        ``synced`` is the owner's note of what will be on the medium even after a loss of power."""
        self._write(identity, synced, clean=False)

    def closed(self, identity: str, synced: int, derived: Path) -> None:
        """Everything is synced and nothing more will be written."""
        self._write(identity, synced, clean=True, seal=seal_of(derived))

    def distrust(self) -> None:
        """The derived data is damaged: the next owner rebuilds it."""
        (self.folder / "state.json").unlink(missing_ok=True)
        sync_folder(self.folder)

    def release(self) -> None:
        """Let another owner in. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, identity: str, synced: int, *, clean: bool, seal: str = "") -> None:
        state = {
            "format": FORMAT,
            "boot": boot_id(),
            "identity": identity,
            "synced": synced,
            "clean": clean,
            "seal": seal,
        }
        fresh = self.folder / "state.new"
        with self._writing:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            failpoint("folder.replace")
            os.replace(fresh, self.folder / "state.json")
            failpoint("folder.replaced")
            sync_folder(self.folder)

"""The lookup log: what engines asked for, a line of JSON each, as ``terracekv simulate`` reads it.

Owns the file. ``add`` and ``take`` are called on the event loop, ``write`` in a worker; between them lines wait in
memory. Imports ``tiers``. Lines have the form of the Mooncake traces: block hashes as numbers, here 48 bits of a hash
of each key under the node's secret, from which nobody without it can tell what was asked, even who has the prompt.
"""

import asyncio
import errno
import hashlib
import json
import os
import stat
import time
from io import FileIO
from pathlib import Path

from terracekv.tiers.journal import Journal
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.sieve import KEY_BYTES

journal = Journal(__name__)

LINES_BYTES_MAX = 4 << 20
FILE_BYTES_MAX = 4 << 30
_HASH_BYTES = 6
_HEAD = b'{"timestamp":'
"""Each line begins so."""


class LookupLog:
    """Appends to ``path``. What cannot be written is dropped and counted; the file stops growing at 4 GiB."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self._secret = hashlib.sha256(b"terracekv/lookup-log/1\0" + secret).digest()
        self._lines: list[str] = []
        self._bytes = 0
        self.dropped = 0
        self._told = False
        self.writing: asyncio.Future[None] | None = None
        """The last write that was begun: nobody waits for it, since the folder may hang, and there is one at a time."""
        self._begun = False
        """Whether what an earlier daemon left at the end was seen to."""

    def add(self, namespace: Namespace, keys: bytes) -> None:
        """A request for a chain of keys, joined."""
        hashes = [self._hash(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        entry = {
            "timestamp": int(time.time() * 1e3),
            "input_length": len(hashes) * namespace.block_tokens,
            "block_bytes": namespace.block_bytes * max(1, namespace.shards),
            "hash_ids": hashes,
        }
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        if self._bytes + len(line) > LINES_BYTES_MAX:
            self.dropped += 1
            return
        self._lines.append(line)
        self._bytes += len(line)

    def _hash(self, key: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(key, digest_size=_HASH_BYTES, key=self._secret).digest())

    @property
    def due(self) -> bool:
        """Whether there is anything to write, and nothing is being written."""
        return bool(self._lines) and (self.writing is None or self.writing.done())

    def take(self) -> list[str]:
        """What was added since the last time, on the event loop."""
        lines, self._lines, self._bytes = self._lines, [], 0
        return lines

    def write(self, lines: list[str]) -> None:
        """Append them. For a worker, one at a time."""
        try:
            with open(self.path, "a+b", buffering=0, opener=_private) as file:
                if not self._begun:
                    _cut_back(file)
                    self._begun = True
                _append(file, "".join(lines).encode())
        except OSError as error:
            self.dropped += len(lines)
            if not self._told:
                journal.warning("TKV-LOG-NOT-WRITTEN", f"the lookup log {self.path} is not written: {error}")
            self._told = True


def _append(file: FileIO, data: bytes) -> None:
    """All of it, or nothing: half a line would spoil the one behind it, and no reader takes such a trace."""
    end = file.seek(0, os.SEEK_END)
    if end + len(data) > FILE_BYTES_MAX:
        raise OSError(f"it has reached {FILE_BYTES_MAX} bytes")
    written = file.write(data)
    if written != len(data):
        file.truncate(end)
        raise OSError(errno.ENOSPC, f"there was room for {written} of {len(data)} bytes")


def _cut_back(file: FileIO) -> None:
    """Drop half a line of ours at the end, of a daemon that was killed while it wrote; what is not ours stays."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - LINES_BYTES_MAX))
    last = file.read(LINES_BYTES_MAX)
    half = last[last.rfind(b"\n") + 1 :]
    if half and _HEAD.startswith(half[: len(_HEAD)]):
        file.truncate(end - len(half))


def _private(path: str, flags: int) -> int:
    """A file that nobody else may read, whoever made it; no link that leads elsewhere, and no device."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", path)
        os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def log_to(path: str, secret: bytes) -> LookupLog | None:
    """``daemon.lookup_log``: none where it is empty."""
    return LookupLog(Path(path), secret) if path else None

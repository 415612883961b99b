"""Which weights: a digest of every byte of their files, computed once for each state of a file.

Owns ``~/.cache/terracekv/weights``, where what was computed is remembered. Called by each worker when the engine
starts; the ranks of a node wait for each other there, so that one of them reads. Standard library only.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
PIECE_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
THREADS = 8
SETTLED_S = 2.0
"""A file that changed more recently may change again without its times telling so: its digest is not remembered."""


def weights_digest(folder: Path, files: list[Path] | None = None, cache: Path | None = None) -> str:
    """32 hex digits over the names and all bytes of the weights' files.

    The first time it reads them whole, a GB in a second or less for each core; later a ``stat`` of each is enough, as
    no write to a file leaves both its time of change and its size, inode and time of modification as they were.
    """
    found = files or sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    if not found:
        raise ValueError(f"no weights in {folder}: set `revision` in kv_connector_extra_config")
    digest = hashlib.sha256(b"terracekv/weights/2\0")
    with _remembered(cache) as memory:
        for path in found:
            digest.update(path.name.encode() + b"\0" + _file_digest(path, memory))
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _remembered(cache: Path | None) -> Iterator[Path | None]:
    """The folder of digests, while nobody else computes any; None where there can be none."""
    lock = None
    try:
        cache = cache or Path.home() / ".cache" / "terracekv" / "weights"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except (OSError, RuntimeError) as error:
        log.warning("digests of weights cannot be remembered, so each start reads them whole: %s", error)
        cache = None
    try:
        yield cache
    finally:
        if lock is not None:
            os.close(lock)


def _file_digest(path: Path, memory: Path | None) -> bytes:
    path = path.resolve()
    state = _state(path)
    note = memory / hashlib.sha256(os.fsencode(path)).hexdigest() if memory is not None else None
    if note is not None and (known := _read(note, state)):
        return known
    began = time.time()
    digest = _read_whole(path)
    if note is not None and _state(path) == state and path.stat().st_ctime < began - SETTLED_S:
        with contextlib.suppress(OSError):
            fresh = note.with_suffix(f".{os.getpid()}")
            fresh.write_text(f"{state} {digest.hex()}\n")
            fresh.replace(note)
    return digest


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_dev}.{stat.st_ino}.{stat.st_size}.{stat.st_mtime_ns}.{stat.st_ctime_ns}"


def _read(note: Path, state: str) -> bytes | None:
    try:
        known = re.fullmatch(r"(\S+) ([0-9a-f]{64})\n", note.read_text())
    except (OSError, ValueError):
        return None
    return bytes.fromhex(known[2]) if known and known[1] == state else None


def _read_whole(path: Path) -> bytes:
    """Over the digests of the file's pieces, which are computed side by side."""
    size = path.stat().st_size
    log.info("reading %s to tell its weights apart: %d MB", path, size >> 20)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file, ThreadPoolExecutor(THREADS, "terracekv-weights") as pool:
        for piece in pool.map(lambda start: _piece(file.fileno(), start), range(0, size, PIECE_BYTES)):
            digest.update(piece)
    return digest.digest()


def _piece(fd: int, start: int) -> bytes:
    digest = hashlib.sha256()
    for at in range(start, start + PIECE_BYTES, CHUNK_BYTES):
        digest.update(os.pread(fd, CHUNK_BYTES, at))
    return digest.digest()

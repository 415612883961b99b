"""A daemon to measure: started as its own process on folders of its own, ended and cleaned up whatever happens.

Used by the scripts of this folder. Imports the client and the protocol.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from terracekv.connector.client import Client
from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides

BLOCK_TOKENS = 256


class Ended(RuntimeError):
    """A process that was started here has ended by itself, and said why on the error output that it shares with us."""


class Served:
    """``runtime`` and ``state`` are the daemon's folders; both outlive a restart and end with the ``with``."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="terracekv-bench-", dir="/dev/shm"))
        self.state = Path(tempfile.mkdtemp(prefix="terracekv-bench-"))
        self.settings = {
            "daemon.runtime_dir": str(self.runtime),
            "daemon.state_dir": str(self.state),
            "daemon.http": "",
            "daemon.log_level": "warning",
            "disk.free_floor": "0",
        } | settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """The engine door."""
        return self.runtime / "engine.sock"

    def start(self) -> float:
        """Start the daemon; seconds until its door answers. Ended if it refuses to."""
        flags = [part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")]
        started = time.perf_counter()
        self.process = subprocess.Popen([sys.executable, "-m", "terracekv.daemon", *flags])
        while True:
            if self.process.poll() is not None:
                raise Ended("the daemon did not start: its own words above say why, and what to do")
            with contextlib.suppress(OSError):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self.socket))
                return time.perf_counter() - started
            time.sleep(0.005)

    def stop(self, *, kill: bool = False) -> None:
        """End the daemon."""
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        """Lose all that the node had, in memory and on disk, as a machine that takes its place has nothing."""
        assert self.process is None
        for folder in (self.runtime, self.state):
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)

    def client(self, block_bytes: int) -> Client:
        """See ``client_of``."""
        return client_of(self.socket, block_bytes)

    def rss_anon(self) -> int:
        """Bytes of memory that only the daemon has."""
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


def client_of(path: Path, block_bytes: int, *, strict: bool = True) -> Client:
    """A session whose blocks have this many bytes and 256 tokens."""
    shape = (1, BLOCK_TOKENS, block_bytes // (BLOCK_TOKENS * 2 * 2))
    layout = Layout("HND", "split", 2, (LayerGroup(1, shape, dense_strides(shape, 2)),))
    assert layout.block_bytes == block_bytes
    return Client(
        path,
        model=f"bench-{block_bytes}",
        revision="",
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
        layout=layout,
        strict=strict,
        lookup_budget_ms=1000,
        store_deadline_ms=120_000,
        load_deadline_ms=120_000,
    )


@contextlib.contextmanager
def served(**settings: str) -> Iterator[Served]:
    """A running daemon with these settings (dots as double underscores: ``host__size="1GiB"``)."""
    daemon = Served({key.replace("__", "."): value for key, value in settings.items()})
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop(kill=True)
        shutil.rmtree(daemon.runtime, ignore_errors=True)
        shutil.rmtree(daemon.state, ignore_errors=True)

"""A real S3 server for tests and benches: SeaweedFS in one process, on loopback only, in a folder that is given.

Owns the process and its ports. Called by tests and benches from one thread. Standard library only.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

START_S = 60.0
MEMORY_MAX = "1200MiB"
ACCESS_KEY = "terrace-test"
SECRET_KEY = "only for tests"
PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3", "admin") for kind in ("", ".grpc")]


def program() -> str | None:
    """Where the server's program is: beside the interpreter or on the path; None when it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """A running server. ``endpoint`` is its URL; ``credentials`` a file in boto3's format."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder = folder
        self._bucket = bucket
        self._ports = free_ports()
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self.credentials = folder / "credentials"
        self.credentials.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server, also again after ``kill``; returns when it serves."""
        weed = program()
        assert weed is not None
        command = [weed, "-logtostderr=true", "mini", f"-dir={self._folder / 'data'}", f"-bucket={self._bucket}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"]
        command += ["-master.telemetry.url=" + "http" + "://127.0.0.1:1/", "-admin.ui=false", "-webdav=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-{name}={port}" for name, port in self._ports.items()]
        environment = {
            "HOME": str(self._folder),
            "PATH": os.environ.get("PATH", ""),
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "GOMEMLIMIT": MEMORY_MAX,
        }
        with open(self._folder / "log", "ab") as log:
            since = log.tell()
            self._process = subprocess.Popen(
                command, env=environment, cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + START_S
        while not self._ready(since):
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError("SeaweedFS did not start:\n" + (self._folder / "log").read_text()[-2000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Freeze the process: its connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Thaw it."""
        os.kill(self.pid, signal.SIGCONT)

    def _ready(self, since: int) -> bool:
        """Whether the log says so, of this start."""
        return b"running and ready to use" in (self._folder / "log").read_bytes()[since:]


@contextmanager
def seaweed(folder: Path, bucket: str = "blocks") -> Iterator[Seaweed]:
    """A server for the length of the context."""
    server = Seaweed(folder, bucket)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_ports() -> dict[str, int]:
    """A port for each part of the server, by the name of its flag."""
    with ExitStack() as stack:
        ports = {}
        for name in PORTS:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports[name] = probe.getsockname()[1]
        return ports

"""The container files, read as a container engine reads them and run without one: the same commands in the same
environment, with folders and ports of this machine in place of the container's.

Owns the processes that it starts: they end with the ``with`` block. Called by tests. Imports PyYAML.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"
MAIN = "from terracekv.daemon.cli import main; main()"
HEALTHY_S = 60.0
SMALL = {
    "TERRACEKV_HOST_SIZE": "64MiB",
    "TERRACEKV_HOST_SLAB": "2MiB",
    "TERRACEKV_DISK_SIZE": "64MiB",
    "TERRACEKV_DISK_SEGMENT": "16MiB",
    "TERRACEKV_DISK_FREE_FLOOR": "0",
}
"""What a machine that runs tests can spare, in place of the sizes in the files."""


class Image:
    """The Dockerfile. ``stages`` are lists of (instruction, rest of the line)."""

    def __init__(self, file: Path = ROOT / "Dockerfile") -> None:
        lines = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
        self.stages: list[list[tuple[str, str]]] = []
        for line in lines.replace("\\\n", " ").splitlines():
            word, _, rest = line.strip().partition(" ")
            if word == "FROM":
                self.stages.append([])
            if word:
                self.stages[-1].append((word, rest.strip()))

    def last(self, word: str) -> str:
        """Of the final image, the last line that begins with this instruction."""
        return [rest for found, rest in self.stages[-1] if found == word][-1]

    @property
    def entrypoint(self) -> list[str]:
        return [str(part) for part in json.loads(self.last("ENTRYPOINT"))]

    @property
    def command(self) -> list[str]:
        return [str(part) for part in json.loads(self.last("CMD"))]

    @property
    def healthcheck(self) -> list[str]:
        return [str(part) for part in json.loads(self.last("HEALTHCHECK").partition("CMD ")[2])]

    @property
    def environment(self) -> dict[str, str]:
        given = [rest for word, rest in self.stages[-1] if word == "ENV"]
        return dict(part.partition("=")[::2] for line in given for part in shlex.split(line))


class Container:
    """A process that the container's would be. ``here`` maps the container's paths and addresses to this machine's."""

    def __init__(self, home: Path, environment: Mapping[str, str], here: Mapping[str, str]) -> None:
        self._here = here
        self.log = home / "log"
        bin = home / "bin"
        bin.mkdir(parents=True)
        (bin / "terracekv").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{MAIN}" "$@"\n')
        (bin / "terracekv").chmod(0o755)
        # Nothing of this process's environment: a container has none of it.
        self.environ = {"HOME": str(home), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self.environ |= {name: self.map(value) for name, value in environment.items() if name != "PATH"}
        self.environ["PATH"] = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._process: subprocess.Popen[bytes] | None = None

    def map(self, text: str) -> str:
        """The same words for this machine."""
        for theirs, ours in self._here.items():
            text = text.replace(theirs, ours)
        return text

    def start(self, command: Sequence[str], *more: str) -> None:
        """Run the container's command; ``more`` are arguments that only this machine needs."""
        with open(self.log, "ab") as log:
            words = [*(self.map(word) for word in command), *more]
            self._process = subprocess.Popen(words, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """What ``docker exec`` does, and the container engine for a health check."""
        words = [self.map(word) for word in command]
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60)

    def healthy(self, command: Sequence[str]) -> None:
        """Wait until the health check says so; AssertionError with the log when it does not, or the process ends."""
        deadline = time.monotonic() + HEALTHY_S
        while (done := self.run(command)).returncode:
            assert self._process is not None
            ended = self._process.poll()
            assert ended is None and time.monotonic() < deadline, f"{ended}: {done.stderr}\n{self.log.read_text()}"
            time.sleep(0.1)

    def end(self) -> int:
        """SIGTERM, as ``docker stop`` sends it; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(30)

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def compose() -> dict[str, Any]:
    """The compose file, with what its anchors stand for."""
    content: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return content


def kubernetes() -> dict[str, dict[str, Any]]:
    """The manifest's documents, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(KUBERNETES.read_text())}


def env_file(path: Path) -> dict[str, str]:
    """NAME=value, a line each."""
    return dict(line.partition("=")[::2] for line in path.read_text().splitlines())


def recipe() -> str:
    """The commands that the operator's page gives for making the secrets."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (shown,) = [block for block in page.split("```sh\n")[1:] if "> secrets/token" in block]
    return shown.partition("```")[0]


def make_secrets(folder: Path) -> Path:
    """Do in ``folder`` as the page says; the folder with the secrets."""
    subprocess.run(["bash", "-euo", "pipefail", "-c", recipe()], cwd=folder, check=True)
    return folder / "secrets"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

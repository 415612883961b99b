"""A daemon whose supervisor closes its standard files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon, until


class Bare(Daemon):
    """Started without some of the three standard files."""

    closed: tuple[int, ...] = (0, 1, 2)

    def launch(self) -> None:
        """Start without waiting."""
        shut = " ".join(f"{number}<&-" if not number else f"{number}>&-" for number in self.closed)
        flags = [part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")]
        command = f'exec "$0" "$@" {shut}'
        self.state.mkdir(exist_ok=True)
        self._process = subprocess.Popen(["sh", "-c", command, sys.executable, *self.program, *flags], cwd=self.state)


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2)])
def test_without_standard_files_it_serves_and_no_file_of_its_own_takes_their_place(
    shm_dir: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """Whatever a library writes to standard error would go into the arena."""
    daemon = Bare(shm_dir, tmp_path)
    daemon.closed = closed
    with daemon, daemon.client() as client:
        assert client.put(client.chain(1, 4)).stored == 4
        assert {os.readlink(f"/proc/{daemon.pid}/fd/{number}") for number in closed} == {"/dev/null"}
        until(lambda: daemon.http("/readyz")[0] == 200, "it is ready")
        os.kill(daemon.pid, signal.SIGUSR1)
        assert daemon.http("/healthz")[0] == 200
        assert daemon.term() == 0

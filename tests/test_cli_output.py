"""Where the command line's output goes may be anything: it is never a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon

COMMAND = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()"]


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as made:
        yield made


def flags(daemon: Daemon) -> list[str]:
    return [part for key, value in daemon.settings.items() for part in ("--set", f"{key}={value}")]


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environ, timeout=60, encoding="latin-1"
    )


@pytest.mark.parametrize("command", ["status", "top", "whatif"])
def test_a_locale_without_the_letters_of_a_bar_shows_the_numbers(daemon: Daemon, command: str) -> None:
    done = run([*COMMAND, command, *flags(daemon)], PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii() and done.stdout


@pytest.mark.parametrize("command", ["status", "top", "whatif"])
def test_with_its_output_closed_a_command_has_an_exit_status_all_the_same(daemon: Daemon, command: str) -> None:
    done = run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, command, *flags(daemon)])
    assert (done.returncode, done.stderr) == (0, "")

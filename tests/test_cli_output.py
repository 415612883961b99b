"""Where the command line's output goes, and what is read from files, may be anything: it is never a traceback."""

import os
import pty
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


def run(command: list[str], stdin: str | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, env=os.environ | environ, timeout=60, encoding="latin-1"
    )


@pytest.mark.parametrize("command", ["status", "top", "whatif"])
def test_a_locale_without_the_letters_of_a_bar_shows_the_numbers(daemon: Daemon, command: str) -> None:
    done = run([*COMMAND, command, *flags(daemon)], PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii() and done.stdout


@pytest.mark.parametrize("command", ["status", "top", "whatif"])
def test_with_its_output_closed_a_command_has_an_exit_status_all_the_same(daemon: Daemon, command: str) -> None:
    done = run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, command, *flags(daemon)])
    assert (done.returncode, done.stderr) == (0, "")


def test_top_on_a_terminal_that_cannot_draw_is_one_look(daemon: Daemon) -> None:
    ours, its = pty.openpty()
    try:
        command = [*COMMAND, "top", *flags(daemon)]
        done = subprocess.run(command, stdin=its, stdout=its, env=os.environ | {"TERM": "dumb"}, timeout=30)
        assert done.returncode == 0 and b"since its start" in os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(its)


def test_a_number_of_thousands_of_digits_is_no_token_id(daemon: Daemon) -> None:
    done = run([*COMMAND, "lookup", "-", "-n", "m", *flags(daemon)], stdin="1" * 5000)
    assert done.returncode == 1 and done.stderr.startswith("terracekv: TOKENS: - holds '111")

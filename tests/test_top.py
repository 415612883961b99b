"""``terracekv top`` on a real terminal: tmux holds it, types into it and says what it shows."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.cli_top import View, frame
from terracekv.tests.harness import Blocks, Daemon, until

RUN = f"{sys.executable} -c 'from terracekv.daemon.cli import main; main()' top --interval 0.2"
COMMAND = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()", "top"]
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: nobody watches a terminal")


def environ(daemon: Daemon) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TERRACEKV_", "TMUX"))}
    kept |= {"COLUMNS": "120", "LINES": "50"}  # as a shell exports them that was once of another size
    return kept | {"TERRACEKV_DAEMON_RUNTIME_DIR": str(daemon.runtime), "TERM": "screen-256color", "LC_ALL": "C.UTF-8"}


class Terminal:
    """A shell of 80 columns and 24 lines in a server of its own, in which the command runs."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._environ = environ(daemon)
        shell = "env PS1='$ ' sh"
        self("new-session", "-d", "-x", "80", "-y", "24", "-s", "t", shell)
        self.type(RUN)

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, env=self._environ, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, line: str) -> None:
        self("send-keys", "-t", "t", line, "Enter")

    @property
    def screen(self) -> str:
        return self("capture-pane", "-p", "-t", "t")

    @property
    def whole(self) -> bool:
        """Whether it is the shell's again: the first screen, an echo, a cursor."""
        flags = self("display-message", "-p", "-t", "t", "#{alternate_on} #{cursor_flag}").split()
        return flags == ["0", "1"]

    def shows(self, *words: str, without: str = "\0") -> None:
        """Wait until all of it is on the screen at once."""

        def there() -> bool:
            screen = self.screen
            return all(word in screen for word in words) and without not in screen

        try:
            until(there, f"{words} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen}") from None


@contextlib.contextmanager
def watched(folder: Path, daemon: Daemon) -> Iterator[Terminal]:
    terminal = Terminal(folder, daemon)
    try:
        yield terminal
    finally:
        terminal("kill-server")


@contextlib.contextmanager
def traffic(engine: Blocks) -> Iterator[None]:
    """Prompts looked up, stored and loaded until the block ends."""
    ended = threading.Event()

    def work() -> None:
        seed = 0
        while not ended.wait(0.01):
            keys = engine.chain(seed % 8, 10)
            engine.lookup([*keys, bytes(32)])
            engine.put(keys)
            engine.get(keys)
            seed += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def lookups(screen: str) -> int:
    found = re.search(r"([\d,]+) lookups found", screen)
    return int(found[1].replace(",", "")) if found else -1


@needs_tmux
def test_its_numbers_move_and_it_follows_the_size_of_the_terminal(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as engine, traffic(engine):
        with watched(tmp_path, daemon) as terminal:
            terminal.shows("TerraceKV", "host", "disk", "blocks/s", "1 session", "q ends it")
            terminal.shows("first misses: ", " absent")
            assert all(len(line) <= 80 for line in terminal.screen.splitlines())
            before = lookups(terminal.screen)
            until(lambda: lookups(terminal.screen) > before, "more lookups are shown")
            share = re.search(r"found (\d+\.\d)% of", terminal.screen)
            assert share and float(share[1]) > 0
            terminal("resize-window", "-t", "t", "-x", "50", "-y", "10")
            terminal.shows("host", "disk", "leased", "in flight", without="queued")
            terminal("resize-window", "-t", "t", "-x", "100", "-y", "30")
            terminal.shows("in flight", "q ends it")


@needs_tmux
@pytest.mark.parametrize("key", ["q", "C-c"])
def test_q_and_ctrl_c_end_it_and_give_the_terminal_back(shm_dir: Path, tmp_path: Path, key: str) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, watched(tmp_path, daemon) as terminal:
        terminal.shows("q ends it")
        assert not terminal.whole
        terminal("send-keys", "-t", "t", key)
        until(lambda: terminal.whole, "the shell has its terminal again")
        terminal.type("echo ended with $?; stty -a | tr ';' '\\n' | grep -ow -e '-icanon' -e '-echo'")
        terminal.shows("ended with 0")
        assert "-icanon\n" not in terminal.screen and "-echo\n" not in terminal.screen
        assert "Traceback" not in terminal.screen


@needs_tmux
def test_sigterm_gives_the_terminal_back_too(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, watched(tmp_path, daemon) as terminal:
        terminal.shows("q ends it")
        shell = int(terminal("display-message", "-p", "-t", "t", "#{pane_pid}"))
        (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(child), 15)
        until(lambda: terminal.whole, "the shell has its terminal again")
        assert "Traceback" not in terminal.screen


@needs_tmux
def test_it_waits_for_a_daemon_that_was_killed_and_goes_on_with_the_next(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, watched(tmp_path, daemon) as terminal:
        terminal.shows("TerraceKV", f"process {daemon.pid}")
        daemon.kill()
        terminal.shows("no daemon answers", "terracekv serve", "trying again every 0.2 s; last heard of")
        assert "host" in terminal.screen, "what was last heard is still there"
        daemon.start()
        terminal.shows(f"process {daemon.pid}", "0 lookups", without="no daemon answers")


@needs_tmux
def test_started_before_the_daemon_it_waits_for_one(shm_dir: Path, tmp_path: Path) -> None:
    daemon = Daemon(shm_dir, tmp_path)
    with watched(tmp_path, daemon) as terminal:
        terminal.shows("no daemon answers", "trying again")
        with daemon:
            terminal.shows("TerraceKV", "0 sessions")


def test_in_a_pipe_it_is_one_look_and_no_more(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as engine:
        keys = engine.chain(1, 10)
        engine.put(keys)
        engine.lookup(keys)
        done = subprocess.run(COMMAND, capture_output=True, text=True, env=environ(daemon), timeout=60)
        assert (done.returncode, done.stderr) == (0, "") and "\x1b" not in done.stdout
        assert "since its start: 1 lookups found 100.0% of 10 blocks, 100.0% of 40 tokens" in done.stdout
        daemon.kill()
        done = subprocess.run(COMMAND, capture_output=True, text=True, env=environ(daemon), timeout=60)
        assert (done.returncode, done.stdout) == (1, "") and "no daemon answers" in done.stderr


def status(asked: int = 100, host: int = 60, **changes: Any) -> dict[str, Any]:
    counters = {"get_bytes": asked << 20, "put_bytes": 0}
    tier = {"mode": "direct", "used_bytes": 1, "capacity_bytes": 4, "blocks": 1, "leased_blocks": 2}
    tier |= {"in_flight_blocks": 3, "in_flight_bytes": 4, "flow": None, "last_error": None, "counters": counters}
    found: dict[str, Any] = {"lookups": 1, "asked_blocks": asked, "asked_tokens": asked * 4, "matched_blocks": host}
    found["misses"] = {"absent": 1, "evicted": 0}
    found |= {"matched_tokens": host * 4, "matched": {"host": host}, "tokens": {"host": host * 4}, "loaded": {}}
    about = {"version": "1", "pid": 7, "uptime_s": 1.0, "ready": True, "not_ready": [], "sessions": []}
    return about | {"tiers": {"host": tier, "disk": tier}, "lookups": found} | changes


def shown(view: View, width: int, height: int, now: float) -> str:
    from rich.console import Console

    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))
    console.print(frame(view, width, height, now, 1.0))
    return console.export_text()


def test_hits_are_those_of_the_last_minute_and_rates_those_between_two_answers() -> None:
    view = View()
    for second in range(0, 200):
        view.hear(status(asked=10 * second, host=6 * second if second < 100 else 600), float(second))
    assert (view.span_s, view.over_the_minute("asked_blocks")) == (60.0, 600)
    assert view.over_the_minute("matched", "host") == 0 and view.rate("get_bytes", "disk") == 10 << 20
    view.hear(status(asked=3, pid=8), 200.0)
    assert (view.span_s, view.over_the_minute("asked_blocks"), view.rate("loaded", "host")) == (0.0, 3, None)


def test_a_daemon_that_restarts_under_the_same_number_begins_anew() -> None:
    view = View()
    view.hear(status(asked=500, host=300, pid=1, uptime_s=900.0), 0.0)
    view.hear(status(asked=3, host=0, pid=1, uptime_s=0.5), 10.0)
    assert (view.span_s, view.over_the_minute("asked_blocks"), view.rate("loaded", "host")) == (0.0, 3, None)


@pytest.mark.parametrize("rows", [5, 1000])
def test_what_is_wrong_is_shown_with_what_to_do_however_many_sessions_there_are(rows: int) -> None:
    session = {"engine": "e\x1b[2J", "pid": 1, "age_s": 1, "model": "m", "shard": None, "pending_blocks": 0}
    sessions = [session | {"leased_blocks": number} for number in range(rows)]
    answer = json.loads(json.dumps(status(sessions=sessions, degraded=["disk hangs"])))
    answer["tiers"]["disk"] |= {"last_error": "I/O error", "last_error_age_s": 1.0, "mode": "stuck"}
    answer["tiers"]["disk"] |= {"advice": "see the kernel's log", "last_event": "TKV-DISK-IO"}
    view = View()
    view.hear(answer, 0.0)
    text = shown(view, 80, 24, 0.0)
    for words in ("degraded: disk hangs", "I/O error", "-> see the kernel's log (TKV-DISK-IO)", "q ends it"):
        assert words in text
    assert len(text.splitlines()) <= 24 and "\x1b" not in text and f"{rows:,} sessions" in text

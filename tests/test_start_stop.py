"""A daemon whose supervisor closes its standard files, or signals it while it starts or ends."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from terracekv.daemon import bounds
from terracekv.daemon.__main__ import _prepare
from terracekv.daemon.config import require_folders
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.protocol import Refused
from terracekv.tests.harness import Daemon, hello, until
from terracekv.tests.people import settings
from terracekv.tiers.arena import Arena
from terracekv.tiers.errors import ConfigError


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


def test_a_daemon_whose_port_is_taken_says_so_and_leaves_no_door_behind(shm_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        values = {"daemon.runtime_dir": shm_dir, "daemon.state_dir": tmp_path, "daemon.http": address}
        values |= {"host.size": "64MiB", "disk.enabled": "false"}
        flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "terracekv.daemon", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"daemon.http: {address} cannot be bound" in done.stderr
    assert [path for path in shm_dir.rglob("*") if path.is_socket()] == []


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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_asks_for_something_does_not_end_a_daemon_that_starts(
    shm_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    daemon = Daemon(shm_dir, tmp_path, failpoints="arena.open=sleep:1")
    try:
        daemon.launch()
        until(lambda: (shm_dir / "owner.lock").exists(), "it opens its tiers")
        daemon.signal(number)
        until(lambda: "TKV-READY" in daemon.tail(), "it is ready")
        assert daemon.term() == 0
    finally:
        daemon.kill()


def test_an_interrupt_ends_a_daemon_that_starts_without_a_traceback(shm_dir: Path, tmp_path: Path) -> None:
    daemon = Daemon(shm_dir, tmp_path, failpoints="arena.open=sleep:20")
    try:
        daemon.launch()
        until(lambda: (shm_dir / "owner.lock").exists(), "it opens its tiers")
        daemon.signal(signal.SIGINT)
        assert daemon.wait() == -signal.SIGINT and daemon.errors() == []
    finally:
        daemon.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_ends_does_not_cut_that_short(shm_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    with Daemon(shm_dir, tmp_path, failpoints="catalog.sync=sleep:1.5") as daemon:
        daemon.signal(signal.SIGTERM)
        until(lambda: "TKV-STOPPED" in daemon.tail(), "its loop has ended")
        time.sleep(0.3)
        daemon.signal(number)
        assert daemon.wait() == 0 and daemon.errors() == []
        assert '"clean": true' in (tmp_path / "state" / "disk" / "state.json").read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_very_end_leaves_the_exit_status_as_it_is(
    shm_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """While the interpreter takes its modules apart it has let go of all handlers."""
    late = f"""
import os, sys
from terracekv.daemon.__main__ import main
class Late:
    def __del__(self, kill=os.kill, own=os.getpid(), write=os.write):
        write(2, b"late")
        kill(own, {int(number)})
sys.late = Late()
sys.exit(main())
"""
    daemon = Daemon(shm_dir, tmp_path)
    daemon.program = ["-c", late]
    with daemon:
        assert daemon.term() == 0
        assert daemon.tail(1) == "late"


@pytest.mark.parametrize("owner", [os.getuid(), 0, 65534, 12345])
def test_a_runtime_folder_that_another_user_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    """Whose folder it is can put sockets and links of their own there. Root's is a volume; 65534 nobody can judge."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(bounds, "_owner", lambda folder: owner)
    config = settings(tmp_path)
    if owner != 12345:
        require_folders(config)
        return
    with pytest.raises(ConfigError, match=r"daemon.runtime_dir is .* and belongs to another user \(uid 12345\)"):
        require_folders(config)


@pytest.mark.parametrize(("error", "word"), [("ENOSPC", "full"), ("EROFS", "read-only"), ("EIO", "dmesg")])
def test_a_file_system_that_takes_nothing_at_the_start_is_told_with_what_may_be_on_it(
    shm_dir: Path, tmp_path: Path, error: str, word: str
) -> None:
    daemon = Daemon(shm_dir, tmp_path, failpoints=f"namespaces.replace=errno:{error}")
    try:
        daemon.launch()
        assert daemon.wait() == 1 and daemon.errors() == []
        assert "daemon.state_dir" in daemon.tail(1) and word in daemon.tail(1)
    finally:
        daemon.kill()


def test_an_arena_that_did_not_get_all_its_memory_is_an_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the status said so, which nobody looks at before an engine's blocks are refused as ``full``."""
    with contextlib.closing(Arena(tmp_path, size_bytes=4 << 20, slab_bytes=1 << 20)) as arena:

        def short(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", short)
        _prepare(SimpleNamespace(arena=arena, gpus=Gpus()))  # type: ignore[arg-type]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "only 1 of 4 slabs" in line and "lower host.size" in line


def test_where_no_more_namespaces_may_be_known_the_refusal_leads_to_what_lets_new_ones_in(
    shm_dir: Path, tmp_path: Path
) -> None:
    few = "import sys; from terracekv.daemon import __main__, reception; reception.NAMESPACES_MAX = 2"
    daemon = Daemon(shm_dir, tmp_path)
    daemon.program = ["-c", f"{few}; sys.exit(__main__.main())"]
    with daemon:
        with daemon.client(model="used") as client:
            kept = client.chain(1, 4)
            assert client.put(kept, durable=True).durable == 4
        with daemon.wire(hello(model="not used any more")), daemon.wire() as wire:
            refused = wire.ask(hello(model="new"))
        assert isinstance(refused, Refused) and "2 namespaces are known" in refused.reason
        assert "TKV-REFUSED in docs/errors.md" in refused.reason
        assert daemon.term() == 0
        (tmp_path / "state" / "namespaces.json").rename(tmp_path / "namespaces.json")
        daemon.start()
        with daemon.wire(hello(model="new")), daemon.client(model="used") as client:
            assert client.get(kept).blocks == 4


def test_too_few_open_files_are_told_with_the_limit_to_raise(shm_dir: Path, tmp_path: Path) -> None:
    daemon = Daemon(shm_dir, tmp_path)
    flags = [part for key, value in daemon.settings.items() for part in ("--set", f"{key}={value}")]
    command = ["sh", "-c", 'ulimit -Hn 24; ulimit -n 24; exec "$0" "$@"', sys.executable, *daemon.program, *flags]
    daemon.state.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=daemon.state, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ulimit -n" in done.stderr and "Traceback" not in done.stderr, done.stderr

"""The command line against a daemon that it started itself."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon, until

RUN = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()"]


class Shell:
    """Commands that all mean the same daemon."""

    def __init__(self, runtime_dir: Path, state_dir: Path) -> None:
        settings = {"RUNTIME_DIR": str(runtime_dir), "STATE_DIR": str(state_dir), "HTTP": "", "DRAIN_S": "5"}
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
        self.environ |= {f"TERRACEKV_DAEMON_{name}": value for name, value in settings.items()}
        self.environ |= {"TERRACEKV_HOST_SIZE": "32MiB", "TERRACEKV_HOST_SLAB": "2MiB"}
        self.environ |= {"TERRACEKV_DISK_SIZE": "16MiB", "TERRACEKV_DISK_SEGMENT": "4MiB"}
        self.environ |= {"TERRACEKV_DISK_FREE_FLOOR": "0"}
        self.served: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*RUN, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.environ, input=stdin, timeout=60)

    def serve(self) -> subprocess.Popen[str]:
        """A daemon that is ready."""
        process = subprocess.Popen([*RUN, "serve"], stderr=subprocess.PIPE, text=True, env=self.environ)
        self.served.append(process)
        waited = self("status", "--wait", "30")
        if waited.returncode:
            process.kill()
            raise AssertionError(waited.stderr + process.communicate()[1])
        return process


@pytest.fixture
def shell(shm_dir: Path, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(shm_dir, tmp_path)
    yield made
    for process in made.served:
        process.kill()
        process.communicate()


@pytest.mark.fault(58)
@pytest.mark.fault(122)
def test_doctor_stores_reads_back_from_each_tier_and_deletes(shell: Shell) -> None:
    shell.serve()
    done = shell("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    for part in ("engine door", "host tier", "disk tier"):
        assert findings[part]["state"] == "ok", findings[part]
    assert "came back the same" in findings["disk tier"]["says"]
    status = json.loads(shell("status", "--json").stdout)
    assert status["tiers"]["disk"]["counters"]["hits"] + status["tiers"]["disk"]["counters"]["puts"] >= 2
    assert [tier["blocks"] for tier in status["tiers"].values()] == [0, 0]
    assert status["sessions"] == [] and status["lookups"]["lookups"] == 0, "a trial is nobody's lookup"


def test_doctor_twice_leaves_one_namespace(shell: Shell) -> None:
    shell.serve()
    assert shell("doctor").returncode == shell("doctor").returncode == 0
    namespaces = json.loads(shell("status", "--json").stdout)["namespaces"]
    assert [namespace["model"] for namespace in namespaces] == ["terracekv/doctor"]


@pytest.mark.fault(115)
@pytest.mark.fault(117)
def test_lookup_says_why_nothing_is_found(shell: Shell) -> None:
    shell.serve()
    shell("doctor")
    tokens = " ".join(str(token) for token in range(40))
    found = shell("lookup", "-", "-n", "terracekv/doctor", stdin=tokens).stdout
    assert "matched 0 of 2 blocks" in found and "first miss: block 0, absent" in found
    assert "shorter_than_block" in shell("lookup", "-", "-n", "terracekv/doctor", stdin="1 2 3").stdout
    mistyped = shell("lookup", "-", "-n", "nobody", stdin=tokens).stdout
    assert "unknown_namespace" in mistyped and "terracekv status lists" in mistyped


@pytest.mark.fault(112)
def test_orders_answer_with_counts_by_tier(shell: Shell) -> None:
    shell.serve()
    shell("doctor")
    flushed = shell("flush", "-n", "terracekv/doctor")
    assert flushed.returncode == 0 and "host: dropped 0" in flushed.stdout
    tokens = " ".join(str(token) for token in range(40))
    pinned = shell("pin", "-", "-n", "terracekv/doctor", stdin=tokens)
    assert "host: pinned 0" in pinned.stdout and "skipped 2" in pinned.stdout
    assert "host: unpinned 0" in shell("unpin", "-", "-n", "terracekv/doctor", stdin=tokens).stdout
    assert shell("flush", "-n", "nobody").returncode == 1


@pytest.mark.fault(63)
def test_a_second_daemon_in_the_same_folders_says_who_is_there_and_ends(shell: Shell) -> None:
    shell.serve()
    second = shell("serve")
    assert second.returncode == 1 and "stop that daemon" in second.stderr and "Traceback" not in second.stderr
    assert shell("status").returncode == 0


@pytest.mark.fault(55)
def test_sigterm_ends_it_with_status_0_and_the_next_start_keeps_its_sizes(shell: Shell) -> None:
    process = shell.serve()
    before = json.loads(shell("status", "--json").stdout)["tiers"]
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert shell("status").returncode == 1
    shell.serve()
    after = json.loads(shell("status", "--json").stdout)["tiers"]
    assert [tier["capacity_bytes"] for tier in after.values()] == [tier["capacity_bytes"] for tier in before.values()]


@pytest.mark.fault(79)
def test_serve_refuses_what_does_not_fit_in_one_line(shell: Shell) -> None:
    done = shell("serve", "--set", "host.size=900TiB")
    assert done.returncode == 1 and "the largest host.size that fits" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.fault(117)
def test_a_stopped_daemon_is_told_from_none(shell: Shell) -> None:
    process = shell.serve()
    process.send_signal(signal.SIGSTOP)
    done = shell("doctor", "--json")
    (found,) = [finding for finding in json.loads(done.stdout) if finding["state"] == "fail"]
    assert done.returncode == 1 and found["what"] == "daemon"
    assert f"a daemon is there (process {process.pid}) but does not answer" in found["says"]
    for arguments in (("status",), ("status", "--wait", "0.2"), ("flush", "-n", "m"), ("verify",)):
        done = shell(*arguments)
        assert done.returncode == 1 and "a daemon is there" in done.stderr
        assert f"kill -CONT {process.pid}" in done.stderr and "terracekv serve" not in done.stderr
    process.send_signal(signal.SIGCONT)
    assert shell("status", "--wait", "30").returncode == 0


def failures(shell: Shell) -> dict[str, str]:
    """What the doctor finds wrong with the daemon."""
    done = shell("doctor", "--json")
    found = {f["what"]: f["says"] for f in json.loads(done.stdout) if f["state"] == "fail"}
    assert done.returncode == bool(found)
    return found


@pytest.mark.long
@pytest.mark.fault(58)
@pytest.mark.parametrize("name", ["arena", "slots"])
def test_doctor_misses_what_engines_map_when_it_was_deleted_cut_or_replaced(
    shell: Shell, name: str, shm_dir: Path
) -> None:
    shell.serve()
    file = shm_dir / name
    assert failures(shell) == {}
    size = file.stat().st_size
    os.rename(file, shm_dir / "aside")
    assert f"{file} is gone" in failures(shell)["arena"]
    file.write_bytes(bytes(4096))
    assert f"{file} has 4096 bytes, and the daemon made it with {size}" in failures(shell)["arena"]
    os.truncate(file, size)
    assert "other bytes" in str(failures(shell)) if name == "arena" else "was replaced" in failures(shell)["arena"]
    os.rename(shm_dir / "aside", file)
    assert failures(shell) == {}


@pytest.mark.fault(58)
def test_doctor_misses_the_sockets(shell: Shell, shm_dir: Path) -> None:
    process = shell.serve()
    os.rename(shm_dir / "engine.sock", shm_dir / "aside")
    assert "engine.sock is gone" in failures(shell)["engine door"]
    os.rename(shm_dir / "aside", shm_dir / "engine.sock")
    os.rename(shm_dir / "http.sock", shm_dir / "aside")
    assert f"a daemon runs (process {process.pid}), but there is no socket" in failures(shell)["daemon"]
    assert "but there is no socket" in shell("status").stderr


def test_flush_of_what_is_not_there_names_the_command_that_lists_what_is(shell: Shell) -> None:
    shell.serve()
    done = shell("flush", "-n", "nope")
    assert done.returncode == 1 and "terracekv status lists" in done.stderr and "/v1/" not in done.stderr


def let_in(shell: Shell, folder: Path, tenant: str) -> None:
    """A daemon at which its own user is nobody in particular, or of a tenant."""
    lines = f"uids = [{os.getuid()}]\nrights = ['read', 'write']\nhost = '4MiB'\n" if tenant else ""
    (folder / "access").write_text(
        "[[tokens]]\nname = 'all'\nsecret = 'sixteen letters or more'\nrights = ['read']\n[tenants.red]\n" + lines
    )
    shell.environ |= {"TERRACEKV_ACCESS_FILE": str(folder / "access"), "TERRACEKV_ACCESS_OWN_USER": "false"}
    process = subprocess.Popen([*RUN, "serve"], stderr=subprocess.DEVNULL, text=True, env=shell.environ)
    shell.served.append(process)
    until(lambda: shell("health", "--ready").returncode == 0, "it is ready")


def test_a_tenants_user_is_shown_what_is_the_tenants(shell: Shell, tmp_path: Path) -> None:
    let_in(shell, tmp_path, "red")
    done = shell("status")
    assert (
        done.returncode == 0
        and "ready; this is what is tenant red's\nhost: 0B, of 4MiB\ndisk: 0B, no limit" in done.stdout
    )
    assert "no namespaces" in done.stdout and "no sessions" in done.stdout
    done = shell("top")
    assert done.returncode == 1 and "this user is of tenant red" in done.stderr and "Traceback" not in done.stderr
    done = shell("doctor")
    assert done.returncode == 0 and "was not looked at: this user is of tenant red" in done.stdout, done.stderr


def test_who_would_need_a_token_is_told_what_the_command_line_can_do(shell: Shell, tmp_path: Path) -> None:
    let_in(shell, tmp_path, "")
    done = shell("status")
    assert done.returncode == 1 and "asks for a token" in done.stderr and "access.file names" in done.stderr


def test_where_the_sockets_ask_for_a_token_the_command_line_sends_that_of_a_file(shm_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("the-operators-secret\n")
    access = tmp_path / "access.toml"
    rights = '["read", "write", "admin", "metrics"]'
    access.write_text(f'[[tokens]]\nname = "operator"\nsecret = "the-operators-secret"\nrights = {rights}\n')
    with Daemon(shm_dir, tmp_path, access__file=str(access), access__own_user="false") as daemon:

        def terracekv(*arguments: str, token: Path | None = None) -> subprocess.CompletedProcess[str]:
            environ = {"TERRACEKV_DAEMON_RUNTIME_DIR": str(daemon.runtime), "HOME": str(tmp_path)}
            named = {} if token is None else {"TERRACEKV_TOKEN_FILE": str(token)}
            command = [*RUN, *arguments]
            return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ | named, timeout=60)

        refused = terracekv("status")
        assert refused.returncode == 1 and "TERRACEKV_TOKEN_FILE" in refused.stderr
        assert "ready" in terracekv("status", token=secret).stdout
        examined = terracekv("doctor", token=secret)
        assert "engine door: session" in examined.stdout and "FAIL" not in examined.stdout, examined.stdout
        for content, says in (("two\nlines\n", "one line"), ("", "one line"), (None, "cannot be read")):
            wrong = tmp_path / "wrong"
            wrong.unlink(missing_ok=True)
            if content is not None:
                wrong.write_text(content)
            done = terracekv("status", token=wrong)
            assert done.returncode == 1 and says in done.stderr and "two" not in done.stderr

"""The command line: what is asked of the daemon, what a person reads, and one clear line when it cannot be done."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.cli_text import last_error
from terracekv.daemon.config import describe, load_config
from terracekv.daemon.http_client import Answered, Door, NotRunning, Silent

RUN = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()"]
MIB = 1 << 20
COUNTERS = {"hits": 1200, "misses": 34, "evictions": {"capacity": 5, "flush": 2}}
TIER = {"mode": "tmpfs", "capacity_bytes": 64 * MIB, "used_bytes": 16 * MIB, "blocks": 4321, "leased_blocks": 7}
NAMESPACE = {"namespace_id": "ab" * 32, "epoch": 3, "registered": True, "model": "tiny-llama", "dtype": "bfloat16"}
NAMESPACE |= {"revision": "main"}
SESSION = {"engine": "vllm-7", "pid": 4711, "age_s": 3725.0, "model": "tiny-llama", "shard": None}
STATUS: dict[str, Any] = {
    "version": "9.8.7",
    "pid": 99,
    "uptime_s": 65.0,
    "ready": False,
    "not_ready": ["rebuilding the catalog"],
    "tiers": {
        "host": TIER | {"counters": COUNTERS, "last_error": None},
        "disk": TIER
        | {
            "mode": "direct",
            "counters": COUNTERS,
            "last_error": "[Errno 5] Input/output error",
            "last_error_age_s": 3.0,
        }
        | {"in_flight_bytes": 0, "in_flight_bytes_max": 16 * MIB, "flow": {"writes_dropped": 12, "writes_failed": 3}},
    },
    "queue": {"bytes": 0, "bytes_max": 16 * MIB},
    "lookups": {
        "lookups": 10,
        "asked_blocks": 1000,
        "matched_blocks": 900,
        "matched": {"host": 700, "disk": 200},
        "writes_dropped": 12,
        "writes_failed": 3,
    },
    "namespaces": [NAMESPACE | {"block_tokens": 256, "block_bytes": 2 * MIB, "shards": 2}],
    "sessions": [SESSION | {"leased_blocks": 7, "pending_blocks": 1, "reserved_blocks": 0}],
    "config": {},
}
LOOKUP = {
    "namespace_id": "ab" * 32,
    "block_tokens": 256,
    "asked_blocks": 16,
    "matched_blocks": 12,
    "matched_tokens": 3072,
    "tiers": {"host": {"blocks": 8, "tokens": 2048}, "disk": {"blocks": 12, "tokens": 3072}},
    "bytes": 24 * MIB,
    "load_ms": 31.46,
    "first_miss": {"index": 12, "reason": "evicted"},
}
DONE = {"done": {"host": {"dropped": 1200}, "disk": {"dropped": 3}}, "skipped": {"leased": 4, "absent": 0}}


class Server(socketserver.ThreadingUnixStreamServer):
    """Stands where the daemon's HTTP socket would; answers what the test says and remembers what it was asked."""

    daemon_threads = True
    block_on_close = True

    def __init__(self, runtime_dir: Path) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "GET /readyz": (200, {"ready": True, "reasons": []}),
            "GET /healthz": (200, {"alive": True}),
        }
        self.asked: list[tuple[str, Any]] = []
        super().__init__(str(runtime_dir / "http.sock"), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = f"{self.command} {self.path}"
        if body:
            assert self.headers["Content-Type"] == "application/json"
        if self.path != "/healthz":
            self.server.asked.append((name, json.loads(body) if body else None))
        unknown = {"error": {"kind": "not_found", "message": f"no such route: {self.path}", "hint": "look it up"}}
        status, value = self.server.answers.get(name, (404, unknown))
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = answer


@pytest.fixture
def server(shm_dir: Path) -> Iterator[Server]:
    with Server(shm_dir) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def terracekv(*arguments: str, at: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with folders of its own."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
    environ |= {"TERRACEKV_DAEMON_RUNTIME_DIR": str(at), "TERRACEKV_DAEMON_STATE_DIR": str(at / "state")}
    environ |= {"COLUMNS": "80", "TERRACEKV_HOST_SIZE": "64MiB", "TERRACEKV_DISK_ENABLED": "false"}
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, env=environ, input=stdin, timeout=60)


def test_status_is_a_table_that_a_person_can_read(server: Server, shm_dir: Path) -> None:
    server.answers["GET /v1/status"] = (200, STATUS)
    done = terracekv("status", at=shm_dir)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "TerraceKV 9.8.7, process 99, up 1 min 5 s, not ready: rebuilding the catalog" in lines
    assert "10 lookups found 900 of 1,000 blocks (90.0%): host 700, disk 200" in lines
    (host,) = [line for line in lines if line.startswith("host tmpfs")]
    assert host.startswith("host tmpfs 16MiB ██░░░░░░░░") and host.endswith("64MiB 4,321 7 1,200 34 5")
    assert "disk: last error, 3 s ago: [Errno 5] Input/output error" in lines
    assert "write-through to disk: 0B of 16MiB queued, 12 blocks dropped, 3 failed" in lines
    assert "tiny-llama main abababababab 256 2MiB bfloat16 2 3" in lines
    assert "vllm-7 4711 1 h 2 min tiny-llama all 7 1 0" in lines


def test_status_says_what_to_do_about_a_tier_that_hangs(server: Server, shm_dir: Path) -> None:
    hangs = {"mode": "stuck", "last_error": "a call has not come back for 12 s", "last_error_age_s": None}
    hangs |= {"last_event": "TKV-TIER-STUCK", "advice": "see what it stands on"}
    disk = STATUS["tiers"]["disk"] | hangs
    died = {"threads": {"watchdog": 2}, "tasks": {"housekeeper": 1}}
    status = STATUS | {"tiers": STATUS["tiers"] | {"disk": disk}, "degraded": ["disk: hangs"], "died": died}
    server.answers["GET /v1/status"] = (200, status)
    shown = terracekv("status", at=shm_dir).stdout
    assert "disk: last error: a call has not come back for 12 s" in shown and "degraded: disk: hangs" in shown
    assert "-> see what it stands on (TKV-TIER-STUCK)" in shown
    assert "watchdog died 2 times" in shown and "housekeeper died 1 times" in shown


def test_status_shows_each_lower_tiers_queue_and_losses_apart(server: Server, shm_dir: Path) -> None:
    s3 = TIER | {"mode": "up", "counters": COUNTERS, "last_error": "put_object: 500", "last_error_age_s": 7300.0}
    s3 |= {"in_flight_bytes": MIB, "in_flight_bytes_max": 8 * MIB, "flow": {"writes_dropped": 900, "writes_failed": 7}}
    server.answers["GET /v1/status"] = (200, STATUS | {"tiers": STATUS["tiers"] | {"s3": s3}})
    lines = terracekv("status", at=shm_dir).stdout.splitlines()
    assert "write-through to disk: 0B of 16MiB queued, 12 blocks dropped, 3 failed" in lines
    assert "write-through to s3: 1MiB of 8MiB queued, 900 blocks dropped, 7 failed" in lines
    assert "s3: last error, 2 h 1 min ago: put_object: 500" in lines


@pytest.mark.parametrize(("seconds", "news"), [(None, True), (5.0, True), (600.0, False)])
def test_an_error_that_is_over_for_a_while_is_no_news(seconds: float | None, news: bool) -> None:
    assert last_error("s3", {"last_error": "x", "last_error_age_s": seconds})[1] is news


@pytest.mark.fault(56)
def test_health_asks_the_probes_routes_and_says_nothing_while_all_is_well(server: Server, shm_dir: Path) -> None:
    server.answers["GET /healthz"] = (200, {"alive": True})
    for arguments, route in ((("health",), "/healthz"), (("health", "--ready"), "/readyz")):
        done = terracekv(*arguments, at=shm_dir)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        if route != "/healthz":  # asked by other commands too, and so not noted by the server of these tests
            assert server.asked[-1] == (f"GET {route}", None)
    server.answers["GET /readyz"] = (503, {"ready": False, "reasons": ["self-test: is running"]})
    done = terracekv("health", "--ready", at=shm_dir)
    assert done.returncode == 1 and "self-test: is running" in done.stderr
    assert terracekv("health", at=shm_dir).returncode == 0


@pytest.mark.fault(108)
def test_names_that_engines_chose_cannot_order_the_terminal_about(server: Server, shm_dir: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202eevil\nline"
    namespace, session = STATUS["namespaces"][0], STATUS["sessions"][0]
    tier = STATUS["tiers"]["host"] | {"last_error": evil}
    server.answers["GET /v1/status"] = (
        200,
        STATUS
        | {"namespaces": [namespace | {"model": evil, "revision": evil}], "not_ready": [evil]}
        | {"sessions": [session | {"engine": evil, "model": evil}], "tiers": {"host": tier}},
    )
    server.answers["POST /v1/flush"] = (404, {"error": {"kind": "k", "message": evil, "hint": evil}})
    server.answers["POST /v1/pin"] = (200, {"done": {evil: {evil: 1}}, "skipped": {evil: 1}})
    asked = [("status",), ("flush", "-n", "m"), ("pin", "-", "-n", "m"), ("doctor",)]
    for arguments in asked:
        done = terracekv(*arguments, at=shm_dir, stdin="[1]")
        shown = (done.stdout + done.stderr).replace("\n", "")
        assert shown.isprintable(), (arguments, shown)
        assert "\\x1b]0;" in shown.replace(" ", ""), (arguments, shown)


def test_status_shows_twenty_of_many_and_says_how_many_more(server: Server, shm_dir: Path) -> None:
    many = [STATUS["namespaces"][0] | {"model": f"model-{number:02}"} for number in range(23)]
    server.answers["GET /v1/status"] = (200, STATUS | {"namespaces": many})
    shown = terracekv("status", at=shm_dir).stdout
    assert "model-19" in shown and "model-20" not in shown and "and 3 more (terracekv status --json" in shown


def test_status_fits_a_terminal_of_80_columns() -> None:
    """With the longest that is usual: a repository's name, a commit as revision, numbers of a week's work."""
    counters = {"hits": 12_345_678, "misses": 1_234_567, "evictions": {"capacity": 1_234_567}}
    tier = STATUS["tiers"]["host"] | {"blocks": 1_234_567, "counters": counters}
    tier |= {"used_bytes": 1023 * MIB, "capacity_bytes": 1024 * MIB}
    long = {"model": "meta-llama/Llama-3.1-8B-Instruct", "revision": "0e9e39f249a16976918f6564b8830bc894c89659"}
    namespaces = [STATUS["namespaces"][0] | long | {"namespace_id": f"{n:064}"} for n in range(2)]
    answer = STATUS | {"tiers": {"host": tier, "disk": tier | {"mode": "buffered"}}, "namespaces": namespaces}
    code = "import json, sys; from terracekv.daemon import cli_status; sys.stdout.isatty = lambda: True; "
    code += "cli_status.print_status(json.load(sys.stdin))"
    environ = os.environ | {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(answer), capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert all(word in done.stdout for word in ("12.3M", "1.2M", "0e9e39f249a1", "1023MiB", "bfloat16"))


def test_status_as_json_is_the_daemons_own(server: Server, shm_dir: Path) -> None:
    server.answers["GET /v1/status"] = (200, STATUS)
    assert json.loads(terracekv("status", "--json", at=shm_dir).stdout) == STATUS


@pytest.mark.fault(117)
@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2\n3\n"])
def test_lookup_sends_tokens_and_says_how_much_where_and_why_not_more(server: Server, shm_dir: Path, text: str) -> None:
    server.answers["POST /v1/lookup"] = (200, LOOKUP)
    done = terracekv("lookup", "-", "--namespace", "tiny-llama", at=shm_dir, stdin=text)
    assert server.asked == [("POST /v1/lookup", {"namespace": "tiny-llama", "tokens": [1, 2, 3]})]
    assert done.stdout.splitlines() == [
        "matched 12 of 16 blocks, 3,072 tokens (256 a block), 24MiB, about 31.5 ms to load",
        "  from host or above: 8 blocks, 2,048 tokens",
        "  from disk or above: 12 blocks, 3,072 tokens",
        "first miss: block 12, evicted",
    ]


@pytest.mark.fault(112)
def test_orders_say_what_was_done_and_what_was_not(server: Server, shm_dir: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[5, 6]")
    for verb in ("flush", "pin", "unpin"):
        server.answers[f"POST /v1/{verb}"] = (200, DONE)
    said = ["host: dropped 1,200", "disk: dropped 3", "skipped 4: leased"]
    assert terracekv("flush", "-n", "m", at=shm_dir).stdout.splitlines() == said
    assert terracekv("flush", "-n", "m", "--tier", "disk", "--json", at=shm_dir).stdout.strip().startswith("{")
    assert terracekv("pin", str(tokens), "-n", "m", "--ttl", "60", at=shm_dir).stdout.splitlines() == said
    assert terracekv("unpin", str(tokens), "-n", "m", at=shm_dir).stdout.splitlines() == said
    assert server.asked == [
        ("POST /v1/flush", {"namespace": "m"}),
        ("POST /v1/flush", {"namespace": "m", "tier": "disk"}),
        ("POST /v1/pin", {"namespace": "m", "tokens": [5, 6], "ttl_s": 60.0}),
        ("POST /v1/unpin", {"namespace": "m", "tokens": [5, 6]}),
    ]


def test_an_error_of_the_daemon_is_one_line_and_its_hint(server: Server, shm_dir: Path) -> None:
    error = {"kind": "not_found", "message": "no namespace 'm'", "hint": "GET /v1/namespaces lists them"}
    server.answers["POST /v1/flush"] = (404, {"error": error})
    done = terracekv("flush", "-n", "m", at=shm_dir)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["terracekv: no namespace 'm'", "  hint: terracekv status lists them"]


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("health",), ("lookup", "-", "-n", "m"), ("flush", "-n", "m"), ("status", "--wait", "0.1")],
)
def test_without_a_daemon_one_line_says_so_and_how_to_start_one(shm_dir: Path, arguments: tuple[str, ...]) -> None:
    done = terracekv(*arguments, at=shm_dir, stdin="[1]")
    assert (done.returncode, done.stdout) == (1, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith(f"terracekv: no daemon answers at {shm_dir}/http.sock") and "terracekv serve" in hint


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("nonsense",), 2, "nonsense"),
        (("lookup",), 2, "TOKENS"),
        (("lookup", "-"), 2, "--namespace"),
        (("lookup", "-", "-n", "m"), 1, "'x'"),
        (("lookup", "no-such-file", "-n", "m"), 1, "TOKENS: no-such-file cannot be read: No such file"),
        (("lookup", "/dev", "-n", "m"), 1, "TOKENS: /dev cannot be read: Is a directory"),
        (("lookup", sys.executable, "-n", "m"), 1, "is no text"),
        (("serve", "--set", "disk.enabled=true", "--set", "disk.path=/dev/null/x"), 1, "disk.path is /dev/null/x"),
        (("serve", "--set", "daemon.state_dir=/dev/null"), 1, "daemon.state_dir is /dev/null"),
        (("serve", "--set", "host.size=1"), 1, "set 16KiB or more"),
        (("config", "--set", "host.siez=1"), 1, "did you mean host.size?"),
        (("config", "--set", "host.size"), 1, "has no value"),
        (("config", "--config", "no.toml"), 1, "no.toml"),
        (("config", "--set", "host.size=900TiB"), 1, "the largest host.size that fits"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_never_a_traceback(
    shm_dir: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    done = terracekv(*arguments, at=shm_dir, stdin="1 x 2")
    assert done.returncode == status and done.stdout == ""
    assert says in done.stderr and "Traceback" not in done.stderr


def test_config_prints_every_setting_with_its_source(shm_dir: Path) -> None:
    done = terracekv("config", "--set", "daemon.io_threads=7", at=shm_dir)
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert set(rows) == set(describe(load_config(environ={})))
    assert rows["daemon.io_threads"].split() == ["7", "flag", "--set"]
    assert rows["host.size"].split() == ["64MiB", "environment", "TERRACEKV_HOST_SIZE"]
    assert json.loads(terracekv("config", "--json", at=shm_dir).stdout)["host.size"]["value"] == 64 * MIB


def test_version_and_help_need_nothing(shm_dir: Path) -> None:
    assert terracekv("--version", at=shm_dir).stdout.startswith("terracekv ")
    page = terracekv("--help", at=shm_dir).stdout
    assert all(
        verb in page
        for verb in ("serve", "status", "health", "lookup", "flush", "pin", "unpin", "doctor", "verify", "config")
    )
    assert "whatif" in page and "simulate" in page
    assert "..." not in page.partition("Commands:")[2], "a summary that is cut says less than a short one"


@pytest.mark.fault(95)
def test_doctor_on_a_machine_without_a_daemon_finds_nothing_wrong_and_says_what_is_there(shm_dir: Path) -> None:
    done = terracekv("doctor", at=shm_dir)
    assert done.returncode == 0, done.stdout
    for part in (
        "Python",
        "lmdb",
        "gpu.enabled is false",
        "tmpfs",
        "MemAvailable",
        "none runs here",
    ):
        assert part in done.stdout


@pytest.mark.fault(83)
def test_doctor_says_what_does_not_fit_and_fails(shm_dir: Path) -> None:
    done = terracekv("doctor", "--set", "host.size=900TiB", "--json", at=shm_dir)
    assert done.returncode == 1
    (failed,) = [finding for finding in json.loads(done.stdout) if finding["state"] == "fail"]
    assert failed.keys() == {"what", "state", "says", "advice"}
    assert failed["what"] == "settings" and "the largest host.size that fits" in failed["advice"]


@pytest.mark.fault(117)
def test_doctor_lists_every_setting_that_somebody_chose_and_that_differs(server: Server, shm_dir: Path) -> None:
    """Even when what it was given itself does not fit this machine."""
    theirs = {
        "host.size": {"value": 32 * MIB, "source": "file /etc/terracekv.toml"},
        "host.slab": {"value": 2 * MIB, "source": "auto: a sixteenth"},
        "daemon.queue": {"value": 8 * MIB, "source": "environment TERRACEKV_DAEMON_QUEUE"},
        "daemon.io_threads": {"value": 9, "source": "flag --set"},
        "daemon.drain_s": {"value": 10.0, "source": "default"},
    }
    server.answers["GET /v1/status"] = (200, STATUS | {"config": theirs})
    for size in ("64MiB", "900TiB"):
        findings = json.loads(terracekv("doctor", "--json", "--set", f"host.size={size}", at=shm_dir).stdout)
        says = [f["says"] for f in findings if f["what"] == "settings" and f["state"] == "warn"]
        assert [text.split()[0] for text in says] == ["daemon.io_threads", "daemon.queue", "host.size"]
        assert "is 9 in the daemon (flag --set), 4 here (default)" in says[0]
        assert "(environment TERRACEKV_DAEMON_QUEUE), auto here (default)" in says[1]
        assert "(file /etc/terracekv.toml)" in says[2] and "here (flag --set)" in says[2]
        for part in ("Input/output error", "it is not ready: rebuilding the catalog"):
            assert any(part in f["says"] for f in findings if f["state"] == "warn")
        (engine,) = [finding for finding in findings if finding["what"] == "engine door"]
        assert engine["state"] == "fail" and "engine.sock is gone" in engine["says"]


def test_door_tells_an_error_of_the_daemon_from_no_daemon(server: Server, shm_dir: Path) -> None:
    door = Door(shm_dir)
    server.answers["GET /plain"] = (500, b"oops")
    server.answers["GET /text"] = (200, b"<html>")
    with pytest.raises(Answered) as caught:
        door.ask("GET", "/plain")
    assert caught.value.status == 500 and "oops" in caught.value.message
    with pytest.raises(Answered, match="no such route"):
        door.ask("GET", "/none")
    with pytest.raises(Silent, match="no TerraceKV daemon"):
        door.ask("GET", "/text")
    with pytest.raises(NotRunning):
        Door(shm_dir / "elsewhere").ask("GET", "/v1/status")

"""Daemons as processes, each with folders of its own, over one bucket."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.http_client import Door
from terracekv.daemon.protocol import Prefetch
from terracekv.tests.harness import Daemon, hello, payload_of, until
from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.seaweed import program, seaweed

pytestmark = pytest.mark.long

RETURN_S = 30.0
"""In which the breaker closes after the server's return."""
Opened = Callable[..., Daemon]


def settings(endpoint: str, credentials: Path, **more: str) -> dict[str, str]:
    usual = {"enabled": "true", "endpoint": endpoint, "bucket": BUCKET, "credentials_file": str(credentials)}
    usual |= {"read_timeout": "0.5", "timeout": "5", "threads": "4", "epoch_ttl": "0.2"}
    return {f"s3__{name}": value for name, value in (usual | more).items()}


@pytest.fixture
def daemon(stub: S3Stub, shm_dir: Path, tmp_path: Path) -> Iterator[Opened]:
    with ExitStack() as stack:

        def opened(label: str = "a", *, started: bool = True, **more: str) -> Daemon:
            wanted = settings(stub.endpoint, stub.credentials) | {"disk__enabled": "false"} | more
            made = Daemon(shm_dir / label, tmp_path / label, **wanted)
            if started:
                stack.enter_context(made)
            else:
                stack.callback(made.kill)
            return made

        yield opened
        stub.switches.stall = False


def ask(daemon: Daemon, method: str, route: str, body: Any = None) -> Any:
    return Door(daemon.runtime).ask(method, route, body)


def s3_of(daemon: Daemon) -> Any:
    return ask(daemon, "GET", "/v1/status")["tiers"]["s3"]


def same_secret(a: Daemon, label: Path) -> None:
    """Nodes of a cluster share the tenants' secret."""
    (label / "state").mkdir(parents=True)
    (label / "state" / "secret").write_bytes((a.state / "state" / "secret").read_bytes())


def test_what_one_daemon_stored_another_loads(daemon: Opened) -> None:
    with daemon("a").client() as client:
        keys = client.chain(1, 16)
        assert client.put(keys, durable=True).durable == 16
        found = client.lookup(keys)
        assert found.blocks == 16 and found.per_tier == {"host": 16, "s3": 16}
    b = daemon("b")
    with b.client() as other:
        found = other.lookup(keys)
        assert found.blocks == 16 and found.per_tier == {"host": 0, "s3": 16}
        assert other.get(keys).blocks == 16
        assert other.lookup(keys).per_tier == {"host": 16, "s3": 16}
    with daemon("c").client() as third:
        assert third.get(keys).blocks == 16, "a load without a lookup before asks by itself"
    d = daemon("d")
    with d.client():
        until(lambda: ask(d, "GET", "/v1/namespaces")["namespaces"] != [], "the engine has joined")
        (space,) = ask(d, "GET", "/v1/namespaces")["namespaces"]
        question = {"namespace": space["namespace_id"], "keys": [key.hex() for key in keys]}
        assert ask(d, "POST", "/v1/lookup", question | {"deadline_ms": 0})["first_miss"]["reason"] == "deadline"
        answer = ask(d, "POST", "/v1/lookup", question | {"deadline_ms": 5000})
        assert answer["matched_blocks"] == 16 and answer["tiers"]["s3"]["blocks"] == 16
        body = Door(d.runtime).exchange("GET", f"/v1/namespaces/{space['namespace_id']}/blocks/{keys[3].hex()}")
        assert body == payload_of(keys[3], 4096)
        done = ask(d, "POST", "/v1/prefetch", question)["done"]
        assert done == {"host": {"present": 1}, "s3": {"coming": 15}}
    e = daemon("e")
    with e.client() as engine, e.wire(hello()) as wire:
        wire.tell(Prefetch(b"".join(keys)))  # answered by nothing: it is a hint
        until(lambda: s3_of(e)["flow"]["promoted"] == 16, "the prompt is brought up before anybody loads it")
        assert engine.lookup(keys).per_tier["host"] == 16
    status = s3_of(b)
    assert (status["mode"], status["flow"]["promoted"], status["details"]["breaker"]) == ("up", 16, "closed")
    assert status["details"]["questions"] >= 1 and status["bandwidth"]["read"]["measured"]
    metrics = Door(b.runtime).exchange("GET", "/metrics").decode()
    assert 'terracekv_tier_promoted_blocks_total{tier="s3"} 16.0' in metrics
    assert 'terracekv_tier_up{tier="s3"} 1.0' in metrics
    assert b.errors() == []


@pytest.mark.fault(28)
def test_a_tenant_of_a_daemon_with_another_secret_reads_nothing(daemon: Opened, stub: S3Stub, tmp_path: Path) -> None:
    a = daemon("a")
    with a.client(credential=b"tenant") as client:
        keys = client.chain(1, 4)
        assert client.put(keys, durable=True).durable == 4
    same_secret(a, tmp_path / "b")
    with daemon("b").client(credential=b"tenant") as friend:
        assert friend.chain(1, 4) == keys and friend.get(keys).blocks == 4
    with daemon("c").client(credential=b"tenant") as stranger:
        assert stranger.chain(1, 4) != keys, "another secret, another salt, other names"
        assert stranger.lookup(stranger.chain(1, 4)).blocks == 0
        assert stranger.get(keys).blocks == 0, "even the right keys are looked for in the stranger's own namespace"
    with daemon("d").client() as nobody:
        assert nobody.get(keys).blocks == 0


def test_a_flush_is_heard_by_all_daemons(daemon: Opened) -> None:
    a, b = daemon("a"), daemon("b")
    with a.client() as client, b.client() as other:
        keys = client.chain(1, 8)
        client.put(keys, durable=True)
        assert other.get(keys).blocks == 8
        (space,) = ask(a, "GET", "/v1/namespaces")["namespaces"]
        done = ask(a, "POST", "/v1/flush", {"namespace": space["namespace_id"]})
        assert done["done"] == {"host": {"dropped": 8}, "s3": {"dropped": 8}}
        assert client.lookup(keys).blocks == 0

        def heard() -> bool:
            return other.lookup(keys).blocks == 0 and ask(b, "GET", "/v1/namespaces")["namespaces"][0]["epoch"] == 1

        until(heard, "the other node hears of the flush")
        until(lambda: ask(b, "GET", "/v1/status")["tiers"]["host"]["used_bytes"] == 0, "its host is emptied")


@pytest.mark.fault(15)
def test_an_engine_that_was_idle_during_a_flush_elsewhere_finds_nothing_of_before(daemon: Opened) -> None:
    a, b = daemon("a"), daemon("b")
    with a.client() as client, b.client() as idle:
        keys = client.chain(1, 8)
        client.put(keys, durable=True)
        assert idle.get(keys).blocks == 8
        until(lambda: s3_of(b)["details"]["questions_under_way"] == 0, "its use is over and was looked after")
        time.sleep(2.5)  # two rounds of housekeeping: of what was used before nothing is remembered
        (space,) = ask(a, "GET", "/v1/namespaces")["namespaces"]
        ask(a, "POST", "/v1/flush", {"namespace": space["namespace_id"]})
        until(lambda: "TKV-FLUSHED-ELSEWHERE" in b.log.read_text(), "its node hears of the flush")
        assert idle.lookup(keys).blocks == 0


def test_an_endpoint_that_hangs_costs_nobody_more_than_its_deadline(daemon: Opened, stub: S3Stub) -> None:
    a = daemon("a", s3__read_timeout="3")
    with a.client() as client, a.client(load_deadline_ms=1000, lookup_budget_ms=1000) as hasty:
        here, there = client.chain(1, 8), client.chain(2, 8)
        client.put(here, durable=True)
        client.put(there, durable=True)
        (space,) = ask(a, "GET", "/v1/namespaces")["namespaces"]
        ask(a, "POST", "/v1/flush", {"namespace": space["namespace_id"], "tier": "host"})
        assert client.get(here).blocks == 8
        stub.switches.stall = True
        requests = stub.asked.total()
        for _ in range(20):
            assert client.lookup(here).blocks == 8 and client.get(here).blocks == 8
        assert stub.asked.total() == requests, "a prompt in host asks the bucket nothing"
        found = hasty.lookup(client.chain(3, 8))
        assert (found.blocks, found.reason) == (0, "deadline"), "the daemon answered, and in time"
        loaded = hasty.get(there)
        assert (loaded.blocks, loaded.why) == (0, "deadline")
        assert hasty.lookup(here).blocks == 8, "the session is as good as before"
        until(lambda: s3_of(a)["mode"] == "down", "the breaker opens")
        assert hasty.lookup(client.chain(4, 8)).reason == "tier_down"
        stub.switches.stall = False
        until(lambda: s3_of(a)["mode"] == "up", "the breaker closes", RETURN_S)
        assert client.get(there).blocks == 8


def test_a_daemon_starts_and_stops_beside_an_endpoint_that_hangs(daemon: Opened, stub: S3Stub) -> None:
    stub.switches.stall = True
    a = daemon("a", daemon__drain_s="0.5")
    with a.client() as client:
        keys = client.chain(1, 4)
        assert client.put(keys).stored == 4 and client.get(keys).blocks == 4
        assert a.term() == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [({"s3__bucket": "nobodys"}, "create_bucket"), ({"s3__profile": "unheard-of"}, "credentials")],
)
def test_a_bucket_that_can_never_be_used_ends_the_start(daemon: Opened, change: dict[str, str], says: str) -> None:
    a = daemon("a", started=False, **change)
    a.launch()
    assert a.wait() == 1 and says in a.tail()


@pytest.mark.parametrize("level", ["debug", "info"])
def test_no_log_level_brings_credentials_or_signatures_into_the_log(
    daemon: Opened, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"AWS_ACCESS_KEY_ID": "the-key", "AWS_SECRET_ACCESS_KEY": "the-secret", "AWS_SESSION_TOKEN": "the-token"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    a = daemon("a", daemon__log_level=level)
    with a.client() as client:
        keys = client.chain(1, 4)
        assert client.put(keys, durable=True).durable == 4
    assert a.term() == 0
    log = a.log.read_text()
    assert "ready after" in log and " DEBUG botocore" not in log and " DEBUG urllib3" not in log
    for secret in (*secrets.values(), "x-amz-security-token", "Signature=", "StringToSign"):
        assert secret not in log


def command(of: Daemon, *arguments: str) -> tuple[int, Any]:
    """Exit status and JSON of ``terracekv`` with a daemon's settings."""
    flags = [f"--set={key}={value}" for key, value in of.settings.items()]
    code = "import sys; from terracekv.daemon.cli import main; sys.argv[0] = 'terracekv'; main()"
    run = [sys.executable, "-c", code, *arguments, "--json", *flags]
    out = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd=of.state)
    return out.returncode, json.loads(out.stdout)


def trials(of: Daemon) -> dict[str, str]:
    """What the doctor says of the daemon's tiers."""
    findings = command(of, "doctor")[1]
    return {
        each["what"]: each["state"] for each in findings if each["what"].endswith(" tier") and each["state"] != "warn"
    }


@pytest.mark.parametrize("admission", ["all", "second_touch"])
def test_the_doctor_is_not_content_with_a_block_of_another_tier(daemon: Opened, admission: str) -> None:
    a = daemon("a", disk__enabled="true", disk__admission=admission)
    assert trials(a) == {"host tier": "ok", "disk tier": "ok", "s3 tier": "ok"}
    resource.prlimit(a.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # no file may be written beyond a byte
    assert trials(a) == {"host tier": "ok", "disk tier": "fail", "s3 tier": "ok"}
    resource.prlimit(a.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert trials(a)["disk tier"] == "ok"


def test_the_doctor_notices_a_disk_that_cannot_be_read(daemon: Opened) -> None:
    a = daemon("a", disk__enabled="true", failpoints="segment.read=errno:EIO")
    assert trials(a) == {"host tier": "ok", "disk tier": "fail", "s3 tier": "ok"}


def test_the_doctor_tries_the_disk_while_the_bucket_is_down(daemon: Opened, stub: S3Stub) -> None:
    a = daemon("a", disk__enabled="true", disk__admission="second_touch")
    with a.client() as client:
        stub.go()
        until(lambda: client.lookup(client.chain(1, 1)).reason and s3_of(a)["mode"] == "down", "the breaker opens")
    assert {"host tier": "ok", "disk tier": "ok"}.items() <= trials(a).items()
    stub.come_back()


def test_the_command_line_looks_into_the_bucket(daemon: Opened, stub: S3Stub) -> None:
    a = daemon("a")
    with a.client() as client:
        keys = client.chain(1, 4)
        client.put(keys, durable=True)

    def run(*arguments: str) -> tuple[int, Any]:
        return command(a, *arguments)

    rows = run("s3", "ls")[1]
    assert {row["key"] for row in rows} == {key.hex() for key in keys} and {row["shard"] for row in rows} == {0}
    (space,) = run("s3", "stat")[1]
    assert (space["objects"], space["current"]) == (4, True)
    assert run("s3", "verify") == (0, {"good": 4, "damaged": []})
    name = stub.blocks()[0]
    stub.objects[name].content = stub.objects[name].content[:-1] + b"!"
    content = bytearray(stub.objects[name].content)
    content[5000] ^= 1
    stub.objects[name].content = bytes(content)
    status, checked = run("s3", "verify")
    assert status == 1 and checked["good"] == 3 and len(checked["damaged"]) == 1
    ask(a, "POST", "/v1/flush", {"namespace": space["namespace_id"], "tier": "host"})
    assert run("s3", "gc", "--dry-run")[1]["blocks"] == 0
    for name in (space["namespace_id"], space["namespace_id"][:8].upper(), space["namespace_id"][:12], "m"):
        assert len(run("s3", "ls", "-n", name)[1]) == 4
        assert run("s3", "verify", "-n", name)[1]["good"] == 3
        assert run("s3", "gc", "--dry-run", "-n", name)[1]["blocks"] == 0
    status, findings = run("doctor")
    states = {(finding["what"], finding["state"]) for finding in findings}
    assert {("s3", "ok"), ("s3 tier", "ok")} <= states, findings


@pytest.mark.fault(123)
def test_200_mb_offered_to_100_kb_a_second_are_bounded_dropped_and_counted(daemon: Opened, stub: S3Stub) -> None:
    a = daemon("a", s3__queue="4MiB", s3__timeout="60", s3__read_timeout="30", host__size="96MiB")
    with a.client() as small, a.client(1 << 20) as large:
        wanted = small.chain(1, 2)
        assert small.put(wanted, durable=True).durable == 2
        (space,) = [each for each in ask(a, "GET", "/v1/namespaces")["namespaces"] if each["block_bytes"] == 4096]
        ask(a, "POST", "/v1/flush", {"namespace": space["namespace_id"], "tier": "host"})
        stub.switches.bytes_per_s = 100_000.0
        memory = a.memory_bytes()["anonymous"]
        for seed in range(50):
            assert large.put(large.chain(seed, 4)).stored == 4, "host takes it"
            status = s3_of(a)
            assert status["in_flight_bytes"] <= status["in_flight_bytes_max"] == 4 << 20
        assert status["flow"]["writes_dropped_bytes"] > 190 << 20
        assert a.memory_bytes()["anonymous"] - memory < 64 << 20
        assert status["in_flight_bytes"] > 1 << 20
        assert small.get(wanted).blocks == 2, "a load does not wait for the stores before it"
        stub.switches.bytes_per_s = 0.0
        until(lambda: s3_of(a)["in_flight_bytes"] == 0, "the queue empties")
        flow = s3_of(a)["flow"]
        assert flow["written"] + flow["writes_dropped"] + flow["writes_failed"] == 2 + 200


@pytest.mark.s3
@pytest.mark.skipif(program() is None, reason="SeaweedFS is not installed")
def test_a_real_server_is_frozen_killed_and_started_again(shm_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "weed").mkdir()
    with seaweed(tmp_path / "weed") as server, ExitStack() as stack:
        wanted = settings(server.endpoint, server.credentials, bucket="blocks", queue="2MiB") | {
            "disk__enabled": "false"
        }
        a, b = (stack.enter_context(Daemon(shm_dir / n, tmp_path / n, **wanted)) for n in "ab")
        client = stack.enter_context(a.client(65536, store_deadline_ms=60_000))
        other = stack.enter_context(b.client(65536))
        keys = client.chain(1, 16)
        assert client.put(keys, durable=True).durable == 16
        assert other.get(keys).blocks == 16
        server.stop()
        for _ in range(20):
            assert client.lookup(keys).blocks == 16 and client.get(keys).blocks == 16
        with a.client(65536, lookup_budget_ms=200) as hasty:
            assert hasty.lookup(client.chain(2, 8)).reason in ("deadline", "tier_down")
        server.go_on()
        until(lambda: s3_of(a)["mode"] == "up", "it is up again", RETURN_S)
        server.kill()
        for seed in range(10, 30):
            stored = client.put(client.chain(seed, 4))
            assert stored.stored == 4, "host takes it"
        status = s3_of(a)
        assert status["in_flight_bytes"] <= status["in_flight_bytes_max"]
        until(lambda: s3_of(a)["mode"] == "down", "the breaker opens")
        until(lambda: s3_of(a)["in_flight_bytes"] == 0, "nothing is kept waiting for a dead server")
        flow = s3_of(a)["flow"]
        assert flow["written"] + flow["writes_failed"] + flow["writes_dropped"] == 16 + 80
        server.start()
        until(lambda: s3_of(a)["mode"] == "up", "the breaker closes", RETURN_S)
        again = client.chain(99, 4)
        assert client.put(again, durable=True).durable == 4 and other.get(again).blocks == 4

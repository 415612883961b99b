"""A tier that closes, and a daemon that stops, while the link is slow: what is under way is cut off, and said to be."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.blocks import get, name, put
from terracekv.tests.harness import MIB, Daemon
from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.s3_tiers import Node, Nodes, until
from terracekv.tiers.tier import Outcome

LARGE = 24 * MIB
"""More than the kernel keeps of a connection, so that a slow link is felt."""
SLOW_BYTES_PER_S = 400_000.0
LONG_S = 120.0
WELL_BEFORE_S = 30.0


@pytest.fixture
def a(nodes: Nodes, stub: S3Stub) -> Iterator[Node]:
    with nodes(block_bytes=LARGE, codec="off", timeout_s=LONG_S, read_timeout_s=5.0) as opened:
        yield opened
        stub.switches.bytes_per_s = 0.0


@pytest.mark.parametrize("call", ["put", "get"])
def test_closing_cuts_off_what_is_under_way(a: Node, stub: S3Stub, call: str, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = list[Outcome]()

    def work() -> None:
        outcomes.append(get(a.tier, a.now, name(1))[0] if call == "get" else put(a.tier, a.now, name(2)))

    assert put(a.tier, a.now, name(1)) is Outcome.STORED
    stub.switches.bytes_per_s = SLOW_BYTES_PER_S
    worker = threading.Thread(target=work)
    worker.start()
    until(lambda: stub.receiving > 0 or stub.requests[-1][:2] == ("GET", a.key(1)), "the server is busy with it")
    a.tier.close()
    worker.join(WELL_BEFORE_S)
    assert not worker.is_alive(), f"it goes on to its deadline, {LONG_S:.0f} s away"
    assert outcomes == [Outcome.FAILED]
    assert "cut off, as the daemon stops" in caplog.text


def test_an_upload_that_we_end_at_its_deadline_is_not_said_to_be_ended_by_the_server(
    nodes: Nodes, stub: S3Stub, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(block_bytes=LARGE, codec="off", timeout_s=1.0, read_timeout_s=5.0) as a:
        stub.switches.bytes_per_s = SLOW_BYTES_PER_S
        assert put(a.tier, a.now, name(1)) is Outcome.FAILED
        stub.switches.bytes_per_s = 0.0
        assert "not sent in time" in str(a.tier.status().last_error)
        assert "Connection was closed" not in caplog.text


def test_a_daemon_stops_when_its_drain_time_is_over_and_says_what_was_cut_off(
    stub: S3Stub, shm_dir: Path, tmp_path: Path
) -> None:
    s3 = {"enabled": "true", "endpoint": stub.endpoint, "bucket": BUCKET, "credentials_file": str(stub.credentials)}
    s3 |= {"timeout": str(LONG_S), "read_timeout": "5", "codec": "off", "queue": "64MiB"}
    settings = {f"s3__{key}": value for key, value in s3.items()}
    settings |= {"disk__enabled": "false", "host__size": "80MiB", "host__slab": "40MiB", "daemon__drain_s": "2.5"}
    with Daemon(shm_dir, tmp_path, **settings) as daemon:
        with daemon.client(LARGE) as client:
            stub.switches.bytes_per_s = SLOW_BYTES_PER_S
            assert client.put(client.chain(1, 1)).stored == 1
            until(lambda: stub.receiving == 1, "it is being sent")
        assert daemon.term(WELL_BEFORE_S) == 0
        stub.switches.bytes_per_s = 0.0
        log = daemon.tail(100)
        assert "were not written within daemon.drain_s: they are cut off" in log
        assert "cut off, as the daemon stops" in log and "Connection was closed" not in log
        assert daemon.errors() == [], "that the daemon removed its sockets is no news"

"""What stands still is seen, left out and said: a disk that hangs, an event loop, the folder of state."""

import asyncio
import logging
import signal
import threading
import time
from pathlib import Path

import pytest

from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.http_client import Door
from terracekv.daemon.protocol import Found, Lookup, Refused
from terracekv.daemon.watchdog import Watchdog, stacks
from terracekv.tests.harness import Daemon, hello, until
from terracekv.tests.hosts import BLOCK
from terracekv.tests.people import People, served
from terracekv.tests.stores import World, Worlds, opened_worlds
from terracekv.tests.test_engine_door_waits import Doors, told
from terracekv.tiers import namespace

pytestmark = pytest.mark.long

worlds = pytest.fixture(opened_worlds)


def flush_host(daemon: Daemon) -> None:
    door = Door(daemon.runtime)
    (space,) = door.ask("GET", "/v1/namespaces")["namespaces"]
    door.ask("POST", "/v1/flush", {"namespace": space["namespace_id"], "tier": "host"})


@pytest.mark.fault(7)
def test_a_disk_that_hangs_is_left_out_and_taken_back(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(
        shm_dir, tmp_path, daemon__io_threads="2", daemon__stuck_s="0.3", failpoints="segment.read=sleep:8"
    ) as daemon:
        with daemon.client(load_deadline_ms=500) as client:
            keys, others = client.chain(1, 2), client.chain(2, 4)
            assert client.put(keys, durable=True).durable == 2
            flush_host(daemon)
            assert client.put(others).stored == 4
            assert client.lookup(keys).blocks == 2
            assert client.get(keys).blocks == 0, "the disk hangs, and the engine computes"
            client.load_deadline_ms = 30_000
            until(lambda: "TKV-TIER-STUCK" in daemon.log.read_text(), "it is seen")
            status, ready = daemon.http("/readyz")
            assert (
                status == 200 and ready["ready"] and ready["degraded"][0].startswith("disk: a call has not come back")
            )
            missed = client.lookup(keys)
            assert missed.blocks == 0 and missed.reason == "tier_down"
            assert client.get(others).blocks == 4 and client.put(client.chain(3, 2)).stored == 2
            _, document = daemon.http("/v1/status")
            disk = document["tiers"]["disk"]
            assert (disk["mode"], disk["last_event"]) == ("stuck", "TKV-TIER-STUCK") and "dmesg" in disk["advice"]
            assert document["degraded"] and disk["capacity_bytes"] == 32 << 20
            assert client.lookup(keys).blocks == 0
            until(lambda: "TKV-TIER-BACK" in daemon.log.read_text(), "it moves again")
            assert daemon.http("/readyz")[1]["degraded"] == []
            until(lambda: client.lookup(keys).blocks == 2, "it is used again, by itself")
        text = daemon.log.read_text()
        assert text.count(" TKV-STACKS ") == 1 and "thread disk-0" in text and "in failpoint" in text, (
            "who hangs, and where"
        )
        assert daemon.term() == 0


@pytest.mark.fault(55)
def test_a_thread_that_never_comes_back_does_not_keep_the_daemon_from_ending(shm_dir: Path, tmp_path: Path) -> None:
    settings = {"daemon__stuck_s": "0.2", "daemon__drain_s": "0.2"}
    with Daemon(shm_dir, tmp_path, **settings, failpoints="segment.write*2=sleep:600") as daemon:
        with daemon.client() as client:
            keys = client.chain(1, 1)
            assert client.put(keys, durable=True).durable == 1
            more = client.chain(2, 1)
            assert client.put(more).stored == 1
            until(lambda: "TKV-TIER-STUCK" in daemon.log.read_text(), "it is seen")
            assert daemon.term() == 0 and "TKV-STUCK-AT-EXIT" in daemon.tail()
            daemon.restart()
            until(lambda: client.lookup(keys).blocks == 1 and client.lookup(more).blocks == 1, "all is adopted")
            assert client.get(keys).blocks == 1 and client.get(more).blocks == 1


def test_stacks_are_written_for_who_asks(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        until(lambda: "TKV-READY" in daemon.log.read_text(), "it is ready")
        for asked in (1, 2):
            daemon.signal(signal.SIGUSR1)
            while daemon.log.read_text().count("task housekeeper:") < asked:
                assert daemon.alive
                time.sleep(0.01)
        text = daemon.log.read_text()
        assert "most recent call first" in text, "faulthandler's, which need no interpreter that moves"
        assert all(f"thread {name}:" in text for name in ("MainThread", "host-0", "disk-0", "state-0", "watchdog"))
        assert "task housekeeper:" in text and "TKV-STACKS" in text
        assert daemon.term() == 0


@served()
async def test_a_loop_that_stands_still_is_seen_and_its_stack_written(
    people: People, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terracekv.daemon.watchdog.LOOP_STUCK_S", 1.0)
    monkeypatch.setattr("terracekv.daemon.watchdog.LOOK_S", 0.02)
    caplog.set_level(logging.INFO, "terracekv")
    watchdog = Watchdog(people.door.heart)
    watchdog.start()

    def hog() -> None:
        until(lambda: watchdog.dumps, "the watchdog has seen it")

    try:
        await asyncio.sleep(0.3)
        hog()
        while not any(getattr(record, "event", "") == "TKV-LOOP-BACK" for record in caplog.records):
            await asyncio.sleep(0.01)
    finally:
        watchdog.stop()
    (seen,) = [record for record in caplog.records if getattr(record, "event", "") == "TKV-LOOP-STUCK"]
    (written,) = [record for record in caplog.records if getattr(record, "event", "") == "TKV-STACKS"]
    assert "thread MainThread" in written.getMessage() and "in hog" in written.getMessage()
    _, document = await people.ask("GET", "/v1/status")
    assert document["loop_lag_ms"] > 50
    async with people.client.get("/metrics") as answer:
        assert "terracekv_loop_lag_seconds 0.0\n" not in await answer.text()


@served()
async def test_the_stacks_have_every_task_by_its_name(people: People) -> None:
    await asyncio.sleep(0)
    text = stacks(asyncio.get_running_loop())
    assert "task heartbeat:" in text and "in keep" in text and "in sleep" in text and "thread MainThread:" in text


@served()
async def test_a_beat_that_fails_is_not_the_last(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = people.door.heart.beat_at
    heart = people.door.heart
    monkeypatch.setattr(heart, "_tiers", [None])
    while heart.beat_at == beats:
        await asyncio.sleep(0.01)
    monkeypatch.setattr(heart, "_tiers", list(people.store.sources))
    failed_at = heart.beat_at
    while heart.beat_at == failed_at:
        await asyncio.sleep(0.01)
    assert heart.degraded == []


def test_a_folder_of_state_that_hangs_keeps_new_models_out_and_nobody_else(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terracekv.daemon.reception.NOTE_S_MAX", 0.2)

    async def story(w: World, doors: Doors) -> None:
        old = await doors.engine()
        heart = Heartbeat(w.store)
        answers = threading.Event()
        monkeypatch.setattr(namespace, "failpoint", lambda name: name != "namespaces.replace" or answers.wait(30))
        stranger = await doors.connect()
        answer = await stranger.ask(hello(BLOCK, model="another"))
        assert isinstance(answer, Refused) and "daemon.state_dir did not answer" in answer.reason
        await heart.beat()
        assert heart.degraded and heart.degraded[0].startswith("daemon.state_dir: ")
        assert isinstance(await old.ask(Lookup(1, b"", 1000)), Found)
        await old.store(b"\1" * 32)
        answers.set()
        until_s = time.monotonic() + 30
        while heart.degraded:
            assert time.monotonic() < until_s
            await asyncio.sleep(0.01)
            await heart.beat()

    worlds.run(told(story), stuck_s=0.1)

"""Whatever happens to the daemon, a real vLLM answers every request with the right tokens and joins again by itself."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon, until
from terracekv.tests.vllm_engine import BLOCK, Engine, expected, expected_of, plain, prompt

SETTINGS = {"host__size": "64MiB", "host__slab": "8MiB", "disk__size": "256MiB", "disk__segment": "16MiB"}
TOKENS = 1000
CACHED = (TOKENS - 1) // BLOCK * BLOCK
STOPPED_S = 30.0
JUNK = b"\xa5" * 4096

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def reference() -> None:
    plain()


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path, **SETTINGS) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket, options={"load_deadline_ms": 500}) as started:
        yield started


def ask_again(engine: Engine, seed: int, tokens: int = TOKENS) -> int:
    """How much of a prompt an engine with an empty cache of its own need not compute; its answer is as ever."""
    engine.forget()
    answer = engine.answer(prompt(tokens, seed))
    assert answer.tokens == expected(prompt(tokens, seed))
    return answer.cached


def rejoins(engine: Engine, seed: int) -> None:
    """Wait until the engine hits again. Nobody starts it anew."""
    until(lambda: ask_again(engine, seed) > 0, "the engine joins by itself")


@pytest.mark.fault(7)
def test_a_killed_daemon_is_a_miss_and_its_successor_is_joined(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 1)
    assert ask_again(engine, 1) == CACHED
    daemon.kill()
    for _ in range(2):
        assert ask_again(engine, 1) == 0
    daemon.start()
    rejoins(engine, 1)
    assert ask_again(engine, 1) == CACHED


@pytest.mark.fault(7)
def test_a_daemon_that_is_killed_during_a_load_does_not_change_the_answer(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 2)
    free = engine.pages_free
    engine.on_load = daemon.kill
    ask_again(engine, 2)
    engine.on_load = lambda: None
    assert not daemon.alive
    assert ask_again(engine, 2) == 0
    engine.forget()
    assert engine.pages_free == free
    daemon.start()
    rejoins(engine, 2)


@pytest.mark.fault(7)
def test_a_daemon_that_is_killed_while_it_stores_does_not_change_the_answer(daemon: Daemon, engine: Engine) -> None:
    free = engine.pages_free
    names = [engine.ask(prompt(TOKENS, seed)) for seed in range(10, 16)]
    for _ in range(2):
        engine.step()
    daemon.kill()
    truth = expected_of([prompt(TOKENS, seed) for seed in range(10, 16)])
    assert [answer.tokens for answer in engine.finish(*names)] == truth
    engine.forget()
    assert engine.pages_free == free
    daemon.start()
    for seed in range(10, 16):
        ask_again(engine, seed)
    rejoins(engine, 15)


@pytest.mark.fault(7)
def test_a_stopped_daemon_is_a_miss_for_as_long_as_it_is_stopped(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 20)
    daemon.stop()
    over, seed = time.monotonic() + STOPPED_S, 21
    while time.monotonic() < over:
        assert ask_again(engine, 20) == 0
        assert ask_again(engine, seed) == 0
        seed += 1
    daemon.cont()
    rejoins(engine, 20)
    assert ask_again(engine, 20) == CACHED


@pytest.mark.fault(7)
def test_a_daemon_that_stops_in_the_middle_of_a_load_is_given_up(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 3)
    engine.on_load = daemon.stop
    ask_again(engine, 3)
    engine.on_load = lambda: None
    ask_again(engine, 3)
    daemon.cont()
    rejoins(engine, 3)


def test_an_engine_that_starts_before_its_daemon_joins_it_later(shm_dir: Path, tmp_path: Path) -> None:
    daemon = Daemon(shm_dir, tmp_path, **SETTINGS)
    with Engine(daemon.socket) as engine:
        assert ask_again(engine, 4) == 0
        assert ask_again(engine, 4) == 0
        with daemon:
            rejoins(engine, 4)


def test_requests_that_are_under_way_when_a_daemon_is_restarted_end_well(daemon: Daemon, engine: Engine) -> None:
    for seed in range(30, 34):
        ask_again(engine, seed)
    engine.forget()
    names = [engine.ask(prompt(TOKENS, seed), 30) for seed in range(30, 38)]
    for _ in range(4):
        engine.step()
    daemon.restart()
    truth = expected_of([prompt(TOKENS, seed) for seed in range(30, 38)], 30)
    assert [answer.tokens for answer in engine.finish(*names)] == truth
    rejoins(engine, 30)


def test_a_disk_that_is_full_costs_the_disk_tier_and_nothing_else(daemon: Daemon, engine: Engine) -> None:
    daemon.restart(failpoints="segment.write=errno:ENOSPC", host__size="32MiB")
    rejoins(engine, 40)
    for seed in range(41, 51):  # twice what host holds
        assert ask_again(engine, seed) == 0
    assert ask_again(engine, 50) == CACHED
    disk = daemon.http("/v1/status")[1]["tiers"]["disk"]
    assert disk["blocks"] == 0 and disk["last_error"]


@pytest.mark.fault(2)
def test_wrong_bytes_on_disk_are_computed_anew(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 60)
    until(lambda: daemon.http("/v1/status")[1]["tiers"]["disk"]["blocks"] == CACHED // BLOCK, "all is on disk")
    daemon.kill()
    for path in daemon.runtime.iterdir():
        path.unlink()
    spoil(next((daemon.state / "state").rglob("*.seg*")))
    daemon.start()
    until(lambda: ask_again(engine, 61) > 0, "the engine joins by itself")
    assert ask_again(engine, 60) < CACHED
    assert ask_again(engine, 60) == CACHED


@pytest.mark.fault(2)
def test_wrong_bytes_in_an_arena_that_a_daemon_finds_are_computed_anew(daemon: Daemon, engine: Engine) -> None:
    ask_again(engine, 62)
    daemon.kill()
    spoil(daemon.runtime / "arena")
    for path in (daemon.state / "state").rglob("*"):  # the disk has no copy that could heal it
        if path.is_file():
            path.unlink()
    daemon.start()
    until(lambda: ask_again(engine, 63) > 0, "the engine joins by itself")
    assert ask_again(engine, 62) < CACHED
    assert ask_again(engine, 62) == CACHED


def spoil(path: Path) -> None:
    """Other bytes in the middle of every block of the file, its first 256 KiB excepted."""
    with open(path, "r+b") as file:
        for offset in range(384 << 10, path.stat().st_size, 256 << 10):
            file.seek(offset)
            file.write(JUNK)

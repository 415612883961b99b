"""The transformers connector beside a real daemon that is stopped, killed, started again: answers never change."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from terracekv.bench.served import Served, served
from terracekv.connector.layout import Blocks
from terracekv.connector.transformers import TerraceCache
from terracekv.tests.tiny_engine import BLOCK, MODEL, answer, answer_with, prompt

EVENTUALLY_S = 30
LOADED = {"host": 4 * BLOCK}


@pytest.fixture
def daemon() -> Iterator[Served]:
    with served(host__size="64MiB", disk__size="1GiB", disk__segment="16MiB") as running:
        yield running


@pytest.fixture
def cache(daemon: Served) -> Iterator[TerraceCache]:
    opened = TerraceCache(MODEL, socket=daemon.socket, block_tokens=BLOCK, lookup_budget_ms=1000)
    yield opened
    opened.close()


IDS = prompt(4 * BLOCK + 3)
EXPECTED = answer(MODEL, IDS)


def same(cache: TerraceCache) -> Any:
    """The report of a prompt whose answer is as ever."""
    text, report = answer_with(cache, IDS)
    assert text == EXPECTED
    return report


def eventually(cache: TerraceCache, condition: Callable[[Any], bool]) -> Any:
    """Ask again and again, always for the same answer, until the report is as it should be."""
    until = time.monotonic() + EVENTUALLY_S
    while not condition(report := same(cache)):
        assert time.monotonic() < until, report
        time.sleep(0.05)
    return report


def test_what_one_engine_stored_another_loads(daemon: Served, cache: TerraceCache) -> None:
    assert same(cache).stored_blocks == 4
    other = TerraceCache(MODEL, socket=daemon.socket, block_tokens=BLOCK, lookup_budget_ms=1000)
    try:
        report = same(other)
    finally:
        other.close()
    assert (report.loaded_tokens, report.computed_tokens, report.why) == (LOADED, 3, None)


@pytest.mark.fault(7)
def test_a_stopped_daemon_costs_the_answer_nothing_and_is_joined_again(daemon: Served, cache: TerraceCache) -> None:
    same(cache)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        report = same(cache)
        assert (report.loaded_tokens, report.why) == ({}, "deadline")
        assert same(cache).why == "no_daemon"
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(cache, lambda report: report.loaded_tokens == LOADED)


@pytest.mark.fault(7)
def test_a_killed_daemon_costs_the_answer_nothing_and_its_successor_has_the_blocks(
    daemon: Served, cache: TerraceCache
) -> None:
    same(cache)
    daemon.stop(kill=True)
    for _ in range(2):
        assert same(cache).why == "no_daemon"
    daemon.start()
    eventually(cache, lambda report: report.loaded_tokens == LOADED)


@pytest.mark.fault(7)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_daemon_killed_in_the_middle_of_a_load_does_not_change_the_answer(
    daemon: Served, cache: TerraceCache, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    same(cache)
    scatter, seen = Blocks.scatter, list[int]()

    def kill_meanwhile(blocks: Blocks, index: int, payload: memoryview) -> None:
        seen.append(index)
        if len(seen) == copies:
            daemon.stop(kill=True)
        scatter(blocks, index, payload)

    monkeypatch.setattr(Blocks, "scatter", kill_meanwhile)
    same(cache)
    assert len(seen) >= copies
    assert same(cache).why == "no_daemon"

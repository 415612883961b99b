"""The demo with the real model: all its rows, and nothing left of it however it ends."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.bench import small_model
from terracekv.tests.demos import ENDS_S, Demo

FINISH_S = 600

pytestmark = pytest.mark.timeout(FINISH_S)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    small_model.load()  # fetched here, if it must be
    running = Demo("demo", tmp_path)
    yield running
    running.end()


@pytest.mark.fault(7)
def test_every_row_of_the_demo_gives_the_answers_without_the_store(demo: Demo) -> None:
    lines = demo.finish()
    assert len([line for line in lines if line.endswith(" same")]) == 5, "\n".join(lines)
    assert demo.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_takes_everything_with_it(demo: Demo, number: signal.Signals) -> None:
    demo.until("demo_engine")
    demo.process.send_signal(number)
    assert demo.process.wait(ENDS_S) == 128 + number
    assert demo.left() == []

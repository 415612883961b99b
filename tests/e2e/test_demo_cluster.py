"""The demo of a cluster, with the real model and a real S3 server: its rows, and nothing left of it."""

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
    running = Demo("demo_cluster", tmp_path)
    yield running
    running.end()


def test_a_node_that_never_saw_the_document_answers_from_the_bucket_and_the_answers_are_the_same(demo: Demo) -> None:
    lines = demo.finish()
    assert len([line for line in lines if line.endswith(" same")]) == 5, "\n".join(lines)
    assert [line for line in lines if line.startswith("node B, which never saw it")], "\n".join(lines)
    assert demo.left() == []


def test_a_cluster_that_is_stopped_takes_everything_with_it(demo: Demo) -> None:
    demo.until("weed")
    demo.until("demo_engine")
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(ENDS_S) == 128 + signal.SIGTERM
    assert demo.left() == []

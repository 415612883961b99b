"""A daemon for all tests of a file; each test has a model, and so a namespace, of its own."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.harness import Daemon
from terracekv.tests.mock_engine import Engine


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix=f"terracekv-test-{os.getpid()}-", dir="/dev/shm"))
    with Daemon(folder, tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
    shutil.rmtree(folder)


@pytest.fixture
def engine(daemon: Daemon, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Engines of this test."""

    def make(**settings: Any) -> Engine:
        return Engine(daemon.socket, **{"model": request.node.nodeid} | settings)

    return make

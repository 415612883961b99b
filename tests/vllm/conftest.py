"""A daemon for all tests of a file; each test has a model, and so a namespace, of its own."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector import client as client_module
from terracekv.tests.harness import JOIN_S, Daemon
from terracekv.tests.mock_engine import Engine


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix=f"terracekv-test-{os.getpid()}-", dir="/dev/shm"))
    with Daemon(folder, tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def there_is_time_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than an engine takes for it: a busy machine may need more than a second to note a namespace."""
    monkeypatch.setattr(client_module, "JOIN_S", JOIN_S)


@pytest.fixture
def engine(daemon: Daemon, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Engines of this test."""

    def make(**settings: Any) -> Engine:
        return Engine(daemon.socket, **{"model": request.node.nodeid} | settings)

    return make

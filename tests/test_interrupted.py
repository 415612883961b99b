"""A call of the client that is broken off, by Ctrl-C or by an error of the engine's own, takes nothing along."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from terracekv.connector import connection
from terracekv.connector.connection import Connection
from terracekv.tests.harness import Daemon


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running


def test_an_interrupt_before_the_request_leaves_the_session_free(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Connection) -> bool:
        raise KeyboardInterrupt

    with daemon.client() as client:
        keys = client.chain(1, 3)
        assert client.put(keys).stored == 3
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "hung_up", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.lookup(keys)
        assert client.get(keys).blocks == 3 and client.troubles == 0


def test_an_engine_that_cannot_pin_the_next_daemons_arena_can_ask_again(daemon: Daemon) -> None:
    attached: list[memoryview] = []

    def attach(view: memoryview) -> Callable[[], None]:
        attached.append(view)
        if len(attached) == 2:
            raise MemoryError("no more memory may be locked")
        return lambda: None

    with daemon.client(attach=attach) as client:
        daemon.kill()
        (daemon.runtime / "arena").unlink()
        daemon.start()
        with pytest.raises(MemoryError):
            client.lookup([])
        client.rejoin()
        assert client.put(client.chain(1, 3)).stored == 3


def test_an_error_of_the_engine_is_told_as_it_is_also_after_the_deadline(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client's clock, which goes on by a minute in the middle of a copy."""
    late_s = [0.0]
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0]))

    def broken(index: int, payload: memoryview) -> None:
        late_s[0] += 60.0
        raise KeyError("the engine's own")

    with daemon.client() as client:
        keys = client.chain(1, 2)
        assert client.put(keys).stored == 2
        with pytest.raises(KeyError):
            client.load(keys, broken)
        client.rejoin()
        with pytest.raises(KeyError):
            client.store(client.chain(2, 2), broken)
        client.rejoin()
        assert client.lookup(client.chain(2, 2)).blocks == 0


def test_without_a_thread_to_join_with_everything_is_a_miss(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, daemon.client() as first:
        keys = first.chain(1, 2)
        daemon.kill()
        patched.setattr(threading.Thread, "start", refused)
        assert first.lookup(keys).reason == "no_daemon"
        client = daemon.client()
        assert client.lookup(keys).reason == "no_daemon"
    with client:
        daemon.start()
        client.rejoin()
        assert client.put(keys).stored == 2

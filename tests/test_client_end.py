"""How a client ends: closed between calls, within one, by a fork."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running


@pytest.mark.parametrize("call", ["close", "forget"])
def test_a_closed_client_misses_and_stays_closed(daemon: Daemon, call: str) -> None:
    client = daemon.client()
    keys = client.chain(1, 2)
    if call == "forget":
        daemon.kill()
        client.lookup(keys)
    client.close()
    client.close()
    assert not client.joined and client.lookup(keys).reason == "no_daemon" and client.put(keys).stored == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("terracekv")]


@pytest.mark.parametrize("call", ["load", "store"])
def test_a_client_that_is_closed_within_its_own_call_ends_with_it(daemon: Daemon, call: str) -> None:
    """As by a copy, or by the handler of a signal that comes meanwhile."""
    client = daemon.client()
    keys = client.chain(1, 2)
    if call == "load":
        client.put(keys)
    copy = threading.Thread(
        target=getattr(client, call), args=(keys, lambda index, payload: client.close()), daemon=True
    )
    copy.start()
    copy.join(30.0)
    assert not copy.is_alive(), "close waits for the call that it is part of"
    assert not client.joined and client.lookup(keys).reason == "no_daemon"
    client.close()


@pytest.mark.fault(67)
def test_a_forked_child_has_its_own_session_and_leaves_its_parents_alone(daemon: Daemon) -> None:
    """Forked in the middle of a store, while another thread waits for its turn."""
    code = f"""
        import os, threading
        from pathlib import Path
        from terracekv.tests.harness import Daemon, payload_of, until
        from terracekv.tests.hosts import is_locked

        daemon = Daemon(Path({str(daemon.runtime)!r}), Path({str(daemon.state)!r}))
        client = daemon.client()
        keys, others = client.chain(1, 3), client.chain(2, 3)
        byte = client._welcome.lock_byte
        assert is_locked(daemon.runtime / "slots", byte)

        def in_the_child():
            assert not client.joined
            client.lookup(others)
            until(lambda: client.joined, "the child joins")
            assert client._welcome.lock_byte != byte
            assert client.put(others).stored == 3 and client.get(others).blocks == 3
            client.close()

        def gather(index, payload):
            payload[:] = payload_of(keys[index], client.block_bytes)
            if index == 1:
                child = os.fork()
                if not child:
                    status = 1
                    try:
                        in_the_child()
                        status = 0
                    finally:
                        os._exit(status)
                assert os.waitpid(child, 0)[1] == 0
                assert is_locked(daemon.runtime / "slots", byte), "the child took its parent's lock away"

        waiting = threading.Thread(target=lambda: client.lookup(keys))
        def store():
            assert client.store(keys, gather).stored == 3
        storing = threading.Thread(target=store)
        storing.start()
        waiting.start()
        storing.join()
        waiting.join()
        assert client.joined and client.troubles == 0
        assert client.get(keys).blocks == 3 and client.get(others).blocks == 3
        client.close()
        assert not is_locked(daemon.runtime / "slots", byte)
        print("all is well")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "all is well\n", done.stderr

"""An engine that stands still in the middle of a copy while the daemon goes, comes back and reuses the memory: what it
read does not count, and what it writes late hits nobody."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon.http_client import Door
from terracekv.tests.harness import Blocks, Daemon, payload_of, until

SLOTS = 16
TINY = {"host__size": "64KiB", "host__slab": "64KiB", "daemon__queue": "1MiB"}
"""An arena of 16 slots of 4 KiB."""


OTHERS = ({"host__slab": "32KiB"}, {"host__size": "128KiB"}, {"host__size": "32KiB", "host__slab": "32KiB"})


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path, **TINY) as running:
        yield running
        assert running.errors() == []


class Pause:
    """A copy that stops at one block until it is told to go on."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._reached = threading.Event()
        self._go_on = threading.Event()

    def here(self, index: int) -> None:
        if index == self._at:
            self._reached.set()
            assert self._go_on.wait(60)

    def wait(self) -> None:
        assert self._reached.wait(60)

    def go_on(self) -> None:
        self._go_on.set()


@contextmanager
def beside(work: Callable[[], None], pause: Pause) -> Iterator[None]:
    """Run ``work`` in a thread until it pauses; let it go on when the block is left, and raise its error."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        pause.wait()
        yield
    finally:
        pause.go_on()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def paused_load(
    client: Blocks, keys: list[bytes], copied: dict[int, bytes], loaded: list[Loaded], at: int = 2
) -> Iterator[None]:
    """A load of ``keys`` that pauses before it copies block ``at``, and goes on when the block is left: ``copied`` is
    what it read by then, and ``loaded`` what came of it."""
    pause = Pause(at)

    def scatter(index: int, payload: memoryview) -> None:
        pause.here(index)
        copied[index] = bytes(payload)

    with beside(lambda: loaded.append(client.load(keys, scatter)), pause):
        yield


def fill(daemon: Daemon, seed: int, blocks: int = SLOTS) -> int:
    """How many blocks another engine gets room for; what it stored comes back whole.

    Durable, since blocks on their way to disk cannot be evicted, and the next one wants all the room too."""
    with daemon.client(model=f"other {seed}") as other:
        keys = other.chain(seed, blocks)
        stored = other.put(keys, durable=True)
        assert other.get(keys).blocks == stored.stored + stored.present
        return stored.stored + stored.present


@pytest.mark.fault(12)
@pytest.mark.fault(7)
def test_bytes_that_were_overwritten_during_the_copy_do_not_count(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 4)
        client.put(keys)
        copied, loaded = dict[int, bytes](), list[Loaded]()
        with paused_load(client, keys, copied, loaded):
            daemon.restart()
            for seed in (2, 3):
                assert fill(daemon, seed) == SLOTS
        assert loaded[0].blocks == 2 and loaded[0].why in ("fenced", "no_daemon")
        assert copied[2] != payload_of(keys[2], client.block_bytes), "it was given another's bytes"
        for index in (0, 1):
            assert copied[index] == payload_of(keys[index], client.block_bytes)
        client.rejoin()
        assert client.put(keys).stored == 4 and client.get(keys) == Loaded(4, None)


@pytest.mark.fault(12)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_daemon_with_another_arena_leaves_the_old_one_to_who_still_reads_it(
    daemon: Daemon, other: dict[str, str]
) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 4)
        client.put(keys)
        copied, loaded = dict[int, bytes](), list[Loaded]()
        with paused_load(client, keys, copied, loaded):
            daemon.restart(**other)
            for seed in (2, 3):
                fill(daemon, seed)
        for index in range(loaded[0].blocks):
            assert copied[index] == payload_of(keys[index], client.block_bytes), "a stale block counted"
        client.rejoin()
        assert client.put(keys).why is None and client.get(keys) == Loaded(4, None)


@pytest.mark.fault(17)
@pytest.mark.parametrize("other", [{}, {"host__slab": "32KiB"}], ids=["the same arena", "another slab"])
def test_a_late_write_damages_no_block_that_was_stored_meanwhile(daemon: Daemon, other: dict[str, str]) -> None:
    with daemon.client() as late, daemon.client(model="others") as client:
        keys, pause = late.chain(1, 4), Pause(at=1)

        def gather(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(keys[index], late.block_bytes)
            pause.here(index)
            payload[:] = b"\xff" * len(payload)

        stored = list[Stored]()
        with beside(lambda: stored.append(late.store(keys, gather)), pause):
            daemon.restart(**other)
            client.rejoin()
            many = client.chain(2, SLOTS)
            room = client.put(many).stored
            assert room == (SLOTS if other else SLOTS - 4), "slots that may still be written to are not handed out"
        assert stored[0].stored == 0 and stored[0].why == "no_daemon"
        assert client.get(many).blocks == room
        late.rejoin()
        assert late.get(keys) == Loaded(0, "absent")
        until(lambda: fill(daemon, 3) == SLOTS, "the slots of the late writer are free again")


@pytest.mark.fault(17)
def test_slots_of_a_writer_that_was_killed_come_back(daemon: Daemon) -> None:
    with writer(daemon, "gather") as process:
        assert fill(daemon, 2) == SLOTS - 4
        daemon.restart()
        assert fill(daemon, 3) == SLOTS - 4, "the process is still there, and may write"
        process.kill()
        process.wait()
        until(lambda: fill(daemon, 4) == SLOTS, "the slots are free again")


@pytest.mark.fault(41)
def test_leases_of_a_reader_that_was_killed_come_back(daemon: Daemon) -> None:
    with daemon.client() as client:
        assert client.put(client.chain(1, 4)).stored == 4
    with writer(daemon, "scatter") as process:
        assert fill(daemon, 2) == SLOTS - 4
        process.kill()
        process.wait()
        until(lambda: fill(daemon, 3) == SLOTS, "the slots are free again")


@contextmanager
def writer(daemon: Daemon, where: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process that stands still in a store (``gather``) or a load (``scatter``) of the chain 1."""
    code = f"""
        import sys
        from pathlib import Path
        from terracekv.tests.harness import Daemon
        client = Daemon(Path({str(daemon.runtime)!r}), Path({str(daemon.state)!r})).client()
        def pause(index, payload):
            print(flush=True)
            sys.stdin.read()
        (client.store if {where!r} == "gather" else client.load)(client.chain(1, 4), pause)
    """
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        yield process
        process.kill()


@pytest.mark.fault(7)
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_daemon_killed_in_the_middle_of_a_load_leaves_what_was_good_so_far(daemon: Daemon, at: int) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 4)
        client.put(keys)
        into = dict[int, bytes]()

        def scatter(index: int, payload: memoryview) -> None:
            if index == at:
                daemon.kill()
            into[index] = bytes(payload)

        loaded = client.load(keys, scatter)
        assert loaded.blocks >= at
        assert all(into[index] == payload_of(keys[index], client.block_bytes) for index in range(loaded.blocks))
        assert client.lookup(keys).reason == "no_daemon"
        daemon.start()
        client.rejoin()
        assert client.get(keys) == Loaded(4, None), "the arena was adopted"


@pytest.mark.fault(1)
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_daemon_killed_in_the_middle_of_a_store_lists_nothing_of_it(daemon: Daemon, at: int) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 4)

        def gather(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(keys[index], client.block_bytes)
            if index == at:
                daemon.kill()

        assert client.store(keys, gather) == Stored(why="no_daemon")
        daemon.start()
        client.rejoin()
        assert client.lookup(keys).blocks == 0 and client.get(keys) == Loaded(0, "absent")
        assert client.put(keys).stored == 4 and client.get(keys) == Loaded(4, None)


def test_a_flush_during_a_copy_leaves_the_copy_whole(daemon: Daemon) -> None:
    """Its bytes were right when it was leased, and nothing may be written over them until it is released."""
    with daemon.client() as client, daemon.client(model="others") as other:
        keys = client.chain(1, 4)
        client.put(keys)
        pause, copied = Pause(at=1), dict[int, bytes]()

        def scatter(index: int, payload: memoryview) -> None:
            pause.here(index)
            copied[index] = bytes(payload)

        loaded = list[Loaded]()
        with beside(lambda: loaded.append(client.load(keys, scatter)), pause):
            flush(daemon, client)
            with daemon.client() as same:
                assert same.lookup(keys).blocks == 0
            assert other.put(other.chain(2, SLOTS)).stored == SLOTS - 4
        assert loaded == [Loaded(4, None)]
        assert all(copied[index] == payload_of(keys[index], client.block_bytes) for index in range(4))
        assert client.lookup(keys).blocks == 0 and client.put(keys).stored == 4


def flush(daemon: Daemon, client: Blocks) -> None:
    assert client.namespace_id is not None
    Door(daemon.runtime).ask("POST", "/v1/flush", {"namespace": client.namespace_id.hex()})

"""The client beside a daemon that is absent, slow, full or talks nonsense: every trouble is a miss, and none raises."""

import inspect
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector import client as client_module
from terracekv.connector.client import Client, Loaded, Stored
from terracekv.connector.connection import Trouble
from terracekv.daemon import protocol
from terracekv.daemon.protocol import Found, Welcome
from terracekv.tests.blocks import in_threads
from terracekv.tests.harness import TOKENS, Blocks, Daemon, payload_of, until

SLOTS = 1024
"""Of 4 KiB in the default arena of a test's daemon."""


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running


def absent(path: Path, **changes: Any) -> Blocks:
    return Daemon(path, path).client(**changes)


def test_the_surface_of_the_client_is_this_and_grows_only_on_purpose() -> None:
    names = {
        name
        for name, value in vars(client_module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == client_module.__name__
    }
    assert names == {"Client", "Loaded", "Stored"} and client_module.Copy
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public == {"joined", "namespace_id", "block_bytes", "keys", "lookup", "load", "store", "close"}
    assert list(inspect.signature(Client).parameters) == [
        "socket", "model", "revision", "dtype", "block_tokens", "layout", "shards", "shard", "credential", "engine",
        "strict", "lookup_budget_ms", "load_deadline_ms", "store_deadline_ms", "attach", "device", "access",
    ]  # fmt: skip
    assert list(inspect.signature(Client.load).parameters) == ["self", "keys", "scatter", "settle", "fetch"]
    assert list(inspect.signature(Client.store).parameters) == ["self", "keys", "gather", "durable", "settle", "first"]


def test_what_was_stored_comes_back(daemon: Daemon) -> None:
    with daemon.client(strict=True) as client:
        keys = client.chain(1, 20)
        assert client.lookup(keys).reason == "absent"
        assert client.put(keys, durable=True) == Stored(stored=20, durable=20)
        assert client.put(keys) == Stored(present=20)
        found = client.lookup(keys)
        assert (found.blocks, found.per_tier, found.reason) == (20, {"host": 20, "disk": 20}, None)
        assert client.get(keys) == Loaded(20, None)
        assert client.get(client.chain(2, 3)) == Loaded(0, "absent")
        assert client.get([*keys[:5], *client.chain(2, 3)]) == Loaded(5, "absent")
        assert client.get([]) == Loaded(0, None) and client.put([]) == Stored() and client.lookup([]).blocks == 0
        assert client.troubles == 0


def test_a_tail_is_stored_only_behind_its_head(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(98, 6)
        assert client.store(keys, lambda index, payload: pytest.fail(), first=3) == Stored(why="head_absent")
        assert client.put(keys[:3]).stored == 3
        written: list[int] = []
        assert client.store(keys, lambda index, payload: written.append(index), first=3) == Stored(3, 3)
        assert written == [3, 4, 5] and client.lookup(keys).blocks == 6


@pytest.mark.fault(13)
@pytest.mark.parametrize("tokens", [0, 1, TOKENS - 1, TOKENS, TOKENS + 1, 5 * TOKENS - 1, 5 * TOKENS])
def test_only_full_blocks_have_names(daemon: Daemon, tokens: int) -> None:
    with daemon.client() as client:
        keys = client.keys(list(range(tokens)))
        assert len(keys) == tokens // TOKENS
        assert client.put(keys).stored == len(keys)
        longer = client.keys(list(range(tokens + 3 * TOKENS)))
        assert client.get(longer).blocks == len(keys)


@pytest.mark.fault(51)
@pytest.mark.fault(59)
def test_without_a_daemon_everything_is_a_miss_until_there_is_one(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path).client() as client:
        assert not client.joined and client.namespace_id is None and client.keys([1] * 8) == []
        keys = [b"k" * 32]
        assert client.lookup(keys).blocks == 0 and client.lookup(keys).reason == "no_daemon"
        assert client.get(keys) == Loaded(0, "no_daemon") and client.put(keys) == Stored(why="no_daemon")
        assert client.troubles == 5 and client.last_trouble
        with Daemon(shm_dir, tmp_path):
            until(lambda: client.joined, "the client joins by itself")
            keys = client.chain(1, 3)
            assert client.put(keys).stored == 3 and client.get(keys).blocks == 3


@pytest.mark.fault(59)
def test_strict_raises_what_otherwise_is_a_miss(daemon: Daemon, shm_dir: Path) -> None:
    with pytest.raises(OSError):
        absent(shm_dir / "nowhere", strict=True)
    with pytest.raises(Trouble, match=r"refused: layout\.axes"):
        daemon.client(strict=True, layout=protocol.Layout("XYZ", "latent", 1, ()))
    with daemon.client(strict=True) as client:
        keys = client.chain(1, 2)
        daemon.kill()
        for call in (client.lookup, client.get, client.put):
            with pytest.raises((OSError, Trouble)):
                call(keys)


def test_what_the_daemon_refuses_is_a_trouble_that_ends_no_session(daemon: Daemon) -> None:
    with daemon.client() as client:
        bad = [b"short"]
        assert client.lookup(bad).reason == "refused" and client.get(bad).why == client.put(bad).why == "refused"
        twice = client.chain(1, 1) * 2
        assert client.get(twice).why == client.put(twice).why == "refused"
        assert client.joined and client.troubles == 5
        assert client.put(client.chain(2, 3)).stored == 3


def test_more_keys_than_one_message_can_have_are_refused_and_end_no_session(daemon: Daemon) -> None:
    with daemon.client() as client:
        session, keys = client._session, [number.to_bytes(32) for number in range(1 << 17)]
        assert client.lookup(keys).reason == client.get(keys).why == client.put(keys).why == "refused"
        assert client._session is session and "ask for fewer keys at once" in str(client.last_trouble)


@pytest.mark.fault(6)
def test_more_than_there_is_room_for_is_stored_and_loaded_as_far_as_it_goes(shm_dir: Path, tmp_path: Path) -> None:
    small = {"host__size": "16KiB", "host__slab": "16KiB", "daemon__queue": "1MiB"}
    with Daemon(shm_dir, tmp_path, **small) as daemon, daemon.client() as client:
        keys = client.chain(1, 10)
        assert client.put(keys, durable=True) == Stored(stored=4, refused=6, durable=4, why="full")
        assert client.get(keys) == Loaded(4, "absent")
        with daemon.client(block_bytes=32 << 10) as huge:
            assert not huge.joined and "larger than a slab" in str(huge.last_trouble)


@pytest.mark.fault(60)
def test_two_clients_of_one_process_have_sessions_of_their_own(daemon: Daemon) -> None:
    with daemon.client() as one, daemon.client() as two, daemon.client(shard=None) as scheduler:
        keys = one.chain(1, 3)
        assert one.put(keys).stored == 3 and two.get(keys).blocks == 3 and scheduler.lookup(keys).blocks == 3
        one.close()
        assert two.get(keys).blocks == 3 and two.put(two.chain(2, 3)).stored == 3
        assert scheduler.put(keys).why == "refused"


def test_threads_share_a_client_in_turns_and_a_lookup_waits_no_longer_than_its_budget(daemon: Daemon) -> None:
    with daemon.client(lookup_budget_ms=50) as client:
        keys = client.chain(1, 4)
        client.put(keys)
        copying, go_on = threading.Event(), threading.Event()

        def scatter(index: int, payload: memoryview) -> None:
            copying.set()
            assert go_on.wait(30)

        def look() -> None:
            assert copying.wait(30)
            try:
                assert client.lookup(keys) == Found(0, 0, {}, 0, "deadline", 0.0)
            finally:
                go_on.set()

        in_threads(lambda: _is(client.load(keys, scatter), Loaded(4, None)), look)
        assert client.joined, "nobody else's request ended the session"
        client.lookup_budget_ms = 10_000
        assert client.lookup(keys).blocks == 4


def _is(found: object, expected: object) -> None:
    assert found == expected


@pytest.mark.fault(59)
def test_an_error_of_the_engine_is_the_engines_and_leaves_nothing_half_stored(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 4)

        def fail(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(keys[index], client.block_bytes)
            if index == 2:
                raise RuntimeError("the engine's own error")

        with pytest.raises(RuntimeError, match="own error"):
            client.store(keys, fail)
        until(lambda: client.joined, "the client joins again")
        assert client.get(keys).why == "absent"
        assert client.put(keys).stored + client.put(keys).present >= 4
        with pytest.raises(RuntimeError, match="own error"):
            client.load(keys, lambda index, payload: fail(2, memoryview(bytearray(payload))))
        until(lambda: client.joined, "the client joins again")
        assert client.get(keys) == Loaded(4, None)


@pytest.mark.fault(7)
@pytest.mark.fault(125)
def test_a_slow_disk_costs_a_load_its_deadline_and_no_more(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as client:
        keys = client.chain(1, 6)
        assert client.put(keys, durable=True).durable == 6
        daemon.kill()
        for name in ("arena", "slots"):
            (shm_dir / name).unlink()
        daemon.restart(failpoints="segment.read*3=sleep:20")
        client.rejoin()
        client.load_deadline_ms = 1000
        loaded = client.get(keys)
        assert loaded.why == "deadline" and loaded.blocks <= 2
        assert client.lookup(keys).blocks == 6 or not client.joined


@pytest.mark.fault(7)
def test_a_block_that_fails_before_its_turn_does_not_keep_the_load_waiting(shm_dir: Path, tmp_path: Path) -> None:
    """Blocks come up side by side: that the sixth fails may be known before the first is there."""
    with told_by_hand(shm_dir) as (path, steps):
        answers: list[protocol.Answer] = [
            protocol.Leased(1, 1, 3, [None, None, None], [0, 1, 2]),
            protocol.Failed(1, [2], "failed"),
            protocol.Ready(1, [1, 0], [protocol.Slot(0, 4096, 0), protocol.Slot(0, 4096, 0)]),
        ]
        steps.append(lambda peer: peer.sendall(b"".join(map(protocol.frame, answers))))
        steps.append(lambda peer: None)  # it has read the Release
        with daemon_like_client(path, load_deadline_ms=20_000) as client:
            assert client.joined, client.last_trouble
            before = time.monotonic()
            assert client.load([b"a" * 32, b"b" * 32, b"c" * 32], lambda index, payload: None) == Loaded(2, "failed")
            assert time.monotonic() - before < 10


NONSENSE: dict[str, Callable[[socket.socket], None]] = {
    "hangs up": lambda peer: None,
    "silence": lambda peer: time.sleep(0.4),
    "not msgpack": lambda peer: peer.sendall(struct.pack("<I", 3) + b"\xc1\xc1\xc1"),
    "half an answer": lambda peer: peer.sendall(protocol.frame(Found(1, 9, {}, None, None, 0.0))[:9]),
    "an answer to nobody": lambda peer: peer.sendall(protocol.frame(Found(99, 9, {}, None, None, 0.0))),
    "another kind of answer": lambda peer: peer.sendall(protocol.frame(protocol.Committed(1, [0], [0]))),
    "a request": lambda peer: peer.sendall(protocol.frame(protocol.Lookup(1, b"", 1))),
    "a web page": lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n<html>"),
    "endless length": lambda peer: peer.sendall(struct.pack("<I", 2**32 - 1) + b"x" * 1000),
    "an error": lambda peer: peer.sendall(protocol.frame(protocol.Error(0, "error", "broken", "mend it"))),
}


@pytest.mark.fault(59)
@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("call", ["lookup", "load", "store"])
def test_nonsense_in_answer_is_a_miss_within_the_deadline(shm_dir: Path, what: str, call: str) -> None:
    with told_by_hand(shm_dir) as (path, steps):
        steps.append(NONSENSE[what])
        budgets = {"lookup_budget_ms": 200, "load_deadline_ms": 200, "store_deadline_ms": 200}
        with daemon_like_client(path, **budgets) as client:
            assert client.joined, client.last_trouble
            keys = [b"a" * 32]
            copied: list[int] = []
            if call == "lookup":
                assert client.lookup(keys).blocks == 0
            elif call == "load":
                assert client.load(keys, lambda index, payload: copied.append(index)).blocks == 0
            else:
                assert client.store(keys, lambda index, payload: copied.append(index)).stored == 0
            assert client.troubles == 1 and not copied


WELCOMES: dict[str, dict[str, object]] = {
    "files that are not there": {"arena": "/nonexistent/arena"},
    "an arena larger than its file": {"arena_bytes": 1 << 30},
    "a table larger than its file": {"slots_bytes": 1 << 30},
}


@pytest.mark.fault(59)
@pytest.mark.parametrize("what", WELCOMES)
def test_a_welcome_to_what_is_not_there_is_no_session(shm_dir: Path, what: str) -> None:
    with told_by_hand(shm_dir, **WELCOMES[what]) as (path, _), daemon_like_client(path) as client:
        assert not client.joined and client.troubles == 1
        assert client.lookup([b"a" * 32]).reason == "no_daemon"


@contextmanager
def told_by_hand(folder: Path, **changes: object) -> Iterator[tuple[Path, list[Callable[[socket.socket], None]]]]:
    """A door that welcomes its first engine and answers its first request as a test says; then it hangs up."""
    for name in ("arena", "slots"):
        (folder / name).write_bytes(bytes(16384))
    welcome: dict[str, object] = {
        "session": 1,
        "namespace_id": bytes(32),
        "epoch": 0,
        "block_bytes": 4096,
        "arena": str(folder / "arena"),
        "arena_bytes": 16384,
        "slots": str(folder / "slots"),
        "slots_bytes": 16384,
        "lock_byte": (1 << 40) + 1,
    }
    steps: list[Callable[[socket.socket], None]] = []
    path = folder / "engine.sock"

    def serve(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        listener.close()
        with peer:
            peer.recv(1 << 16)
            peer.sendall(protocol.frame(Welcome(**(welcome | changes))))  # type: ignore[arg-type]
            for step in steps:
                if peer.recv(1 << 16):
                    step(peer)

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    thread = threading.Thread(target=serve, args=(listener,))
    thread.start()
    try:
        yield path, steps
    finally:
        thread.join()


def daemon_like_client(path: Path, **changes: Any) -> Blocks:
    return Daemon(path.parent, path.parent).client(**changes)

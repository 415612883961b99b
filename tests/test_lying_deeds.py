"""Clients that lie by what they do with the memory and the locks they were given, and with keys that are not theirs.

Of an engine that may write, docs/security.md says what it can do to the others: change what lies in the arena, and cut
that short. What it cannot do is here: be given what others write, take a durable block's place, have the daemon store
or serve from below what is not what was committed, or be the end of more than itself when it leaves.
"""

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from terracekv.connector.arena import Arena
from terracekv.connector.client import Loaded
from terracekv.daemon.http_client import Door
from terracekv.daemon.protocol import (
    Acquire,
    Commit,
    Committed,
    Found,
    GpuMemory,
    Leased,
    Lookup,
    Opened,
    Reserve,
    Reserved,
    frame,
)
from terracekv.tests.gpu_daemon import GPU, gpu_daemon
from terracekv.tests.harness import Daemon, Wire, hello, until
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.liars import KEPT, Stage
from terracekv.tests.lies import BLOCK
from terracekv.tiers.slots import LOCK_BASE

ALL_LOCKS = 1 << 40


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running
        assert running.errors() == [] and running.term() == 0


@contextmanager
def mapped(wire: Wire) -> Iterator[Arena]:
    """The arena, as a session that may write has it."""
    assert wire.welcome is not None
    arena = Arena(wire.welcome)
    try:
        yield arena
    finally:
        arena.close()


def scribbled(arena: Arena, reserved: Reserved | Leased) -> None:
    """Other bytes than any honest client writes, in all slots."""
    for slot in reserved.slots:
        assert slot is not None
        arena.payload(slot, BLOCK)[:] = b"\xa5" * BLOCK


def reserved(wire: Wire, keys: list[bytes]) -> Reserved:
    answer = wire.ask(Reserve(1, b"".join(keys)))
    assert isinstance(answer, Reserved)
    return answer


def committed(wire: Wire, held: Reserved, durable: bool) -> Committed:
    answer = wire.ask(Commit(2, held.reservation, [*range(len(held.slots))], durable))
    assert isinstance(answer, Committed)
    return answer


def of_host(daemon: Daemon, name: str) -> int:
    host = daemon.http("/v1/status")[1]["tiers"]["host"]
    return int(host[name] if name in host else host["details"][name])


def only_disk_outlives(daemon: Daemon) -> None:
    """A new daemon, with nothing in host."""
    Door(daemon.runtime).ask("POST", "/v1/sync")
    daemon.kill()
    (daemon.runtime / "arena").unlink()
    daemon.start()


def of_disk(daemon: Daemon, name: str) -> int:
    return int(daemon.http("/v1/status")[1]["tiers"]["disk"]["counters"][name])


def test_whoever_commits_the_keys_of_another_namespace_takes_no_durable_blocks_place(daemon: Daemon) -> None:
    stage = Stage(daemon, "another")
    with daemon.wire(hello(model="another")) as liar, mapped(liar) as arena:
        held = reserved(liar, stage.kept)
        scribbled(arena, held)
        told = committed(liar, held, durable=True)
        assert told.stored == told.durable == [*range(KEPT)], "blocks of its own"
        stage.nobody_is_harmed()
    stage.close()
    daemon.kill()
    (daemon.runtime / "arena").unlink()
    daemon.start()
    with daemon.client() as honest, daemon.client(model="another") as liars:
        assert honest.get(stage.kept) == Loaded(KEPT, None), "from disk"
        assert liars.lookup(stage.kept).per_tier["disk"] == KEPT, "its own are there beside them"


def test_what_is_scribbled_over_after_its_commit_is_not_served_from_below_nor_after_a_restart(daemon: Daemon) -> None:
    with daemon.client() as honest, daemon.wire(hello()) as liar, mapped(liar) as arena:
        keys = honest.chain(1, KEPT)
        assert honest.put(keys, durable=True).durable == KEPT
        leased = liar.ask(Acquire(1, b"".join(keys), 1000))
        assert isinstance(leased, Leased)
        scribbled(arena, leased)
    daemon.restart()
    with daemon.client() as honest:
        assert honest.get(keys) == Loaded(KEPT, None), "the bytes in host are checked, and come from disk instead"
        host = daemon.http("/v1/status")[1]["tiers"]["host"]
        assert host["counters"]["checksum_failures"] == KEPT


def test_what_was_changed_between_its_commit_and_its_way_down_is_a_miss_there(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path, disk__admission="second_touch") as daemon:
        with daemon.client() as honest, daemon.wire(hello()) as liar, mapped(liar) as arena:
            keys = honest.chain(1, KEPT)
            held = reserved(liar, keys)
            assert len(committed(liar, held, durable=False).stored) == KEPT
            scribbled(arena, held)
            assert isinstance(liar.ask(Acquire(1, b"".join(keys), 1000)), Leased)
            until(lambda: of_disk(daemon, "puts") == KEPT, "they are met again, and written")
        only_disk_outlives(daemon)
        with daemon.client() as honest:
            assert honest.get(keys).blocks == 0, "what is on disk is not what was committed"
            assert honest.put(keys, durable=True).stored == KEPT
            until(lambda: of_disk(daemon, "puts") == KEPT, "the next put heals it, or the end of a late read")
            assert of_disk(daemon, "checksum_failures") == KEPT
        only_disk_outlives(daemon)
        with daemon.client() as honest:
            assert honest.get(keys) == Loaded(KEPT, None), "from disk"


def test_slots_of_a_client_that_left_a_child_are_nobody_elses_until_that_has_ended(daemon: Daemon) -> None:
    stage = Stage(daemon, "m")
    until(lambda: of_host(daemon, "ready_bytes") == of_host(daemon, "capacity_bytes"), "the arena is ready")
    with ExitStack() as open:
        liar = open.enter_context(daemon.wire(hello()))
        assert liar.welcome is not None
        arena = Arena(liar.welcome)
        arena.lock(liar.welcome.lock_byte)
        held = reserved(liar, stage.chain(200))
        child = os.fork()
        if not child:  # has the arena and the lock, and goes on writing
            try:
                liar.socket.close()
                stage.neighbour.socket.close()
                while True:
                    scribbled(arena, held)
            finally:
                os._exit(0)
        open.callback(os.waitpid, child, 0)
        open.callback(os.kill, child, signal.SIGKILL)
        arena.forget()  # as in a process that has ended: the child's lock stays
        liar.socket.close()
        until(lambda: of_host(daemon, "orphaned_blocks") == 200, "the session is over, and its slots are not free")
        for _ in range(5):
            stage.nobody_is_harmed()
        keys = stage.chain(900)
        assert stage.honest.put(keys).why == "full" and stage.honest.get(keys).blocks > 0
    until(lambda: of_host(daemon, "orphaned_blocks") == 0, "its process is gone")
    stage.close()


def test_whoever_locks_the_bytes_of_all_sessions_keeps_their_slots_no_longer_than_it_lives(daemon: Daemon) -> None:
    stage = Stage(daemon, "m")
    with daemon.wire(hello()) as liar, mapped(liar) as arena:
        every = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, LOCK_BASE, ALL_LOCKS, 0)
        fcntl.fcntl(arena._slots_fd, fcntl.F_OFD_SETLK, every)
        with daemon.wire(hello()) as other:
            reserved(other, stage.chain(3))
        until(lambda: of_host(daemon, "orphaned_blocks") == 3, "the daemon takes it for its writer")
        stage.nobody_is_harmed()
    until(lambda: of_host(daemon, "orphaned_blocks") == 0, "the liar is gone")
    stage.close()


def test_whoever_locks_them_for_itself_alone_keeps_new_clients_out_who_join_when_it_is_gone(daemon: Daemon) -> None:
    """Only the daemon's own user can open the table for writing, which this takes."""
    stage = Stage(daemon, "m")
    table = os.open(daemon.runtime / "slots", os.O_RDWR | os.O_CLOEXEC)
    first = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BASE + 100, ALL_LOCKS, 0)
    fcntl.fcntl(table, fcntl.F_OFD_SETLK, first)
    with ExitStack() as open:
        for _ in range(100):
            open.enter_context(daemon.wire(hello()))
        with daemon.client() as late:
            assert not late.joined and late.lookup(stage.kept).reason == "no_daemon", "a miss with a reason"
            stage.nobody_is_harmed()
            os.close(table)
            late.rejoin()
            assert late.get(stage.kept) == Loaded(KEPT, None)
    stage.close()


def test_what_was_handed_out_before_a_flush_is_worth_nothing_after_it(daemon: Daemon) -> None:
    """A session goes on as if the epoch were the one that Welcome told it."""
    stage = Stage(daemon, "another")
    with daemon.wire(hello(model="another")) as liar:
        assert liar.welcome is not None
        keys = stage.chain(2)
        held = reserved(liar, keys[:1])
        assert committed(liar, reserved(liar, keys[1:]), durable=True).durable == [0]
        leased = liar.ask(Acquire(1, keys[1], 1000))
        assert isinstance(leased, Leased) and leased.blocks == 1
        Door(daemon.runtime).ask("POST", "/v1/flush", {"namespace": liar.welcome.namespace_id.hex()})
        assert committed(liar, held, durable=True) == Committed(2, [], [])
        for key in keys:
            found = liar.ask(Lookup(3, key, 1000))
            assert isinstance(found, Found) and found.blocks == 0
            again = liar.ask(Acquire(4, key, 1000))
            assert isinstance(again, Leased) and again.blocks == 0
        stage.nobody_is_harmed()
    stage.close()


def test_descriptors_that_nobody_asked_for_are_not_kept(daemon: Daemon) -> None:
    stage = Stage(daemon, "m")
    with daemon.wire(hello()) as liar:
        before = daemon.descriptors()
        for id in range(50):
            socket.send_fds(liar.socket, [frame(Lookup(id, b"", 1000))], [liar.socket.fileno()] * 8)
            assert isinstance(liar.read(), Found)
        assert daemon.descriptors() <= before
        stage.nobody_is_harmed()
    stage.close()


def test_an_arena_that_is_removed_serves_on_and_one_cut_short_costs_no_durable_block(
    shm_dir: Path, tmp_path: Path
) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        stage = Stage(daemon, "m")
        with daemon.wire(hello()) as liar:
            held = reserved(liar, stage.chain(2))
            os.truncate(daemon.runtime / "arena", 0)
            liar.tell(Commit(2, held.reservation, [0, 1]))
            assert daemon.wait() == -signal.SIGBUS, "as docs/operations.md says"
        stage.neighbour.socket.close()
        stage.honest.close()
        daemon.start()
        again = Stage(daemon, "m")
        assert again.honest.get(stage.kept) == Loaded(KEPT, None)
        for name in ("arena", "slots"):
            (daemon.runtime / name).unlink()
        again.nobody_is_harmed()
        again.close()


@pytest.mark.skipif(COMPILER is None, reason=WITHOUT)
def test_a_gpus_memory_is_nobodys_who_only_says_so(shm_dir: Path, tmp_path: Path) -> None:
    """Neither of those who were not offered it and say that they have it open, nor of sessions that may not write: what
    CUDA opens can be written to."""
    (world := tmp_path / "gpu").mkdir()
    with gpu_daemon(shm_dir, tmp_path, world) as daemon:
        liars = (
            {"gpu": GPU, "access": "read"},
            {"gpu": GPU, "shard": None},
            {"gpu": GPU[:-1] + "9"},
            {"gpu": ""},
        )
        for lie in liars:
            with daemon.wire(hello(**lie)) as liar:
                assert liar.welcome is not None and liar.welcome.gpu is None, lie
                liar.tell(Opened(None))
                assert isinstance(liar.ask(Acquire(1, b"", 1000, True)), Leased)
                (told,) = daemon.http("/v1/status")[1]["sessions"]
                assert told["transport"] == "arena", lie
            until(lambda: not daemon.http("/v1/status")[1]["sessions"], "it has left")
        forged = "\n2026-01-01T00:00:00.000Z ERROR TKV-INTERNAL forged"
        with daemon.wire(hello(gpu=GPU, engine=forged)) as undecided:
            assert undecided.welcome is not None and isinstance(undecided.welcome.gpu, GpuMemory)
            undecided.tell(Opened(forged))
            undecided.tell(Opened(None))
            assert isinstance(undecided.ask(Acquire(1, b"", 1000, True)), Leased)
            (told,) = daemon.http("/v1/status")[1]["sessions"]
            assert told["transport"] == "arena", "who could not open it is never given such slots"
            assert told["transport_reason"].isprintable() and "forged" in told["transport_reason"]
        assert "forged" in daemon.tail()
        assert not any(line.startswith("2026-01-01") for line in daemon.tail().splitlines()), "one line is one event"


@pytest.mark.skipif(COMPILER is None, reason=WITHOUT)
def test_made_up_reasons_use_up_nobodys_warning(shm_dir: Path, tmp_path: Path) -> None:
    (world := tmp_path / "gpu").mkdir()
    with gpu_daemon(shm_dir, tmp_path, world) as daemon:

        def engine(gpu: str, why: str) -> None:
            with daemon.wire(hello(gpu=gpu)) as wire:
                wire.tell(Opened(why))
                assert isinstance(wire.ask(Lookup(1, b"", 1000)), Found)

        for number in range(70):
            engine(f"GPU-{number}", "")
            engine(GPU, f"reason {number}")
        engine(GPU, "CUDA does not open memory of the daemon (cudaErrorMapBufferObjectFailed)")
        warnings = [line for line in daemon.log.read_text().splitlines() if "TKV-GPU-NOT-SHARED" in line]
        assert len(warnings) == 3 and "GPU-0" in warnings[0] and "reason 0" in warnings[1]
        assert "cudaErrorMapBufferObjectFailed" in warnings[2]

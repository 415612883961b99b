"""The daemon's life: killed, stopped, told to end, started twice, started without room; and engines that join again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.tests.blocks import in_threads
from terracekv.tests.harness import MIB, Daemon, payload_of, until
from terracekv.tests.test_stuck import flush_host


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running
        assert running.errors() == []


@pytest.mark.fault(49)
@pytest.mark.parametrize("how", ["term", "kill"])
@pytest.mark.parametrize("lost", ["nothing", "shared memory"])
def test_two_hundred_durable_blocks_are_there_after_a_restart(daemon: Daemon, how: str, lost: str) -> None:
    with daemon.client() as client:
        chains = [client.chain(seed, 20) for seed in range(10)]
        for chain in chains:
            assert client.put(chain, durable=True) == Stored(stored=20, durable=20)
        if how == "term":
            assert daemon.term() == 0
        else:
            daemon.kill()
        if lost == "shared memory":
            for name in os.listdir(daemon.runtime):
                (daemon.runtime / name).unlink()
        daemon.start()
        client.rejoin()
        for chain in chains:
            found = client.lookup(chain)
            assert found.blocks == 20 and found.per_tier["host"] == (20 if lost == "nothing" else 0)
            assert client.get(chain) == Loaded(20, None)


@pytest.mark.fault(54)
def test_killed_five_times_it_starts_a_sixth_with_one_arena_and_all_its_blocks(daemon: Daemon) -> None:
    with daemon.client() as client:
        chains = []
        for seed in range(5):
            chains.append(client.chain(seed, 10))
            assert client.put(chains[-1]).stored == 10, "not durable: only the arena has it for certain"
            daemon.restart()
            client.rejoin()
        assert all(client.get(chain) == Loaded(10, None) for chain in chains)
    here = {name: (daemon.runtime / name).stat().st_size for name in os.listdir(daemon.runtime)}
    assert here.keys() == {"arena", "slots", "owner.lock", "engine.sock", "http.sock"}
    assert here["arena"] == 4 * MIB
    assert daemon.term() == 0
    assert set(os.listdir(daemon.runtime)) == {"arena", "slots", "owner.lock"}


@pytest.mark.fault(51)
def test_engines_join_again_by_themselves(daemon: Daemon) -> None:
    with daemon.client() as client, daemon.client(model="another") as other:
        keys = client.chain(1, 5)
        client.put(keys)
        for _ in range(2):
            daemon.kill()
            assert client.lookup(keys).reason == "no_daemon" and client.get(keys) == Loaded(0, "no_daemon")
            daemon.start()
            client.rejoin()
            other.rejoin()
            assert client.get(keys) == Loaded(5, None)
            assert other.put(other.chain(2, 5)).stored + other.put(other.chain(2, 5)).present >= 5


@pytest.mark.fault(52)
def test_a_daemon_that_stands_still_costs_one_budget_and_is_joined_when_it_goes_on(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 5)
        client.put(keys)
        client.lookup_budget_ms = 100
        daemon.stop()
        before = time.monotonic()
        assert client.lookup(keys).reason == "deadline"
        assert not client.joined, "nobody asks it again until it answers"
        for call in (client.lookup, client.get, client.put):
            assert "no_daemon" in str(call(keys))
        assert time.monotonic() - before < 25, "far more than a budget, and less than a load or a store may take"
        assert client.last_trouble
        daemon.cont()
        client.lookup_budget_ms = 10_000
        client.rejoin()
        assert client.get(keys) == Loaded(5, None)


@pytest.mark.fault(52)
def test_a_daemon_that_stands_still_in_a_load_or_store_costs_its_deadline(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys, others = client.chain(1, 3), client.chain(2, 3)
        assert client.put(keys).stored == 3

        def gather(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(others[index], client.block_bytes)
            daemon.stop()

        client.store_deadline_ms = 1000
        assert client.store(others, gather) == Stored(why="deadline") and not client.joined
        daemon.cont()
        client.rejoin()
        assert client.get(keys) == Loaded(3, None)
        assert client.get(others).blocks in (0, 3), "the daemon may have read the commit, and then it is whole"
        daemon.stop()
        client.load_deadline_ms = 300
        assert client.get(keys) == Loaded(0, "deadline")
        daemon.cont()
        client.rejoin()


@pytest.mark.fault(55)
def test_told_to_end_it_lets_a_store_end_and_does_not_wait_for_the_idle(daemon: Daemon) -> None:
    with daemon.client() as client, daemon.client(model="idle") as idle:
        keys = client.chain(1, 3)
        assert idle.joined

        def gather(index: int, payload: memoryview) -> None:
            payload[:] = payload_of(keys[index], client.block_bytes)
            if index == 1:
                daemon.signal(signal.SIGTERM)
                until(lambda: "taking no more work" in daemon.tail(), "the daemon is on its way down")

        assert client.store(keys, gather, durable=True) == Stored(stored=3, durable=3)
        assert daemon.wait() == 0
        assert idle.lookup([]).reason == "no_daemon"
        daemon.start()
        client.rejoin()
        assert client.get(keys) == Loaded(3, None) and client.lookup(keys).per_tier["disk"] == 3


@pytest.mark.fault(55)
def test_it_ends_within_its_grace_although_an_engine_never_commits(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path, daemon__drain_s="0.2") as daemon, daemon.client() as client:
        ended = threading.Event()

        def gather(index: int, payload: memoryview) -> None:
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0
            ended.set()

        assert client.store(client.chain(1, 2), gather).stored == 0 and ended.is_set()


@pytest.mark.fault(63)
@pytest.mark.parametrize("shared", ["runtime", "state", "both"])
@pytest.mark.parametrize("disk", ["true", "false"])
def test_a_second_daemon_on_the_same_folder_says_so_and_harms_nobody(daemon: Daemon, shared: str, disk: str) -> None:
    other = Daemon(daemon.runtime, daemon.state, disk__enabled=disk)
    if shared == "state":
        other.settings["daemon.runtime_dir"] = str(daemon.runtime / "other")
    if shared == "runtime":
        other.settings["daemon.state_dir"] = str(daemon.state / "other")
    other.log = daemon.state / "other.log"
    with daemon.client() as client:
        keys = client.chain(1, 3)
        client.put(keys)
        other.launch()
        try:
            assert other.wait() == 1
        finally:
            other.kill()
        assert "Traceback" not in other.tail() and "stop that daemon" in other.tail()
        assert client.get(keys) == Loaded(3, None) and client.troubles == 0


@pytest.mark.fault(83)
def test_where_there_is_no_room_it_says_so_with_numbers_and_does_not_die_of_a_signal(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=2m none /mnt && exec "$@"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs in a user namespace")
    settings = ["daemon.runtime_dir=/mnt/run", f"daemon.state_dir={tmp_path}", "daemon.http=", "host.slab=1MiB"]
    flags = [part for setting in [*settings, "host.size=64MiB"] for part in ("--set", setting)]
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-m", "terracekv.daemon", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "host.size" in done.stderr and "64MiB" in done.stderr and "2MiB" in done.stderr, done.stderr


@pytest.mark.fault(39)
@pytest.mark.fault(123)
def test_five_times_what_fits_goes_through_in_bounded_memory(shm_dir: Path, tmp_path: Path) -> None:
    size = 8 * MIB
    sizes = {"host__size": f"{size}", "disk__size": "32MiB", "daemon__queue": "2MiB"}
    with Daemon(shm_dir, tmp_path, **sizes) as daemon, daemon.client(block_bytes=64 << 10) as client:
        before = daemon.memory_bytes()["anonymous"]
        for seed in range(5 * 8):
            stored = client.put(client.chain(seed, 16))
            assert stored.stored == 16, stored
        memory = daemon.memory_bytes()
        assert memory["anonymous"] - before < 32 * MIB
        assert memory["shared"] < size + size // 16
        newest = client.chain(39, 16)
        assert client.lookup(newest).per_tier["host"] == 16 and client.get(newest) == Loaded(16, None)
        assert client.lookup(client.chain(0, 16)).per_tier["host"] == 0
        on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
        assert on_disk < 34 * MIB and daemon.errors() == []


@pytest.mark.fault(41)
def test_ten_thousand_lookups_over_the_socket_hold_nothing(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 8)
        client.put(keys)
        for _ in range(10_000):
            client.lookup(keys)
        assert client.lookup(keys).blocks == 8
        assert client.put(client.chain(2, 1024)).stored == 1024, "every slot could be had"


def test_many_engines_at_once_through_restarts_see_only_their_own_bytes(daemon: Daemon) -> None:
    """Four engines store and load while the daemon is killed under them; nothing they count is wrong."""
    stop = threading.Event()
    good = [0]

    def engine(seed: int) -> None:
        with daemon.client(model=f"m{seed % 2}") as client:
            number = 0
            while not stop.is_set():
                number = (number + 1) % 7
                keys = client.chain(number, 6)
                client.put(keys)
                good[0] += client.get(keys).blocks
                if not client.joined:
                    time.sleep(0.01)

    def reaper() -> None:
        try:
            for _ in range(4):
                enough = good[0] + 50
                until(lambda enough=enough: good[0] > enough, "engines go on")  # type: ignore[misc]
                daemon.restart()
        finally:
            stop.set()

    in_threads(*(lambda seed=seed: engine(seed) for seed in range(4)), reaper)


@pytest.mark.fault(76)
def test_lookups_do_not_wait_for_eight_reads_that_stand_still(daemon: Daemon) -> None:
    """Every worker is inside a read; each lookup is one request, whatever the length of the prompt."""
    with daemon.client() as client:
        on_disk, in_host = client.chain(1, 8), client.chain(2, 512)
        assert client.put(on_disk, durable=True).durable == 8
    daemon.kill()
    for name in os.listdir(daemon.runtime):
        (daemon.runtime / name).unlink()
    daemon.restart(daemon__io_threads="8", daemon__stuck_s="60", failpoints="segment.read=sleep:30")
    with daemon.client() as client, daemon.client(load_deadline_ms=300) as reader:
        assert client.put(in_host).stored == 512
        assert reader.get(on_disk) == Loaded(0, "deadline"), "eight reads have begun"
        for _ in range(50):
            found = client.lookup(in_host)
            assert (found.blocks, found.reason) == (512, None)


@pytest.mark.parametrize("name", ["arena", "slots", "engine.sock"])
def test_a_file_that_engines_need_and_somebody_removed_is_missed_at_once(daemon: Daemon, name: str) -> None:
    assert daemon.http("/readyz")[0] == 200
    (daemon.runtime / name).unlink()
    until(lambda: daemon.http("/readyz")[0] == 503, "the daemon noticed")
    assert f"{name} in {daemon.runtime} was removed" in str(daemon.http("/readyz")[1])
    assert [line for line in daemon.errors() if name in line]
    daemon.log.write_text("")


def test_a_host_tier_counts_what_it_served(daemon: Daemon) -> None:
    with daemon.client() as client:
        chain = client.chain(1, 8)
        client.put(chain)
        assert client.get(chain).blocks == 8
    assert daemon.http("/v1/status")[1]["tiers"]["host"]["counters"]["hits"] == 8


def test_a_state_folder_that_cannot_be_written_refuses_new_namespaces_and_keeps_the_old(daemon: Daemon) -> None:
    with daemon.client() as client:
        (daemon.state / "state" / "namespaces.new").mkdir()
        with daemon.client(model="another") as other:
            assert not other.joined and "cannot be noted" in str(other.last_trouble)
        chain = client.chain(1, 8)
        assert client.put(chain).stored == 8


def test_a_model_without_a_name_is_refused(daemon: Daemon) -> None:
    with daemon.client(model="") as client:
        assert not client.joined and "model: empty" in str(client.last_trouble)


def test_what_is_used_all_the_time_in_host_outlives_its_segment_on_disk(shm_dir: Path, tmp_path: Path) -> None:
    """It is never read from disk, and is what one would miss most after the machine was started anew. But when the
    catalog must grow, a segment goes at once and unread, and that may be the one: so it has more than one try."""
    small = {"host__size": "1MiB", "disk__size": "8MiB"}
    with Daemon(shm_dir, tmp_path, **small) as daemon, daemon.client() as client:
        hot = client.chain(0, 8)
        for attempt in range(3):
            client.put(hot, durable=True)
            for number in range(1, 41):
                client.put(client.chain(100 * attempt + number, 64), durable=True)
                assert client.get(hot).blocks == 8
            flush_host(daemon)
            first = client.chain(100 * attempt + 1, 64)
            assert client.lookup(first).blocks == 0, "the disk has been filled more than once"
            if client.lookup(hot).per_tier == {"host": 0, "disk": 8}:
                break
        assert client.get(hot).blocks == 8

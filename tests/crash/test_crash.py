"""The daemon as a process, killed: what was durable stays, nothing wrong is served, nothing leaks, engines come back.

TERRACEKV_TEST_CRASH_ROUNDS makes more rounds of it; so does ``python -m terracekv.tests.crash.rounds``.
"""

import os
import shutil
from pathlib import Path

import pytest

from terracekv.tests.crash.rounds import EVICTING, Rounds, disk_bytes_for, named_lines
from terracekv.tests.harness import MIB, Daemon, until

ROUNDS = int(os.environ.get("TERRACEKV_TEST_CRASH_ROUNDS", "20"))
BLOCKS = 200


@pytest.mark.long
@pytest.mark.timeout(60 + 30 * ROUNDS)
@pytest.mark.fault(49)
@pytest.mark.fault(54)
def test_killed_at_every_named_line_and_at_random_it_keeps_what_was_durable(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in named_lines() if line not in EVICTING]
    rounds = Rounds(shm_dir, tmp_path, seed=int.from_bytes(os.urandom(4)), disk_bytes=disk_bytes_for(ROUNDS))
    summary = rounds.run(ROUNDS, lines)
    with capsys.disabled():
        print(f"\n{summary}")
    assert not summary.missed
    assert summary.durable and summary.verified >= summary.durable


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.fault(11)
def test_killed_while_it_evicts_it_serves_right_bytes_or_none(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = Rounds(shm_dir, tmp_path, seed=int.from_bytes(os.urandom(4)), disk_bytes=8 * MIB, keeps_all=False)
    summary = rounds.run(2, sorted(EVICTING))
    with capsys.disabled():
        print(f"\n{summary}")
    assert summary.reached == EVICTING


@pytest.mark.fault(50)
def test_a_lost_catalog_is_rebuilt_from_the_segments_and_every_byte_stays_accounted(
    shm_dir: Path, tmp_path: Path
) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as client:
        keys = client.chain(1, BLOCKS)
        assert client.put(keys, durable=True).durable == BLOCKS
        daemon.kill()
        shutil.rmtree(shm_dir)
        disk = tmp_path / "state" / "disk"
        before = sorted(path.name for path in (disk / "segments").iterdir())
        shutil.rmtree(disk / "catalog")
        daemon.start()
        until(lambda: client.lookup(keys).blocks == BLOCKS, "all blocks are listed again")
        assert client.get(keys).blocks == BLOCKS
        assert sorted(path.name for path in (disk / "segments").iterdir()) == before

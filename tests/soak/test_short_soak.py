"""Half a minute of all at once: kills, outages, faults, evictions, several namespaces, tenants and ranks."""

import os
from pathlib import Path

import pytest

from terracekv.tests.seaweed import program
from terracekv.tests.soak.run import soak


@pytest.mark.long
@pytest.mark.fault(3)
@pytest.mark.fault(49)
@pytest.mark.timeout(300)
@pytest.mark.skipif(program() is None, reason="SeaweedFS is not installed")
def test_whatever_happens_at_once_bytes_are_right_and_what_was_durable_stays(
    shm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = soak(shm_dir, tmp_path, minutes=0.5, seed=int.from_bytes(os.urandom(4)))
    with capsys.disabled():
        print(f"\n{summary}")
    assert not summary.violations
    assert summary.daemon_kills and summary.s3_outages and summary.read and summary.durable_blocks

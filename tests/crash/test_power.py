"""After a loss of power: what is listed can be read, and what was synced is there.

TERRACEKV_TEST_POWER_CUTS makes more cuts of it.
"""

import os
import random
from pathlib import Path

import pytest

from terracekv.tests.crash.power import COMPILER, lose_power, recorded
from terracekv.tests.crash.power_work import BLOCKS

CUTS = int(os.environ.get("TERRACEKV_TEST_POWER_CUTS", "40"))


@pytest.mark.long
@pytest.mark.fault(69)
@pytest.mark.timeout(60 + 10 * CUTS)
@pytest.mark.parametrize("direct", ["off", "auto"])
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler to record what the tier and LMDB write")
def test_power_may_go_at_any_call(tmp_path: Path, direct: str, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int.from_bytes(os.urandom(4))
    ops = recorded(tmp_path / "run", tmp_path / "log", tmp_path / "recorder.so", str(seed), direct)
    kinds = {op.kind for op in ops}
    assert kinds >= set("CMWTASR"), f"only {kinds} were recorded"
    cuts = set(random.Random(seed).sample(range(len(ops)), min(CUTS, len(ops))))
    (tmp_path / "images").mkdir()
    found = lose_power(ops, cuts, tmp_path / "images", seed, BLOCKS)
    with capsys.disabled():
        print(f"\npower: seed {seed}, {len(ops)} calls, {found}")
    assert found.listed and found.required

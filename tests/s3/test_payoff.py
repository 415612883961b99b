"""``terracekv bench`` with a bucket: it is measured, too, and nothing but what was there before is left in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terracekv.tests.s3_stub import BUCKET, S3Stub

COMMAND = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()", "bench"]
SMALL = "--layers 2 --kv-heads 2 --head-dim 16 --block-tokens 16 --tokens 64,128 --rounds 2 --json".split()


@pytest.mark.fault(121)
@pytest.mark.parametrize("prefix", ["", "kv/blocks"])
def test_the_bucket_gives_a_prompt_back_and_keeps_nothing_of_the_bench(
    stub: S3Stub, shm_dir: Path, tmp_path: Path, prefix: str
) -> None:
    at = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
    at |= {"TERRACEKV_DAEMON_RUNTIME_DIR": str(shm_dir / "run"), "TERRACEKV_DAEMON_STATE_DIR": str(tmp_path / "state")}
    at |= {"TERRACEKV_DISK_SEGMENT": "1MiB", "TERRACEKV_DISK_FREE_FLOOR": "0", "TERRACEKV_S3_PREFIX": prefix}
    at |= {"TERRACEKV_S3_ENABLED": "true", "TERRACEKV_S3_ENDPOINT": stub.endpoint, "TERRACEKV_S3_BUCKET": BUCKET}
    at |= {"TERRACEKV_S3_CREDENTIALS_FILE": str(stub.credentials)}
    before = set(stub.objects)
    done = subprocess.run(
        [*COMMAND, *SMALL, "--prefill-rate", "10"], capture_output=True, text=True, env=at, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["tiers"]) == ["host", "disk", "s3"] and report["notes"] == []
    for name, tier in report["tiers"].items():
        assert tier["ms"].keys() == {"64", "128"}, (name, tier)
    assert report["tiers"]["s3"]["pays_from"] is not None, "ten tokens a second are slower than any bucket"
    assert stub.asked["PUT"] >= 8 and set(stub.objects) == before
    assert not [path for path in (*shm_dir.rglob("*"), *tmp_path.rglob("*")) if "terracekv-bench" in path.name]

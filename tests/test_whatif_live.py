"""A real daemon under real engines: what more memory would buy, the lookup log, and a policy that it chooses itself."""

import os
import subprocess
import sys
from pathlib import Path

from terracekv.daemon.traces import read_trace
from terracekv.tests.harness import Daemon, until

RUN = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()"]


def test_what_engines_look_up_is_told_logged_and_decides_the_policy(shm_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "lookups.jsonl"
    settings = {"daemon.lookup_log": str(log), "host.eviction": "auto", "disk.admission": "auto"}
    with Daemon(shm_dir, tmp_path, **{key.replace(".", "__"): value for key, value in settings.items()}) as daemon:
        with daemon.client() as client:
            chains = [client.chain(seed, 12) for seed in range(60)]
            for chain in chains + chains:
                if client.lookup(chain).blocks < 12:
                    client.put(chain)
        until(lambda: daemon.http("/v1/whatif")[1]["requests"] == 120, "all lookups were looked at")
        _, answer = daemon.http("/v1/whatif")
        assert answer["asked_blocks"] == 1440 and answer["passed_over"] == 0 and answer["block_bytes"] == 4096
        hits = [point["hits"] for point in answer["curve"]]
        assert hits == sorted(hits) and 0.3 < hits[-1] <= 0.6
        _, status = daemon.http("/v1/status")
        assert status["policies"]["host"]["contest"]["policy"] in ("lru/all", "frequency/all")
        assert status["policies"]["disk"]["contest"]["candidates"].keys() == {"lru/all", "lru/second_touch"}
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 120, "the log is written")
        trace = read_trace(log)
        assert (len(trace.chains), trace.unique, trace.block_bytes) == (120, 720, 4096)
        environ = os.environ | {"TERRACEKV_DAEMON_RUNTIME_DIR": str(daemon.runtime)}
        shown = subprocess.run([*RUN, "whatif"], capture_output=True, text=True, env=environ, timeout=60)
        assert shown.returncode == 0 and "120 requests" in shown.stdout and "host of" in shown.stdout
        replayed = subprocess.run(
            [*RUN, "simulate", str(log), "--sizes", "100%"], capture_output=True, text=True, timeout=60
        )
        assert replayed.returncode == 0 and "0.500" in replayed.stdout
        assert daemon.errors() == []

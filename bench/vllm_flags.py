"""How vLLM is started here, in tests and in measurements: its environment and its one JSON flag.

Standard library only.
"""

import os
from pathlib import Path
from typing import Any

CORES = sorted(os.sched_getaffinity(0))
CONNECTOR = "terracekv.connector.vllm"


def environment(ranks: int = 1, kv_gib: int = 1) -> dict[str, str]:
    """For an engine whose every rank has one core. Unless told, vLLM takes another number of cores when it has a
    connector, which changes its speed and the last digits of what it computes; and nearly all memory."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:ranks])),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def transfer(socket: Path, **options: Any) -> dict[str, Any]:
    """The value of ``--kv-transfer-config``; ``options`` are the connector's."""
    return {
        "kv_connector": "TerraceConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket)} | options,
    }

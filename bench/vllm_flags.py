"""How vLLM is started here, in tests and in measurements: its environment and its one JSON flag.

Standard library only.
"""

from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else it takes nearly all memory
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # else a connector changes how many cores vLLM takes, and so speed and tokens
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
CONNECTOR = "terracekv.connector.vllm"


def transfer(socket: Path, **options: Any) -> dict[str, Any]:
    """The value of ``--kv-transfer-config``; ``options`` are the connector's."""
    return {
        "kv_connector": "TerraceConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket)} | options,
    }

"""The connector behind another in vLLM's MultiConnector, which tells all of them what the first one's workers say."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

from terracekv.bench.vllm_flags import transfer  # noqa: E402
from terracekv.tests.harness import Daemon  # noqa: E402
from terracekv.tests.vllm_engine import BLOCK, OPTIONS, Engine, expected, plain, prompt  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def reference() -> None:
    plain()


@dataclass
class Greeting(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What nobody but a ``Greeter`` understands."""


class Greeter(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector that has workers to introduce, and caches nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def get_handshake_metadata(self) -> Greeting:
        return Greeting()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        assert all(isinstance(said, Greeting) for said in metadata.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


def test_behind_a_connector_whose_workers_introduce_themselves_it_caches_from_the_second_step_on(
    shm_dir: Path, tmp_path: Path
) -> None:
    tokens = prompt(500, 1)
    with Daemon(shm_dir, tmp_path) as daemon:
        greeter = {"kv_connector": "Greeter", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
        both = {"connectors": [greeter, transfer(daemon.socket, **OPTIONS)]}
        settings = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        with Engine(kv_transfer_config=settings | {"kv_connector_extra_config": both}) as engine:
            engine.answer(prompt(BLOCK, 2))
            for cached in (0, (len(tokens) - 1) // BLOCK * BLOCK):
                answered = engine.answer(tokens)
                assert (answered.tokens, answered.cached) == (expected(tokens), cached)
                engine.forget()

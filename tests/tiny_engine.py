"""An engine in miniature for the tests of the transformers connector: random models of a few thousand weights, and
the client's surface over a dict. Used by tests only; imports torch, transformers and the connector.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from terracekv.connector import transformers as connector
from terracekv.connector.client import Loaded, Stored
from terracekv.connector.transformers import TerraceCache
from terracekv.daemon.protocol import Found, Layout
from terracekv.tiers.block import block_keys, namespace_id

torch.set_num_threads(1)  # the models are tiny: a second thread would mostly wait

BLOCK = 8
VOCABULARY = 199


class MemoryClient:
    """The client's surface over a dict. ``good`` is how many blocks a load gets right before it fails."""

    blocks: ClassVar[dict[bytes, bytes]] = {}
    good: ClassVar[int | None] = None

    def __init__(
        self,
        socket: str | Path,
        *,
        model: str,
        revision: str,
        dtype: str,
        block_tokens: int,
        layout: Layout,
        engine: str,
    ) -> None:
        assert layout.problem(block_tokens) is None
        self.block_tokens, self.layout, self.dtype = block_tokens, layout, dtype
        self.namespace = namespace_id(
            model=model, revision=revision, dtype=dtype, layout=layout.digest(), block_tokens=block_tokens
        )
        self.loads: list[int] = []
        self.stores: list[tuple[int, int]] = []

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        return block_keys(self.namespace, tokens, self.block_tokens)

    def lookup(self, keys: Sequence[bytes]) -> Found:
        present = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        return Found(0, present, {"host": present}, present, "absent" if present < len(keys) else None, 0.0)

    def load(self, keys: Sequence[bytes], scatter: Callable[[int, memoryview], None]) -> Loaded:
        self.loads.append(len(keys))
        for index, key in enumerate(keys):
            if index == self.good:
                scatter(index, memoryview(b"\x7f" * len(self.blocks[key])))
                return Loaded(index, "damaged")
            scatter(index, memoryview(self.blocks[key]))
        return Loaded(len(keys), None)

    def store(self, keys: Sequence[bytes], gather: Callable[[int, memoryview], None], durable: bool = False) -> Stored:
        fresh = [index for index, key in enumerate(keys) if key not in self.blocks]
        for index in fresh:
            payload = bytearray(self.layout.block_bytes)
            gather(index, memoryview(payload))
            self.blocks[keys[index]] = bytes(payload)
        self.stores.append((len(keys), len(fresh)))
        return Stored(len(fresh), len(keys) - len(fresh))

    def close(self) -> None:
        pass


def use_memory_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the connector's client is the one above, and the store is empty."""
    monkeypatch.setattr(connector, "Client", MemoryClient)
    MemoryClient.blocks.clear()


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


MODEL = tiny()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cached(model: PreTrainedModel, **options: Any) -> TerraceCache:
    return TerraceCache(model, socket="unused", block_tokens=BLOCK, **options)


def answer(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> list[int]:
    out: list[int] = model.generate(input_ids, do_sample=False, max_new_tokens=12, **kwargs)[0].tolist()
    return out


def answer_with(terrace: TerraceCache, input_ids: torch.Tensor, **kwargs: Any) -> tuple[list[int], Any]:
    output, report = terrace.generate(input_ids, do_sample=False, max_new_tokens=12, **kwargs)
    return output[0].tolist(), report

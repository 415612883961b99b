"""What the miniature of vLLM in ``mock_engine.py`` computes with: requests, a pool of pages, and ranks with memory.

The KV of a token is a digest of all tokens up to it, and a sampled token a digest of the KV that was read for it: so a
wrong byte anywhere in a page shows in the answer. Called by ``mock_engine`` from one thread. Imports the connector and
NumPy.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from terracekv.connector import vllm_start
from terracekv.connector.vllm_layout import GroupSpec, Pages
from terracekv.connector.vllm_memory import InHost, Memory
from terracekv.connector.vllm_options import Options
from terracekv.connector.vllm_start import Introduction
from terracekv.connector.vllm_worker import WorkerHalf

ITEM = 8
"""Bytes of a token in one layer."""
LAYERS = 2
BLOCK = 8
PAGE = 4


@dataclass(eq=False)
class Request:
    """What the connector reads of vLLM's request, and what the engine keeps about it."""

    request_id: str
    all_token_ids: list[int]
    answer_tokens: int = 2
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    cache_salt: str | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    num_computed_tokens: int = 0
    status: str = "waiting"
    tables: list[list[int]] = field(default_factory=list)
    local: int = 0
    """Tokens that vLLM has in its own prefix cache when the request comes."""
    resumed: bool = False
    """Preempted, and not told of since."""
    received: int = 0
    """Ranks whose load is over."""
    loaded_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that were computed here, over all attempts."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def answer(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def identity(self) -> bytes:
        """What besides tokens shapes all of this request's KV."""
        if self.lora_request is None:
            return b""
        weights = Path(self.lora_request.lora_path, "adapter_model")
        return weights.read_bytes() if weights.exists() else b"an adapter that vLLM has in memory"

    def at(self, token: int) -> bytes:
        """What token number ``token`` brings into the KV from there on."""
        places = [(item.identifier, token - item.mm_position.offset) for item in self.mm_features]
        lengths = [item.mm_position.length for item in self.mm_features]
        inside = [place for place, length in zip(places, lengths, strict=True) if 0 <= place[1] < length]
        return repr((self.all_token_ids[token], inside)).encode()

    def seeds(self, tokens: int, weights: bytes) -> list[bytes]:
        """What the KV of each of the first ``tokens`` tokens is made from."""
        seed = hashlib.sha256(weights + self.identity).digest()
        seeds = []
        for token in range(tokens):
            seed = hashlib.sha256(seed + self.at(token)).digest()
            seeds.append(seed)
        return seeds


def prompt(id: str, tokens: int, seed: int = 0, **fields: Any) -> Request:
    """Two seeds share no block."""
    return Request(id, [(seed * 7919 + token * 31) % 50_000 for token in range(tokens)], **fields)


def lacking(*requests: Request) -> int:
    """Pages to the end of what there is of them: vLLM begins no load that could leave all who hold pages waiting for
    more."""
    return sum(-(-request.num_tokens // PAGE) - len(table) for request in requests for table in request.tables)


def specs_of(windows: Sequence[int | None]) -> list[GroupSpec]:
    """A group of layers for each entry: None for full attention, else the tokens of its sliding window."""
    return [
        GroupSpec(
            "SlidingWindowSpec" if window else "FullAttentionSpec",
            PAGE,
            tuple(f"{group}.{layer}" for layer in range(LAYERS)),
        )
        for group, window in enumerate(windows)
    ]


class Pool:
    """vLLM's block pool: references, and a list of free pages in the order of their reuse. Page 0 stands for none."""

    def __init__(self, pages: int) -> None:
        self.blocks = [SimpleNamespace(number=number, ref_cnt=int(number == 0)) for number in range(pages)]
        self.free = list(range(1, pages))

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for number in taken:
            assert self.blocks[number].ref_cnt == 0
            self.blocks[number].ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block.number)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0 and block.number:
                self.free.insert(0, block.number)  # soon reused: a copy that comes late finds other bytes


class Tensor:
    """What the connector asks of a KV tensor."""

    def __init__(self, array: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.array, self.shape = array, array.shape

    def stride(self) -> Sequence[int]:
        return self.array.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


class Rank:
    """The memory of one worker, ``groups`` x layers x pages, and its half."""

    def __init__(
        self, specs: Sequence[GroupSpec], page_count: int, mine: Introduction, options: Options | None
    ) -> None:
        """``options`` is None for a rank without a connector."""
        self.memory = [self.allocate((LAYERS, page_count, ITEM * PAGE)) for _ in specs]
        self.introduction = mine
        if options is not None:
            tensors = {
                layer: Tensor(memory[number])
                for memory, spec in zip(self.memory, specs, strict=True)
                for number, layer in enumerate(spec.layers)
            }
            pages = Pages.of(tensors, specs, page_count, BLOCK)
            self.introduction = replace(mine, layout=pages.layout)
            self.half: WorkerHalf = vllm_start.worker_half(self.introduction, self.where(pages), options)

    def allocate(self, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return np.zeros(shape, np.uint8)

    def where(self, pages: Pages) -> Memory:
        return InHost(pages)

    def do(self, work: Callable[[], None]) -> None:
        """Work on the memory: the model's."""
        work()

    def wait(self) -> None:
        """Until all work that was given is done."""

    def close(self) -> None:
        self.half.close()

    def kv(self, seed: bytes, group: int, layer: int) -> bytes:
        return hashlib.sha256(seed + bytes([self.introduction.shard, group, layer])).digest()[:ITEM]

    def write(self, request: Request, start: int, end: int, seeds: Sequence[bytes]) -> None:
        places = []
        for group, table in enumerate(request.tables):
            for token in range(start, end):
                page, at = table[token // PAGE], token % PAGE * ITEM
                assert page, "a token is computed into no page"
                places += [(self.memory[group][n, page, at : at + ITEM], seeds[token], group, n) for n in range(LAYERS)]

        def compute() -> None:
            for place, seed, group, layer in places:
                place[:] = np.frombuffer(self.kv(seed, group, layer), np.uint8)

        self.do(compute)

    def read(self, request: Request, tokens: int, windows: Sequence[int | None]) -> bytes:
        """All that attention would read for token number ``tokens - 1``."""
        self.wait()
        digest = hashlib.sha256()
        for group, (table, window) in enumerate(zip(request.tables, windows, strict=True)):
            for token in range(max(0, tokens - window) if window else 0, tokens):
                at = token % PAGE * ITEM
                digest.update(self.memory[group][:, table[token // PAGE], at : at + ITEM].tobytes())
        return digest.digest()

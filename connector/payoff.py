"""The engine's side of ``terracekv bench``: a client that stores a prompt and loads it again, on somebody's orders.

Owns a session with a daemon, and memory such as an engine keeps its KV in. Run as a process of its own
(``python -m terracekv.connector.payoff``) by whoever measures, which sends one order a line as JSON on standard input
and reads one answer a line; the end of the input ends it. Imports ``client``, ``layout`` and ``daemon.protocol``.

What is timed is what an engine waits for: the lookup, the leases, and each block copied out of the arena into its
place in the memory of the layers. On a GPU the last copy goes over the bus instead.
"""

import ctypes
import json
import math
import mmap
import random
import struct
import sys
import time
from typing import Any

from terracekv.connector.client import Client
from terracekv.connector.layout import Blocks, Plane, layout_of

WINDOW_BYTES = 256 << 20
"""Memory that stands for the engine's pages: a longer prompt goes round in it, which no cache of a processor holds."""
PIECE_BYTES = 16 << 20
WAIT_MS = 120_000
BELL = random.Random(1)


class Engine:
    """Has joined the daemon of the order, with tensors of K and V for each layer (or a latent one), heads apart."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._tokens: list[int] = order["tokens"]
        size, item, dim = order["block_tokens"], order["item_bytes"], order["dim"]
        heads, layers = order["heads"] or 1, order["layers"]
        latent = not order["heads"]
        layout = layout_of(
            axes="ND" if latent else "HND",
            packing="latent" if latent else "split",
            layers=[(dim,) if latent else (heads, dim)] * layers,
            block_tokens=size,
            item_bytes=item,
        )
        self._client = Client(
            order["socket"],
            model=order["model"],
            revision="bench",
            dtype=order["dtype"],
            block_tokens=size,
            layout=layout,
            engine="terracekv bench",
            strict=True,
            lookup_budget_ms=WAIT_MS,
            load_deadline_ms=WAIT_MS,
            store_deadline_ms=WAIT_MS,
        )
        block_bytes = self._client.block_bytes
        pages = max(1, min(len(self._tokens) // size, WINDOW_BYTES // block_bytes))
        self._from, self._into = (mmap.mmap(-1, pages * block_bytes) for _ in range(2))
        self._from[:] = looks_like_kv(order["dtype"], item, pages * block_bytes)
        self._pages = pages
        planes = layers * (1 if latent else 2)
        self._source = _tensors(self._from, planes, heads, pages * size, dim, item, size)
        self._target = _tensors(self._into, planes, heads, pages * size, dim, item, size)
        self._keys = self._client.keys(self._tokens)

    def about(self) -> dict[str, Any]:
        """What the orders are about."""
        namespace = self._client.namespace_id
        assert namespace is not None
        return {"block_bytes": self._client.block_bytes, "namespace_id": namespace.hex(), "blocks": len(self._keys)}

    def store(self, blocks: int) -> dict[str, Any]:
        """Store the prompt up to this block, in all tiers."""
        begun = time.perf_counter()
        stored = self._client.store(
            self._keys[:blocks], lambda index, payload: self._source.gather(index % self._pages, payload), True
        )
        spent_ms = (time.perf_counter() - begun) * 1e3
        return {"stored": stored.stored + stored.present, "why": stored.why, "ms": spent_ms}

    def load(self, blocks: int) -> dict[str, Any]:
        """Look it up and load it up to this block. ``right``: whether the bytes are those that were stored."""
        keys = self._keys[:blocks]
        self._into[:] = bytes(len(self._into))
        begun = time.perf_counter()
        found = self._client.lookup(keys)
        loaded = self._client.load(keys, lambda index, payload: self._target.scatter(index % self._pages, payload))
        spent_ms = (time.perf_counter() - begun) * 1e3
        right = blocks < self._pages or self._from[:] == self._into[:]
        return {"found": found.blocks, "blocks": loaded.blocks, "why": loaded.why, "ms": spent_ms, "right": right}

    def memcpy(self) -> dict[str, Any]:
        """Bytes a second from memory to memory, by one thread: nothing can load faster through here."""
        size = len(self._from)
        spent = []
        for _ in range(5):
            begun = time.perf_counter()
            ctypes.memmove(_address(self._into), _address(self._from), size)
            spent.append(time.perf_counter() - begun)
        return {"bytes_per_s": size / sorted(spent)[len(spent) // 2]}

    def close(self) -> None:
        """End the session."""
        self._client.close()


def looks_like_kv(dtype: str, item_bytes: int, size: int) -> bytearray:
    """Bytes that compress as KV does: a bell curve's high byte in each float of 16 or 32 bits, the rest noise."""
    filled = bytearray()
    while len(filled) < size:  # more at once than the generator can do
        filled += BELL.randbytes(min(PIECE_BYTES, size - len(filled)))
    if item_bytes in (2, 4):
        form, scale = ("<e", 2) if dtype == "float16" else ("<f", 4)
        high = bytes(struct.pack(form, _bell((step + 0.5) / 256))[scale - 1] for step in range(256))
        filled[item_bytes - 1 :: item_bytes] = filled[item_bytes - 1 :: item_bytes].translate(high)
    return filled


def _bell(part: float) -> float:
    """The value below which this part of a standard normal distribution lies, by halving."""
    low, high = -8.0, 8.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < part else (low, middle)
    return low


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _tensors(
    memory: mmap.mmap, planes: int, heads: int, tokens: int, dim: int, item_bytes: int, block_tokens: int
) -> Blocks:
    of_head = tokens * dim * item_bytes
    first = _address(memory)
    rows = [
        Plane(first + plane * heads * of_head, heads, tokens, dim, (of_head, dim * item_bytes))
        for plane in range(planes)
    ]
    return Blocks.of(rows, block_tokens, item_bytes)


def main() -> None:
    """Do what each line says, until there are no more."""
    engine: Engine | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "join":
            engine = Engine(order)
            answer = engine.about()
        else:
            assert engine is not None, "join comes first"
            answer = engine.memcpy() if order["do"] == "memcpy" else getattr(engine, order["do"])(order["blocks"])
        print(json.dumps(answer), flush=True)
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()

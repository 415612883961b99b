"""Paged KV in a GPU's memory for checks and measurements: geometries of known models, filled with known bytes.

Owns what it allocates, until ``close``. Imports ``kernels``; runs on whatever ``Device`` it is given.
"""

import ctypes
import random
from collections.abc import Sequence
from typing import NamedTuple

from terracekv.kernels.cuda import Device
from terracekv.kernels.runs import Runs

PAGE_TOKENS = 16
POISON = 0xA5


class Geometry(NamedTuple):
    """KV of one rank. ``layout`` is NHD, HND, fused or MLA (then ``heads`` is 1 and ``dim`` the latent)."""

    name: str
    layout: str
    layers: int
    heads: int
    dim: int
    item_bytes: int = 2
    block_tokens: int = 256


GEOMETRIES = (
    Geometry("llama-3.1-8b tp1", "NHD", 32, 8, 128),
    Geometry("llama-3.1-8b tp1 HND", "HND", 32, 8, 128),
    Geometry("llama-3.1-8b tp1 fp8", "NHD", 32, 8, 128, 1),
    Geometry("llama-3.1-8b tp8", "NHD", 32, 1, 128),
    Geometry("llama-3.1-70b tp1", "NHD", 80, 8, 128),
    Geometry("llama-3.1-70b tp8", "NHD", 80, 1, 128),
    Geometry("deepseek-v3 mla", "MLA", 61, 1, 576),
)


class Paged:
    """``blocks`` blocks in twice as many pages as they need, in an order that a seed shuffles."""

    def __init__(self, device: Device, geometry: Geometry, blocks: int, seed: int = 1) -> None:
        self._device = device
        self.pages_per_block = geometry.block_tokens // PAGE_TOKENS
        page_count = 2 * blocks * self.pages_per_block
        head = PAGE_TOKENS * geometry.dim * geometry.item_bytes
        page = geometry.heads * head
        planes = geometry.layers * (1 if geometry.layout == "MLA" else 2)
        self.size = planes * page_count * page
        self.address = device.allocate(self.size)
        stride, run = page, page
        if geometry.layout == "HND":
            run = head
            starts = [p * page_count * page + h * head for p in range(planes) for h in range(geometry.heads)]
        elif geometry.layout == "fused":
            stride = 2 * page
            starts = [layer * page_count * stride + k * page for layer in range(geometry.layers) for k in (0, 1)]
        else:
            starts = [p * page_count * page for p in range(planes)]
        self.runs = Runs(tuple(self.address + start for start in starts), stride, page_count, run)
        order = random.Random(seed).sample(range(page_count), blocks * self.pages_per_block)
        each = self.pages_per_block
        self.pages = [tuple(order[at : at + each]) for at in range(0, len(order), each)]
        self.block_bytes = len(starts) * each * run

    def put(self, content: bytes, host: int) -> None:
        """Make all of it ``content``; ``host`` is pinned memory of as many bytes."""
        ctypes.memmove(host, content, self.size)
        move(self._device, [(self.address, host, self.size)])

    def get(self, host: int) -> bytes:
        """All of it."""
        move(self._device, [(host, self.address, self.size)])
        return ctypes.string_at(host, self.size)

    def close(self) -> None:
        self._device.free(self.address)


class Wholly:
    """Host memory that one registration pins as a whole."""

    def covers(self, address: int, size: int) -> bool:
        return True

    def spans(self, address: int, size: int) -> list[tuple[int, int]]:
        return [(address, size)]


def move(device: Device, copies: Sequence[tuple[int, int, int]]) -> None:
    """Plain copies ``(to, source, size)``, one after the other, to their end."""
    stream = device.stream()
    for to, source, size in copies:
        device.copy(to, source, size, stream.ptr)
    device.synchronize(stream.ptr)

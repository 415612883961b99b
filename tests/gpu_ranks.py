"""The miniature of vLLM with its pages on a fake GPU: each rank has a stream, which computes later than it is told.

Owns a rank's memory on the GPU. Called by ``mock_engine`` from one thread. Imports the connector and the fake.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from terracekv.connector.vllm_layout import Pages
from terracekv.connector.vllm_memory import InGpu, Memory
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import bytes_at, device_on
from terracekv.tests.mock_pages import Rank


class GpuRank(Rank):
    """``Engine(socket, make=partial(GpuRank, fake))``."""

    def __init__(self, fake: FakeCupy, *arguments: Any) -> None:
        self.fake, self.device = fake, device_on(fake)
        self.stream = self.device.stream()
        self._addresses: list[int] = []
        super().__init__(*arguments)

    def allocate(self, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        size = math.prod(shape)
        self._addresses.append(self.device.allocate(size))
        array = np.frombuffer(bytes_at(self._addresses[-1], size), np.uint8).reshape(shape)
        array[:] = 0
        return array

    def where(self, pages: Pages) -> Memory:
        return InGpu(pages, lambda: self.stream.ptr, self.device)

    def do(self, work: Callable[[], None]) -> None:
        self.fake.give(self.stream.ptr, work)

    def wait(self) -> None:
        self.device.synchronize(self.stream.ptr)

    def close(self) -> None:
        super().close()
        for address in self._addresses:
            self.device.free(address)

"""``pynvml`` for tests: one GPU, of which any reading may be refused.

Owns nothing. Used by tests in place of the library. Standard library only.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

UUID = "GPU-8f6a2c1e-1111-2222-3333-444455556666"


class NVMLError(Exception):
    pass


class FakeNvml:
    """``pynvml`` for one GPU; ``broken`` functions raise."""

    NVMLError = NVMLError

    def __init__(self, **broken: str) -> None:
        self.broken = broken
        self.total = 80 << 30
        self.shut = 0
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetUUID": lambda handle: UUID.encode(),
            "nvmlDeviceGetName": lambda handle: "Board",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=7, free=self.total - 7, total=self.total),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=33, memory=4),
            "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetPcieThroughput": lambda handle, way: (100, 200)[way],
            "nvmlDeviceGetMigMode": lambda handle: (0, 0),
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=b"00000000:3B:00.0"),
        }
        for name, answer in answers.items():
            setattr(self, name, self._guarded(name, answer))

    def _shutdown(self) -> None:
        self.shut += 1

    def _guarded(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self.broken:
                raise NVMLError(self.broken[name])
            return answer(*arguments)

        return call

"""What NVML tells of the GPUs of this node: each reading by itself, null with a reason where there is none.

Owns NVML's connection to the driver. Called by the daemon from a worker thread (throughput is sampled over 20 ms).
Imports the standard library, and ``pynvml`` when it is first asked; the only module that does.

Nothing here is ever fatal: without the library, without a driver, on a MIG slice or on a board that does not measure
something, the other readings are kept. GPUs are named by UUID, as every process and container knows them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

SYSFS = Path("/sys/bus/pci/devices")
FIELDS = (
    "name",
    "memory_used_bytes",
    "memory_free_bytes",
    "memory_total_bytes",
    "utilisation_percent",
    "temperature_c",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_width",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "mig",
    "numa_node",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """``readings`` has every name of ``FIELDS``; where one is None, ``reasons`` has why."""

    uuid: str
    readings: dict[str, int | str | None]
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Survey:
    """All GPUs, or none and the ``reason``."""

    gpus: list[Gpu]
    reason: str | None = None


class Nvml:
    """One for the process. ``sysfs`` is where the kernel says which memory a GPU is near."""

    def __init__(self, sysfs: Path = SYSFS) -> None:
        self._sysfs = sysfs
        self._lock = threading.Lock()
        self._library: ModuleType | None = None
        self._reason: str | None = None

    def survey(self) -> Survey:
        """Read everything now. Takes some 50 ms a GPU."""
        with self._lock:
            library = self._connect()
            if library is None:
                return Survey([], self._reason)
            try:
                count = library.nvmlDeviceGetCount()
            except library.NVMLError as error:
                return Survey([], f"NVML does not count GPUs: {error}")
            gpus, trouble = [], []
            for index in range(count):
                try:
                    gpus.append(self._gpu(library, library.nvmlDeviceGetHandleByIndex(index)))
                except library.NVMLError as error:
                    trouble.append(f"GPU {index}: {error}")
            return Survey(gpus, "; ".join(trouble) or None)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            if self._library is not None:
                try:
                    self._library.nvmlShutdown()
                except self._library.NVMLError:
                    pass  # the driver is gone: there is nothing to disconnect from
                self._library = None

    def _connect(self) -> ModuleType | None:
        """A driver may be loaded later, so it is looked for each time; a library that is missing stays so."""
        if self._library is not None:
            return self._library
        try:
            import pynvml
        except ImportError as error:
            self._reason = f"NVML is not asked: {error} (nvidia-ml-py comes with terracekv[gpu])"
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._reason = f"NVML does not start: {error}"
            return None
        self._library = pynvml
        return self._library

    def _gpu(self, library: ModuleType, handle: Any) -> Gpu:
        uuid = _text(library.nvmlDeviceGetUUID(handle))
        readings: dict[str, int | str | None] = dict.fromkeys(FIELDS)
        reasons: dict[str, str] = {}

        def read(ask: Callable[[], dict[str, int | str]], *names: str) -> None:
            try:
                readings.update(ask())
            except (library.NVMLError, OSError, ValueError) as error:
                reasons.update(dict.fromkeys(names, str(error)))

        def memory() -> dict[str, int | str]:
            found = library.nvmlDeviceGetMemoryInfo(handle)
            if not found.total:
                raise ValueError("NVML reports a total of 0 bytes: this GPU shares the memory of the host")
            return {
                "memory_used_bytes": found.used,
                "memory_free_bytes": found.free,
                "memory_total_bytes": found.total,
            }

        def one(name: str, function: str, *arguments: Any, scale: int = 1) -> None:
            read(lambda: {name: getattr(library, function)(handle, *arguments) * scale}, name)

        read(lambda: {"name": _text(library.nvmlDeviceGetName(handle))}, "name")
        read(memory, "memory_used_bytes", "memory_free_bytes", "memory_total_bytes")
        read(lambda: {"utilisation_percent": library.nvmlDeviceGetUtilizationRates(handle).gpu}, "utilisation_percent")
        one("temperature_c", "nvmlDeviceGetTemperature", 0)
        one("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration")
        one("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration")
        one("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth")
        one("pcie_tx_bytes_per_s", "nvmlDeviceGetPcieThroughput", 0, scale=1024)
        one("pcie_rx_bytes_per_s", "nvmlDeviceGetPcieThroughput", 1, scale=1024)
        read(lambda: {"mig": int(library.nvmlDeviceGetMigMode(handle)[0])}, "mig")
        read(lambda: {"numa_node": self._node(_text(library.nvmlDeviceGetPciInfo(handle).busId))}, "numa_node")
        return Gpu(uuid, readings, reasons)

    def _node(self, bus_id: str) -> int:
        """NVML writes ``00000000:3B:00.0`` where the kernel writes ``0000:3b:00.0``."""
        domain, _, rest = bus_id.lower().partition(":")
        node = int((self._sysfs / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        if node < 0:
            raise ValueError("the kernel knows no NUMA node for it: the machine has only one, or the VM hides them")
        return node


def _text(value: str | bytes) -> str:
    """Older libraries answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value

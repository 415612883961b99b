"""NVML in all its states of absence: the daemon's survey of GPUs is never an error, and keeps what can be read."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.tiers.nvml import FIELDS, Nvml

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


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, library: FakeNvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_a_gpu_is_read_whole(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    library = FakeNvml()
    install(monkeypatch, library)
    nvml = Nvml(sysfs)
    survey = nvml.survey()
    assert survey.reason is None
    (gpu,) = survey.gpus
    assert gpu.uuid == UUID and gpu.reasons == {}
    assert gpu.readings == {
        "name": "Board",
        "memory_used_bytes": 7,
        "memory_free_bytes": (80 << 30) - 7,
        "memory_total_bytes": 80 << 30,
        "utilisation_percent": 33,
        "temperature_c": 41,
        "pcie_generation": 4,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_rx_bytes_per_s": 200 * 1024,
        "pcie_tx_bytes_per_s": 100 * 1024,
        "mig": 0,
        "numa_node": 1,
    }
    nvml.close()
    nvml.close()
    assert library.shut == 1


@pytest.mark.fault(89)
@pytest.mark.parametrize(
    ("function", "lost"),
    [
        ("nvmlDeviceGetMemoryInfo", {"memory_used_bytes", "memory_free_bytes", "memory_total_bytes"}),
        ("nvmlDeviceGetUtilizationRates", {"utilisation_percent"}),
        ("nvmlDeviceGetPcieThroughput", {"pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
        ("nvmlDeviceGetMigMode", {"mig"}),
        ("nvmlDeviceGetPciInfo", {"numa_node"}),
        ("nvmlDeviceGetName", {"name"}),
    ],
)
def test_what_is_not_supported_is_null_with_its_reason_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, function: str, lost: set[str]
) -> None:
    install(monkeypatch, FakeNvml(**{function: "Not Supported"}))
    (gpu,) = Nvml(sysfs).survey().gpus
    assert gpu.readings.keys() == set(FIELDS)
    assert {name for name, value in gpu.readings.items() if value is None} == lost == gpu.reasons.keys()
    assert set(gpu.reasons.values()) == {"Not Supported"}


@pytest.mark.fault(89)
def test_a_gpu_that_shares_the_hosts_memory_has_no_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path
) -> None:
    library = FakeNvml()
    library.total = 0
    install(monkeypatch, library)
    (gpu,) = Nvml(sysfs).survey().gpus
    assert gpu.readings["memory_total_bytes"] is None and "shares the memory" in gpu.reasons["memory_total_bytes"]


@pytest.mark.fault(89)
def test_without_library_or_driver_there_are_no_gpus_and_a_reason(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    install(monkeypatch, None)
    survey = Nvml(sysfs).survey()
    assert survey.gpus == [] and "nvidia-ml-py" in str(survey.reason)
    install(monkeypatch, FakeNvml(nvmlInit="Driver Not Loaded"))
    survey = Nvml(sysfs).survey()
    assert survey.gpus == [] and "Driver Not Loaded" in str(survey.reason)


def test_a_driver_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    library = FakeNvml(nvmlInit="Driver Not Loaded")
    install(monkeypatch, library)
    nvml = Nvml(sysfs)
    assert not nvml.survey().gpus
    library.broken.clear()
    assert len(nvml.survey().gpus) == 1
    nvml.close()


@pytest.mark.fault(92)
@pytest.mark.parametrize("content", ["-1\n", "", None])
def test_a_gpu_whose_node_is_unknown_says_so(monkeypatch: pytest.MonkeyPatch, sysfs: Path, content: str | None) -> None:
    file = sysfs / "0000:3b:00.0" / "numa_node"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    install(monkeypatch, FakeNvml())
    (gpu,) = Nvml(sysfs).survey().gpus
    assert gpu.readings["numa_node"] is None and gpu.reasons["numa_node"]


def test_the_real_library_is_asked_by_names_that_it_has() -> None:
    library = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml()) if name.startswith("nvml")]
    assert [name for name in names if not hasattr(library, name)] == []
    assert (library.NVML_PCIE_UTIL_TX_BYTES, library.NVML_PCIE_UTIL_RX_BYTES, library.NVML_TEMPERATURE_GPU) == (0, 1, 0)
    assert issubclass(library.NVMLError, Exception)

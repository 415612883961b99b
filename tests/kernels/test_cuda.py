"""GPUs by their names, and what is said where there is none."""

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from terracekv.kernels import cuda
from terracekv.kernels.cuda import NoCuda
from terracekv.tests.kernels.fake_cupy import FakeCupy, FakeError
from terracekv.tests.kernels.gpus import device_on


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """The fake is what ``import cupy`` finds."""
    fake = FakeCupy(gpus=2)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    cuda._cupy.cache_clear()
    yield fake
    cuda._cupy.cache_clear()


@pytest.mark.fault(88)
def test_devices_are_known_by_uuid_whatever_their_ordinal(installed: FakeCupy) -> None:
    first, second = cuda.devices()
    assert (first.uuid, second.uuid) == (
        "GPU-01010101-0101-0101-0101-010101010101",
        "GPU-02020202-0202-0202-0202-020202020202",
    )
    assert (second.ordinal, second.name) == (1, "Fake GPU")


@pytest.mark.fault(88)
def test_a_uuid_with_a_zero_in_it_is_whole(installed: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy hands out what stands before the zero, which two GPUs may have in common."""
    whole = bytes.fromhex("0a0b00ff") + bytes(range(1, 13))
    about = {"uuid": whole[:2], "name": "G", "multiProcessorCount": 1}
    monkeypatch.setattr(installed.cuda.runtime, "getDeviceProperties", lambda ordinal: about)

    class Driver:
        def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
            return 0

        def cuDeviceGetUuid_v2(self, found: Any, device: Any) -> int:  # noqa: N802
            found[:] = whole
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert cuda.devices()[0].uuid == "GPU-0a0b00ff-0102-0304-0506-0708090a0b0c"


@pytest.mark.fault(88)
@pytest.mark.parametrize(
    ("wanted", "ordinal"),
    [
        ("", 0),
        ("1", 1),
        ("GPU-02020202-0202-0202-0202-020202020202", 1),
        ("GPU-01", 0),
        ("gpu-02", 1),
        ("GPU-", "2 GPUs are called"),
        ("2", "no GPU number 2"),
        ("GPU-03", "0 GPUs are called"),
        ("MIG-8f6a2c1e", "a slice of a GPU"),
    ],
)
def test_a_gpu_is_meant_by_uuid_its_beginning_or_number(installed: FakeCupy, wanted: str, ordinal: int | str) -> None:
    found = cuda.devices()
    if isinstance(ordinal, int):
        assert cuda.pick(found, wanted).ordinal == ordinal
    else:
        with pytest.raises(NoCuda, match=f"{ordinal}.*GPU-0101.*GPU-0202"):
            cuda.pick(found, wanted)


def test_the_device_of_an_address_is_asked_for_and_host_memory_has_none(installed: FakeCupy) -> None:
    device = cuda.devices()[0]
    address, pinned = device.allocate(4096), device.allocate_pinned(4096)
    assert cuda.device_of(address + 100).uuid == device.uuid
    with pytest.raises(ValueError, match="not memory of a GPU"):
        cuda.device_of(pinned)
    device.free(address)
    device.free_pinned(pinned)


@pytest.mark.fault(88)
def test_a_machine_without_a_gpu_is_told_so(installed: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    installed._gpus = 0
    with pytest.raises(NoCuda, match="CUDA_VISIBLE_DEVICES"):
        cuda.devices()

    def broken() -> int:
        raise FakeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(installed.cuda.runtime, "getDeviceCount", broken)
    with pytest.raises(NoCuda, match="InsufficientDriver"):
        cuda.devices()


def test_a_process_without_cupy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda._cupy.cache_clear()
    with pytest.raises(NoCuda, match=r"terracekv\[gpu\]"):
        cuda.devices()
    cuda._cupy.cache_clear()


def test_a_thread_keeps_its_current_device() -> None:
    fake = FakeCupy(gpus=2)
    second = device_on(fake, 1)
    seen: list[int] = []
    malloc = fake.cuda.runtime.malloc

    def watched(size: int) -> int:
        seen.append(fake.cuda.runtime.getDevice())
        return int(malloc(size))

    fake.cuda.runtime.malloc = watched
    second.free(second.allocate(256))
    assert seen == [1] and fake.cuda.runtime.getDevice() == 0


def test_kernels_are_compiled_once_for_a_geometry() -> None:
    fake = FakeCupy()
    made: list[tuple[str, ...]] = []
    module = fake.RawModule

    def counted(**how: Any) -> Any:
        made.append(how["options"])
        return module(**how)

    fake.RawModule = counted  # type: ignore[method-assign]
    device = device_on(fake)
    stream = device.stream()
    for constants in ((), (), ("-DRUN_BYTES=1ULL", "-DPAGE_STRIDE=1ULL", "-DPAGES_PER_BLOCK=1ULL")):
        for kernel in ("gather_runs", "scatter_runs"):
            device.launch(kernel, 1, stream, *[0] * 8, constants=constants)
    assert len(made) == 2


def test_kernels_that_do_not_compile_are_told_as_an_error_of_cuda() -> None:
    """So that a connector takes it for a miss, as all that goes wrong with a GPU."""
    fake = FakeCupy()
    fake.compile_error = "nvrtc: error: invalid value for --gpu-architecture"
    device = device_on(fake)
    with pytest.raises(NoCuda, match="gpu-architecture"):
        device.launch("gather_runs", 1, device.stream(), *[0] * 8)
    assert issubclass(NoCuda, RuntimeError)


def test_the_batch_copy_of_the_first_version_is_given_its_extra_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers before 13 want to be told where to write the index of what failed."""
    given: list[tuple[Any, ...]] = []

    class Function:
        argtypes: tuple[Any, ...] = ()

        def __call__(self, *arguments: Any) -> int:
            given.append(arguments)
            return 0

    class Driver:
        cuMemcpyBatchAsync = Function()  # noqa: N815

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    function = cuda._batch_copy()
    assert function(1, 2, 3, 4, 5, 6, 7, 8) == 0
    assert given[0][:7] == (1, 2, 3, 4, 5, 6, 7) and given[0][8] == 8
    assert len(Driver.cuMemcpyBatchAsync.argtypes) == 9


def test_without_a_driver_there_is_no_batch_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda._batch_copy() is None


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_has_all_that_the_fake_has() -> None:
    """A fake that offers what the library does not would prove nothing."""
    names = [name[3:] for name in dir(FakeCupy) if name.startswith("rt_")]
    code = f"from cupy.cuda import runtime as r; print([n for n in {names} if not hasattr(r, n)])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

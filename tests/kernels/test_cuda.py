"""GPUs by their names, and what is said where there is none."""

import builtins
import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from terracekv.kernels import cuda, driver
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


def test_a_process_without_a_place_for_cupys_cache_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy makes that folder when it is imported: no daemon may die of a home that cannot be written."""
    real = builtins.__import__

    def imported(name: str, *how: Any) -> Any:
        if name == "cupy":
            raise PermissionError(13, "Permission denied", "/.cupy")
        return real(name, *how)

    monkeypatch.setattr(builtins, "__import__", imported)
    cuda._cupy.cache_clear()
    with pytest.raises(NoCuda, match="/.cupy.*CUPY_CACHE_DIR"):
        cuda.devices()
    cuda._cupy.cache_clear()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left.*CUPY_CACHE_DIR"),
        (RuntimeError('Failure finding "libnvrtc.so.13"'), "libnvrtc.*nvidia-cuda-nvrtc"),
    ],
)
def test_kernels_that_cannot_be_made_are_an_error_of_cuda_that_says_what_to_do(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCupy()

    def compile() -> None:
        raise error

    monkeypatch.setattr(fake, "RawModule", lambda **_: SimpleNamespace(compile=compile))
    with pytest.raises(NoCuda, match=told):
        device_on(fake).prepare("gather_runs")


def test_kernels_are_made_ready_on_each_gpu_of_a_process() -> None:
    fake = FakeCupy(gpus=2)
    made: list[int] = []
    module = fake.RawModule

    def counted(**how: Any) -> Any:
        made.append(fake.cuda.runtime.getDevice())
        return module(**how)

    fake.RawModule = counted  # type: ignore[method-assign]
    for ordinal in (0, 1, 1):
        device_on(fake, ordinal).prepare("gather_runs")
    assert made == [0, 1]


@pytest.mark.fault(2)
def test_an_event_behind_a_copy_that_failed_is_an_error_and_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy raises nothing here: who asks until it has happened would ask for ever."""
    fake = FakeCupy()
    device = device_on(fake)
    event = device.event()
    for code in (0, 600):
        monkeypatch.setattr(fake.cuda.runtime, "eventQuery", lambda event, code=code: code)
        assert device.happened(event) is (code == 0)
    monkeypatch.setattr(fake.cuda.runtime, "eventQuery", lambda event: 700)
    with pytest.raises(RuntimeError, match="700"):
        device.happened(event)


def test_a_thread_that_waits_does_not_end_anothers_capture_of_a_graph() -> None:
    fake = FakeCupy()
    device = device_on(fake)
    stream, event = device.stream(), device.event()
    device.record(event, stream.ptr)
    fake.capturing = True
    device.happened(event)
    device.await_event(event)
    device.synchronize(stream.ptr)
    assert fake.broken is None


def test_what_is_no_handle_of_cuda_is_refused_as_cuda_would() -> None:
    """CuPy raises an IndexError for another number of bytes."""
    device = device_on(FakeCupy())
    with pytest.raises(RuntimeError, match="3 bytes"):
        device.open(b"abc")


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


@pytest.mark.parametrize("in_use", [False, True])
def test_no_context_is_made_on_a_gpu_that_the_process_does_not_use(in_use: bool) -> None:
    """A new thread is on the first GPU, and setDevice makes a context: one for each rank of an engine, on the GPU of
    the first."""
    fake = FakeCupy(gpus=2)
    contexts = {0} if in_use else set()
    set_device = fake.cuda.runtime.setDevice

    def state(ordinal: int, _: Any, active: Any) -> int:
        active._obj.value = ordinal in contexts
        return 0

    def switch(ordinal: int) -> None:
        contexts.add(ordinal)
        set_device(ordinal)

    fake.cuda.runtime.setDevice = switch
    device = device_on(fake, 1)
    device._context_state = state
    event = device.event()
    device.await_event(event)
    device.destroy_event(event)
    device.free(device.allocate(256))
    assert contexts == ({0, 1} if in_use else {1})
    assert fake.cuda.runtime.getDevice() == (0 if in_use else 1)


@pytest.mark.parametrize("call", ["await_event", "happened", "synchronize", "destroy_event"])
def test_no_call_is_made_on_another_gpu_than_the_devices(call: str) -> None:
    """CUDA makes a context on the thread's device for whatever it is asked first."""
    fake = FakeCupy(gpus=2)
    device = device_on(fake, 1)
    event, stream = device.event(), device.stream()
    seen: list[int] = []
    names = {
        "await_event": "eventSynchronize",
        "happened": "eventQuery",
        "synchronize": "streamSynchronize",
        "destroy_event": "eventDestroy",
    }
    real = getattr(fake.cuda.runtime, names[call])

    def watched(handle: int) -> Any:
        seen.append(fake.cuda.runtime.getDevice())
        return real(handle)

    setattr(fake.cuda.runtime, names[call], watched)
    getattr(device, call)(stream.ptr if call == "synchronize" else event)
    assert seen == [1]


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
    function = driver.batch_copy()
    assert function(1, 2, 3, 4, 5, 6, 7, 8) == 0
    assert given[0][:7] == (1, 2, 3, 4, 5, 6, 7) and given[0][8] == 8
    assert len(Driver.cuMemcpyBatchAsync.argtypes) == 9


def test_without_a_driver_there_is_no_batch_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver.batch_copy() is None

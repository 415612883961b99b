"""One GPU: its memory, streams, events, copies and the kernels of ``copy.cu``. The only ``import cupy``, at call time.

Owns nothing but what a caller allocates through it; a ``Device`` may be used from any thread, and leaves the current
device of a thread that uses another as it found it. Called by ``pinned.py``, ``transfer.py``, tiers and connectors.
Imports the standard library and ``driver``, and CuPy when the first device is opened.

Addresses, streams and events are integers, as CUDA and every tensor library know them, so an engine's own streams can
be waited for. Sizes are bytes. CUDA's errors are RuntimeErrors (CuPy's subclasses name the code); ``NoCuda`` is raised
when there is no GPU, no driver or no CuPy, and says which.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from terracekv.kernels import driver

SOURCE = Path(__file__).with_name("copy.cu")
THREADS = 256
"""Of a block of a launch: eight warps, so that a multiprocessor is full with eight blocks."""
_TO_ANY = 4
_EVENT_PLAIN, _EVENT_TIMED = 2, 0
_NOT_READY = 600
_REGISTER_PORTABLE_MAPPED = 3
_CAPTURE_THREAD_LOCAL = 1
_HANDLE_BYTES = 64


class NoCuda(RuntimeError):
    """CUDA cannot be used in this process; the message says why and what to do."""


class Stream(Protocol):
    """CuPy's: ``ptr`` is CUDA's own handle; entered, the thread's launches go to it."""

    ptr: int

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


def devices() -> "list[Device]":
    """All GPUs that this process sees, in its own order; ``uuid`` is the name that holds elsewhere. NoCuda if none."""
    cupy = _cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise NoCuda(f"CuPy finds no usable GPU or driver: {error}") from None
    if not count:
        raise NoCuda("this process sees no GPU: look at CUDA_VISIBLE_DEVICES and at the container's devices")
    return [Device(cupy, ordinal) for ordinal in range(count)]


def pick(found: "Sequence[Device]", wanted: str) -> "Device":
    """The GPU that a person means: by UUID, in full or its beginning, or by its number here; the first when ``wanted``
    is empty. NoCuda says what there is."""
    names = ", ".join(f"{device.uuid} ({device.name})" for device in found)
    if wanted.startswith("MIG-"):
        raise NoCuda(f"{wanted} is a slice of a GPU, whose memory cannot be shared: name a whole GPU of {names}")
    if wanted.isdecimal():
        if int(wanted) < len(found):
            return found[int(wanted)]
        raise NoCuda(f"there is no GPU number {wanted}: this process sees {names}")
    matches = [device for device in found if device.uuid.lower().startswith(wanted.lower())]
    if len(matches) == 1 or (matches and not wanted):
        return matches[0]
    raise NoCuda(f"{len(matches)} GPUs are called {wanted!r}: this process sees {names}")


def device_of(address: int) -> "Device":
    """The GPU whose memory an address is in. ValueError for memory of the host."""
    cupy = _cupy()
    found = cupy.cuda.runtime.pointerGetAttributes(address)
    if found.type != _MEMORY_DEVICE:
        raise ValueError(f"{address:#x} is not memory of a GPU")
    return Device(cupy, found.device)


_MEMORY_DEVICE = 2
_CACHE = "set CUPY_CACHE_DIR to a folder that can be written"


@functools.cache
def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise NoCuda(
            f"CuPy cannot be imported ({error}): install terracekv[gpu], or cupy-cuda12x for CUDA 12"
        ) from None
    except OSError as error:  # its cache of kernels is made at once, beneath the user's home
        raise NoCuda(f"CuPy has no place for its kernels ({error}): {_CACHE}") from None
    return cupy  # type: ignore[no-any-return, unused-ignore]


class Device:
    """One GPU as this process numbers it."""

    def __init__(self, cupy: ModuleType, ordinal: int) -> None:
        self._cupy = cupy
        self._cuda = cupy.cuda.runtime
        self.ordinal = ordinal
        about = self._cuda.getDeviceProperties(ordinal)
        self.uuid = _uuid(about["uuid"], ordinal)
        name = about["name"]
        self.name: str = name.decode() if isinstance(name, bytes) else name
        self.multiprocessors: int = about["multiProcessorCount"]
        self._batch = driver.batch_copy()
        self._exchange_capture_mode = driver.function("cuThreadExchangeStreamCaptureMode")
        self._context_state = driver.function("cuDevicePrimaryCtxGetState")

    @contextmanager
    def current(self) -> Iterator[None]:
        """The thread's current device is this one, until the end of the block. A thread that was on a GPU which this
        process does not use, as every new one is on the first, stays here: to go back is to make a context there, which
        takes hundreds of megabytes from whoever works on that GPU."""
        before = self._cuda.getDevice()
        if before == self.ordinal:
            yield
            return
        back = self._in_use(before)
        self._cuda.setDevice(self.ordinal)
        try:
            yield
        finally:
            if back:
                self._cuda.setDevice(before)

    def _in_use(self, ordinal: int) -> bool:
        """Whether this process has a context on a GPU."""
        flags, active = ctypes.c_uint(), ctypes.c_int(1)
        if self._context_state is not None:
            self._context_state(ordinal, ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """As ``current``, for calls that CUDA forbids to all threads while one captures a graph, as an engine does when
        it starts: they would fail, and the capture with them. They are allowed to a thread that says it minds its own
        captures only."""
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        with self.current():
            if self._exchange_capture_mode is None:
                yield
                return
            self._exchange_capture_mode(ctypes.byref(mode))
            try:
                yield
            finally:
                self._exchange_capture_mode(ctypes.byref(mode))

    # What there is, and who has it.

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory."""
        with self.current():
            free, total = self._cuda.memGetInfo()
        return free, total

    def allocate(self, size: int) -> int:
        """Memory of the GPU, aligned to 256. One allocation of its own, so that it can be exported."""
        with self._beside_captures():
            return int(self._cuda.malloc(size))

    def free(self, address: int) -> None:
        """Waits for all work on the GPU: for closing time, never between two copies."""
        with self._beside_captures():
            self._cuda.free(address)

    def allocate_pinned(self, size: int) -> int:
        """Memory of the host that the GPU reaches by itself."""
        with self._beside_captures():
            return int(self._cuda.hostAlloc(size, _REGISTER_PORTABLE_MAPPED))

    def free_pinned(self, address: int) -> None:
        with self._beside_captures():
            self._cuda.freeHost(address)

    def register(self, address: int, size: int) -> None:
        """Pin memory of the host that is mapped already. RuntimeError when the system has no more to pin."""
        with self._beside_captures():
            self._cuda.hostRegister(address, size, _REGISTER_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        with self._beside_captures():
            self._cuda.hostUnregister(address)

    def mapped(self, address: int) -> int:
        """Where the GPU sees pinned memory of the host."""
        with self.current():
            return int(self._cuda.pointerGetAttributes(address).devicePointer)

    # Between processes of one GPU.

    def export(self, address: int) -> bytes:
        """A handle for the whole allocation that begins at ``address``. RuntimeError where this memory cannot be
        shared."""
        with self.current():
            return bytes(self._cuda.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """The address here of what another process exported. RuntimeError when it cannot be reached from here."""
        if len(handle) != _HANDLE_BYTES:
            raise RuntimeError(f"a handle of {len(handle)} bytes is none of CUDA's, which have {_HANDLE_BYTES}")
        with self._beside_captures():
            return int(self._cuda.ipcOpenMemHandle(handle))

    def close(self, address: int) -> None:
        """The end of ``open``."""
        with self._beside_captures():
            self._cuda.ipcCloseMemHandle(address)

    # Order.

    def stream(self) -> Stream:
        """A stream that waits for no other unless told to. Its life is that of the object."""
        with self.current():
            made: Stream = self._cupy.cuda.Stream(non_blocking=True)
            return made

    def synchronize(self, stream: int) -> None:
        """Wait for all that a stream was given; raises what went wrong in it."""
        with self._beside_captures():
            self._cuda.streamSynchronize(stream)

    def event(self, *, timed: bool = False) -> int:
        with self.current():
            return int(self._cuda.eventCreateWithFlags(_EVENT_TIMED if timed else _EVENT_PLAIN))

    def destroy_event(self, event: int) -> None:
        with self.current():
            self._cuda.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """The event happens when all that the stream was given until now is done."""
        with self.current():
            self._cuda.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on waits for the event as last recorded. Nobody waits here."""
        with self.current():
            self._cuda.streamWaitEvent(stream, event)

    def happened(self, event: int) -> bool:
        """Raises what went wrong before it: such an event would never happen. CuPy answers with CUDA's code here."""
        with self._beside_captures():
            code = self._cuda.eventQuery(event)
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"cudaEventQuery failed with CUDA error {code}")
        return bool(code == 0)

    def await_event(self, event: int) -> None:
        """Wait for the event as last recorded; the interpreter lock is let go."""
        with self._beside_captures():
            self._cuda.eventSynchronize(event)

    def seconds(self, start: int, end: int) -> float:
        """Between two timed events that have happened."""
        with self.current():
            return float(self._cuda.eventElapsedTime(start, end)) / 1e3

    # Work.

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """One copy between any two of host and GPU. From or to memory that is not pinned it blocks."""
        with self.current():
            self._cuda.memcpyAsync(to, source, size, _TO_ANY, stream)

    @property
    def can_batch(self) -> bool:
        """Whether the driver has ``cuMemcpyBatchAsync`` (12.8 and later)."""
        return self._batch is not None

    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copies ``(to, source, size)`` in one call and in any order among themselves."""
        assert self._batch is not None
        count = len(copies)
        array = ctypes.c_uint64 * count
        to, source, size = (array(*column) for column in zip(*copies, strict=True))
        how, first = driver.in_stream_order(), ctypes.c_size_t(0)
        with self.current():
            code = self._batch(to, source, size, count, ctypes.byref(how), ctypes.byref(first), 1, stream)
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies failed with CUDA error {code}")

    def prepare(self, kernel: str, constants: tuple[str, ...] = ()) -> None:
        """Compile a kernel and load it, which takes seconds the first time, before it is needed."""
        with self._beside_captures():
            _kernel(self._cupy, self.ordinal, kernel, constants)

    def launch(
        self, kernel: str, blocks: int, stream: Stream, *arguments: int, constants: tuple[str, ...] = ()
    ) -> None:
        """Start a kernel of ``copy.cu`` with so many blocks; ``constants`` are compiler flags that define some."""
        with self.current(), stream:
            _kernel(self._cupy, self.ordinal, kernel, constants)((blocks,), (THREADS,), arguments)


@functools.cache
def _module(cupy: ModuleType, ordinal: int, constants: tuple[str, ...]) -> Any:
    """Compiled for the thread's current device, which is ``ordinal``; CuPy keeps the result on disk for later
    processes."""
    module = cupy.RawModule(code=SOURCE.read_text(), options=("-std=c++17", *constants), backend="nvrtc")
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise NoCuda(f"the kernels do not compile for this GPU with this CUDA: {error}") from error
    except OSError as error:
        raise NoCuda(f"CuPy cannot keep the kernels that it compiled ({error}): {_CACHE}") from error
    except RuntimeError as error:
        raise NoCuda(
            f"the kernels cannot be compiled ({error}): CUDA's run-time compiler comes with a CUDA toolkit, and with"
            " nvidia-cuda-nvrtc"
        ) from error
    return module


@functools.cache
def _kernel(cupy: ModuleType, ordinal: int, name: str, constants: tuple[str, ...]) -> Any:
    """Loaded for that device: CuPy loads a module for each, and so this is asked for each."""
    with _compiling:
        return _module(cupy, ordinal, constants).get_function(name)


_compiling = threading.Lock()


def _uuid(raw: bytes, ordinal: int) -> str:
    """As NVML, ``nvidia-smi`` and CUDA_VISIBLE_DEVICES write it. CuPy takes the 16 bytes for text and ends them at the
    first that is zero, as one of 17 GPUs has; then the driver is asked."""
    text = (raw if len(raw) >= 16 else _driver_uuid(ordinal))[:16].hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _driver_uuid(ordinal: int) -> bytes:
    library = ctypes.CDLL("libcuda.so.1")
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    ask = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    code = library.cuDeviceGet(ctypes.byref(device), ordinal) or ask(found, device)
    if code:
        raise NoCuda(f"the driver does not name GPU {ordinal}: CUDA error {code}")
    return bytes(found)

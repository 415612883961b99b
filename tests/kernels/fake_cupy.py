"""A GPU for tests: what the project uses of CuPy, over ordinary memory, with streams that are as late as CUDA allows.

Owns its memory and its worlds. Used by tests in place of ``import cupy``. Imports the emulated kernels.

Nothing that a stream is given happens when it is given. It happens when somebody waits for it, and then only what must
happen before; or, ``eager``, at a moment that the dice choose. Only order within a stream, events and what CUDA itself
waits for hold anything back. So a wait that was forgotten shows as wrong bytes: fresh memory is full of 0xDD, freed
memory of 0xEE, and a freed address in a copy is an error.

Limits of real machines can be set: how much may be pinned, whether memory can be exported, what fails when.
"""

import ctypes
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from terracekv.tests.kernels.emulated import launch
from terracekv.tests.kernels.fake_world import FREED, Queue, Record, Work, World

LAUNCH_S, COPY_S = 5e-6, 2e-6
NOT_READY = 600
NOT_BESIDE_CAPTURES = {
    *("malloc", "free", "hostAlloc", "freeHost", "hostRegister", "hostUnregister", "ipcOpenMemHandle"),
    *("eventQuery", "eventSynchronize", "streamSynchronize"),
}


class FakeError(RuntimeError):
    """Stands for CUDARuntimeError."""


class FakeCompileError(Exception):
    """Stands for CompileException, which is no RuntimeError."""


class FakeStream:
    """``cupy.cuda.Stream``."""

    def __init__(self, gpu: "FakeCupy", ptr: int) -> None:
        self._gpu, self.ptr = gpu, ptr

    def __enter__(self) -> "FakeStream":
        self._gpu.entered().append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.entered().pop()


class FakeCupy:
    """The module ``cupy`` of one process. ``pin_limit`` bounds what it may register; ``export_error`` and
    ``open_error`` are what CUDA says to IPC; ``fail_calls`` counts calls by name until one is refused; ``fail_copies``
    counts copies until one goes wrong on its way, after which every call fails, as it does after a real one."""

    def __init__(
        self,
        world: World | None = None,
        *,
        seed: int = 0,
        eager: bool = False,
        pin_limit: int | None = None,
        gpus: int = 1,
    ) -> None:
        self.world = world or World()
        self._dice = random.Random(seed)
        self._eager = eager
        self._gpus = gpus
        self.pin_limit = pin_limit
        self.export_error = self.open_error = ""
        self.fail_copies: int | None = None
        self.fail_calls: dict[str, int] = {}
        self.broken: FakeError | None = None
        self.compile_error = ""
        self.room_bytes: int | None = None
        self.capturing = False
        """A thread captures a graph, so that CUDA forbids some calls to all that have not said to mind their own."""
        self.calls: list[tuple[Any, ...]] = []
        self._lock = threading.RLock()
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._queues: dict[int, Queue] = {0: Queue()}
        self._events: dict[int, Record | None] = {}
        self._opened: dict[int, int] = {}
        self._register_refused = False
        names = [name for name in dir(self) if name.startswith("rt_")]
        runtime = SimpleNamespace(**{name[3:]: self._logged(name[3:], getattr(self, name)) for name in names})
        compiler = SimpleNamespace(CompileException=FakeCompileError)
        self.cuda = SimpleNamespace(runtime=runtime, Stream=self._stream, compiler=compiler)

    def _logged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._lock:
                if name not in ("getDevice", "setDevice", "eventQuery"):
                    self.calls.append((name, *arguments))
                    if self.fail_calls.get(name) == 0:
                        del self.fail_calls[name]
                        raise FakeError(f"{name} was told to fail")
                    if name in self.fail_calls:
                        self.fail_calls[name] -= 1
                if self.capturing and name in NOT_BESIDE_CAPTURES and not getattr(self._local, "mode", 0):
                    self.broken = FakeError(f"cudaErrorStreamCaptureUnsupported: {name}")
                    raise self.broken
                result = function(*arguments)
                self._perhaps_run()
                if self.broken is not None and name not in ("getDevice", "setDevice"):
                    raise self.broken
                return result

        return call

    def entered(self) -> list[int]:
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[int] = self._local.entered
        return entered

    # Streams.

    def _stream(self, non_blocking: bool = False) -> FakeStream:
        assert non_blocking, "a blocking stream waits for the engine's default stream"
        with self._lock:
            number = next(self._numbers)
            self._queues[number] = Queue()
            self._queues[number].clock = max(queue.clock for queue in self._queues.values())
            return FakeStream(self, number)

    def give(self, stream: int, run: Callable[[], None], seconds: float = 0.0) -> None:
        """Work of the engine itself, say."""

        def timed() -> float:
            run()
            return seconds

        with self._lock:
            self._queues[stream].work.append(Work(timed))
            self._perhaps_run()

    def _step(self, stream: int) -> None:
        queue = self._queues[stream]
        work = queue.work[0]
        if work.before is not None:
            self._happen(work.before)
            queue.clock = max(queue.clock, work.before.clock)
        queue.work.popleft()
        if work.run is not None and self.broken is None:
            try:
                queue.clock += work.run()
            except FakeError as error:
                self.broken = error
        if work.record is not None:
            work.record.done, work.record.clock = True, queue.clock

    def _happen(self, record: Record) -> None:
        while not record.done:
            self._step(next(s for s, q in self._queues.items() if any(w.record is record for w in q.work)))

    def _perhaps_run(self) -> None:
        """Work that nothing holds back may happen at any time."""
        while self._eager and self._dice.random() < 0.6:
            ready = [s for s, q in self._queues.items() if q.work and (not q.work[0].before or q.work[0].before.done)]
            if not ready:
                return
            self._step(self._dice.choice(ready))

    def run_all(self, stream: int | None = None) -> None:
        with self._lock:
            for number in [stream] if stream is not None else list(self._queues):
                while self._queues[number].work:
                    self._step(number)

    @property
    def busy(self) -> bool:
        """Whether some copy or kernel was started and has not happened."""
        with self._lock:
            return any(work.run for queue in self._queues.values() for work in queue.work)

    @property
    def clock(self) -> float:
        """The latest of all streams' clocks: when the GPU is done."""
        with self._lock:
            self.run_all()
            now = max(queue.clock for queue in self._queues.values())
            for queue in self._queues.values():
                queue.clock = now  # what comes next begins now
            return now

    # What the runtime offers, under CuPy's names.

    def rt_getDeviceCount(self) -> int:
        return self._gpus

    def rt_getDevice(self) -> int:
        return getattr(self._local, "device", 0)

    def rt_setDevice(self, ordinal: int) -> None:
        assert 0 <= ordinal < self._gpus
        self._local.device = ordinal

    def rt_getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        return {"uuid": bytes([ordinal + 1]) * 16, "name": b"Fake GPU", "multiProcessorCount": 4}

    def rt_memGetInfo(self) -> tuple[int, int]:
        total = self.room_bytes if self.room_bytes is not None else 1 << 34
        return total - sum(self.world.device.values()), total

    def rt_malloc(self, size: int) -> int:
        if self.room_bytes is not None and size > self.rt_memGetInfo()[0]:
            raise FakeError("cudaErrorMemoryAllocation: out of memory")
        address = self.world.allocate_device(size)
        self.world.device[address] = size
        return address

    def rt_free(self, address: int) -> None:
        self.run_all()  # cudaFree waits for the whole GPU
        size = self.world.device.pop(address)
        ctypes.memset(address, FREED, size)
        self.world.freed[address] = size

    def rt_hostAlloc(self, size: int, flags: int) -> int:
        address = self.world.allocate(size)
        self.world.pinned[address] = size
        return address

    def rt_freeHost(self, address: int) -> None:
        self.run_all()
        ctypes.memset(address, FREED, self.world.pinned.pop(address))

    def rt_hostRegister(self, address: int, size: int, flags: int) -> None:
        assert flags & 2, "memory that is not mapped cannot be written by a kernel"
        assert address % 4096 == 0 and size % 4096 == 0
        if self.world.inside(self.world.pinned, address):
            raise FakeError("cudaErrorHostMemoryAlreadyRegistered")
        assert not self._register_refused, "a refused process asked again"
        if self.pin_limit is not None and sum(self.world.pinned.values()) + size > self.pin_limit:
            self._register_refused = True
            raise FakeError("cudaErrorMemoryAllocation: out of memory")
        self.world.pinned[address] = size

    def rt_hostUnregister(self, address: int) -> None:
        self.run_all()
        del self.world.pinned[address]

    def rt_pointerGetAttributes(self, address: int) -> SimpleNamespace:
        on_device = self.world.inside(self.world.device, address)
        if not on_device and not self.world.inside(self.world.pinned, address):
            raise FakeError("cudaErrorInvalidValue: not memory of CUDA")
        return SimpleNamespace(type=2 if on_device else 1, device=0, devicePointer=address)

    def rt_ipcGetMemHandle(self, address: int) -> bytes:
        if self.export_error:
            raise FakeError(self.export_error)
        start = next(s for s, size in self.world.device.items() if s <= address < s + size)
        return self.world.export(start)

    def rt_ipcOpenMemHandle(self, handle: bytes) -> int:
        if self.open_error:
            raise FakeError(self.open_error)
        address = self.world.open(handle)
        if address is None:
            raise FakeError("cudaErrorInvalidValue: unknown handle")
        self._opened[address] = self._opened.get(address, 0) + 1
        return address

    def rt_ipcCloseMemHandle(self, address: int) -> None:
        self.run_all()
        self._opened[address] -= 1
        if not self._opened[address]:
            del self._opened[address]

    @property
    def opened(self) -> int:
        return sum(self._opened.values())

    @property
    def left(self) -> list[str]:
        """What this process has not given back."""
        return [
            *(f"event {event}" for event in self._events),
            *(f"{size} bytes of the GPU" for size in self.world.device.values()),
            *(f"{size} pinned bytes" for size in self.world.pinned.values()),
            *(f"{count} openings of {address:#x}" for address, count in self._opened.items()),
        ]

    def rt_eventCreateWithFlags(self, flags: int) -> int:
        event = next(self._numbers)
        self._events[event] = None
        return event

    def rt_eventDestroy(self, event: int) -> None:
        del self._events[event]

    def rt_eventRecord(self, event: int, stream: int) -> None:
        assert event in self._events
        self._events[event] = record = Record()
        self._queues[stream].work.append(Work(record=record))

    def rt_streamWaitEvent(self, stream: int, event: int) -> None:
        record = self._events[event]
        if record is not None:
            self._queues[stream].work.append(Work(before=record))

    def rt_eventQuery(self, event: int) -> int:
        record = self._events[event]
        return 0 if record is None or record.done else NOT_READY

    def rt_eventSynchronize(self, event: int) -> None:
        record = self._events[event]
        if record is not None:
            self._happen(record)

    def rt_eventElapsedTime(self, start: int, end: int) -> float:
        first, last = self._events[start], self._events[end]
        assert first is not None and last is not None and first.done and last.done
        return (last.clock - first.clock) * 1e3

    def rt_streamSynchronize(self, stream: int) -> None:
        self.run_all(stream)

    def rt_memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        for address in (to, source):
            assert not self.world.inside(self.world.freed, address) or self.world.inside(self.world.device, address)
        sides = [self._kind(address, size) for address in (to, source)]
        between = "device" in sides and sides != ["device", "device"]
        seconds = COPY_S + size / (self.world.bus if between else self.world.memory)

        def run() -> float:
            if self.fail_copies is not None:
                self.fail_copies -= 1
                if self.fail_copies < 0:
                    raise FakeError("cudaErrorIllegalAddress")
            ctypes.memmove(to, source, size)
            return seconds

        self._queues[stream].work.append(Work(run))
        if "pageable" in sides:  # CUDA blocks: the memory may be another's as soon as the call returns
            self.run_all(stream)

    def _kind(self, address: int, size: int) -> str:
        world = self.world
        for name, ranges in (("device", world.device), ("pinned", world.pinned)):
            if world.inside(ranges, address, size):
                return name
            assert not world.inside(ranges, address), "a copy reaches from one allocation into another"
        return "pageable"

    def batch(self, to: Any, source: Any, sizes: Any, count: int, how: Any, first: Any, kinds: int, stream: int) -> int:
        """cuMemcpyBatchAsync: its copies in any order."""
        copies = list(zip(to, source, sizes, strict=True))
        assert len(copies) == count and kinds == 1
        with self._lock:
            self.calls.append(("batch", count, stream))
            self._dice.shuffle(copies)
            for a, b, size in copies:
                self.rt_memcpyAsync(a, b, size, 4, stream)
            self._perhaps_run()
        return 0

    def exchange_capture_mode(self, mode: Any) -> None:
        """cuThreadExchangeStreamCaptureMode; 0, global, is every thread's first."""
        before, self._local.mode = getattr(self._local, "mode", 0), mode._obj.value
        mode._obj.value = before

    def RawModule(self, *, code: str, options: tuple[str, ...], backend: str) -> SimpleNamespace:  # noqa: N802
        """Takes the source for that which the emulation was built from."""
        assert "gather_runs" in code and backend == "nvrtc"
        flags = tuple(option for option in options if option.startswith("-D"))

        def get_function(name: str) -> Callable[..., None]:
            def start(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[int, ...]) -> None:
                stream = self.entered()[-1]

                def run() -> float:
                    launch(name, min(grid[0], 3), block[0], self._dice.randrange(1000), *arguments, flags=flags)
                    return LAUNCH_S + self._moved(name, arguments)

                with self._lock:
                    self.calls.append((name, grid, stream, *arguments))
                    self._queues[stream].work.append(Work(run))
                    self._perhaps_run()

            return start

        def compile() -> None:
            if self.compile_error:
                raise FakeCompileError(self.compile_error)

        return SimpleNamespace(get_function=get_function, compile=compile)

    def _moved(self, name: str, arguments: tuple[int, ...]) -> float:
        """How long a launch over runs takes: at memory speed, or over the bus where its payloads are of the host."""
        if not name.endswith("_runs"):
            return 0.0
        size = arguments[1] * arguments[3] * arguments[5] * arguments[7]
        payload = ctypes.c_uint64.from_address(arguments[4]).value
        return size / (self.world.mapped if self.world.inside(self.world.pinned, payload) else self.world.memory)

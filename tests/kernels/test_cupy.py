"""What ``cuda.py`` and the fake believe of CuPy, asked of CuPy itself where it is installed. No GPU is needed.

A fake that offers what the library does not, or takes it in another order, would prove nothing.
"""

import importlib.util
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from terracekv.kernels import cuda
from terracekv.tests.kernels.fake_cupy import FakeCupy

USED = {
    "eventCreateWithFlags": "flags",
    "eventDestroy": "event",
    "eventElapsedTime": "start end",
    "eventQuery": "event",
    "eventRecord": "event stream",
    "eventSynchronize": "event",
    "free": "ptr",
    "freeHost": "ptr",
    "getDevice": "",
    "getDeviceCount": "",
    "getDeviceProperties": "device",
    "hostAlloc": "size flags",
    "hostRegister": "ptr size flags",
    "hostUnregister": "ptr",
    "ipcCloseMemHandle": "devPtr",
    "ipcGetMemHandle": "devPtr",
    "ipcOpenMemHandle": "handle",
    "malloc": "size",
    "memGetInfo": "",
    "memcpyAsync": "dst src size kind stream",
    "pointerGetAttributes": "ptr",
    "setDevice": "device",
    "streamSynchronize": "stream",
    "streamWaitEvent": "stream event",
}
"""The functions of the runtime that are called, with what they are given, in this order and under CuPy's names."""

ASK = f"""
import json, cupy
from cupy.cuda import compiler, runtime
def refused(handle):
    try: runtime.ipcOpenMemHandle(handle)
    except Exception as error: return isinstance(error, RuntimeError)
print(json.dumps({{
    "signatures": {{name: getattr(runtime, name).__doc__.splitlines()[0] for name in {sorted(USED)}}},
    "constants": [runtime.eventDisableTiming, runtime.memcpyDefault, runtime.memoryTypeDevice,
                  runtime.hostAllocPortable | runtime.hostAllocMapped],
    "attributes": [name for name in ("type", "device", "devicePointer") if hasattr(runtime.PointerAttributes, name)],
    "module": cupy.RawModule.__doc__.splitlines()[0],
    "kernel": [hasattr(cupy.RawModule, "compile"), hasattr(cupy.RawModule, "get_function"),
               hasattr(cupy.RawKernel, "__call__")],
    "stream": cupy.cuda.Stream.__init__.__doc__.splitlines()[0],
    "errors": [issubclass(runtime.CUDARuntimeError, RuntimeError), issubclass(compiler.CompileException, RuntimeError)],
    "handles": [refused(bytes({cuda._HANDLE_BYTES})), refused(bytes({cuda._HANDLE_BYTES - 1}))],
}}))
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    """In a process of its own: the tests' own has a fake, or none."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ASK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fake_offers_what_is_used_and_nothing_else() -> None:
    fake = {name[3:]: getattr(FakeCupy, name) for name in dir(FakeCupy) if name.startswith("rt_")}
    taken = {name: len(inspect.signature(function).parameters) - 1 for name, function in fake.items()}
    assert taken == {name: len(arguments.split()) for name, arguments in USED.items()}


@pytest.mark.parametrize("name", USED)
def test_cupy_takes_what_it_is_given_in_this_order(cupy: Any, name: str) -> None:
    inside = cupy["signatures"][name].split("(", 1)[1].rsplit(")", 1)[0]
    given = [each.split("=")[0].split()[-1] for each in inside.split(",") if each]
    optional = sum("=" in each for each in inside.split(","))
    wanted = USED[name].split()
    assert given[: len(wanted)] == wanted and len(given) - optional <= len(wanted)


def test_the_numbers_mean_what_they_are_called(cupy: Any) -> None:
    assert cupy["constants"] == [
        cuda._EVENT_PLAIN,
        cuda._TO_ANY,
        cuda._MEMORY_DEVICE,
        cuda._REGISTER_PORTABLE_MAPPED,
    ]


def test_addresses_modules_and_streams_have_the_attributes_that_are_read(cupy: Any) -> None:
    assert cupy["attributes"] == ["type", "device", "devicePointer"] and all(cupy["kernel"])
    for word in ("code=", "tuple options=", "str backend="):
        assert word in cupy["module"]
    assert "non_blocking=" in cupy["stream"]


def test_errors_of_cuda_are_runtime_errors_those_of_the_compiler_are_not(cupy: Any) -> None:
    assert cupy["errors"] == [True, False]


def test_a_handle_has_as_many_bytes_as_are_asked_for(cupy: Any) -> None:
    """Of another size it is no error of CUDA."""
    assert cupy["handles"] == [True, False]

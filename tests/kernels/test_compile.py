"""``copy.cu`` under the real compiler: no warning, nothing spilled, wide accesses. No GPU is needed to compile."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from terracekv.kernels import cuda
from terracekv.kernels.driver import BATCH_IN_STREAM_ORDER, Attributes
from terracekv.kernels.runs import Runs
from terracekv.tests.kernels.emulated import constants

SOURCE = Path(__file__).parents[2] / "kernels" / "copy.cu"
NVCC = shutil.which("nvcc")
KERNELS = {"gather_runs", "scatter_runs", "split_planes", "merge_planes"}
REGISTERS_MAX = 64
"""So that 1024 threads still fit on a multiprocessor."""
NVRTC = [str(file) for folder in sys.path for file in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="needs nvcc, CUDA's compiler")


def compiled(output: Path, *flags: str) -> str:
    """What the compiler says; AssertionError when it says no."""
    assert NVCC is not None
    command = [NVCC, "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v", *flags, "-o", str(output), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@NEEDS_NVCC
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_for(architecture: str, tmp_path: Path) -> None:
    said = compiled(tmp_path / "cubin", "-cubin", f"-arch={architecture}")
    assert set(re.findall(r"Compiling entry function '(\w+)'", said)) == KERNELS
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    print(f"{architecture}: registers {registers}, no spills")
    assert len(registers) == len(KERNELS) and max(registers) <= REGISTERS_MAX


@NEEDS_NVCC
def test_kernels_for_one_geometry_compile_too(tmp_path: Path) -> None:
    plan = Runs((0,), 65536, 64, 32768, tuple(range(16)))
    said = compiled(tmp_path / "cubin", "-cubin", "-arch=sm_90", *constants(plan))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@NEEDS_NVCC
def test_runs_and_planes_move_in_words_of_16_bytes(tmp_path: Path) -> None:
    compiled(tmp_path / "ptx", "-ptx", "-arch=sm_80")
    code = (tmp_path / "ptx").read_text()
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", code, re.DOTALL))
    assert bodies.keys() == KERNELS
    for name, body in bodies.items():
        assert re.search(r"\bld(\.global)?\.v4\.u32\b", body), name
        assert re.search(r"\bst(\.global)?\.v4\.u32\b", body), name


@pytest.mark.skipif(not NVRTC, reason="needs NVRTC, CUDA's compiler as a library (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_compiler_that_is_used_at_run_time_takes_it_too(architecture: str) -> None:
    library = ctypes.CDLL(NVRTC[0])
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"copy.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(b"-std=c++17", f"--gpu-architecture={architecture}".encode())
    code = library.nvrtcCompileProgram(program, len(options), options)
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert code == 0 and not log.value, log.value.decode()


@NEEDS_NVCC
def test_the_batch_copys_attributes_lie_as_the_driver_reads_them(tmp_path: Path) -> None:
    source = tmp_path / "layout.cu"
    fields = {
        "access_order": "srcAccessOrder",
        "source_hint": "srcLocHint",
        "target_hint": "dstLocHint",
        "flags": "flags",
    }
    checks = "".join(
        f'static_assert(offsetof(CUmemcpyAttributes, {theirs}) == {getattr(Attributes, ours).offset}, "{ours}");\n'
        for ours, theirs in fields.items()
    )
    source.write_text(
        "#include <cstddef>\n#include <cuda.h>\n"
        + checks
        + f'static_assert(sizeof(CUmemcpyAttributes) == {ctypes.sizeof(Attributes)}, "size");\n'
        + f'static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == {BATCH_IN_STREAM_ORDER}, "order");\n'
    )
    assert NVCC is not None
    done = subprocess.run([NVCC, "-c", str(source), "-o", str(tmp_path / "o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@NEEDS_NVCC
def test_what_is_called_past_cupy_is_what_cudas_headers_declare(tmp_path: Path) -> None:
    """Functions of the driver with their arguments, and numbers under their names."""
    numbers = {
        "cudaErrorNotReady": cuda._NOT_READY,
        "cudaEventDisableTiming": cuda._EVENT_PLAIN,
        "cudaEventDefault": cuda._EVENT_TIMED,
        "cudaHostAllocPortable | cudaHostAllocMapped": cuda._REGISTER_PORTABLE_MAPPED,
        "cudaHostRegisterPortable | cudaHostRegisterMapped": cuda._REGISTER_PORTABLE_MAPPED,
        "cudaMemcpyDefault": cuda._TO_ANY,
        "cudaMemoryTypeDevice": cuda._MEMORY_DEVICE,
        "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": cuda._CAPTURE_THREAD_LOCAL,
        "sizeof(cudaIpcMemHandle_t)": cuda._HANDLE_BYTES,
        "sizeof(CUdeviceptr)": ctypes.sizeof(ctypes.c_void_p),
        "sizeof(CUdevice)": ctypes.sizeof(ctypes.c_int),
    }
    functions = {
        "cuThreadExchangeStreamCaptureMode": "CUstreamCaptureMode *",
        "cuDevicePrimaryCtxGetState": "CUdevice, unsigned int *, int *",
        "cuDeviceGetUuid_v2": "CUuuid *, CUdevice",
        "cuDeviceGet": "CUdevice *, int",
        "cuMemcpyBatchAsync_v2": "CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,"
        " size_t, CUstream",
    }
    source = tmp_path / "names.cu"
    source.write_text(
        "#include <cuda.h>\n#include <cuda_runtime.h>\n"
        + "".join(f'static_assert(({name}) == {number}, "{name}");\n' for name, number in numbers.items())
        + "".join(f"CUresult (*use_{name})({taken}) = {name};\n" for name, taken in functions.items())
    )
    assert NVCC is not None
    done = subprocess.run([NVCC, "-c", str(source), "-o", str(tmp_path / "o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

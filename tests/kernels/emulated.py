"""``kernels/copy.cu`` on the CPU: built by a C++ compiler and called with addresses, as a launch on a GPU would be.

Owns the libraries that it builds, one for each set of flags, in a folder that goes with the process. Imports
``kernels``; used by tests of the kernels and by the fake CUDA runtime.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

from terracekv.kernels.runs import Runs

SOURCE = Path(__file__).parent / "emulated.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")
WITHOUT = "needs a C++ compiler (g++ or clang++) to run the kernels on the CPU"
FLAGS = ("-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")

_folder = tempfile.TemporaryDirectory(prefix="terracekv-kernels-")


@functools.cache
def library(*flags: str) -> ctypes.CDLL:
    """The kernels, built with the flags given besides the usual ones."""
    assert COMPILER is not None, WITHOUT
    made = Path(_folder.name) / f"{len(list(Path(_folder.name).iterdir()))}.so"
    command = [COMPILER, *FLAGS, *flags, str(SOURCE), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


def launch(kernel: str, grid: int, block: int, seed: int, *arguments: int, flags: Sequence[str] = ()) -> None:
    """Run a kernel to its end; ``arguments`` are its own, every one of 64 bits."""
    function = getattr(library(*flags), f"launch_{kernel}")
    function.restype = None
    function(ctypes.c_uint(grid), ctypes.c_uint(block), ctypes.c_ulonglong(seed), *map(ctypes.c_ulonglong, arguments))


def constants(plan: Runs) -> tuple[str, ...]:
    """The flags under which the kernels serve one geometry only."""
    return (
        f"-DRUN_BYTES={plan.run_bytes}ULL",
        f"-DPAGE_STRIDE={plan.page_stride}ULL",
        f"-DPAGES_PER_BLOCK={len(plan.pages)}ULL",
    )


def move_runs(
    kernel: str,
    plan: Runs,
    pages: Sequence[Sequence[int]],
    payloads: Sequence[int],
    *,
    grid: int = 2,
    block: int = 64,
    seed: int = 0,
    flags: Sequence[str] = (),
) -> None:
    """Gather or scatter several blocks of the plan's memory in one launch, each with its own pages and payload."""
    bases = array("Q", plan.bases)
    indices = array("Q", [page for of_block in pages for page in of_block])
    addresses = array("Q", payloads)
    launch(
        kernel,
        grid,
        block,
        seed,
        bases.buffer_info()[0],
        len(bases),
        indices.buffer_info()[0],
        len(pages[0]) if pages else 0,
        addresses.buffer_info()[0],
        len(payloads),
        plan.page_stride,
        plan.run_bytes,
        flags=flags,
    )


def move_planes(
    kernel: str, elements: Sequence[int], planes: Sequence[int], count: int, *, grid: int = 2, block: int = 32
) -> None:
    """Split or merge several payloads of ``count`` 16-bit elements in one launch."""
    sources, targets = array("Q", elements), array("Q", planes)
    launch(kernel, grid, block, 1, sources.buffer_info()[0], targets.buffer_info()[0], len(elements), count)

"""Runs the kernels under a preloaded address sanitizer, which ends the process at the first access that is wrong.

Run by ``test_copy.py`` in a process of its own; prints how many cases went well. Imports ``kernels``.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from terracekv.kernels.runs import Runs
from terracekv.tests.kernels.emulated import SANITIZE, launch, move_runs

CASES = 120

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)


@contextmanager
def memory(size: int) -> Iterator[int]:
    """The address of exactly ``size`` bytes."""
    address = _libc.malloc(size)
    ctypes.memset(address, size & 0xFF, size)
    yield address
    _libc.free(address)


def move(dice: random.Random) -> None:
    """Blocks of a random geometry, there and back."""
    run = dice.choice((1, 3, 15, 16, 17, 31, 64, 100, 511, 512, 4095, 4096, 4097, 8200))
    stride = run + dice.choice((0, 0, 1, 8, 16))
    pages = dice.randrange(1, 6)
    each = dice.randrange(1, pages + 1)
    order = dice.sample(range(pages), pages)
    blocks = [order[at : at + each] for at in range(0, pages - each + 1, each)]
    with ExitStack() as held:
        extent = (pages - 1) * stride + run
        bases = tuple(held.enter_context(memory(extent)) for _ in range(dice.randrange(1, 4)))
        payloads = [held.enter_context(memory(len(bases) * each * run)) for _ in blocks]
        plan = Runs(bases, stride, pages, run)
        for kernel in ("gather_runs", "scatter_runs"):
            move_runs(kernel, plan, blocks, payloads, grid=dice.randrange(1, 4), flags=SANITIZE)


def split(dice: random.Random) -> None:
    """Planes of a random number of elements, there and back."""
    count = dice.randrange(1, 400)
    with memory(2 * count) as whole, memory(2 * count) as apart, memory(8) as first, memory(8) as second:
        ctypes.c_uint64.from_address(first).value = whole
        ctypes.c_uint64.from_address(second).value = apart
        for kernel in ("split_planes", "merge_planes"):
            launch(kernel, 1, 32, 0, first, second, 1, count, flags=SANITIZE)


if __name__ == "__main__":
    dice = random.Random(1)
    for _ in range(CASES):
        move(dice)
        split(dice)
    print(2 * CASES)

"""Copies between an engine's host memory and a payload: bytes in, bytes out, each byte moved once.

Owns nothing. Called by connectors from any thread (the interpreter lock is let go during large copies), and the
reference that other kernels are compared with. Imports ``runs`` and NumPy, which is used for strided copies only:
one call per strip, so the cost per run is that of ``memcpy`` and not of the interpreter.

Memory is named by address, as ``torch.Tensor.data_ptr()`` gives it. The caller keeps it alive and its own for the
length of the call; ``Runs`` has checked that no run leaves it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from terracekv.kernels.runs import Runs, Strip

Bytes = npt.NDArray[np.uint8]


def gather_runs(plan: Runs, into: memoryview) -> None:
    """Copy the plan's runs into the first ``plan.payload_bytes`` bytes of ``into``; the rest is left alone.

    Raises ValueError, having copied nothing, when ``into`` is too small, read-only or not of single bytes.
    """
    payload = _payload(plan, into)
    for strip in plan.strips():
        np.copyto(_dense(strip, payload), _paged(strip))


def scatter_runs(plan: Runs, payload: memoryview) -> None:
    """Copy the first ``plan.payload_bytes`` bytes of ``payload`` out to the plan's runs.

    Raises ValueError, having copied nothing, when ``payload`` is too small or not of single bytes.
    """
    source = _payload(plan, payload)
    for strip in plan.strips():
        np.copyto(_paged(strip), _dense(strip, source))


class _Memory:
    """What NumPy needs to know to see an address as an array."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def _payload(plan: Runs, buffer: memoryview) -> memoryview:
    if buffer.itemsize != 1 or not buffer.c_contiguous:
        raise ValueError("a payload is a contiguous memoryview of bytes")
    if buffer.nbytes < plan.payload_bytes:
        raise ValueError(f"the payload has {buffer.nbytes} bytes, the plan {plan.payload_bytes}")
    return buffer


def _paged(strip: Strip) -> Bytes:
    shape = (strip.rows, strip.columns, strip.run_bytes)
    return np.asarray(_Memory(strip.address, shape, (strip.row_stride, strip.column_stride, 1)))


def _dense(strip: Strip, payload: memoryview) -> Bytes:
    shape = (strip.rows, strip.columns, strip.run_bytes)
    strides = (strip.row_step, strip.run_bytes, 1)
    return np.ndarray(shape, np.uint8, payload, strip.offset, strides)

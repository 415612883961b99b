"""Functions of CUDA's driver that CuPy does not offer, where the driver has them.

Owns nothing; called by ``cuda.py`` when a device is opened. Standard library only. None stands for a function that this
machine's driver does not have: it is older, or there is none.
"""

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"
BATCH_IN_STREAM_ORDER = 1


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how the copies of a batch read their sources. The two locations are hints for managed
    memory."""

    _fields_ = [
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def in_stream_order() -> Attributes:
    """Sources are read when the stream comes to it."""
    return Attributes(access_order=BATCH_IN_STREAM_ORDER)


def function(name: str) -> Any:
    """One by its name."""
    try:
        return getattr(ctypes.CDLL(LIBRARY), name, None)
    except OSError:
        return None


def batch_copy() -> Any:
    """The driver's batch copy with the arguments of version 2, or None."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        second_version = driver.cuMemcpyBatchAsync_v2
        second_version.argtypes = _BATCH_ARGUMENTS
        return second_version
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    first_version = driver.cuMemcpyBatchAsync
    first_version.argtypes = (*_BATCH_ARGUMENTS[:-1], ctypes.c_void_p, ctypes.c_void_p)

    def call(*arguments: Any) -> Any:
        failed = ctypes.c_size_t()
        return first_version(*arguments[:-1], ctypes.byref(failed), arguments[-1])

    return call


_BATCH_ARGUMENTS = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)

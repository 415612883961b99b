"""Mapping pages ahead of use, and the address of a buffer. Standard library only; pure functions, any thread.

The first write through a fresh mapping of shared memory faults page by page and runs at a fraction of memory speed,
in every process that maps it. ``populate`` takes those faults in one call.
"""

import ctypes
import errno
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
_ANY_BYTES = 0


class _Buffer(ctypes.Structure):
    """Py_buffer: what an object says of its memory."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("rest", ctypes.c_void_p * 5),
    ]


def address_of(view: memoryview) -> int:
    """Address of the first byte of a contiguous view, which may be for reading only."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), _ANY_BYTES)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return found.address or 0


def populate(view: memoryview) -> bool:
    """Map all pages of a writable, page-aligned view for writing; lets go of the interpreter lock meanwhile.

    False where the kernel cannot (before Linux 5.14): the pages then come one by one. OSError (ENOMEM, EFAULT) when
    the memory is not there.
    """
    if not view.nbytes:
        return True
    address = address_of(view)
    assert address % mmap.PAGESIZE == 0
    if _libc.madvise(address, view.nbytes, _MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, f"MADV_POPULATE_WRITE of {view.nbytes} bytes: {os.strerror(code)}")

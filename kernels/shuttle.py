"""Whole payloads between host memory and a place in a GPU's memory: no pages, no runs, one run of bytes.

Owns a stream and two pinned buffers. Made by the gpu tier; called from any thread, one at a time gets in, and each call
returns when the bytes are where they go. Imports ``cuda``, ``pages`` and ``pinned``.

Memory that is pinned already is copied by DMA at once; other memory through the buffers, one being filled or emptied
while the other is on the bus.
"""

import ctypes
import threading
from contextlib import suppress

from terracekv.kernels.cuda import Device
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned

BUFFER_BYTES = 8 << 20


class Shuttle:
    """RuntimeError, with nothing left allocated, when the buffers cannot be had. ``host`` is memory that is pinned."""

    def __init__(self, device: Device, host: Pinned | None = None, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._host = host
        self._size = buffer_bytes
        self._lock = threading.Lock()
        self._stream = device.stream()
        self._events = [device.event(), device.event()]
        try:
            self._buffer = device.allocate_pinned(2 * buffer_bytes)
        except BaseException:
            for event in self._events:
                device.destroy_event(event)
            raise
        self._view = memoryview((ctypes.c_ubyte * (2 * buffer_bytes)).from_address(self._buffer)).cast("B")

    def write(self, address: int, payload: memoryview) -> None:
        """Copy a payload to the GPU."""
        with self._lock:
            if self._direct(payload):
                self._copy(address, payload, True)
                return
            for turn, start in enumerate(range(0, len(payload), self._size)):
                half = turn % 2
                self._device.await_event(self._events[half])
                part = payload[start : start + self._size]
                at = half * self._size
                self._view[at : at + len(part)] = part
                self._device.copy(address + start, self._buffer + at, len(part), self._stream.ptr)
                self._device.record(self._events[half], self._stream.ptr)
            self._device.synchronize(self._stream.ptr)

    def read(self, address: int, into: memoryview) -> None:
        """Fill ``into`` from the GPU."""
        with self._lock:
            if self._direct(into):
                self._copy(address, into, False)
                return
            starts = range(0, len(into), self._size)
            for turn, start in enumerate(starts):
                self._fetch(address, start, min(self._size, len(into) - start), turn % 2)
                if turn:
                    self._empty(into, starts[turn - 1], (turn - 1) % 2)
            if starts:
                self._empty(into, starts[-1], (len(starts) - 1) % 2)

    def close(self) -> None:
        """Nobody copies any more. After an error of the GPU there may be nothing to give back to."""
        self._view.release()
        with suppress(RuntimeError):
            self._device.free_pinned(self._buffer)
        for event in self._events:
            with suppress(RuntimeError):
                self._device.destroy_event(event)

    def _fetch(self, address: int, start: int, length: int, half: int) -> None:
        self._device.copy(self._buffer + half * self._size, address + start, length, self._stream.ptr)
        self._device.record(self._events[half], self._stream.ptr)

    def _empty(self, into: memoryview, start: int, half: int) -> None:
        self._device.await_event(self._events[half])
        part = into[start : start + self._size]
        part[:] = self._view[half * self._size : half * self._size + len(part)]

    def _direct(self, payload: memoryview) -> bool:
        if self._host is None or payload.readonly or not payload.nbytes:
            return False
        return self._host.covers_all(address_of(payload), payload.nbytes)

    def _copy(self, address: int, payload: memoryview, write: bool) -> None:
        """What was begun is over when this ends, however it does: the payload is another's then."""
        assert self._host is not None
        start = address_of(payload)
        try:
            for part, length in self._host.spans(start, payload.nbytes):
                there = address + part - start
                to, source = (there, part) if write else (part, there)
                self._device.copy(to, source, length, self._stream.ptr)
        finally:
            self._device.synchronize(self._stream.ptr)

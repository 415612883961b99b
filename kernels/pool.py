"""What transfers on one GPU use again and again: events, buffers for parameters, memory that lives as long as they do.

Owns all that it hands out, until ``close``. Called by ``transfer.py`` under its lock. Imports ``cuda``.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from terracekv.kernels.cuda import Device

BUFFER_BYTES = 4096


class Buffer(NamedTuple):
    """The same number of bytes on both sides; those of the host are pinned, so that a copy does not block."""

    host: int
    device: int
    size: int


class Pool:
    """Creating events and pinning memory is slow, and may wait for the whole GPU: both are kept for the next use."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[int] = []
        self._idle_events: list[int] = []
        self._buffers: list[Buffer] = []
        self._idle_buffers: list[Buffer] = []
        self._memory: list[int] = []

    def event(self) -> int:
        """An event that nobody else uses."""
        if self._idle_events:
            return self._idle_events.pop()
        event = self._device.event()
        self._events.append(event)
        return event

    def mark(self, stream: int) -> int:
        """An event that happens when the stream has done what it was given until now."""
        event = self.event()
        try:
            self._device.record(event, stream)
        except BaseException:
            self.give_back(event)
            raise
        return event

    def give_back(self, *events: int) -> None:
        """Nobody will ask for these any more. Streams that wait for them already go on doing so."""
        self._idle_events += events

    def buffer(self, size: int) -> Buffer:
        """At least ``size`` bytes on either side."""
        for buffer in self._idle_buffers:
            if buffer.size >= size:
                self._idle_buffers.remove(buffer)
                return buffer
        size = max(BUFFER_BYTES, 1 << (size - 1).bit_length())
        host = self._device.allocate_pinned(size)
        try:
            made = Buffer(host, self._device.allocate(size), size)
        except BaseException:
            self._device.free_pinned(host)
            raise
        self._buffers.append(made)
        return made

    def give_back_buffer(self, buffer: Buffer) -> None:
        """No copy from it is under way."""
        self._idle_buffers.append(buffer)

    def memory(self, size: int) -> int:
        """Memory of the GPU until ``close``."""
        address = self._device.allocate(size)
        self._memory.append(address)
        return address

    def numbers(self, words: Sequence[int], stream: int) -> int:
        """Unsigned numbers of 64 bits on the GPU until ``close``; they are there when this returns."""
        source = array("Q", words)
        address = self.memory(8 * len(source))
        self._device.copy(address, source.buffer_info()[0], 8 * len(source), stream)
        self._device.synchronize(stream)
        return address

    def close(self) -> None:
        """Give all back. Nothing is under way any more. After an error of the GPU there may be nothing to give back
        to: the process that dies frees it."""
        for event in self._events:
            with suppress(RuntimeError):
                self._device.destroy_event(event)
        for address in [*self._memory, *(buffer.device for buffer in self._buffers)]:
            with suppress(RuntimeError):
                self._device.free(address)
        for buffer in self._buffers:
            with suppress(RuntimeError):
                self._device.free_pinned(buffer.host)
        self._events, self._memory, self._buffers = [], [], []

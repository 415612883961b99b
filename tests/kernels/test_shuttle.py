"""Payloads of any length to a GPU and back, through buffers that are much smaller."""

import random
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.kernels import pinned
from terracekv.kernels.shuttle import Shuttle
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import Slots, bytes_at, device_on


@given(st.integers(0, 400), st.integers(0, 1000), st.booleans())
@settings(deadline=None)
def test_what_is_written_is_read_whatever_the_gpu_does_late(size: int, seed: int, eager: bool) -> None:
    payload = random.Random(seed).randbytes(size)
    fake = FakeCupy(seed=seed, eager=eager)
    device = device_on(fake)
    address = device.allocate(500)
    with closing(Shuttle(device, buffer_bytes=64)) as shuttle:
        shuttle.write(address + 7, memoryview(payload))
        assert bytes(bytes_at(address + 7, len(payload) or 1))[: len(payload)] == payload
        into = bytearray(len(payload))
        shuttle.read(address + 7, memoryview(into))
        assert into == payload
    device.free(address)
    assert not fake.left


def test_buffers_that_cannot_be_had_leave_nothing() -> None:
    fake = FakeCupy()
    fake.fail_calls["hostAlloc"] = 0
    with pytest.raises(RuntimeError):
        Shuttle(device_on(fake))
    assert not fake.left


def test_a_payload_that_fails_half_way_is_not_written_to_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a slot of the host, and another's as soon as the call has failed."""
    monkeypatch.setattr(pinned, "_refused", None)
    fake = FakeCupy()
    device = device_on(fake)
    slots = Slots(device, 2, 4096, chunk_bytes=4096)
    address = device.allocate(8192)
    with closing(Shuttle(device, slots.pinned)) as shuttle, slots.view[:8192] as into:
        fake.fail_calls["memcpyAsync"] = 1
        with pytest.raises(RuntimeError, match="told to fail"):
            shuttle.read(address, into)
        assert not fake.busy
    device.free(address)
    slots.close()
    assert not fake.left

"""Splitting into byte planes and back, against the definition."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.kernels.planes import WIDTHS, merge, split

CANARY = 0xA5


@settings(max_examples=60, deadline=None)
@given(width=st.sampled_from(WIDTHS), count=st.integers(0, 700), offset=st.integers(0, 7), seed=st.integers(0, 2**32))
def test_planes_hold_the_nth_bytes_of_all_elements_and_merge_back(
    width: int, count: int, offset: int, seed: int
) -> None:
    size = width * count
    payload = random.Random(seed).randbytes(size)
    source = memoryview(bytearray(offset) + payload)[offset:]
    planes = memoryview(bytearray([CANARY]) * (size + 9))
    split(source, width, planes)
    assert bytes(planes) == b"".join(payload[index::width] for index in range(width)) + bytes([CANARY]) * 9
    back = memoryview(bytearray([CANARY]) * (offset + size + 9))
    merge(planes, width, back[offset : offset + size])
    assert bytes(back) == bytes([CANARY]) * offset + payload + bytes([CANARY]) * 9


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ValueError):
        split(memoryview(bytes(7)), 2, memoryview(bytearray(8)))
    with pytest.raises(ValueError):
        split(memoryview(bytes(8)), 2, memoryview(bytearray(7)))
    with pytest.raises(ValueError):
        merge(memoryview(bytes(7)), 2, memoryview(bytearray(8)))
    with pytest.raises(ValueError):
        split(memoryview(bytes(8)), 2, memoryview(bytes(8)))
    with pytest.raises(ValueError):
        merge(memoryview(bytes(8)), 2, memoryview(bytes(8)))

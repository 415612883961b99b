"""Pinning what the system lets us pin, and telling what it did not."""

import mmap
from collections.abc import Iterator

import pytest

from terracekv.kernels import pinned
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.tests.kernels.fake_cupy import FakeCupy, FakeError
from terracekv.tests.kernels.gpus import device_on

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_refused", None)


@pytest.fixture
def mapping() -> Iterator[memoryview]:
    with mmap.mmap(-1, 10 * PAGE) as mapped, memoryview(mapped) as view:
        yield view


def pinned_on(fake: FakeCupy, view: memoryview) -> Pinned:
    made = Pinned(device_on(fake), address_of(view), len(view), chunk_bytes=4 * PAGE)
    made.pin()
    return made


def test_an_arena_is_pinned_piece_by_piece_and_given_back(mapping: memoryview) -> None:
    fake = FakeCupy()
    made = pinned_on(fake, mapping)
    assert (made.pinned_bytes, made.pageable_bytes, made.reason) == (10 * PAGE, 0, None)
    assert sorted(fake.world.pinned.values()) == [2 * PAGE, 4 * PAGE, 4 * PAGE]
    made.close()
    made.close()
    assert not fake.world.pinned


@pytest.mark.fault(80)
def test_what_the_system_refuses_is_pageable_and_counted(mapping: memoryview) -> None:
    made = pinned_on(FakeCupy(pin_limit=9 * PAGE), mapping)
    assert (made.pinned_bytes, made.pageable_bytes) == (8 * PAGE, 2 * PAGE)
    base = address_of(mapping)
    assert made.covers(base, PAGE) and made.covers(base + 4 * PAGE, 4 * PAGE)
    assert not made.covers(base + 8 * PAGE, PAGE) and not made.covers(base + 7 * PAGE, 2 * PAGE)
    made.close()


@pytest.mark.fault(82)
def test_a_refusal_names_host_memory_the_sizes_and_the_knob_and_is_not_repeated(mapping: memoryview) -> None:
    fake = FakeCupy(pin_limit=5 * PAGE)
    first = pinned_on(fake, mapping)
    assert first.reason is not None
    for word in ("host memory", str(4 * PAGE), str(10 * PAGE), "ulimit -l", "host.size"):
        assert word in first.reason
    second = pinned_on(fake, mapping)  # the fake would not forgive another attempt
    assert second.reason == first.reason and second.pageable_bytes == 10 * PAGE
    assert [call[0] for call in fake.calls].count("hostRegister") == 2
    first.close()


def test_a_span_of_bytes_is_cut_where_a_registration_ends(mapping: memoryview) -> None:
    made = pinned_on(FakeCupy(), mapping)
    base = address_of(mapping)
    assert made.spans(base + 3 * PAGE, 6 * PAGE) == [
        (base + 3 * PAGE, PAGE),
        (base + 4 * PAGE, 4 * PAGE),
        (base + 8 * PAGE, PAGE),
    ]
    assert made.covers(base + PAGE, 3 * PAGE) and not made.covers(base + 3 * PAGE, 2 * PAGE)
    assert not made.covers(base - PAGE, PAGE)
    made.close()


def test_pinning_ends_early_when_the_arena_is_closed(mapping: memoryview) -> None:
    fake = FakeCupy()
    made = Pinned(device_on(fake), address_of(mapping), len(mapping))
    made.close()
    made.pin()
    assert not fake.world.pinned


@pytest.mark.fault(2)
def test_memory_that_cannot_be_unpinned_any_more_is_nobodys_trouble(mapping: memoryview) -> None:
    """The engine's GPU has failed: its client still closes, and finds the next daemon."""
    fake = FakeCupy()
    made = pinned_on(fake, mapping)
    fake.broken = FakeError("cudaErrorIllegalAddress")
    made.close()
    assert made.pinned_bytes == 0

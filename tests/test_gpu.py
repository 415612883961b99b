"""What the gpu tier does beyond the contract: sharing, demotion, damage, and GPUs that say no."""

import ctypes
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, name, payload_of, put, registered
from terracekv.tests.gpu_tiers import SLAB_BYTES, gpu_tier
from terracekv.tests.kernels.fake_cupy import FakeCupy, FakeError
from terracekv.tests.kernels.gpus import Slots, bytes_at, device_on
from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import NoRoom
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.tier import Outcome

SLOTS = SLAB_BYTES // (5 * 4096)
"""Of a block in the one slab that these tiers have."""


@pytest.fixture
def namespaces(tmp_path: Path) -> Namespaces:
    return Namespaces(tmp_path / "namespaces.json")


@pytest.fixture
def namespace(namespaces: Namespaces) -> Namespace:
    return registered(namespaces, 1)


@pytest.fixture
def fake() -> FakeCupy:
    return FakeCupy()


@pytest.fixture
def tier(tmp_path: Path, fake: FakeCupy, namespaces: Namespaces) -> Iterator[GpuTier]:
    with gpu_tier(tmp_path, fake, namespaces, SLAB_BYTES) as opened:
        yield opened
        opened.check()


def test_an_engine_finds_a_leased_slot_in_the_exported_memory(
    tier: GpuTier, fake: FakeCupy, namespace: Namespace
) -> None:
    put(tier, namespace, name(1))
    put(tier, namespace, name(2))
    assert tier.exported is not None and tier.exported.uuid == tier.device.uuid
    base = fake.world.handles[tier.exported.handle]
    (slot,) = tier.acquire(namespace, [name(2)])
    assert slot is not None
    assert bytes(bytes_at(base + slot.offset, BLOCK_BYTES)) == payload_of(name(2), namespace.id)
    tier.release([slot])


def test_a_leased_block_is_not_evicted_and_keeps_its_bytes_when_deleted(
    tier: GpuTier, fake: FakeCupy, namespace: Namespace
) -> None:
    put(tier, namespace, name(0))
    (slot,) = tier.acquire(namespace, [name(0)])
    assert slot is not None and tier.exported is not None
    for index in range(1, 2 * SLOTS):
        assert put(tier, namespace, name(index)) is Outcome.STORED
    assert tier.leading(namespace, [name(0)]) == 1
    tier.delete(namespace, [name(0)])
    for index in range(2 * SLOTS, 4 * SLOTS):
        put(tier, namespace, name(index))
    base = fake.world.handles[tier.exported.handle]
    assert bytes(bytes_at(base + slot.offset, BLOCK_BYTES)) == payload_of(name(0), namespace.id)
    tier.release([slot])


@pytest.mark.fault(84)
@pytest.mark.fault(85)
def test_memory_that_cuda_does_not_export_is_still_a_tier_and_the_status_says_why(
    tmp_path: Path, fake: FakeCupy, namespaces: Namespaces, namespace: Namespace
) -> None:
    fake.export_error = "cudaErrorInvalidValue: memory of cuMemCreate"
    with gpu_tier(tmp_path, fake, namespaces, SLAB_BYTES) as tier:
        status = tier.status()
        assert (tier.exported, status.mode) == (None, "copy")
        assert "cuMemCreate" in str(status.details["sharing"]) and "MIG" in str(status.details["sharing"])
        assert put(tier, namespace, name(1)) is Outcome.STORED
        assert get(tier, namespace, name(1))[0] is Outcome.HIT


def test_a_gpu_without_room_is_an_error_with_numbers(tmp_path: Path, fake: FakeCupy, namespaces: Namespaces) -> None:
    fake.room_bytes = 1000
    with pytest.raises(NoRoom, match="1048576 bytes of GPU-01010101.* 1000 bytes free of 1000"):
        with gpu_tier(tmp_path, fake, namespaces, SLAB_BYTES):
            pass
    assert not fake.left


def test_bytes_that_changed_in_the_gpu_are_damage_and_not_listed_again(
    tier: GpuTier, fake: FakeCupy, namespace: Namespace
) -> None:
    put(tier, namespace, name(1))
    (slot,) = tier.acquire(namespace, [name(1)])
    assert slot is not None and tier.exported is not None
    at = fake.world.handles[tier.exported.handle] + slot.offset + 777
    ctypes.c_ubyte.from_address(at).value ^= 1
    tier.release([slot])
    assert get(tier, namespace, name(1))[0] is Outcome.DAMAGED
    assert tier.leading(namespace, [name(1)]) == 0
    assert tier.counters.checksum_failures == 1 and tier.counters.evictions == {"damaged": 1}
    assert put(tier, namespace, name(1)) is Outcome.STORED


@pytest.mark.fault(2)
def test_a_copy_that_fails_is_no_block_and_no_hit(tier: GpuTier, fake: FakeCupy, namespace: Namespace) -> None:
    fake.fail_calls["memcpyAsync"] = 0
    assert put(tier, namespace, name(1)) is Outcome.FAILED
    assert tier.leading(namespace, [name(1)]) == 0 and tier.status().details["reserved_blocks"] == 0
    assert put(tier, namespace, name(1)) is Outcome.STORED
    fake.fail_calls["memcpyAsync"] = 0
    assert get(tier, namespace, name(1))[0] is Outcome.FAILED
    assert tier.counters.io_errors == 2 and "told to fail" in str(tier.status().last_error)
    assert get(tier, namespace, name(1))[0] is Outcome.HIT


def test_what_goes_in_place_of_a_leased_block_is_handed_down(tier: GpuTier, namespace: Namespace) -> None:
    handed = list[bytes]()
    tier.held_below = lambda of, id: False
    tier.demote = lambda of, id, payload, digest: handed.append(id)
    for index in range(SLOTS):
        put(tier, namespace, name(index))
    leases = [slot for slot in tier.acquire(namespace, [name(0), name(1)], touch=False) if slot is not None]
    put(tier, namespace, name(SLOTS))
    assert tier.absent(namespace, [name(index) for index in range(SLOTS + 1)]) == [2]
    assert handed == [name(2)]
    tier.release(leases)


def test_all_that_goes_for_a_block_of_another_size_is_handed_down(
    tier: GpuTier, namespaces: Namespaces, namespace: Namespace
) -> None:
    handed = list[bytes]()
    tier.held_below = lambda of, id: False
    tier.demote = lambda of, id, payload, digest: handed.append(id)
    for index in range(3):
        put(tier, namespace, name(index))
    put(tier, registered(namespaces, 2, 2 * BLOCK_BYTES), name(9))
    assert sorted(handed) == sorted(name(index) for index in range(3))


def test_what_goes_in_place_of_a_slab_that_is_in_use_is_handed_down(
    tmp_path: Path, fake: FakeCupy, namespaces: Namespaces, namespace: Namespace
) -> None:
    """However many blocks lie in that slab: one that is read keeps all of them."""
    large = registered(namespaces, 2, 2 * BLOCK_BYTES)
    handed = list[bytes]()
    with gpu_tier(tmp_path, fake, namespaces, 2 * SLAB_BYTES) as tier:
        tier.held_below = lambda of, id: False
        tier.demote = lambda of, id, payload, digest: handed.append(id)
        for index in range(SLOTS):
            put(tier, namespace, name(index))
        room = SLAB_BYTES // (10 * 4096)
        leases = [slot for slot in tier.acquire(namespace, [name(9)], touch=False) if slot is not None]
        for index in range(100, 101 + room):
            assert put(tier, large, name(index)) is Outcome.STORED
        assert not tier.has(large, name(100)) and handed == [name(100)]
        tier.release(leases)


def test_what_goes_for_its_tenants_quota_is_handed_down(
    tier: GpuTier, namespaces: Namespaces, namespace: Namespace
) -> None:
    red = namespaces.register(replace(namespace, id=bytes([9]) * 32, tenant="red"))
    handed = list[bytes]()
    tier.held_below = lambda of, id: False
    tier.demote = lambda of, id, payload, digest: handed.append(id)
    tier.shares.limits = {"red": 3 * 5 * 4096}
    put(tier, namespace, name(0))
    for index in range(1, 4):
        put(tier, red, name(index))
    leases = [slot for slot in tier.acquire(red, [name(1)], touch=False) if slot is not None]
    assert put(tier, red, name(4)) is Outcome.STORED
    assert tier.absent(red, [name(index) for index in range(1, 5)]) == [1] and handed == [name(2)]
    tier.release(leases)


def test_what_goes_is_dropped_when_a_tier_below_has_it_and_handed_down_when_none_has(
    tier: GpuTier, namespace: Namespace
) -> None:
    below = {name(index) for index in range(0, SLOTS, 2)}
    handed: dict[bytes, bytes] = {}

    def demote(of: Namespace, id: bytes, payload: memoryview, digest: int) -> None:
        assert of == namespace and digest == checksum(payload)
        handed[id] = bytes(payload)

    tier.held_below = lambda of, id: id in below
    tier.demote = demote
    for index in range(2 * SLOTS):
        assert put(tier, namespace, name(index)) is Outcome.STORED
    gone = [name(index) for index in range(SLOTS)]
    assert handed == {id: payload_of(id, namespace.id) for id in gone if id not in below}
    assert tier.demoted == len(handed) and tier.counters.evictions == {"capacity": SLOTS}


def test_a_flushed_namespaces_room_is_taken_back(tier: GpuTier, namespaces: Namespaces, namespace: Namespace) -> None:
    put(tier, namespace, name(1))
    flushed = namespaces.raise_epoch(namespace.id)
    put(tier, flushed, name(1))
    assert tier.reclaim(flushed) == 1
    assert tier.status().blocks == 1


def test_pinned_memory_of_the_host_is_copied_without_a_detour(
    tmp_path: Path, namespaces: Namespaces, namespace: Namespace
) -> None:
    """Its bytes go over the bus once, registrations that end within a payload included."""
    fake = FakeCupy()
    slots = Slots(device_on(fake), 2, BLOCK_BYTES, chunk_bytes=3 * 4096)
    slots.fill(random.Random(1))
    with gpu_tier(tmp_path, fake, namespaces, SLAB_BYTES, host=slots.pinned) as tier:
        expected = slots.payload(1)
        source = slots.view[slots.step : slots.step + BLOCK_BYTES]
        assert tier.put(namespace, name(1), source, checksum(expected)) is Outcome.STORED
        into = slots.view[:BLOCK_BYTES]
        assert tier.get(namespace, name(1), into) is Outcome.HIT
        assert slots.payload(0) == expected
        staging = [call for call in fake.calls if call[0] == "eventRecord"]
        assert not staging
        source.release()
        into.release()
    slots.close()
    assert not fake.left


@pytest.mark.fault(2)
def test_a_tier_on_a_gpu_that_has_failed_still_closes(tmp_path: Path, namespaces: Namespaces) -> None:
    """And with it the daemon: the tiers below have blocks to write."""
    fake = FakeCupy()
    slots = Slots(device_on(fake), 2, BLOCK_BYTES)
    with gpu_tier(tmp_path, fake, namespaces, SLAB_BYTES, host=slots.pinned):
        fake.broken = FakeError("cudaErrorIllegalAddress")
    assert not (tmp_path / "gpu-slots").exists()
    slots.close()

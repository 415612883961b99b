"""One GPU's memory in two processes: opened once, within bounds, and closed again."""

import pytest

from terracekv.kernels.shared import Exported, NotShared, Shared, export
from terracekv.tests.kernels.fake_cupy import FakeCupy, FakeError
from terracekv.tests.kernels.fake_world import World
from terracekv.tests.kernels.gpus import device_on

SIZE = 4096


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def exported(world: World) -> Exported:
    device = device_on(FakeCupy(world))
    return export(device, device.allocate(SIZE), SIZE)


def test_offsets_are_those_of_the_allocation_and_stay_in_it(world: World, exported: Exported) -> None:
    engine = FakeCupy(world)
    shared = Shared(device_on(engine), exported)
    base = world.handles[exported.handle]
    assert shared.address(100, 50) == base + 100
    assert shared.address(SIZE - 1, 1) == base + SIZE - 1
    for offset, size in ((-1, 10), (0, SIZE + 1), (SIZE, 1), (SIZE - 9, 10), (10, 0), (10, -5)):
        with pytest.raises(ValueError, match="not inside"):
            shared.address(offset, size)
    shared.close()
    with pytest.raises(ValueError, match="closed"):
        shared.address(0, 1)


@pytest.mark.fault(86)
def test_a_thousand_openings_are_one_and_leave_none(world: World, exported: Exported) -> None:
    engine = FakeCupy(world)
    device = device_on(engine)
    first = Shared(device, exported)
    for _ in range(1000):
        another = Shared(device, exported)
        assert engine.opened == 1
        another.close()
        another.close()
    first.close()
    assert engine.opened == 0
    for _ in range(1000):
        Shared(device, exported).close()
    assert engine.opened == 0
    assert [call[0] for call in engine.calls].count("ipcOpenMemHandle") == 1001


@pytest.mark.fault(84)
def test_memory_that_cannot_be_opened_says_what_would_let_it(world: World, exported: Exported) -> None:
    engine = FakeCupy(world)
    engine.open_error = "cudaErrorMapBufferObjectFailed"
    with pytest.raises(NotShared, match="MapBufferObjectFailed.*IPC namespace.*MIG"):
        Shared(device_on(engine), exported)
    engine.open_error = ""
    Shared(device_on(engine), exported).close()


@pytest.mark.fault(88)
def test_another_gpu_is_recognised_by_its_uuid_and_not_its_number(world: World, exported: Exported) -> None:
    engine = FakeCupy(world, gpus=2)
    with pytest.raises(NotShared, match="GPU-0101.*GPU-0202"):
        Shared(device_on(engine, 1), exported)
    assert not engine.calls or all(call[0] != "ipcOpenMemHandle" for call in engine.calls)


def test_memory_that_is_gone_cannot_be_opened(world: World) -> None:
    daemon = device_on(FakeCupy(world))
    address = daemon.allocate(SIZE)
    exported = export(daemon, address, SIZE)
    daemon.free(address)
    with pytest.raises(NotShared):
        Shared(device_on(FakeCupy(world)), exported)


def test_memory_of_a_daemon_that_is_gone_is_not_taken_for_that_of_the_next_which_has_its_handle(
    world: World, exported: Exported
) -> None:
    """In a container each daemon has the same process id. CUDA too would answer with what it has open already."""
    device = device_on(FakeCupy(world))
    old = Shared(device, exported)
    restarted = exported._replace(made=bytes(16))
    with pytest.raises(NotShared, match="earlier daemon"):
        Shared(device, restarted)
    Shared(device, exported).close()
    old.close()
    Shared(device, restarted).close()


@pytest.mark.fault(2)
def test_memory_that_cannot_be_closed_any_more_is_nobodys_trouble(world: World, exported: Exported) -> None:
    engine = FakeCupy(world)
    shared = Shared(device_on(engine), exported)
    engine.broken = FakeError("cudaErrorIllegalAddress")
    shared.close()
    shared.close()

"""The choice of a strategy follows what was measured; a full GPU is no error."""

import pytest

from terracekv.kernels.choice import measure
from terracekv.kernels.transfer import STAGED, Choice, Strategy
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import World
from terracekv.tests.kernels.gpus import PAGES_PER_BLOCK, engine_on

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)


@pytest.mark.parametrize(
    ("mapped", "wanted"), [(1e7, Strategy.STAGED), (400e9, Strategy.MAPPED)], ids=["slow mapping", "fast mapping"]
)
def test_the_faster_way_is_chosen_by_the_gpus_own_clock(mapped: float, wanted: Strategy) -> None:
    fake = FakeCupy(World(bus=50e9, mapped=mapped))
    with engine_on(fake, ("HND",)) as engine:
        measured = measure(
            engine.device,
            engine.pieces,
            PAGES_PER_BLOCK,
            scratch_bytes=1 << 20,
            part_bytes=1 << 16,
            clock=lambda: fake.clock,
        )
        assert measured.choice == Choice(wanted, wanted)
        assert measured.rates["gather"].keys() == {Strategy.STAGED, Strategy.MAPPED}
        assert all(rate > 0 for rates in measured.rates.values() for rate in rates.values())


@pytest.mark.fault(77)
def test_long_runs_are_also_tried_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the length of the whole, but of a run."""
    monkeypatch.setattr("terracekv.kernels.choice.BATCHED_RUN_BYTES", 64)
    fake = FakeCupy()
    with engine_on(fake, ("NHD",)) as engine:
        rates = measure(engine.device, engine.pieces, PAGES_PER_BLOCK, scratch_bytes=1 << 16, part_bytes=1 << 14).rates
        assert Strategy.BATCHED in rates["gather"]
    assert any(call[0] == "batch" for call in fake.calls)


def test_a_gpu_too_full_to_measure_on_stages_and_says_why() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine:
        fake.room_bytes = sum(fake.world.device.values()) + 100
        measured = measure(engine.device, engine.pieces, PAGES_PER_BLOCK)
        assert measured.choice == STAGED and not measured.rates
        assert measured.reason is not None and "out of memory" in measured.reason

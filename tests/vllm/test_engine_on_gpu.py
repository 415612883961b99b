"""An engine whose pages are on a GPU, a fake one that does nothing before it must: answers stay what they would be."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.connector.paged import Paged
from terracekv.connector.vllm_layout import Pages, Unfit
from terracekv.connector.vllm_memory import InGpu, memory_of
from terracekv.connector.vllm_plan import Load, Step, Store, pages
from terracekv.kernels import cuda, pinned
from terracekv.tests.gpu_daemon import gpu_daemon
from terracekv.tests.gpu_ranks import GpuRank
from terracekv.tests.harness import until
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import SharedWorld
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, prompt

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

Make = Callable[..., Engine]


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_refused", None)


@pytest.fixture
def gpu() -> Iterator[Callable[..., FakeCupy]]:
    """GPUs of this test, on which nothing may be left."""
    made: list[FakeCupy] = []

    def make(**settings: Any) -> FakeCupy:
        made.append(FakeCupy(**settings))
        return made[-1]

    yield make
    assert [fake.left for fake in made if not fake.broken] == [[] for fake in made if not fake.broken]


def on(fake: FakeCupy) -> dict[str, Any]:
    return {"make": partial(GpuRank, fake)}


@pytest.mark.parametrize("windows", [(None,), (None, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_what_one_engine_has_computed_another_loads(
    engine: Make, gpu: Callable[..., FakeCupy], seed: int, windows: Sequence[int | None]
) -> None:
    settings = {"windows": windows, **on(gpu(seed=seed, eager=seed % 2 == 1))}
    with engine(**settings) as first:
        asked = [prompt(f"a{n}", 60 + 4 * n, n) for n in range(3)]
        assert first.ask(*asked) == [truth(each, windows=windows) for each in asked]
    with engine(**settings) as second:
        asked = [prompt(f"b{n}", 60 + 4 * n, n) for n in range(3)]
        assert second.ask(*asked) == [truth(each, windows=windows) for each in asked]
        assert all(each.loaded_tokens >= 48 for each in asked)


@pytest.mark.parametrize("stores_on_gpu", [True, False])
def test_engines_on_a_gpu_and_on_a_cpu_find_each_others_blocks(
    engine: Make, gpu: Callable[..., FakeCupy], stores_on_gpu: bool
) -> None:
    ways: list[dict[str, Any]] = [on(gpu(seed=7)), {}]
    if not stores_on_gpu:
        ways.reverse()
    with engine(**ways[0]) as first:
        first.ask(prompt("a", 100))
    with engine(**ways[1]) as second:
        asked = prompt("b", 100)
        assert second.ask(asked) == [truth(asked)] and asked.loaded_tokens == 96


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_change_hands_while_the_gpu_lags_behind_are_not_mixed_up(
    engine: Make, gpu: Callable[..., FakeCupy], seed: int
) -> None:
    """Few pages, an older vLLM that lends no pool, and requests that take them from each other."""
    settings = {"pages": 64, **on(gpu(seed=seed, eager=seed % 2 == 1))}
    for turn in range(3):
        with engine(older=turn == 1, **settings) as some:
            asked = [prompt(f"{turn}-{n}", 40 + 4 * n, n % 3, answer_tokens=8) for n in range(6)]
            assert some.ask(*asked) == [truth(each) for each in asked]


def test_copies_come_after_all_that_the_engines_stream_was_given_before(
    engine: Make, gpu: Callable[..., FakeCupy]
) -> None:
    """A store after the computation of its pages, a load after their last use by whoever had them."""
    fake = gpu(seed=5)
    with engine(**on(fake)) as some:
        (rank,) = some.ranks
        memory, half = rank.memory[0], rank.half
        events = []

        def fill(first: int, value: int) -> None:
            rank.do(lambda: memory[:, first : first + 2].fill(value))

        for turn in range(1, 4):
            keys = b"".join(half._loader._client.keys([turn] * BLOCK))
            fill(1, turn)
            half.store(Step(stores=[Store(turn, keys, 0, (pages([1, 2]),))]))
            until(half.results, "it is stored")
            fill(3, 0xBB)
            half.load(Step(loads=[Load(f"r{turn}", keys, 0, BLOCK, (pages([3, 4]),))]))
            until(lambda: half.finished()[0], "it is loaded")
            rank.wait()
            assert (memory[:, 3:5] == turn).all() and not half.bad_pages()
            half.load(Step(loads=[Load(f"lost{turn}", b"", 0, BLOCK, (pages([5, 6]),))]))
            until(lambda: half.bad_pages() == {5, 6}, "it cannot be done")
            assert half.finished()[0] == {f"lost{turn}"} and half.results()
            events.append(sum(name.startswith("event") for name in fake.left))
        assert events[0] == events[2], "a moment that is over is used again"


@pytest.mark.fault(2)
def test_a_copy_that_the_gpu_refuses_costs_a_computation(engine: Make, gpu: Callable[..., FakeCupy]) -> None:
    fake = gpu(seed=1)
    with engine(**on(fake)) as first:
        first.ask(prompt("a", 100))
        first.idle()
    with engine(**on(fake)) as second:
        fake.fail_calls["memcpyAsync"] = 5
        asked = prompt("b", 100)
        assert second.ask(asked) == [truth(asked)]
        assert "memcpyAsync" not in fake.fail_calls, "it was refused"
        assert asked.computed_tokens > 10
        again = prompt("c", 100, 1)
        assert second.ask(again) == [truth(again)]


@pytest.mark.fault(2)
def test_a_load_whose_moment_cannot_be_recorded_is_answered_for(engine: Make, gpu: Callable[..., FakeCupy]) -> None:
    fake = gpu(seed=2)
    with engine(**on(fake)) as first:
        first.ask(prompt("a", 100))
    with engine(**on(fake)) as second:
        fake.fail_calls["eventRecord"] = 0
        asked = prompt("b", 100)
        assert second.ask(asked) == [truth(asked)]
        assert "eventRecord" not in fake.fail_calls and second.reported == ["b"]


def test_a_prompt_that_is_loaded_often_comes_out_of_the_gpu_tier(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    world = SharedWorld(folder)
    fetched: list[int] = []
    fetch = Paged.fetch

    def counted(self: Paged, index: int, *where: Any) -> None:
        fetched.append(index)
        fetch(self, index, *where)

    monkeypatch.setattr(Paged, "fetch", counted)
    with gpu_daemon(shm_dir, tmp_path, world=folder) as daemon:
        with Engine(daemon.socket, **on(FakeCupy(world, seed=3))) as some:
            numbers = iter(range(1000))

            def loads() -> bool:
                asked = prompt(f"r{next(numbers)}", 100)
                assert some.ask(asked) == [truth(asked)]
                some.idle()
                return len(fetched) >= 12

            until(loads, "the prompt goes up, and is read there")
        assert daemon.errors() == []
    world.buffers.clear()


def test_the_arena_is_pinned_while_the_engine_captures_its_graphs(engine: Make, gpu: Callable[..., FakeCupy]) -> None:
    """CUDA would refuse it, and spoil the capture, if the thread did not say that it minds its own captures only."""
    fake = gpu()
    made: list[GpuRank] = []

    class Capturing(GpuRank):
        def where(self, pages: Pages) -> Any:
            made.append(self)
            memory = super().where(pages)
            fake.capturing = True
            return memory

    with engine(make=partial(Capturing, fake)) as some:
        memory = made[0].half._memory
        assert isinstance(memory, InGpu)
        until(lambda: memory.report()["pinned_bytes"], "the arena is pinned")
        assert fake.broken is None
        fake.capturing = False
        asked = prompt("a", 40)
        assert some.ask(asked) == [truth(asked)]


@pytest.mark.parametrize(
    ("kind", "says"), [("xpu", "KV on xpu"), ("cuda", "KV in GPU memory, .*CuPy cannot be imported")]
)
def test_memory_that_cannot_be_copied_is_refused_by_name(kind: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda._cupy.cache_clear()
    group = SimpleNamespace(pieces=(SimpleNamespace(bases=(4096,)),))
    with pytest.raises(Unfit, match=says):
        memory_of(kind, SimpleNamespace(groups=[group], block_tokens=8), lambda: 0)  # type: ignore[arg-type]

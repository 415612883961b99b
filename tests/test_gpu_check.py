"""``make gpu-check`` itself, on the fake GPU: it finds what is right and says when something is not."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.bench import gpu_check, gpu_copy, gpu_daemon
from terracekv.bench.gpu_paged import Geometry
from terracekv.kernels import cuda, pinned
from terracekv.tests.gpu_daemon import gpu_daemon as daemon_on_fake
from terracekv.tests.harness import Daemon
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT, launch
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import SharedWorld
from terracekv.tests.kernels.gpus import device_on

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

TINY = Geometry("tiny", "NHD", 1, 1, 8, 1, block_tokens=32)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """The fake is what ``import cupy`` finds."""
    installed = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", installed)
    monkeypatch.setattr(pinned, "_refused", None)
    cuda._cupy.cache_clear()
    yield installed
    cuda._cupy.cache_clear()
    assert not installed.left


def test_the_parts_pass_and_are_written_as_a_table_and_as_json(
    fake: FakeCupy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "GEOMETRIES", (TINY,))
    out = tmp_path / "results" / "gpu.json"
    assert gpu_check.main(["--parts", "kernels,pinned", "--figures", "tiny", "--bytes", "2000", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"^{part} +ok ", table, re.MULTILINE) for part in ("kernels", "pinned", "tiny"))
    document = json.loads(out.read_text())
    assert document["device"] == "Fake GPU"
    assert [part["ok"] for part in document["parts"]] == [True, True, True]
    names = {figure["name"] for figure in document["figures"]}
    assert {"gather staged", "scatter mapped", "gather run by run", "load from gpu tier"} <= names
    assert all(figure["ratio"] > 0 for figure in document["figures"])


def test_a_kernel_that_is_wrong_fails_its_part_and_not_the_others(
    fake: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: cuda.Device) -> str:
        raise AssertionError("other bytes than the host's")

    monkeypatch.setitem(gpu_check.PARTS, "kernels", broken)
    monkeypatch.setattr("shutil.which", lambda name: None)
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--parts", "kernels,sanitizer,pinned", "--figures", "", "--out", str(out)]) == 1
    assert [part["ok"] for part in json.loads(out.read_text())["parts"]] == [False, None, True]
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("error", [TypeError("an argument too many"), RuntimeError("cudaErrorMemoryAllocation")])
def test_whatever_goes_wrong_the_rest_is_run_and_all_is_written(
    fake: FakeCupy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """Somebody's minutes on a GPU are not to be had again: neither a mistake of ours nor a full GPU may cost the
    table."""

    def broken(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setitem(gpu_check.PARTS, "kernels", broken)
    monkeypatch.setattr(gpu_check, "GEOMETRIES", (TINY,))
    monkeypatch.setattr(gpu_copy, "figures", broken)
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--parts", "kernels,pinned", "--figures", "tiny", "--out", str(out)]) == 1
    assert [part["ok"] for part in json.loads(out.read_text())["parts"]] == [False, True, False]
    assert capsys.readouterr().out.count(str(error)) == 2


def test_a_part_that_there_is_none_of_is_named_before_anything_runs(
    fake: FakeCupy, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "kernels,kernals"])
    assert "no such: kernals; there are kernels, pinned" in capsys.readouterr().err
    assert all(call[0] != "malloc" for call in fake.calls)


def test_wrong_bytes_are_found(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which every launch loses the last block of threads."""

    def loses(kernel: str, grid: int, block: int, seed: int, *arguments: int, flags: tuple[str, ...] = ()) -> None:
        if kernel == "scatter_runs":
            arguments = (*arguments[:5], max(0, arguments[5] - 1), *arguments[6:])
        launch(kernel, grid, block, seed, *arguments, flags=flags)

    monkeypatch.setattr("terracekv.tests.kernels.fake_cupy.launch", loses)
    results = list(gpu_check.check(cuda.devices()[0], {"kernels": gpu_check.kernels}))
    assert [result.ok for result in results] == [False] and "scatter, staged" in results[0].detail
    fake.world.device.clear()
    fake.world.pinned.clear()
    fake._events.clear()


def test_blocks_go_through_a_real_daemon_and_come_back(fake: FakeCupy) -> None:
    told = gpu_daemon.there_and_back(device_on(fake), geometry=TINY, part_bytes=512, scratch_bytes=4096)
    assert told.startswith("8 blocks of 2 pages, ")


def test_and_then_out_of_the_gpu_tier_of_a_daemon_that_has_one(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_refused", None)
    (tmp_path / "gpu").mkdir()
    world = SharedWorld(tmp_path / "gpu")
    asked: dict[str, str] = {}

    def served(**settings: str) -> Daemon:
        asked.update(settings)
        return daemon_on_fake(shm_dir, tmp_path, tmp_path / "gpu", settings=settings)

    monkeypatch.setattr(gpu_daemon, "served", served)
    device = device_on(FakeCupy(world))
    told = gpu_daemon.there_and_back(device, geometry=TINY, part_bytes=512, scratch_bytes=4096)
    assert told.endswith("then all 8 from the gpu tier of the daemon") and asked["gpu__device"] == device.uuid
    world.buffers.clear()


def test_figures_compare_with_a_copy_of_the_same_bytes(fake: FakeCupy) -> None:
    """By the fake's clock, on which the bus is the bottleneck."""
    geometry = Geometry("t", "NHD", 2, 2, 16, 2, block_tokens=64)
    device = device_on(fake)
    found = {
        figure["name"]: figure
        for figure in gpu_copy.figures(device, geometry, bytes_moved=1 << 16, rounds=1, clock=lambda: fake.clock)
    }
    assert found["gather run by run"]["ratio"] < found["gather staged"]["ratio"] < 1.1
    assert found["load from gpu tier"]["reference"] == "device copy"


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cuda._cupy.cache_clear()
    assert gpu_check.main([]) == 2
    assert "terracekv[gpu]" in capsys.readouterr().err
    assert gpu_copy.main() == 0
    cuda._cupy.cache_clear()

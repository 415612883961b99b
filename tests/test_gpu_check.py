"""``make gpu-check`` itself, on the fake GPU: it finds what is right and says when something is not."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.bench import gpu_check, gpu_copy, gpu_daemon
from terracekv.bench.gpu_paged import Geometry
from terracekv.kernels import cuda, pinned
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT, launch
from terracekv.tests.kernels.fake_cupy import FakeCupy
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
    assert "kernels    ok" in table and "pinned     ok" in table
    document = json.loads(out.read_text())
    assert document["device"] == "Fake GPU"
    assert [part["ok"] for part in document["parts"]] == [True, True]
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


def test_wrong_bytes_are_found(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which every launch loses the last block of threads."""

    def loses(kernel: str, grid: int, block: int, seed: int, *arguments: int, flags: tuple[str, ...] = ()) -> None:
        if kernel == "scatter_runs":
            arguments = (*arguments[:5], max(0, arguments[5] - 1), *arguments[6:])
        launch(kernel, grid, block, seed, *arguments, flags=flags)

    monkeypatch.setattr("terracekv.tests.kernels.fake_cupy.launch", loses)
    results = list(gpu_check.check(cuda.devices()[0], ["kernels"]))
    assert [result.ok for result in results] == [False] and "scatter, staged" in results[0].detail
    fake.world.device.clear()
    fake.world.pinned.clear()
    fake._events.clear()


def test_blocks_go_through_a_real_daemon_and_come_back(fake: FakeCupy) -> None:
    told = gpu_daemon.there_and_back(device_on(fake), geometry=TINY, part_bytes=512, scratch_bytes=4096)
    assert told.startswith("8 blocks of 2 pages, ")


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

"""A demo that cannot go on: whoever tries it first reads a sentence, not where in the code that was."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.bench import demo
from terracekv.bench.demo import Engine
from terracekv.bench.served import served


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A demo reads the command line of the process, and says what SIGTERM does in it."""
    monkeypatch.setattr("sys.argv", ["demo"])
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_demo_whose_daemon_finds_no_room_ends_with_what_the_daemon_says(capfd: pytest.CaptureFixture[str]) -> None:
    def show(times: float) -> int:
        with served(host__size="1000TiB"):
            return 0

    assert demo.main(show, None, 1) == 1
    says = capfd.readouterr().err
    assert "the largest host.size that fits" in says
    assert says.endswith("the daemon did not start: its own words above say why, and what to do\n")
    assert "Traceback" not in says


def test_a_demo_whose_engine_ends_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "ENGINE_MAIN", "import sys; sys.exit('no model could be fetched')")

    def show(times: float) -> int:
        engine = Engine(tmp_path / "engine.sock")
        try:
            engine.ready()
        finally:
            engine.end()
        return 0

    assert demo.main(show, None, 1) == 1
    says = capfd.readouterr().err
    assert says == "no model could be fetched\nan engine ended with status 1: its own words above say why\n"

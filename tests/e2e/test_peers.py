"""The comparison with others measures nothing where there is nothing to compare with, and says why."""

import sys
from pathlib import Path

import pytest

from terracekv.bench import lmcache_server, peers_vllm


def test_an_environment_without_lmcache_has_no_versions(tmp_path: Path) -> None:
    assert lmcache_server.versions(tmp_path / "python") == []
    assert lmcache_server.versions(Path(sys.executable)) == []


def test_without_an_environment_nothing_is_measured_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers_vllm"])
    peers_vllm.main()
    figures, reasons = capsys.readouterr()
    assert not figures
    assert "--lmcache-python" in reasons


@pytest.mark.parametrize(
    "log",
    [
        "(Worker pid=7) ERROR [executor.py:1] Exception: only on other machines\nRuntimeError: core failed",
        "WARNING `OSError: [Errno 24] Too many open files`. Consider ulimit -n\nException: only on other machines\n",
    ],
)
def test_the_error_that_is_reported_is_the_first_that_an_engine_raised(log: str) -> None:
    assert peers_vllm.error_in(log) == "Exception: only on other machines"

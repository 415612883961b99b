"""The folder of models: each made once, and nothing kept of what a killed process had half made."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from terracekv.bench import models


def killed_while_making(folder: Path, scratch: Path) -> None:
    (scratch / "weights").write_bytes(b"half of them")
    os.kill(os.getpid(), signal.SIGKILL)


def whole(folder: Path, scratch: Path) -> None:
    (folder / "weights").write_bytes(b"all of them")


def test_what_a_killed_process_had_half_made_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MODELS", tmp_path)
    process = multiprocessing.get_context("fork").Process(target=models.once, args=("small", killed_while_making))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert len(list(tmp_path.rglob("weights"))) == 1
    made = models.once("small", whole)
    assert list(tmp_path.rglob("weights")) == [made / "weights"]
    assert (made / "weights").read_bytes() == b"all of them"

"""The Makefile where a newcomer may have put the checkout."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAMPS = (".venv/base.stamp", ".venv/run.stamp", ".venv/demo.stamp", ".venv/cluster.stamp", ".venv-vllm/stamp")


def program(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_its_verbs_run_in_a_folder_whose_name_has_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    for part in (".venv", ".venv-vllm", ".models", "bench"):
        (folder / part).mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("constraints.txt", "constraints-vllm.txt", "pyproject.toml", *STAMPS, ".models/small.stamp"):
        (folder / name).touch()  # each is newer than what it is made of: nothing is installed
    (folder / "bench" / "one_vllm.py").touch()
    program(folder / ".venv" / "bin" / "terracekv", 'echo "served: $@"')
    program(folder / ".venv-vllm" / "bin" / "python", 'echo "found: $(command -v terracekv)"')
    command = ["make", "--silent", "--directory", str(folder), "serve", "bench-vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert f"served: serve\nfound: {folder}/.venv/bin/terracekv\n" in done.stdout

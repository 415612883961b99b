"""The demo with the real model: all its rows, and nothing left of it however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.bench import small_model

FINISH_S = 600
ENDS_S = 30
RUNTIME = re.compile(r"daemon\.runtime_dir=(\S+)")

pytestmark = pytest.mark.timeout(FINISH_S)


class Demo:
    """A running demo whose temporary files go to a folder of its own, and what was seen of its children."""

    def __init__(self, scratch: Path) -> None:
        self.children: dict[int, str] = {}
        self._scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, "-m", "terracekv.bench.demo", "--times", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(scratch)},
        )

    def look(self) -> None:
        """Note the children that there are now."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid and "terracekv" in command:
                self.children[int(folder.name)] = command

    def left(self) -> list[str]:
        """What is still there of children, their shared memory and their files."""
        alive = [command for pid, command in self.children.items() if Path(f"/proc/{pid}").exists()]
        runtimes = [found[1] for command in self.children.values() if (found := RUNTIME.search(command))]
        assert runtimes, "no daemon was seen"
        return alive + [path for path in runtimes if Path(path).exists()] + [str(p) for p in self._scratch.iterdir()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    small_model.load()  # fetched here, if it must be
    running = Demo(tmp_path)
    yield running
    running.end()


@pytest.mark.fault(7)
def test_every_row_of_the_demo_gives_the_answers_without_the_store(demo: Demo) -> None:
    assert demo.process.stdout is not None
    lines = []
    for line in demo.process.stdout:
        lines.append(line.rstrip())
        demo.look()
    assert demo.process.wait(ENDS_S) == 0, "\n".join(lines)
    assert len([line for line in lines if line.endswith(" same")]) == 6, "\n".join(lines)
    assert demo.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_takes_everything_with_it(demo: Demo, number: signal.Signals) -> None:
    while not any("demo_engine" in command for command in demo.children.values()):
        assert demo.process.poll() is None
        demo.look()
        time.sleep(0.05)
    demo.process.send_signal(number)
    assert demo.process.wait(ENDS_S) == 128 + number
    assert demo.left() == []

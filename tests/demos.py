"""A running demo of ``bench``, watched from outside.

Owns the demo's process. Called by the tests with a real engine, from one thread. Standard library only.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ENDS_S = 30
RUNTIME = re.compile(r"daemon\.runtime_dir=(\S+)")


class Demo:
    """A running demo whose temporary files go to a folder of its own, and what was seen of its children."""

    def __init__(self, module: str, scratch: Path) -> None:
        self.children: dict[int, str] = {}
        self._scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"terracekv.bench.{module}", "--times", "0"],
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

    def finish(self) -> list[str]:
        """Its lines, once it has ended as it should."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip())
            self.look()
        assert self.process.wait(ENDS_S) == 0, "\n".join(lines)
        return lines

    def until(self, child: str) -> None:
        """Wait for a child with this in its command."""
        while not any(child in command for command in self.children.values()):
            assert self.process.poll() is None
            self.look()
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

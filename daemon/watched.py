"""Files that somebody may write anew while the daemon runs: whether they have changed.

Owns what they looked like last. Called on the event loop, about once a second. Standard library only.

Links are followed, so that a folder that is swapped for another, as secrets are in Kubernetes, is a change.
"""

import os
from collections.abc import Sequence


class Watched:
    """Some files; names that are empty are passed over, and one that is missing looks like nothing else."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [path for path in paths if path]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether any looks otherwise than at the last call, or at the beginning. What is read after the answer is at
        least as new as what was looked at."""
        seen = self._look()
        changed, self._seen = seen != self._seen, seen
        return changed

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

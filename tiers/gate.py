"""A gate that lets in many at once, or one alone.

Owns nothing else. The catalog's transactions pass it from any thread. Imports the standard library only.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many at once, or one alone. Not reentrant: whoever is inside must leave before asking to be alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    def enter(self) -> None:
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for those inside to leave; those who come wait until the block ends."""
        with self._changed:
            while self._alone:
                self._changed.wait()
            self._alone = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

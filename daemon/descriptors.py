"""File descriptors: how many the process may have, and how many connections a door may therefore keep open.

Owns the process's soft limit and its standard files. ``stand_in`` and ``raise_limit`` are called once at the start,
``most`` by both doors on the event loop. Imports the standard library.

Reads and writes of the disk open a file each, and every connection keeps one. A door that let in whoever comes would
take the last of them: then no block can be read, and the other door is shut too.
"""

import os
import resource
import sys

KEPT = 128
"""For the disk's files, the arena, the catalog, calls to the bucket, threads and the log."""
LEAST = 16
"""Connections that a door takes at least, whatever the limit is."""


def stand_in() -> None:
    """Put the null device where the three standard files should be and are not: else the arena or a segment would take
    such a number, and whatever a library writes to standard error would go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # as of the whole process: it is never closed


def raise_limit() -> int:
    """Take what the system allows; the limit from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def most(wanted: int) -> int:
    """Connections of one door that may be open at a time: ``wanted``, or half of what the limit leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(LEAST, (soft - KEPT) // 2))

"""File descriptors: how many the process may have, and how many connections a door may therefore keep open.

Owns the process's soft limit. ``raise_limit`` is called once at the start, ``most`` by both doors on the event loop.
Imports the standard library.

Reads and writes of the disk open a file each, and every connection keeps one. A door that let in whoever comes would
take the last of them: then no block can be read, and the other door is shut too.
"""

import resource

KEPT = 128
"""For the disk's files, the arena, the catalog, calls to the bucket, threads and the log."""
LEAST = 16
"""Connections that a door takes at least, whatever the limit is."""


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

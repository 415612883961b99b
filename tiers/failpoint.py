"""Named lines at which a test makes the process fail. Imports the standard library only.

Owns the table of armed points, empty in production: a point then costs one look at an empty dict. Armed before any
thread starts, by the daemon from its environment or by a test in its own process, never through a door; hit from any
thread.

A specification is ``name=action`` joined by commas. Actions: ``kill`` (SIGKILL this process), ``errno:ENOSPC`` (raise
OSError), ``sleep:SECONDS``; and, where bytes are moved, ``short`` (only some of them are) and ``flip`` (one bit of them
is wrong), which whoever moves them has to do. ``name*3=kill`` acts on the third hit and on all after it,
``name*3-4=kill`` not on the fifth, ``name%0.01=kill`` on one hit in a hundred, drawn.
"""

import errno
import os
import random
import re
import signal
import threading
import time
from typing import NamedTuple


class _Armed(NamedTuple):
    verb: str
    argument: str
    first: int
    last: float
    share: float


_armed: dict[str, _Armed] = {}
_hits: dict[str, int] = {}
_lock = threading.Lock()
_POINT = re.compile(r"([^*%]+)(?:\*(\d+)(?:-(\d+))?)?(?:%(\d*\.?\d+))?")
_FOR_MOVERS = ("short", "flip")


def arm(specification: str) -> None:
    """Arm points; ValueError names what cannot be read."""
    for part in filter(None, specification.split(",")):
        point, _, action = part.partition("=")
        verb, _, argument = action.partition(":")
        where = _POINT.fullmatch(point)
        known = (
            verb in ("kill", *_FOR_MOVERS)
            or (verb == "errno" and hasattr(errno, argument))
            or (verb == "sleep" and argument)
        )
        if where is None or not known:
            raise ValueError(
                f"failpoint {part!r} is not name=kill, name=errno:CODE, name=sleep:SECONDS, name=short or name=flip"
            )
        name, first, last, share = where.groups()
        _armed[name] = _Armed(verb, argument, int(first or 1), float(last or "inf"), float(share or 1))


def disarm(name: str | None = None) -> None:
    """Forget a point, or all of them."""
    for points in (_armed, _hits):
        if name is None:
            points.clear()
        else:
            points.pop(name, None)


def failpoint(name: str) -> str:
    """A line at which ``name`` may be armed. Empty, or what the caller is to do to the bytes that it moves here."""
    if not _armed or name not in _armed:
        return ""
    verb, argument, first, last, share = _armed[name]
    with _lock:
        _hits[name] = _hits.get(name, 0) + 1
        due = first <= _hits[name] <= last and (share == 1 or random.random() < share)
    if not due:
        return ""
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "errno":
        raise OSError(getattr(errno, argument), f"failpoint {name}")
    return verb if verb in _FOR_MOVERS else ""

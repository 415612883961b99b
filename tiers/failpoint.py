"""Named lines at which a test makes the process fail. Imports the standard library only.

Owns the table of armed points, empty in production: a point then costs one look at an empty dict. Armed before any
thread starts, by the daemon from its settings or by a test in its own process; hit from any thread.

A specification is ``name=action`` joined by commas. Actions: ``kill`` (SIGKILL this process), ``errno:ENOSPC`` (raise
OSError), ``sleep:SECONDS``. ``name*3=kill`` acts on the third hit and not before; errors and sleeps then go on.
"""

import errno
import os
import signal
import threading
import time

_armed: dict[str, tuple[str, str, int]] = {}
_hits: dict[str, int] = {}
_lock = threading.Lock()


def arm(specification: str) -> None:
    """Arm points; ValueError names what cannot be read."""
    for part in filter(None, specification.split(",")):
        point, _, action = part.partition("=")
        name, _, nth = point.partition("*")
        verb, _, argument = action.partition(":")
        known = (verb == "kill") or (verb == "errno" and hasattr(errno, argument)) or (verb == "sleep" and argument)
        if not name or not known:
            raise ValueError(f"failpoint {part!r} is not name=kill, name=errno:CODE or name=sleep:SECONDS")
        _armed[name] = (verb, argument, int(nth or 1))


def disarm() -> None:
    """Forget all points."""
    _armed.clear()
    _hits.clear()


def failpoint(name: str) -> None:
    """A line at which ``name`` may be armed."""
    if not _armed or name not in _armed:
        return
    verb, argument, nth = _armed[name]
    with _lock:
        _hits[name] = _hits.get(name, 0) + 1
        due = _hits[name] >= nth
    if not due:
        return
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "sleep":
        time.sleep(float(argument))
    else:
        raise OSError(getattr(errno, argument), f"failpoint {name}")

"""The log: what one event looks like as a line, and how many lines of a kind are written.

Owns the handler on standard error. Called once by ``__main__`` before anything is said; formats in whatever thread
speaks. Imports the standard library only.

A line has the time, the level, the id of the event and its fields. Events without an id are of libraries: ``-``. A
traceback, and the stacks that the watchdog writes, follow their line in text and are a field of it in JSON.
"""

import json
import logging
import os
import select
import sys
import threading
import time
from typing import Any, TextIO

WINDOW_S = 60.0
LINES_MAX = 20
"""Lines of one event in a window; how many more there would have been stands in the first of the next one."""
NOBODY = "-"

counts = {"warning": 0, "error": 0}
"""Lines since start, those that were left out among them."""


class Lines(logging.Formatter):
    """``TIME LEVEL EVENT MESSAGE FIELD=VALUE ...``, or an object of JSON."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging``."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        event, message = event_of(record), record.getMessage()
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            line = {"time": moment, "level": record.levelname.lower(), "event": event, "from": record.name}
            line |= {"message": message, **fields} | ({"traceback": trace} if trace else {})
            return json.dumps(line, default=str)
        shown = "".join(f" {name}={value}" for name, value in fields.items() if " " not in str(value))
        first, *rest = message.split("\n")
        lines = [_printable(f"{moment} {record.levelname} {event} {first}{shown}")]
        lines += ["  " + _printable(line) for line in rest]  # what an engine calls itself cannot look like an event
        return "\n".join([*lines, *([trace] if trace else [])])


class Sparing(logging.Filter):
    """Lets through ``LINES_MAX`` lines of an event in ``WINDOW_S`` seconds. Libraries' lines count by their logger."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging``."""
        event = event_of(record)
        kind = record.name if event == NOBODY else event
        now = time.monotonic()
        with self._lock:
            if record.levelno >= logging.WARNING:
                counts["error" if record.levelno >= logging.ERROR else "warning"] += 1
            since, count = self._seen.get(kind, (now, 0))
            left_out = 0
            if now - since >= WINDOW_S:
                left_out, since, count = max(0, count - LINES_MAX), now, 0
            self._seen[kind] = since, count + 1
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        return count < LINES_MAX


class Standard(logging.StreamHandler[TextIO]):
    """Writes lines to a stream, and waits for nobody: where the stream is a pipe that is full, since whoever should
    read it has stopped, lines are lost, and counted in the first one that finds room again."""

    lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging``; one at a time."""
        try:
            text = self.format(record) + "\n"
            if self.lost:
                text = f"{self.lost} lines were lost: nobody read the log\n{text}"
            if self._write(text.encode(errors="backslashreplace")):
                self.lost = 0
            else:
                self.lost += 1
        except (OSError, ValueError, TypeError):  # the stream is closed, or a library's words do not fit together
            self.lost += 1

    def _write(self, data: bytes) -> bool:
        file = self.stream.fileno()
        for at in range(0, len(data), select.PIPE_BUF):  # a pipe that is ready takes so much at once
            if not select.select([], [file], [], 0)[1]:
                return False
            os.write(file, data[at : at + select.PIPE_BUF])
        return True


def _printable(line: str) -> str:
    """Characters that would move a terminal's cursor, by their numbers."""
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def event_of(record: logging.LogRecord) -> str:
    """The id of the event that a record tells of."""
    return str(getattr(record, "event", NOBODY))


def to_stderr(level: str, form: str) -> None:
    """Write the log there, from ``level`` on, as ``text`` or ``json``.

    Libraries never below INFO: what they tell a debugger has signatures and session tokens in it."""
    handler = Standard(sys.stderr)
    handler.setFormatter(Lines(form == "json"))
    handler.addFilter(Sparing())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(max(logging.INFO, logging.getLevelNamesMapping()[level]))
    logging.getLogger("terracekv").setLevel(level)

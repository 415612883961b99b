"""What the daemon has to say, one event at a time: each bears a stable id, of which ``docs/errors.md`` tells more.

Owns nothing: how a line looks and how many of a kind are written is the matter of whoever listens (``daemon/logs.py``).
Called from any thread. Imports the standard library only.
"""

import logging

INTERNAL = "TKV-INTERNAL"
"""The event of what is our own fault."""


class Journal:
    """Says things under a logger's name. ``fields`` are figures and names, for programs that read the log."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def info(self, event: str, message: str, **fields: object) -> None:
        """All is well."""
        self._say(logging.INFO, event, message, fields)

    def warning(self, event: str, message: str, **fields: object) -> None:
        """Something is worse than it could be; we go on."""
        self._say(logging.WARNING, event, message, fields)

    def error(self, event: str, message: str, **fields: object) -> None:
        """Something that should work does not."""
        self._say(logging.ERROR, event, message, fields)

    def failed(self, event: str, message: str, error: BaseException, **fields: object) -> None:
        """As ``error``, with where ``error`` was raised."""
        self._say(logging.ERROR, event, message, fields, error)

    def _say(
        self, level: int, event: str, message: str, fields: dict[str, object], error: BaseException | None = None
    ) -> None:
        extra = {"event": event, "fields": fields}
        self._log.log(level, "%s", message, extra=extra, exc_info=error, stacklevel=3)

"""Nothing that goes wrong here may reach the engine: an entry point that fails is a miss, logged and counted.

``guarded`` owns nothing. Used by the classes that vLLM calls, on its threads. Standard library only.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])
LOGGED_MAX = 20
"""Tracebacks of one entry point; further errors are only counted."""


def guarded(default: Callable[[], Any]) -> Callable[[Method], Method]:
    """An exception in the method becomes what ``default()`` gives; ``self.errors[name]`` counts it."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.errors[method.__name__] += 1
                if self.errors[method.__name__] <= LOGGED_MAX:
                    log.exception("%s failed: the engine goes on without the cache", method.__name__)
                return default()

        return entry  # type: ignore[return-value]

    return wrap

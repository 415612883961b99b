"""Tasks of the event loop: every one has a name, and none ends by an error that nobody hears of.

Owns the count of those that did. Called on the event loop by whoever owns the task, and by ``__main__`` for the loop
itself; which name belongs to whom is a table in ``docs/design.md``. Imports ``tiers.journal``.

A task of a request ends with it. What must go on for as long as the daemon runs is ``keep``: a step that fails is
logged and counted, and the next one is made all the same.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from terracekv.tiers.journal import INTERNAL, Journal

T = TypeVar("T")
journal = Journal(__name__)

failures = Counter[str]()
"""By the task's name: how often it, or a step of it, ended by an error."""


def begin(work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Run ``work`` beside the loop's other work. An error of it is heard even if nobody awaits the task."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


async def keep(step: Callable[[], Awaitable[None]], name: str, every_s: float) -> None:
    """Make a step every so often, for good."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await step()
        except Exception as error:
            failures[name] += 1
            journal.failed("TKV-TASK-DIED", f"a step of task {name} failed and is made again", error)


def hear(loop: asyncio.AbstractEventLoop) -> None:
    """From here on, errors of the loop's callbacks, timers and connections are events, too."""
    loop.set_exception_handler(_heard)


def _ended(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StopAsyncIteration):
        failures[task.get_name()] += 1
        journal.failed("TKV-TASK-DIED", f"task {task.get_name()} died", error)


def _heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    failures["callback"] += 1
    error, message = context.get("exception"), str(context.get("message"))
    if isinstance(error, BaseException):
        journal.failed(INTERNAL, f"event loop: {message}", error)
    else:
        journal.error(INTERNAL, f"event loop: {message}")

"""``terracekv top``: what a daemon does now, again and again, on a whole terminal.

Owns the terminal while it runs, and gives it back however it ends; remembers the figures of the last minute. Called by
``cli`` in its own process, and imported only there. Imports rich, ``cli_options``, ``cli_text``,
``http_client``, ``budget`` and ``errors``.
"""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from terracekv.daemon.cli_options import ended_by_sigterm
from terracekv.daemon.cli_text import age, last_error, printable, short
from terracekv.daemon.http_client import Door
from terracekv.tiers.budget import show
from terracekv.tiers.errors import TerraceError

WINDOW_S = 60.0
LOOK_S = 0.1
"""Between two looks at the keyboard and at the terminal's size."""
ASK_S = 1.0
"""A key is not noticed while the daemon is asked: so much, no more."""
BAR = 10
NARROW = 76
"""With fewer columns what matters less is left out."""
LOOKS: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 1, 0, 0), "header_style": "bold"}
OF_ALL = ("lookups", "asked_blocks", "asked_tokens", "matched_blocks", "matched_tokens")
OF_LOOKUPS = ("matched", "tokens", "loaded")
OF_TIERS = ("get_bytes", "put_bytes")
PIPE_WIDTH = 100
FIRST_ROWS = 15
"""Lines of the frame above the sessions, where there are four tiers and nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts since the daemon's start, at one moment of ``time.monotonic``."""

    at: float
    counts: dict[tuple[str, str], int]
    """By field and tier, or reason of a miss; "" for those of neither."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is nothing new, since when, and what to do."""

    since: float
    message: str
    hint: str


class View:
    """What was heard of the daemon. Times are of ``time.monotonic``."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.trouble: Trouble | None = None
        self._past = deque[Figures]()
        self._pid: int | None = None
        self._uptime_s = 0.0

    def hear(self, status: dict[str, Any], now: float) -> None:
        """An answer. Counts of another process begin anew, and so does the minute. In a container each of them has the
        same number: it is up for less time than the one before."""
        if status["pid"] != self._pid or status["uptime_s"] < self._uptime_s:
            self._past.clear()
        self._pid, self._uptime_s = status["pid"], status["uptime_s"]
        self._past.append(Figures(now, _counts(status)))
        while len(self._past) > 2 and self._past[1].at <= now - WINDOW_S:
            self._past.popleft()
        self.status, self.trouble = status, None

    def miss(self, error: TerraceError, now: float) -> None:
        """No answer."""
        since = self.trouble.since if self.trouble else self._past[-1].at if self._past else now
        self.trouble = Trouble(since, error.message, error.hint)

    @property
    def span_s(self) -> float:
        """How far back ``over_the_minute`` reaches; 0 when it is since the daemon's start."""
        return self._past[-1].at - self._past[0].at if len(self._past) > 1 else 0.0

    def over_the_minute(self, field: str, of: str = "") -> int:
        """How much a count grew in the last minute, or since the start when nothing was heard before."""
        now = self._past[-1].counts.get((field, of), 0)
        return now - self._past[0].counts.get((field, of), 0) if len(self._past) > 1 else now

    def rate(self, field: str, tier: str) -> int | None:
        """A count's growth a second between the last two answers; None before there are two."""
        if len(self._past) < 2:
            return None
        before, now = self._past[-2], self._past[-1]
        grown = now.counts.get((field, tier), 0) - before.counts.get((field, tier), 0)
        return round(grown / max(1e-3, now.at - before.at))


def run(door: Door, interval_s: float) -> None:
    """Until ``q`` or Ctrl-C; one look where nobody watches. TerraceError in that case alone."""
    view = View()
    if not sys.stdout.isatty() or Console().is_dumb_terminal:  # on the latter nothing is drawn over
        view.hear(door.status(), time.monotonic())
        console = Console(width=PIPE_WIDTH, highlight=False, markup=False, emoji=False)
        console.print(frame(view, PIPE_WIDTH, sys.maxsize, time.monotonic()))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm(), _keys() as pressed:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            asked, size = float("-inf"), ConsoleDimensions(0, 0)
            while not pressed("q"):
                now, present = time.monotonic(), ConsoleDimensions(*os.get_terminal_size())
                if due := now - asked >= interval_s:
                    asked = now
                    try:
                        view.hear(door.status(timeout_s=ASK_S), time.monotonic())
                    except TerraceError as error:
                        view.miss(error, time.monotonic())
                if due or size != present:
                    size = console.size = present  # whatever COLUMNS and LINES said once
                    live.update(frame(view, size[0], size[1], time.monotonic(), interval_s), refresh=True)


def frame(view: View, width: int, height: int, now: float, interval_s: float | None = None) -> RenderableType:
    """All that fits, what matters most first. ``interval_s`` is None for a single look."""
    parts: list[RenderableType] = []
    if view.trouble is not None:
        parts.append(Text(printable(view.trouble.message), style="bold red"))
        parts.append(Text(printable(f"  -> {view.trouble.hint}")))
        last = f"; last heard of {age(now - view.trouble.since)} ago" if view.status else ""
        parts.append(Text(f"trying again every {interval_s or 0:g} s{last}"))
    if view.status is not None:
        status = view.status
        state = "ready" if status["ready"] else f"not ready: {'; '.join(status['not_ready'])}"
        head = f"TerraceKV {status['version']}, process {status['pid']}, up {age(status['uptime_s'])}, {state}"
        parts.append(Text(printable(head), style="bold", no_wrap=True, overflow="ellipsis"))
        parts += [Text(), _tiers(status, width), Text(), *_traffic(view, status, width), Text()]
        warnings = list(_warnings(status))
        parts += warnings
        used = FIRST_ROWS + len(view.status["tiers"]) * 2 - 8 + 2 * len(warnings) + (4 if view.trouble else 0)
        parts += _sessions(status, max(0, height - used))
    if interval_s is not None:
        parts.append(Text(f"q ends it; every {interval_s:g} s (--interval)", style="dim"))
    return Group(*parts)


def _tiers(status: dict[str, Any], width: int) -> Table:
    table = Table(**LOOKS)
    for name in ("tier", "mode", "used", "", "of", "blocks", "leased", "in flight", "queued"):
        if width >= NARROW or name not in ("mode", "", "queued"):
            table.add_column(name, justify="left" if name in ("tier", "mode", "") else "right", no_wrap=True)
    for name, tier in status["tiers"].items():
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        filled = min(BAR, max(used > 0, round(BAR * used / capacity))) if capacity else 0
        mode = Text(tier["mode"], style="red" if tier["mode"] in ("down", "stuck", "read-only") else "")
        bar = Text("\u2588" * filled, style="cyan") + Text("\u2591" * (BAR - filled), style="dim")
        of = show(capacity) if capacity or name != "s3" else "shared"
        counts = (short(tier[f"{state}blocks"]) for state in ("", "leased_", "in_flight_"))
        if width >= NARROW:
            queued = show(tier["in_flight_bytes"]) if tier["flow"] else ""
            table.add_row(name, mode, show(used), bar, of, *counts, queued)
        else:
            table.add_row(name, show(used), of, *counts)
    return table


def _traffic(view: View, status: dict[str, Any], width: int) -> Iterator[RenderableType]:
    """Hits of the last minute, and what moves now."""
    asked, tokens = view.over_the_minute("asked_blocks"), view.over_the_minute("asked_tokens")
    span = f"last {view.span_s:.0f} s" if view.span_s else "since its start"
    found = view.over_the_minute("matched_blocks")
    yield Text(
        f"{span}: {view.over_the_minute('lookups'):,} lookups found {_share(found, asked)} of {short(asked)} blocks, "
        f"{_share(view.over_the_minute('matched_tokens'), tokens)} of {short(tokens)} tokens",
        no_wrap=True,
        overflow="ellipsis",
    )
    yield Text(_misses(view, status), no_wrap=True, overflow="ellipsis")
    table = Table(**LOOKS)
    for name in ("hits", "blocks", "", "tokens", "", "to engines", "read", "written")[: 8 if width >= NARROW else 5]:
        table.add_column(name, justify="left" if name == "hits" else "right", no_wrap=True)
    for name in status["tiers"]:
        blocks, of_tier = (view.over_the_minute(field, name) for field in ("matched", "tokens"))
        loaded, *moved = (view.rate(field, name) for field in ("loaded", "get_bytes", "put_bytes"))
        rates = ["-" if loaded is None else f"{short(loaded)} blocks/s"]
        rates += ["-" if rate is None else f"{show(rate)}/s" for rate in moved]
        cells = (name, short(blocks), _share(blocks, asked), short(of_tier), _share(of_tier, tokens), *rates)
        table.add_row(*cells[: len(table.columns)])
    yield table


def _misses(view: View, status: dict[str, Any]) -> str:
    """Why prompts were not found to their end, the most frequent reason first."""
    counts = {reason: view.over_the_minute("misses", reason) for reason in status["lookups"]["misses"]}
    told = [f"{short(count)} {reason}" for reason, count in sorted(counts.items(), key=lambda each: -each[1]) if count]
    return f"first misses: {', '.join(told) or 'none'}"


def _warnings(status: dict[str, Any]) -> Iterator[RenderableType]:
    """What is wrong, and what to do about it."""
    for told in status.get("degraded", []):
        yield Text(printable(f"degraded: {told}"), style="red")
    for name, tier in status["tiers"].items():
        if tier["last_error"]:
            text, news = last_error(name, tier)
            style = "red" if news else "dim"
            yield Text(printable(text), style=style)
            if tier.get("advice"):
                yield Text(printable(f"  -> {tier['advice']} ({tier['last_event']})"), style=style)
        if tier["flow"] and (lost := tier["flow"]["writes_dropped"] + tier["flow"]["writes_failed"]):
            yield Text(f"{name}: {short(lost)} blocks since its start were not written: a full queue, or errors")


def _sessions(status: dict[str, Any], rows: int) -> Iterator[RenderableType]:
    sessions = sorted(status["sessions"], key=lambda session: -session["leased_blocks"])
    yield Text(f"{len(sessions):,} session{'' if len(sessions) == 1 else 's'}")
    if not sessions or rows < 2:
        return
    table = Table(**LOOKS)
    for name in ("engine", "pid", "age", "model", "shard", "leased", "coming"):
        table.add_column(name, justify="left" if name in ("engine", "model") else "right", no_wrap=True)
    for session in sessions[: rows - 1]:
        table.add_row(
            printable(session["engine"]),
            str(session["pid"]),
            age(session["age_s"]),
            printable(session["model"]),
            "all" if session["shard"] is None else str(session["shard"]),
            short(session["leased_blocks"]),
            short(session["pending_blocks"]),
        )
    yield table


def _counts(status: dict[str, Any]) -> dict[tuple[str, str], int]:
    """What grows, flat."""
    lookups = status["lookups"]
    counts = {(field, ""): int(lookups.get(field, 0)) for field in OF_ALL}
    counts |= {("misses", reason): int(count) for reason, count in lookups["misses"].items()}
    for name, tier in status["tiers"].items():
        counts |= {(field, name): int(lookups.get(field, {}).get(name, 0)) for field in OF_LOOKUPS}
        counts |= {(field, name): int(tier["counters"][field]) for field in OF_TIERS}
    return counts


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[str], bool]]:
    """Whether a key was pressed, waiting a moment for it. The terminal does not show what is typed meanwhile."""
    if not sys.stdin.isatty():
        yield _nothing_pressed
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(key: str) -> bool:
        ready, _, _ = select.select([file], [], [], LOOK_S)
        return bool(ready) and key.encode() in os.read(file, 64).lower()

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _nothing_pressed(key: str) -> bool:
    time.sleep(LOOK_S)
    return False

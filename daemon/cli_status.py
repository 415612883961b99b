"""What ``terracekv status`` prints: tables of tiers, namespaces and sessions. The only ``import rich``.

Owns nothing. Called by ``cli`` in its own process, and imported only there. Imports ``cli_text`` and ``budget``.
"""

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from terracekv.daemon.cli_text import age, last_error, policies, printable, queues, sentence, short
from terracekv.tiers.budget import show

BAR = 10
ID_DIGITS = 12
ROWS_MAX = 20
"""Namespaces and sessions that a person is shown."""


def print_status(answer: dict[str, Any]) -> None:
    """The answer of ``GET /v1/status``, for a person."""
    # Nobody looks at the width of a pipe, and a table cut to 80 columns is of no use to grep.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    if "tenant" in answer:
        _print_tenant(console, answer)
    else:
        _print_daemon(console, answer)

    columns = {"model": "model", "revision": "revision", "namespace": "namespace_id", "tokens": "block_tokens"}
    columns |= {"block": "block_bytes", "dtype": "dtype", "shards": "shards", "epoch": "epoch"}
    _print_rows(console, "namespaces", answer["namespaces"], columns)
    columns = {"engine": "engine", "pid": "pid", "age": "age_s", "model": "model", "shard": "shard"}
    columns |= {"leased": "leased_blocks", "pending": "pending_blocks", "reserved": "reserved_blocks"}
    _print_rows(console, "sessions", answer["sessions"], columns)


def _print_tenant(console: Console, answer: dict[str, Any]) -> None:
    """What a tenant may know of the daemon."""
    state = "ready" if answer["ready"] else "not ready"
    print(printable(f"TerraceKV {answer['version']}, {state}; this is what is tenant {answer['tenant']}'s"))
    for name, tier in answer["tiers"].items():
        limit = tier["limit_bytes"]
        console.print(f"{name}: {show(tier['used_bytes'])}, {'no limit' if limit is None else f'of {show(limit)}'}")


def _print_daemon(console: Console, answer: dict[str, Any]) -> None:
    """The daemon, its tiers, and what is wrong with them."""
    state = "ready" if answer["ready"] else f"not ready: {'; '.join(answer['not_ready'])}"
    print(printable(f"TerraceKV {answer['version']}, process {answer['pid']}, up {age(answer['uptime_s'])}, {state}"))
    print(printable(sentence(answer["lookups"])))
    for told in answer.get("degraded", []):
        print(printable(f"degraded: {told}"))
    died = answer.get("died", {"threads": {}, "tasks": {}})  # an older daemon does not say
    for name, count in {**died["threads"], **died["tasks"]}.items():
        print(printable(f"{name} died {count} times and goes on: see the log"))

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("tier", "mode", "used", "", "of", "blocks", "leased", "reads", "failed", "evicted"):
        table.add_column(name, justify="left" if name in ("tier", "mode", "") else "right", no_wrap=True)
    for name, tier in answer["tiers"].items():
        used, capacity, counters = tier["used_bytes"], tier["capacity_bytes"], tier["counters"]
        of = show(capacity) if capacity or name != "s3" else "shared"
        filled = min(BAR, max(used > 0, round(BAR * used / capacity))) if capacity else 0
        bar = Text("\u2588" * filled, style="cyan") + Text("\u2591" * (BAR - filled), style="dim")
        counts = (tier["blocks"], tier["leased_blocks"], counters["hits"], counters["misses"])
        evicted = counters["evictions"].get("capacity", 0)
        numbers = (short(count) for count in (*counts, evicted))
        table.add_row(name, tier["mode"], show(used), bar, of, *numbers)
    console.print()
    console.print(table)
    for name, tier in answer["tiers"].items():
        if tier["last_error"]:
            text, news = last_error(name, tier)
            console.print(printable(text), style="red" if news else "dim")
            if tier.get("last_event"):
                console.print(
                    printable(f"  -> {tier['advice']} ({tier['last_event']})"), style="red" if news else "dim"
                )
    for line in queues(answer["tiers"]) + policies(answer.get("policies", {})):
        console.print(line)


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    if not rows:
        console.print(f"no {title}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in columns:
        wide = name in ("model", "revision", "engine")
        table.add_column(name, no_wrap=not wide, overflow="fold" if wide else "ellipsis")
    shown: dict[str, Callable[[Any], str]] = {
        "namespace_id": lambda value: str(value)[:ID_DIGITS],
        "revision": lambda value: value if len(value) <= ID_DIGITS else value[:ID_DIGITS] + "\u2026",
        "block_bytes": show,
        "age_s": age,
        "shard": lambda value: "all" if value is None else str(value),
    }
    for row in rows[:ROWS_MAX]:
        table.add_row(*(printable(shown.get(key, str)(row[key])) for key in columns.values()))
    console.print()
    console.print(table)
    if len(rows) > ROWS_MAX:
        console.print(f"and {len(rows) - ROWS_MAX:,} more (terracekv status --json has all)")

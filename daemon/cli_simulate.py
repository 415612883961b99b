"""What ``terracekv simulate`` and ``terracekv whatif`` show: progress bars and tables.

Owns nothing. Called by ``cli`` in its own process, and imported only there. Imports rich, ``cli_text``, ``simulate``,
``traces`` and ``budget``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from terracekv.daemon.cli_text import count
from terracekv.daemon.simulate import Row, as_csv, blocks_of, draw, policies_of, replay, require_plot
from terracekv.daemon.traces import read_trace
from terracekv.tiers.budget import show
from terracekv.tiers.eviction import AUTO

BAR = 30


def simulate(
    path: Path,
    *,
    sizes: Sequence[str],
    policies: Sequence[str],
    disk: str | None,
    block_bytes: int,
    as_json: bool,
    csv: Path | None,
    png: Path | None,
) -> None:
    """Replay a trace under each policy at each size, and show what came of it; ``block_bytes`` 0 is the trace's."""
    wanted = policies_of(policies)
    if png is not None:
        require_plot()
    for wanted_file in filter(None, (csv, png)):
        wanted_file.open("ab").close()  # what cannot be written is told now, not after the replay
    trace = read_trace(path)
    block_bytes = block_bytes or trace.block_bytes
    capacities = [blocks_of(size, trace, block_bytes) for size in sizes]
    below = blocks_of(disk, trace, block_bytes) if disk else 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    rows = []
    # Nobody watches the bar of a pipe.
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(trace.chains) * len(capacities) * len(wanted))
        for policy in wanted:
            for capacity in capacities:
                bar.update(task, description=f"{policy.name}, {capacity:,} blocks")
                rows.append(
                    replay(
                        trace,
                        policy,
                        capacity,
                        below,
                        block_bytes=block_bytes,
                        progress=lambda count: bar.advance(task, count),
                    )
                )
    if csv is not None:
        csv.write_text(as_csv(rows))
    if png is not None:
        draw(rows, png)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    console = _console()
    console.print(
        f"{count(len(trace.chains), 'request')} for {count(trace.asked, 'block')}, {trace.unique:,} different ones"
        + (f", {show(block_bytes)} each" if block_bytes else "")
    )
    console.print(_table(rows, block_bytes))


def print_whatif(answer: dict[str, Any]) -> None:
    """The answer of ``GET /v1/whatif``, for a person."""
    console = _console()
    sample, asked = answer["sample"], answer["asked_blocks"]
    console.print(
        f"{count(answer['requests'], 'request')}, {count(asked, 'block')} asked for"
        + (f", {show(answer['block_bytes'])} each on average" if asked else "")
        + f"; told from {count(sample['blocks'], 'block')}, one in {1 / sample['rate']:,.0f}"
    )
    if not sample["enough"]:
        console.print("these are too few to tell: ask again when engines have asked for more different blocks")
        return
    console.print(answer["scope"])
    if answer["passed_over"]:
        console.print(f"passed over: {count(answer['passed_over'], 'request')}, there was no time to look at them")
    for name, points in answer["tiers"].items():
        table = Table(box=None, pad_edge=False, header_style="bold", title=f"{name} of", title_justify="left")
        for title in ("size", "blocks", "prefix hits", ""):
            table.add_column(title, justify="left" if not title else "right")
        for point in points:
            filled = round(BAR * point["hits"])
            bar = "\u2588" * filled + "\u2591" * (BAR - filled)
            table.add_row(show(point["bytes"]), f"{point['blocks']:,}", f"{point['hits']:.1%}", bar)
        console.print()
        console.print(table)


def _table(rows: Sequence[Row], block_bytes: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    disk, auto = any(row.disk_capacity for row in rows), any(row.policy == AUTO for row in rows)
    titles = ["policy", "blocks", "of all", "prefix hits", "loaded"]
    titles += ["from disk", "promoted", "written to disk"] if disk else ["written"]
    for title in titles + ["switches"] * auto:
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)

    def amount(blocks: int) -> str:
        return show(blocks * block_bytes) if block_bytes else f"{blocks:,}"

    for row in rows:
        cells = [
            row.policy,
            f"{row.capacity:,}",
            f"{row.share:.1%}" if row.share <= 1 else "all",
            f"{row.hit_rate:.3f}",
            amount(row.loaded_blocks),
        ]
        cells += [f"{row.disk_rate:.3f}", amount(row.promoted_blocks)] if disk else []
        table.add_row(*cells, amount(row.written_blocks), *[str(row.switches)] * auto)
    return table


def _console() -> Console:
    # Nobody looks at the width of a pipe, and a table cut to 80 columns is of no use to grep.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)

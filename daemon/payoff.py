"""Does offload pay here? Each tier's time to give a prompt back, beside the time to compute it.

Owns nothing but the figures. Called by ``cli_bench`` in the command's own process. Imports ``payoff_cold``,
``payoff_models``, ``payoff_stand``, ``config`` and ``errors``.

A tier is measured only when the prompt is really in it and in none above it: what is above is emptied before each load,
and the daemon asked whether it is empty.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from terracekv.daemon.config import Config, survey
from terracekv.daemon.payoff_cold import Cold
from terracekv.daemon.payoff_models import Geometry
from terracekv.daemon.payoff_stand import BenchTrouble, Sizes, Stand
from terracekv.tiers.errors import NoRoom

Say = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """One tier. ``ms`` is the median by tokens; from ``pays_from`` tokens on it pays, None where it does
    not at the longest length, or nobody knows."""

    mode: str
    ms: dict[int, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    of_memcpy: float | None = None
    pays_from: int | None = None
    verdict: str = ""
    note: str = ""


@dataclass(slots=True)
class Report:
    """All of it."""

    geometry: Geometry
    block_tokens: int
    block_bytes: int
    lengths: list[int]
    rounds: int
    memcpy_bytes_per_s: float
    tiers: dict[str, Measured]
    cold: Cold | None
    notes: list[str]
    verdict: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"token_bytes": self.geometry.token_bytes}


def that_fit(
    config: Config, geometry: Geometry, block_tokens: int, lengths: Sequence[int]
) -> tuple[list[int], list[str]]:
    """The lengths for which there is room here, as whole blocks, and why the others are left out. NoRoom for none."""
    room = survey(config)
    kept, notes = [], []
    for length in sorted({max(1, length // block_tokens) * block_tokens for length in lengths}):
        short = Sizes(geometry, block_tokens, length, config.disk.segment).shortage(config, room)
        if short is None:
            kept.append(length)
        else:
            notes.append(f"{length:,} tokens are left out, {short}")
    if not kept:
        raise NoRoom(f"no prompt fits here: {notes[0]}", "ask for fewer --tokens, or another --geometry (or its --tp)")
    return kept, notes


def measure(
    config: Config,
    file: Path | None,
    flags: Mapping[str, str],
    geometry: Geometry,
    *,
    block_tokens: int,
    lengths: Sequence[int],
    rounds: int,
    cold: Cold | None,
    say: Say,
) -> Report:
    """Run it. Takes as long as the tiers take for ``rounds`` loads of each length."""
    kept, notes = that_fit(config, geometry, block_tokens, lengths)
    sizes = Sizes(geometry, block_tokens, kept[-1], config.disk.segment)
    draw = random.Random(7)
    tokens = [draw.randrange(1 << 17) for _ in range(kept[-1])]
    stand = Stand(config, file, flags, geometry, sizes)
    with stand:
        about = stand.join(tokens, block_tokens)
        stored = stand.order(do="store", blocks=sizes.blocks)
        if stored["stored"] != sizes.blocks:
            raise BenchTrouble(f"{stored['stored']} of {sizes.blocks} blocks were stored: {stored['why']}")
        say(f"stored {sizes.blocks:,} blocks of {about['block_bytes']:,} bytes in {stored['ms']:,.0f} ms")
        memcpy = float(stand.order(do="memcpy")["bytes_per_s"])
        tiers = {name: Measured(mode) for name, mode in stand.modes().items()}
        report = Report(geometry, block_tokens, about["block_bytes"], kept, rounds, memcpy, tiers, cold, notes)
        for depth, name in enumerate(tiers):
            _measure_tier(stand, report, name, [*tiers][:depth], say)
    if stand.left is not None:
        notes.append(stand.left)
    _judge(report)
    return report


def _measure_tier(stand: Stand, report: Report, name: str, above: Sequence[str], say: Say) -> None:
    measured, size = report.tiers[name], report.block_tokens
    if measured.mode in ("down", "stuck"):
        measured.note = f"not measured: the tier is {measured.mode}"
        return
    for length in report.lengths:
        blocks, spent = length // size, []
        for _ in range(report.rounds):
            if above:
                stand.force_out(above, report.lengths[-1] // size, size)
            if name == "disk":
                measured.note = stand.drop_pages()
            before = stand.given(name)
            loaded = stand.order(do="load", blocks=blocks)
            given = stand.given(name) - before
            if loaded["blocks"] < blocks or given < blocks:
                measured.note = f"not measured: {loaded['blocks']} of {blocks} blocks came back, {given} from here"
                measured.note += f" ({loaded['why']})" if loaded["why"] else ""
                measured.ms.clear()
                return
            if not loaded["right"]:
                raise BenchTrouble(f"{name} gave back other bytes than were stored", "please report this")
            spent.append(loaded["ms"])
        measured.ms[length] = statistics.median(spent)
        say(f"{name}, {length:,} tokens: {measured.ms[length]:,.1f} ms")
    longest = report.lengths[-1]
    measured.bytes_per_s = longest * report.geometry.token_bytes / measured.ms[longest] * 1e3
    measured.of_memcpy = measured.bytes_per_s / report.memcpy_bytes_per_s
    if name == "s3":
        measured.note = "what the service keeps in a cache of its own is not in our hands"


def break_even(points: Mapping[int, float], cold: Cold, block_tokens: int) -> int | None:
    """From how many tokens on a load takes less time than it saves, in whole blocks; None when it does not at the
    longest length of ``points`` (milliseconds by tokens).

    Between two lengths, and below the shortest, times lie on straight lines; beyond the longest nothing is claimed.
    """
    lengths = sorted(points)
    costs = [(0, _base_ms(points))] + [(length, points[length] - cold.saved_ms(length)) for length in lengths]
    if costs[-1][1] > 0:
        return None
    last = max((at for at, (_, cost) in enumerate(costs) if cost > 0), default=None)
    if last is None:
        return block_tokens
    (before, loss), (after, gain) = costs[last], costs[last + 1]
    crossing = before + (after - before) * loss / (loss - gain)
    return max(1, math.ceil(crossing / block_tokens - 1e-9)) * block_tokens


def _base_ms(points: Mapping[int, float]) -> float:
    """What a load costs whatever its length: all of it, as far as can be told from one length."""
    first, *more = sorted(points)
    if not more:
        return points[first]
    slope = (points[more[0]] - points[first]) / (more[0] - first)
    return max(0.0, points[first] - max(0.0, slope) * first)


def _judge(report: Report) -> None:
    if report.cold is None:
        longest = report.lengths[-1]
        rates = [f"{name} {longest / of.ms[longest] * 1e3:,.0f}" for name, of in report.tiers.items() if of.ms]
        report.verdict = (
            f"tokens given back a second, at {longest:,}: {', '.join(rates)}; it pays where the engine computes fewer: "
            "name one that runs (--engine http://localhost:8000 --model NAME), or its rate (--prefill-rate TOKENS/S)"
        )
        return
    pays, longest = [], report.lengths[-1]
    for name, measured in report.tiers.items():
        if not measured.ms:
            measured.verdict = measured.note
            continue
        measured.pays_from = break_even(measured.ms, report.cold, report.block_tokens)
        ratio = report.cold.saved_ms(longest) / measured.ms[longest]
        if measured.pays_from is None:
            measured.verdict = f"does not pay up to {longest:,} tokens: they take {1 / ratio:,.1f} times as long as "
            measured.verdict += "to compute them"
        else:
            measured.verdict = f"pays from {measured.pays_from:,} tokens on; {longest:,} tokens come {ratio:,.1f} "
            measured.verdict += "times as fast as they are computed"
            pays.append(name)
    if not pays:
        report.verdict = f"offload does not pay here: to compute {longest:,} tokens is quicker than any tier"
        return
    report.verdict = f"offload pays here, down to {pays[-1]}, from {report.tiers[pays[-1]].pays_from:,} tokens on"
    if others := [name for name, measured in report.tiers.items() if measured.ms and name not in pays]:
        report.verdict += f"; not from {' or '.join(others)}"

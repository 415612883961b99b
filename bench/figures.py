"""How a figure is reported: one JSON line, with the reference that was measured beside it in the same run.

Imported by every script of this folder. Standard library only.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence


def report(
    name: str,
    value: float,
    unit: str,
    reference: str = "",
    reference_value: float | None = None,
    runs: int = 1,
    *,
    ratio: float | None = None,
    **more: float | int | str,
) -> None:
    """Print one figure. ``ratio`` is value over reference unless given (the median of paired ratios, say)."""
    if ratio is None and reference_value:
        ratio = value / reference_value
    figure = {
        "name": name,
        "value": _short(value),
        "unit": unit,
        "reference": reference,
        "reference_value": _short(reference_value),
        "ratio": _short(ratio),
        "runs": runs,
    }
    print(json.dumps(figure | more), flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def core_rate(work: Callable[[], object], size_bytes: int, rounds: int) -> float:
    """GB per second of a core: the median of so many calls that work on ``size_bytes`` each, in this thread."""
    spent = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        spent.append(time.thread_time() - started)
    return size_bytes / median(spent) / 1e9


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def break_even_tokens(cold_s: float, own_s: float, tier_s: float, tokens: int) -> int:
    """From how many tokens on a load from a tier is quicker than computing them. Times to the first token of a prompt
    of ``tokens``: computed, from the engine's own prefix cache, from the tier. What a tier costs more than the own
    cache is taken as the same for every length, so this is an upper bound; 0 when it costs no more."""
    a_token_s = max(cold_s - own_s, 1e-9) / tokens
    return max(0, math.ceil((tier_s - own_s) / a_token_s))


def note(text: str) -> None:
    """What a reader of the figures should know, out of their way."""
    print(text, file=sys.stderr, flush=True)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

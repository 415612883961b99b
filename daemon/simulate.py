"""``terracekv simulate``: a trace replayed against tiers of other sizes and under other policies, exactly.

Owns nothing; runs in the command line's process, without a daemon. Called by ``cli``. Imports ``traces`` and the model
tiers, which run the same orders and admissions as the real ones.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from terracekv.daemon.traces import Trace
from terracekv.tiers.budget import parse_size
from terracekv.tiers.contest import CANDIDATES, AutoTier
from terracekv.tiers.errors import BadRequest
from terracekv.tiers.eviction import ADMISSIONS, AUTO, EVICTIONS, Policy
from terracekv.tiers.replay import ModelStack, ModelTier

TICK = 256
"""Requests between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Row:
    """One replay. Blocks; ``hit_rate`` is of all blocks asked for, ``disk_rate`` what of these only disk had."""

    policy: str
    capacity: int
    share: float
    disk_capacity: int
    hit_rate: float
    disk_rate: float
    loaded_blocks: int
    promoted_blocks: int
    written_blocks: int
    """To disk where there is one below, else into the tier itself."""
    loaded_bytes: int
    promoted_bytes: int
    written_bytes: int
    switches: int
    """Of an ``auto``."""


def policies_of(names: Sequence[str]) -> list[Policy]:
    """``lru/all`` and so on; ``auto`` for both. BadRequest for others."""
    made = []
    for name in names:
        eviction, _, admission = name.partition("/")
        policy = Policy(eviction, admission or (AUTO if eviction == AUTO else "all"))
        auto = policy == Policy(AUTO, AUTO)
        if not auto and (policy.eviction not in EVICTIONS or policy.admission not in ADMISSIONS):
            known = ", ".join([candidate.name for candidate in CANDIDATES] + [AUTO])
            raise BadRequest(f"there is no policy {name}", f"policies are {known}")
        made.append(policy)
    return made


def blocks_of(size: str, trace: Trace, block_bytes: int) -> int:
    """Blocks of ``5%`` (of the different blocks of the trace), ``3000`` (blocks) or ``64GiB``; one at least."""
    text = size.strip()
    try:
        if text.endswith("%"):
            wanted = float(text[:-1])
            blocks = int(trace.unique * wanted / 100)
        elif text.isdigit():
            wanted = blocks = int(text)
        else:
            wanted = parse_size(text)
            if not block_bytes:
                raise BadRequest(
                    f"the trace does not tell how large a block is, so {text} is not known",
                    "say it with --block-bytes, or write 5% or 3000 (blocks)",
                )
            blocks = wanted // block_bytes
    except (ValueError, OverflowError):
        raise BadRequest(f"{text!r} is no size", "write 5%, 3000 (blocks) or 64GiB") from None
    if wanted <= 0:
        raise BadRequest(f"a tier of {text} holds nothing", "write 5%, 3000 (blocks) or 64GiB")
    return max(1, blocks)


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    disk_capacity: int = 0,
    *,
    block_bytes: int = 0,
    progress: Callable[[int], object] = lambda requests: None,
) -> Row:
    """Replay all of a trace. With a disk below, eviction is that of host and admission that of disk; without one both
    are of the one tier. ``progress`` is told of requests that were replayed."""
    tiers = [tier for tier in _tiers(policy, capacity, disk_capacity) if tier is not None]
    autos = [tier for tier in tiers if isinstance(tier, AutoTier)]
    stack = ModelStack(*tiers) if len(tiers) == 2 else None
    hits = below = 0
    for number, chain in enumerate(trace.chains, 1):
        if stack is None:
            hits += tiers[0].use(chain)
        else:
            upper, lower = stack.use(chain)
            hits += upper
            below += lower
        if autos:
            keys = b"".join(chain)
            for auto in autos:
                auto.heed(keys)
        if not number % TICK:
            progress(TICK)
    progress(len(trace.chains) % TICK)
    written = tiers[-1].writes
    return Row(
        policy=AUTO if policy.eviction == AUTO else policy.name,
        capacity=capacity,
        share=capacity / trace.unique,
        disk_capacity=disk_capacity,
        hit_rate=(hits + below) / trace.asked,
        disk_rate=below / trace.asked,
        loaded_blocks=hits + below,
        promoted_blocks=below,
        written_blocks=written,
        loaded_bytes=(hits + below) * block_bytes,
        promoted_bytes=below * block_bytes,
        written_bytes=written * block_bytes,
        switches=sum(auto.contest.switches for auto in autos),
    )


def as_csv(rows: Sequence[Row]) -> str:
    """With a line of names."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def require_plot() -> None:
    """BadRequest where the extra ``plot`` is not installed."""
    if find_spec("matplotlib") is None:
        raise BadRequest("--png needs matplotlib, which is not installed", 'pip install "terracekv[plot]"')


def draw(rows: Sequence[Row], path: Path) -> None:
    """Hits by capacity, a line for each policy; see ``require_plot``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(row.policy for row in rows):
        line = sorted((row.capacity, row.hit_rate) for row in rows if row.policy == policy)
        axes.plot([at for at, _ in line], [rate for _, rate in line], marker="o", label=policy)
    axes.set(xscale="log", xlabel="capacity in blocks", ylabel="prefix hits, share of blocks asked for", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _tiers(policy: Policy, capacity: int, disk_capacity: int) -> tuple[ModelTier, ModelTier | None]:
    auto = policy.eviction == AUTO
    if not disk_capacity:
        return AutoTier(capacity) if auto else ModelTier(capacity, policy), None
    if auto:
        evictions = [Policy(eviction, "all") for eviction in EVICTIONS]
        admissions = [Policy("lru", admission) for admission in ADMISSIONS]
        return AutoTier(capacity, evictions), AutoTier(disk_capacity, admissions)
    return ModelTier(capacity, Policy(policy.eviction)), ModelTier(disk_capacity, Policy("lru", policy.admission))

"""``terracekv explain``: why a prompt misses, block by block.

Owns nothing. Called by ``cli`` in its own process, and imported only there. Imports ``cli_text``, ``doctor_trial``,
``http_client`` and ``errors``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from terracekv.daemon.cli_text import count, printable
from terracekv.daemon.doctor_trial import MODEL as TRIAL
from terracekv.daemon.http_client import Door
from terracekv.tiers.errors import BadRequest

KEY_DIGITS = 12
ID_DIGITS, ID_DIGITS_MIN = 16, 4
ROWS_MAX = 40
"""Blocks that a person is shown: of a run that are alike, and of all."""
FIELDS = ("model", "revision", "dtype", "block_tokens")

REASONS = {
    "shorter_than_block": "the prompt fills no block, and only full blocks are stored",
    "unknown_namespace": "no engine has registered such a namespace with this daemon",
    "absent": "never stored here, or gone for longer than this daemon remembers (since its start, 65,536 blocks); "
    "blocks that were flushed or deleted are forgotten",
    "evicted": "it was here and made room for others: more host.size or disk.size would have kept it",
    "damaged": "its bytes were wrong when they were last read: it was forgotten, and is stored anew when computed",
    "tier_down": "a tier that may have it cannot be asked now: see terracekv status",
    "deadline": "the bucket has not said yet whether it has it: ask again",
    "too_slow": "the bucket may have it, but to compute it is faster (s3.prefill_tokens_per_s)",
}


def choose(door: Door, name: str | None, wanted: Mapping[str, str | int | None]) -> str:
    """What to call the namespace in a question: ``name``, narrowed down by the ``wanted`` fields that are not None.

    Without a name it is the one that live sessions use, or the only one. BadRequest lists the candidates when there
    are several.
    """
    status = door.ask("GET", "/v1/status")
    spaces: list[dict[str, Any]] = [s for s in status["namespaces"] if s["registered"] and s["model"] != TRIAL]
    live = {session["namespace_id"] for session in status["sessions"]}
    given = {field: value for field, value in wanted.items() if value is not None}
    if name is not None:
        named = [s for s in spaces if s["model"] == name]
        if not named and len(name) >= ID_DIGITS_MIN:
            named = [s for s in spaces if s["namespace_id"].startswith(name.lower())]
        if not named:
            return name  # the daemon says that it does not know it, and where else the tokens are
        spaces = named
    found = [s for s in spaces if all(s[field] == value for field, value in given.items())]
    if name is None and not given:
        found = [s for s in spaces if s["namespace_id"] in live] or (spaces if len(spaces) == 1 else [])
    if len(found) == 1:
        return str(found[0]["namespace_id"])
    listed = found or spaces
    which = " ".join(f"{field}={value}" for field, value in given.items()) or name or "a live session"
    lines = "; ".join(_named(space, live) for space in listed[:ROWS_MAX])
    says = f"{len(found)} namespaces fit {which}" if found else f"no namespace fits {which}"
    if not listed:
        raise BadRequest(f"{says}: no engine has registered any", "start an engine, or see terracekv status")
    raise BadRequest(
        says, f"name one with --namespace MODEL or ID (or narrow it with --revision, --dtype, --block-tokens): {lines}"
    )


def lines_of(told: Mapping[str, Any]) -> Iterator[str]:
    """The answer of ``POST /v1/explain``, for a person."""
    size, miss = told["block_tokens"], told["first_miss"]
    if told["namespace_id"] is not None:
        yield printable(
            f"namespace {told['namespace_id'][:ID_DIGITS]}: {told['model']}, revision {told['revision']}, "
            f"{told['dtype']}, {size} tokens a block, {count(told['shards'], 'shard')}"
            + (f", flushed {count(told['epoch'], 'time')}" if told["epoch"] else "")
        )
        yield (
            f"matched {told['matched_blocks']} of {count(told['asked_blocks'], 'block')}, "
            f"{told['matched_tokens']:,} of {told['asked_tokens']:,} tokens"
            + (f"; the last {told['rest_tokens']:,} fill no block of {size}" if told["rest_tokens"] else "")
        )
    yield from _table(told)
    if miss is not None:
        where = f"first miss: block {miss['index']}, {miss['reason']}"
        yield f"{where}: {REASONS.get(miss['reason'], 'see docs/operations.md')}"
        blocks = told["blocks"][miss["index"] :]
        if blocks and 0 < len(blocks[0]["missing"]) < told["shards"]:
            shards = ", ".join(map(str, blocks[0]["missing"]))
            yield f"  only shard {shards} of {told['shards']} is missing: did every rank store its part?"
        if whole := sum(not row["missing"] for row in blocks):
            yield f"  {count(whole, 'block')} behind it, whole and of no use: a prefix has no holes"
    for other in told["elsewhere"]:
        yield printable(
            f"the same tokens are present under namespace {other['namespace_id'][:ID_DIGITS]} "
            f"({count(other['matched_blocks'], 'block')}, {other['matched_tokens']:,} tokens), which differs in "
            + _differences(other["differs"])
        )


def _table(told: Mapping[str, Any]) -> Iterator[str]:
    rows = told["blocks"]
    if not rows:
        return
    last = told["block_tokens"]
    yield f"{'block':>5}  {'tokens':>17}  {'key':{KEY_DIGITS}}  {'where':20}  why not"
    shown = _picked(rows, told["first_miss"])
    for at, index in enumerate(shown):
        if at and index > shown[at - 1] + 1:
            yield f"    :  ({index - shown[at - 1] - 1:,} more)"
        row = rows[index]
        tokens = f"{row['first_token']:,}-{row['first_token'] + last - 1:,}"
        where = " ".join(
            name if count == told["shards"] else f"{name}({count}/{told['shards']})"
            for name, count in row["tiers"].items()
        )
        why = row["reason"] or ""
        yield f"{row['index']:>5}  {tokens:>17}  {row['key'][:KEY_DIGITS]}  {where or '-':20}  {why}".rstrip()
    if (left := told["asked_blocks"] - shown[-1] - 1) > 0:
        yield f"    :  ({left:,} more; --json has {len(rows):,} in all)"


def _picked(rows: list[dict[str, Any]], miss: Mapping[str, Any] | None) -> list[int]:
    """All of a short prompt; of a long one where something changes, the first miss among it."""
    if len(rows) <= ROWS_MAX:
        return [*range(len(rows))]
    kinds = [(row["tiers"], row["reason"]) for row in rows]
    changes = [at for at in range(1, len(rows)) if kinds[at] != kinds[at - 1]]
    edges = {0, len(rows) - 1} | {at - 1 for at in changes} | set(changes)
    around = {miss["index"]} if miss is not None and miss["index"] < len(rows) else set[int]()
    return sorted(set(sorted(edges)[: ROWS_MAX - 1]) | around)


def _differences(differs: Mapping[str, Mapping[str, Any]]) -> str:
    if "salt" in differs:
        return "whose it is: another tenant's, or stored with another credential"
    parts = []
    for field, values in differs.items():
        mine, its = values["asked"], values["there"]
        short = [str(value)[:KEY_DIGITS] if field == "layout" else str(value) for value in (mine, its)]
        parts.append(f"{field} ({short[1]} there" + (f", {short[0]} here)" if mine is not None else ")"))
    return ", ".join(parts)


def _named(space: Mapping[str, Any], live: set[str]) -> str:
    fields = ", ".join(f"{field} {space[field]}" for field in FIELDS)
    used = ", in use" if space["namespace_id"] in live else ""
    return f"{space['namespace_id'][:ID_DIGITS]} ({fields}{used})"

"""What goes over the people's door: the shapes of requests and answers, and how they are written.

Owns the formats (JSON and msgpack) and the map from our errors to HTTP's. Called by the other ``http_`` modules on the
event loop. Imports aiohttp, msgspec, ``pins``, ``block`` and ``errors``.

Requests are typed and forbid fields they do not know, so that a misspelt one is named instead of being ignored.
"""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from terracekv.daemon.pins import TTL_S_MAX
from terracekv.tiers.block import KEY_BYTES, TOKEN_MAX
from terracekv.tiers.errors import BadRequest, NotFound, TerraceError, TierDown, TierFull

BODY_BYTES_MAX = 32 << 20
"""A body of JSON or msgpack: a million tokens and more."""
KEYS_MAX = 1 << 17
DEADLINE_MS = 200
PIECE_BYTES = 32 << 10
"""Tokens are parsed in pieces: between two of them another thread may have the interpreter."""
PACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")

Tokens = Annotated[
    Raw | UnsetType,
    Meta(
        extra_json_schema={
            "type": ["array", "null"],
            "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_MAX},
        }
    ),
]
KEY_SCHEMA = {"type": "string", "pattern": "^[0-9a-fA-F]{64}$", "description": "64 hex digits"}
Key = Annotated[str, Meta(extra_json_schema=KEY_SCHEMA)]
TIER_SCHEMA = {"enum": ["gpu", "host", "disk", "s3"], "description": "one that is configured"}
Tier = Annotated[str, Meta(extra_json_schema=TIER_SCHEMA)]
Keys = Annotated[list[Key], Meta(max_length=KEYS_MAX, extra_json_schema={"uniqueItems": True})]
Name = Annotated[
    str,
    Meta(description="namespace id in hex, a unique prefix of it (8 digits or more), or a model name that is unique"),
]


class Chain(Struct, forbid_unknown_fields=True, kw_only=True):
    """A chain of blocks from its first one on: by its tokens, or by its keys, and not by both."""

    namespace: Name
    tokens: Tokens = UNSET
    keys: Keys | None = None


ONE_OF_BOTH = {"oneOf": [{"required": [name], "properties": {name: {"type": "array"}}} for name in ("tokens", "keys")]}
"""What the schema of a chain's fields cannot say by itself."""


class Lookup(Chain, forbid_unknown_fields=True, kw_only=True):
    """How much of a chain is here? Only what nobody but a distant tier can tell is waited for, ``deadline_ms``."""

    deadline_ms: Annotated[int, Meta(ge=0, le=60_000)] = DEADLINE_MS


class Prefetch(Chain, forbid_unknown_fields=True, kw_only=True):
    """Bring a chain up into host, without keeping it there."""


class Pin(Chain, forbid_unknown_fields=True, kw_only=True):
    """Keep a chain in host for ``ttl_s`` seconds."""

    ttl_s: Annotated[float, Meta(gt=0, le=TTL_S_MAX)] = 3600.0


class Unpin(Chain, forbid_unknown_fields=True, kw_only=True):
    """Let go of a pinned chain."""


class Flush(Struct, forbid_unknown_fields=True, kw_only=True):
    """Make all blocks of a namespace misses, in all tiers for good, or in one tier."""

    namespace: Name
    tier: Tier | None = None


class Verify(Struct, forbid_unknown_fields=True, kw_only=True):
    """Check the next blocks of a tier, from ``after`` on: what the answer before this one said, or null."""

    tier: Tier
    after: Annotated[str, Meta(pattern="^[0-9a-f]{1,80}$")] | None = None


class Verified(Struct):
    """Blocks checked and passed over (of flushed namespaces); how many of those checked are sealed with a key that is
    not here, and so not opened; what was wrong with which, by id; ``next`` is null when all were looked at. What was
    wrong is forgotten."""

    tier: str
    checked: int
    passed_over: int
    locked: int
    wrong: dict[str, str]
    next: str | None


class Reach(Struct):
    """Contiguous leading blocks."""

    blocks: int
    tokens: int


class FirstMiss(Struct):
    index: int
    reason: str


class Found(Struct):
    """``tiers`` has the configured tiers, from the top down: what can be had from each or from above it.

    ``block_tokens`` is 0 and ``namespace_id`` null when no engine has registered such a namespace.
    """

    namespace_id: str | None
    block_tokens: int
    asked_blocks: int
    matched_blocks: int
    matched_tokens: int
    tiers: dict[str, Reach]
    bytes: int
    load_ms: float
    first_miss: FirstMiss | None


class Explain(Chain, forbid_unknown_fields=True, kw_only=True):
    """Block by block: where is it, and if it is nowhere, why? What only a distant tier can tell is waited for."""

    deadline_ms: Annotated[int, Meta(ge=0, le=60_000)] = DEADLINE_MS


class Told(Struct):
    """One block. ``tiers`` are those that are known to have it, each with the number of its shards there; ``missing``
    are shards that no tier has, and ``reason`` why, as far as the daemon remembers. A whole block behind the first miss
    is of no use: a prefix has no holes."""

    index: int
    first_token: int
    key: str
    tiers: dict[str, int]
    missing: list[int]
    reason: str | None


class Difference(Struct):
    """``asked`` is null where no such namespace is known."""

    asked: str | int | None
    there: str | int | None


class Elsewhere(Struct):
    """Another namespace that has leading blocks of the same tokens; ``differs`` has the fields of its name that are
    not as asked. ``salt`` differs where nothing else does."""

    namespace_id: str
    matched_blocks: int
    matched_tokens: int
    differs: dict[str, Difference]


class Explained(Struct):
    """As ``Found``, for people: nothing is counted. ``rest_tokens`` fill no block, and are always computed. ``blocks``
    ends after ``KEYS_TOLD`` blocks. Elsewhere is looked only for tokens: keys are of one namespace."""

    namespace_id: str | None
    model: str
    revision: str
    dtype: str
    shards: int
    epoch: int
    block_tokens: int
    asked_tokens: int | None
    rest_tokens: int | None
    asked_blocks: int
    matched_blocks: int
    matched_tokens: int
    first_miss: FirstMiss | None
    blocks: list[Told]
    elsewhere: list[Elsewhere]


class Done(Struct):
    """What was done, by tier and by verb, and what was skipped, by reason. Counts are of block shards: a block of a
    namespace with two shards counts twice."""

    namespace_id: str
    asked_shards: int | None
    done: dict[str, dict[str, int]]
    skipped: dict[str, int]


class Synced(Struct):
    """``waited``: blocks that were on their way to each tier when it was asked. ``synced``: the tiers whose blocks
    outlive a loss of power from now on. A bucket is not among them: what it has answered it answers for itself."""

    waited: dict[str, int]
    synced: list[str]


class Stored(Struct):
    """``outcome`` is ``stored``, or ``present`` when the block was there already."""

    outcome: str
    checksum: str | None
    durable: bool


class Alive(Struct):
    alive: bool


class Ready(Struct):
    """``degraded`` names tiers that stand still or are down: requests are served without them, so that is no reason
    not to be ready."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


class ErrorBody(Struct):
    """``kind`` is stable, for programs; some kinds add figures, such as ``limit_bytes`` or ``free_bytes``."""

    kind: str
    message: str
    hint: str


class Failure(Struct):
    error: ErrorBody


class Problem(TerraceError):
    """An error with its HTTP status. ``facts`` are figures for programs, put beside the message."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        hint: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})
        self.facts = facts


def too_large(what: str, size_bytes: int, limit_bytes: int, hint: str) -> Problem:
    """413 with both numbers."""
    return Problem(
        413,
        "too_large",
        f"{what} is {size_bytes} bytes or more; the limit is {limit_bytes}",
        hint,
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


def no_room(error: OSError, folders: str) -> Problem:
    """507 for what the file system would not take. ``folders`` are named when the error names no file."""
    return Problem(
        507,
        "no_room",
        f"{error.filename or folders} could not be written: {error.strerror}",
        "free some space there, or make it writable; then repeat the request",
    )


def failure(request: web.BaseRequest, error: TerraceError) -> web.Response:
    """The answer to a request that was not done."""
    status, facts, headers = 500, dict[str, Any](), dict[str, str]()
    match error:
        case Problem():
            status, facts, headers = error.status, error.facts, error.headers
        case TierFull():
            status = 507
            facts = {"tier": error.tier, "needed_bytes": error.needed_bytes, "free_bytes": error.free_bytes}
        case BadRequest():
            status = 400
        case NotFound():
            status = 404
        case TierDown():
            status = 503
    body = {"kind": error.kind, "message": error.message, "hint": error.hint, **facts}
    return reply(request, {"error": body}, status, headers)


def reply(
    request: web.BaseRequest, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """``value`` in the format that the request accepts; JSON unless it names msgpack. No cache keeps it."""
    accepted = request.headers.get("Accept", "")
    packed = any(kind in accepted for kind in PACK_TYPES)
    body = msgspec.msgpack.encode(value) if packed else msgspec.json.encode(value)
    kind = PACK_TYPES[0] if packed else "application/json"
    headers = {"Cache-Control": "no-store"} | dict(headers or {})
    return web.Response(body=body, status=status, headers=headers, content_type=kind)


def tokens_of(request: Chain) -> bytes | None:
    """Tokens as they were sent; None when there were none, or null."""
    raw = b"" if request.tokens is UNSET else bytes(request.tokens)
    return None if raw in (b"", b"null", b"\xc0") else raw


def parse_tokens(raw: bytes) -> "array[int]":
    """Tokens of a request. BadRequest when they are no list of u32. For any thread.

    A long JSON list is cut at commas and parsed in pieces: one call would keep the interpreter for as long as it takes.
    """
    parsed = array("I")
    wanted = f"tokens: not a list of integers between 0 and {TOKEN_MAX}"
    hint = "send the token ids as the tokenizer gives them, special tokens included: [1, 15043, 3186]"
    try:
        if raw[:1] + raw[-1:] != b"[]":
            # In msgpack 0x90 to 0x9f, 0xdc and 0xdd begin a list; no list of JSON gets here, and no text of it is one.
            if not (0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)):
                raise BadRequest(wanted, hint)
            parsed.extend(msgspec.msgpack.decode(raw, type=list[int]))
            return parsed
        start, end = 1, len(raw) - 1
        while start <= end:
            comma = raw.find(b",", start + PIECE_BYTES, end)
            stop = end if comma < 0 else comma
            parsed.extend(msgspec.json.decode(b"[%b]" % raw[start:stop], type=list[int]))
            start = stop + 1
    except (msgspec.MsgspecError, OverflowError) as error:
        raise BadRequest(f"{wanted}: {error}", hint) from None
    return parsed


def parse_key(text: str, where: str = "key") -> bytes:
    """A key from its hex digits."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(text) != 2 * KEY_BYTES:
        raise BadRequest(f"{where}: {text[:80]!r} is not {2 * KEY_BYTES} hex digits", "keys are SHA-256 digests in hex")
    return key

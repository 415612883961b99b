"""Why a prompt misses, block by block: what ``POST /v1/explain`` answers.

Owns nothing; reads the store. Called by ``http_queries`` on the event loop, and gives it back between blocks: this is
asked by a person, and no engine should wait for it. Imports ``http_messages``, ``store`` and ``tiers``.

It says what the daemon knows and no more: ``absent`` is a block of which nothing is remembered.
"""

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial

from terracekv.daemon.http_messages import Difference, Elsewhere, Explained, FirstMiss, Told, parse_tokens
from terracekv.daemon.store import Store
from terracekv.tiers.block import block_id, block_keys
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import Miss

KEYS_TOLD = 4096
"""Blocks that are told one by one: a million tokens."""
PIECE = 64
"""Blocks looked at between two turns of the loop."""
SPACES_MAX = 256
"""Other namespaces in which the same tokens are looked for."""
WORK_S = 30.0
FIELDS = ("model", "revision", "dtype", "layout", "block_tokens", "shards", "tenant")
"""Of what a namespace is named by; the salt is not shown."""


async def explained(
    store: Store,
    namespace: Namespace | None,
    keys: Sequence[bytes],
    *,
    raw: bytes | None,
    spaces: Sequence[Namespace],
    wait_s: float,
) -> Explained:
    """``namespace`` is None for one that nobody knows; ``raw`` are tokens as they were sent, in ``spaces`` of the
    caller's they are looked for too."""
    tokens = None if raw is None else await store.mover.ask(lambda: parse_tokens(raw), WORK_S, "host")
    others = [] if tokens is None else await _elsewhere(store, namespace, tokens, spaces)
    asked = None if tokens is None else len(tokens)
    if namespace is None:
        miss = FirstMiss(0, Miss.UNKNOWN_NAMESPACE.value)
        return Explained(None, "", "", "", 0, 0, 0, asked, asked, 0, 0, 0, miss, [], others)
    ids = [block_id(key, shard) for key in keys for shard in range(namespace.shards)]
    namespace = await store.learn(namespace, ids, wait_s)
    found, _ = store.look(namespace, keys)
    size = namespace.block_tokens
    return Explained(
        namespace_id=namespace.id.hex(),
        model=namespace.model,
        revision=namespace.revision,
        dtype=namespace.dtype,
        shards=namespace.shards,
        epoch=namespace.epoch,
        block_tokens=size,
        asked_tokens=asked,
        rest_tokens=None if asked is None else asked % size,
        asked_blocks=len(keys),
        matched_blocks=found.blocks,
        matched_tokens=found.blocks * size,
        first_miss=None if found.first_miss is None else FirstMiss(found.first_miss, str(found.reason)),
        blocks=await _told(store, namespace, keys),
        elsewhere=others,
    )


async def _told(store: Store, namespace: Namespace, keys: Sequence[bytes]) -> list[Told]:
    """Where each block is, and why it is not."""
    rows = []
    for index, key in enumerate(keys[:KEYS_TOLD]):
        if index % PIECE == PIECE - 1:
            await asyncio.sleep(0)
        ids = [block_id(key, shard) for shard in range(namespace.shards)]
        holders = [list(store.holders(namespace, id)) for id in ids]
        tiers = {name: sum(name in held for held in holders) for name in store.tiers}
        missing = [shard for shard, held in enumerate(holders) if not held]
        why = store.departed.why(namespace, [ids[shard] for shard in missing]).value if missing else None
        rows.append(
            Told(
                index=index,
                first_token=index * namespace.block_tokens,
                key=key.hex(),
                tiers={name: count for name, count in tiers.items() if count},
                missing=missing,
                reason=why,
            )
        )
    return rows


async def _elsewhere(
    store: Store, asked: Namespace | None, tokens: "array[int]", spaces: Sequence[Namespace]
) -> list[Elsewhere]:
    """Other namespaces that have the first block of the same tokens, the longest match first."""
    others = [s for s in spaces if s.registered and (asked is None or s.id != asked.id)]
    rows = []
    for other in others[:SPACES_MAX]:
        size = other.block_tokens
        head = block_keys(other.id, tokens[:size], size)
        if head and store.look(other, head)[0].blocks:
            work = partial(block_keys, other.id, tokens[: KEYS_TOLD * size], size)
            blocks = store.look(other, await store.mover.ask(work, WORK_S, "host"))[0].blocks
            rows.append(Elsewhere(other.id.hex(), blocks, blocks * size, _differs(asked, other)))
    return sorted(rows, key=lambda row: -row.matched_tokens)


def _differs(asked: Namespace | None, there: Namespace) -> dict[str, Difference]:
    found = {}
    for field in FIELDS:
        mine, its = None if asked is None else _shown(asked, field), _shown(there, field)
        if mine != its:
            found[field] = Difference(mine, its)
    return found or {"salt": Difference(None, None)}


def _shown(namespace: Namespace, field: str) -> str | int | None:
    value = getattr(namespace, field)
    return value.hex() if isinstance(value, bytes) else value or None

"""Blocks for tests of tiers: named by a number, filled with bytes that say whose they are.

Owns nothing. Called by tests from any thread. Imports ``tiers``.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable

from terracekv.tiers.block import block_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.tier import Outcome, Tier

BLOCK_BYTES = 20_000
"""Not a multiple of the page."""


def name(index: int, shard: int = 0) -> bytes:
    return block_id(hashlib.sha256(b"block %d" % index).digest(), shard)


_EXPONENTS = bytes(0x3C + value % 4 for value in range(256))


def payload_of(id: bytes, salt: bytes = b"", size: int = BLOCK_BYTES) -> bytes:
    """Noise for one half of all ids; for the other, 16-bit numbers of which only the lower bytes are noise, so that a
    codec has something to do."""
    noise = hashlib.shake_128(id + salt).digest(size)
    return like_numbers(noise) if id[0] % 2 else noise


def like_numbers(noise: bytes) -> bytes:
    """Every second byte takes one of four values, as exponents do."""
    made = bytearray(noise)
    made[1::2] = noise[1::2].translate(_EXPONENTS)
    return bytes(made)


def registered(namespaces: Namespaces, seed: int, block_bytes: int = BLOCK_BYTES, dtype: str = "") -> Namespace:
    wanted = Namespace(
        id=bytes([seed]) * 32,
        number=0,
        epoch=0,
        model=f"model {seed}",
        dtype=dtype,
        block_tokens=16,
        shards=1,
        block_bytes=block_bytes,
    )
    return namespaces.register(wanted)


def put(tier: Tier, namespace: Namespace, id: bytes, payload: bytes | None = None) -> Outcome:
    payload = payload_of(id, namespace.id, namespace.block_bytes) if payload is None else payload
    return tier.put(namespace, id, memoryview(payload), checksum(payload))


def get(tier: Tier, namespace: Namespace, id: bytes) -> tuple[Outcome, bytes]:
    into = bytearray(namespace.block_bytes)
    outcome = tier.get(namespace, id, memoryview(into))
    return outcome, bytes(into) if outcome is Outcome.HIT else b""


def verified(tier: Tier, namespace: Namespace, ids: Iterable[bytes]) -> int:
    """How many are hits; AssertionError when one that is listed does not come back whole and right."""
    hits = 0
    for id in ids:
        listed = tier.leading(namespace, [id])
        outcome, found = get(tier, namespace, id)
        assert (outcome is Outcome.HIT) == bool(listed), f"{id.hex()}: listed {listed}, but {outcome}"
        assert outcome is not Outcome.HIT or found == payload_of(id, namespace.id, namespace.block_bytes)
        hits += listed
    return hits


def in_threads(*works: Callable[[], object]) -> None:
    """Run all at once; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

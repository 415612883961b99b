"""The name of a block: namespace ids, prefix-chained keys, block ids.

Owns nothing; pure functions. Called by engines (connector) and by the daemon, from any thread.
Imports the standard library only, so that every process computes the same names from the same tokens.

A key covers its whole prefix: ``key_i`` hashes ``key_{i-1}``, so one different token changes every later key.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence

KEY_BYTES = 32
BLOCK_ID_BYTES = KEY_BYTES + 2
NAMESPACE_ID_BYTES = 32
TOKEN_MAX = 2**32 - 1

EXTRA_LORA = 16
"""Tag of a LoRA adapter's content digest."""
EXTRA_MULTIMODAL = 17
"""Tag of a multimodal item: its digest, then the u32le offset of the item in the block."""
EXTRA_OTHER = 18
"""Tag of anything else besides tokens that shapes a block's KV."""

_NAMESPACE_DOMAIN = b"terracekv/namespace/1\0"
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")


def field(tag: int, value: bytes) -> bytes:
    """``u8 tag || u32le length || value``: no two different field lists have the same bytes."""
    return bytes((tag,)) + _U32.pack(len(value)) + value


def namespace_id(
    *, model: str, revision: str, dtype: str, layout: bytes, block_tokens: int, salt: bytes = b""
) -> bytes:
    """Digest (32 bytes) of everything that makes KV bytes interchangeable; it seeds every key.

    ``layout`` is the 32-byte digest of one shard's layout; ``block_tokens`` is in tokens.
    Raises ValueError when a value cannot be part of a name.
    """
    if len(layout) != 32:
        raise ValueError(f"layout must be a 32-byte digest, not {len(layout)} bytes")
    if not 0 < block_tokens <= TOKEN_MAX:
        raise ValueError(f"block_tokens must be between 1 and {TOKEN_MAX}, not {block_tokens}")
    fields = (
        field(1, model.encode()),
        field(2, revision.encode()),
        field(3, dtype.encode()),
        field(4, layout),
        field(5, _U32.pack(block_tokens)),
        field(6, salt),
    )
    return hashlib.sha256(_NAMESPACE_DOMAIN + b"".join(fields)).digest()


def block_keys(
    namespace_id: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    extras: Mapping[int, Sequence[tuple[int, bytes]]] | None = None,
) -> list[bytes]:
    """Keys (32 bytes each) of the full blocks of ``tokens``; a last part shorter than a block has none.

    ``extras`` maps a block's index to the ``(tag, digest)`` pairs of that block, in order.
    A list, a tuple, an ``array`` or anything with the buffer protocol will do for ``tokens``;
    ``array('I')`` and 32-bit NumPy arrays are the fastest. Raises ValueError for what is not a u32.
    """
    if len(namespace_id) != NAMESPACE_ID_BYTES:
        raise ValueError(f"namespace_id must be {NAMESPACE_ID_BYTES} bytes, not {len(namespace_id)}")
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    packed = _pack_tokens(tokens)
    size = block_tokens * 4
    count = _U32.pack(block_tokens)
    sha256 = hashlib.sha256
    key = namespace_id
    keys = []
    if not extras:
        for start in range(0, len(packed) - size + 1, size):
            key = sha256(key + count + packed[start : start + size]).digest()
            keys.append(key)
        return keys
    for index, start in enumerate(range(0, len(packed) - size + 1, size)):
        extra = b"".join(field(tag, digest) for tag, digest in extras.get(index, ()))
        key = sha256(key + count + packed[start : start + size] + extra).digest()
        keys.append(key)
    return keys


def block_id(key: bytes, shard: int) -> bytes:
    """``key || u16le shard`` (34 bytes): the name of what one engine rank holds of a block."""
    return key + _U16.pack(shard)


def shard_of(block: bytes) -> int:
    """The shard of a block id."""
    return int(_U16.unpack_from(block, KEY_BYTES)[0])


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as consecutive u32le."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        packed = tokens
    else:
        values: Sequence[int] = tokens
        if not isinstance(tokens, (list, tuple, range)):
            try:
                view = memoryview(tokens)  # type: ignore[arg-type]
            except TypeError:
                values = list(tokens)
            else:
                if view.ndim != 1:
                    raise ValueError(f"tokens must be one-dimensional, not {view.ndim}-dimensional")
                if view.format in ("I", "<I") and sys.byteorder == "little":
                    return view.tobytes()
                values = view.tolist()
        try:
            packed = array("I", values)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"tokens must be integers between 0 and {TOKEN_MAX}: {error}") from None
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()

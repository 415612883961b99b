"""How a block lies in a bucket: the name of its object, and the record that is the object's body.

Pure functions. Called by the s3 tier and by ``s3_audit`` from any thread. Imports ``block``, ``body``, ``checksum``,
``coder``, ``errors``, ``namespace``, ``segment``, ``tier`` and ``vault``.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from terracekv.tiers.block import BLOCK_ID_BYTES, KEY_BYTES, block_id, shard_of
from terracekv.tiers.body import Body
from terracekv.tiers.checksum import RunningChecksum
from terracekv.tiers.coder import restore
from terracekv.tiers.errors import Damaged
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.segment import Record, pages_of
from terracekv.tiers.segment import decode as decode_header
from terracekv.tiers.tier import PAGE
from terracekv.tiers.vault import OVERHEAD_BYTES, Vault

_NAME = re.compile(r"([0-9a-f]{64})/([0-9]{1,10})/([0-9a-f]{2})/([0-9a-f]{64})\.([0-9]{1,5})")
_PADDING = bytes(PAGE)
_PIECE_BYTES = 1 << 20
EPOCH_BELIEVED_MAX = 2**31
"""A higher number in an epoch object is damage: nobody flushes so often. Far enough below the last epoch that a
record can bear that one wrong number does not bring a namespace to its end."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an object's name says of it."""

    namespace_id: bytes
    epoch: int
    id: bytes


def key_of(root: str, namespace_id: bytes, epoch: int, id: bytes) -> str:
    """The name of a block's object."""
    assert len(id) == BLOCK_ID_BYTES
    key = id[:KEY_BYTES].hex()
    return f"{root}{namespace_id.hex()}/{epoch}/{key[:2]}/{key}.{shard_of(id)}"


def place_of(root: str, name: str) -> Place | None:
    """The reverse of ``key_of``; None for a name that is not a block's."""
    match = _NAME.fullmatch(name.removeprefix(root)) if name.startswith(root) else None
    if match is None:
        return None
    namespace, epoch, head, key, shard = match.groups()
    if not key.startswith(head) or int(epoch) >= 2**32 or int(shard) >= 2**16:
        return None
    return Place(bytes.fromhex(namespace), int(epoch), block_id(bytes.fromhex(key), int(shard)))


def epoch_key(root: str, namespace_id: bytes) -> str:
    """The name of the object that holds a namespace's epoch."""
    return f"{root}{namespace_id.hex()}/epoch"


def epoch_of(content: bytes) -> int | None:
    """What an epoch object says; None when it is damaged."""
    return epoch if content.isdigit() and (epoch := int(content)) <= EPOCH_BELIEVED_MAX else None


def pack(namespace: Namespace, id: bytes, codec: int, stored: memoryview, digest: int) -> list[memoryview | bytes]:
    """The buffers of a record, to be sent one after the other; ``digest`` is of the payload before the codec, or of
    sealed bytes."""
    record = Record(
        id=id,
        namespace_id=namespace.id,
        epoch=namespace.epoch,
        payload_bytes=namespace.block_bytes,
        stored_bytes=len(stored),
        checksum=digest,
        generation=0,
        created_ms=time.time_ns() // 1_000_000,
        codec=codec,
    )
    padding = pages_of(len(stored)) * PAGE - len(stored)
    return [record.encode().ljust(PAGE, b"\0"), stored, _PADDING[:padding]]


def header(body: Body) -> Record:
    """Read the first page of a body. Damaged when it is not a record that ends where the body ends."""
    size = body.about.size
    page = memoryview(bytearray(PAGE))
    if size < PAGE:
        raise Damaged(f"{body.about.key} has {size} bytes, less than a header")
    body.read_into(page)
    record = decode_header(page)
    if record is None:
        raise Damaged(f"{body.about.key} does not begin with a header")
    if record.pages * PAGE != size:
        raise Damaged(f"{body.about.key} has {size} bytes, its record {record.pages * PAGE}")
    return record


def payload(body: Body, record: Record, into: memoryview) -> float:
    """Read the rest of a body: the payload fills ``into``, nothing beside it is touched. The seconds that decoding
    took, without the waiting for bytes.

    Damaged when it is not the payload of which the header has the checksum.
    """
    return _timed(body, record, lambda: restore(record, body.read_into, into, body.about.key))


def opened(body: Body, record: Record, into: memoryview, vault: Vault, deadline: float) -> float:
    """The same of a record that is sealed. Damaged also when it does not open; TierDown when there is no memory."""

    def fill(pages: memoryview) -> None:
        body.read_into(pages[: record.stored_bytes])

    return _timed(body, record, lambda: vault.restore(record, fill, into, body.about.key, deadline))


def _timed(body: Body, record: Record, read: Callable[[], None]) -> float:
    started, waited_s = time.perf_counter(), body.waited_s
    read()
    spent_s = time.perf_counter() - started - (body.waited_s - waited_s)
    _padding(body, record)
    return max(0.0, spent_s)


def sealed_bytes(body: Body, record: Record) -> bytes:
    """Read the rest of a body whose record is sealed. Damaged when it is not what was stored: that much is seen without
    a key. The first of its bytes, which name the key."""
    running, head = RunningChecksum(), b""
    left = record.stored_bytes
    while left:
        piece = memoryview(bytearray(min(left, _PIECE_BYTES)))
        body.read_into(piece)
        running.add(piece)
        head = head or bytes(piece[:OVERHEAD_BYTES])
        left -= len(piece)
    if running.value != record.checksum:
        raise Damaged(f"{body.about.key} has other bytes than were stored")
    _padding(body, record)
    return head


def _padding(body: Body, record: Record) -> None:
    body.read_into(memoryview(bytearray(pages_of(record.stored_bytes) * PAGE - record.stored_bytes)))

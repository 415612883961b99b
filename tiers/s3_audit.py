"""Looks at a bucket from outside: what is in it, is it whole, what is of no use any more. For the command line.

Owns nothing; called by one thread, beside running daemons or without any. Each call of the server has ``timeout_s``,
and is made again where the server asks for fewer; TierDown when it fails. Imports ``body``, ``bucket``, ``codec_id``,
``errors``, ``s3_errors`` and ``s3_record``.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from terracekv.tiers.body import Object
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.codec_id import is_sealed
from terracekv.tiers.errors import Damaged
from terracekv.tiers.s3_errors import Busy
from terracekv.tiers.s3_record import Place, epoch_key, epoch_of, header, payload, place_of, sealed_bytes

PAYLOAD_BYTES_MAX = 4 << 30
"""A header that promises more is not believed."""


LINK_BYTES_PER_S = 1e4
PAGE_KEYS = 1000
"""Objects that are listed at a time."""
PAUSES_S = (0.1, 0.4, 1.6, 6.4)
"""Before a call is made again, of which the server said that it has too many; after the last it has failed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """One block in the bucket."""

    about: Object
    place: Place
    sealed_with: bytes = b""
    """Of a sealed one whose body was read and is whole: its first bytes, which name the key."""


@dataclass(slots=True)
class Space:
    """What one epoch of a namespace takes. Ages in seconds."""

    namespace_id: bytes
    epoch: int
    current: bool
    """Whether it is the namespace's epoch of now; older ones are waste."""
    objects: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = float("inf")


def ls(bucket: Bucket, timeout_s: float = 30.0, namespace_id: bytes | None = None) -> Iterator[Stored]:
    """All blocks, of one namespace or of all, in order of names. Other objects are passed over."""
    root = bucket.settings.root
    within = f"{root}{namespace_id.hex()}/" if namespace_id is not None else root
    after = ""
    while page := _patiently(partial(_page, bucket, within, timeout_s, after)):
        for about in page:
            place = place_of(root, about.key)
            if place is not None:
                yield Stored(about, place)
        if len(page) < PAGE_KEYS:
            return
        after = page[-1].key


def begun_by(bucket: Bucket, digits: str, timeout_s: float = 30.0) -> list[bytes]:
    """Ids of namespaces that begin with these hex digits, two at most: whether one is meant is all that matters."""
    ids: list[bytes] = []
    root, after = bucket.settings.root, ""
    while len(ids) < 2:
        found = _patiently(partial(_page, bucket, f"{root}{digits}", timeout_s, after, 1))
        if not found:
            break
        name = found[0].key[len(root) :].partition("/")[0]
        if re.fullmatch("[0-9a-f]{64}", name):
            ids.append(bytes.fromhex(name))
        after = f"{root}{name}0"  # after all keys that go on with a slash
    return ids


def stat(bucket: Bucket, timeout_s: float = 30.0) -> list[Space]:
    """What each epoch of each namespace takes."""
    spaces: dict[tuple[bytes, int], Space] = {}
    epochs: dict[bytes, int] = {}
    for stored in ls(bucket, timeout_s):
        place, about = stored.place, stored.about
        if place.namespace_id not in epochs:
            epochs[place.namespace_id] = _epoch(bucket, place.namespace_id, timeout_s)
        at = (place.namespace_id, place.epoch)
        if at not in spaces:
            spaces[at] = Space(*at, current=place.epoch >= epochs[place.namespace_id])
        space = spaces[at]
        space.objects += 1
        space.bytes += about.size
        space.oldest_s = max(space.oldest_s, about.age_s)
        space.newest_s = min(space.newest_s, about.age_s)
    return list(spaces.values())


def verify(
    bucket: Bucket, timeout_s: float = 30.0, namespace_id: bytes | None = None
) -> Iterator[tuple[Stored, str | None]]:
    """Read every block and check it against its own checksum and its name: what is wrong with it, None if nothing.
    Of a sealed one the sealed bytes are checked, which takes no key.
    One that goes away meanwhile is not mentioned.

    A block has ``timeout_s`` and the time that a link of ``LINK_BYTES_PER_S`` takes. TierDown when it does not come:
    that says nothing of the block."""
    for stored in ls(bucket, timeout_s, namespace_id):
        try:
            seen = _patiently(partial(_looked_at, bucket, stored, timeout_s))
        except Damaged as error:
            yield stored, error.message
        else:
            if seen is not None:
                yield seen, None


def gc(
    bucket: Bucket, ttl_s: float, timeout_s: float = 30.0, dry: bool = False, namespace_id: bytes | None = None
) -> tuple[int, int]:
    """Delete blocks older than ``ttl_s`` (0: however old) and those of flushed epochs, of one namespace or of all:
    ``(blocks, bytes)``. ``dry`` only counts."""
    epochs: dict[bytes, int] = {}
    blocks = size = 0
    for stored in ls(bucket, timeout_s, namespace_id):
        id = stored.place.namespace_id
        if id not in epochs:
            epochs[id] = _epoch(bucket, id, timeout_s)
        if stored.place.epoch >= epochs[id] and not 0 < ttl_s < stored.about.age_s:
            continue
        if not dry:
            _patiently(partial(_deleted, bucket, stored.about.key, timeout_s))
        blocks += 1
        size += stored.about.size
    return blocks, size


def _epoch(bucket: Bucket, namespace_id: bytes, timeout_s: float) -> int:
    """A namespace's epoch; 0, with which nothing is waste, when its object is absent or damaged."""
    key = epoch_key(bucket.settings.root, namespace_id)
    found = _patiently(lambda: bucket.read(key, 32, time.monotonic() + timeout_s))
    return (epoch_of(found[0]) or 0) if found is not None else 0


def _page(bucket: Bucket, within: str, timeout_s: float, after: str, keys: int = PAGE_KEYS) -> list[Object]:
    return list(islice(bucket.list(within, timeout_s, after=after), keys))


def _deleted(bucket: Bucket, key: str, timeout_s: float) -> None:
    bucket.delete(key, time.monotonic() + timeout_s)


def _looked_at(bucket: Bucket, stored: Stored, timeout_s: float) -> Stored | None:
    """What is known of a block once all of it was read; None when it is gone. Damaged."""
    enough_s = timeout_s + stored.about.size / LINK_BYTES_PER_S
    with bucket.get(stored.about.key, time.monotonic() + enough_s) as body:
        if body is None:
            return None
        record = header(body)
        if Place(record.namespace_id, record.epoch, record.id) != stored.place:
            raise Damaged(f"{stored.about.key} holds another block than its name says")
        if record.payload_bytes > PAYLOAD_BYTES_MAX:
            raise Damaged(f"{stored.about.key} promises {record.payload_bytes} bytes")
        if is_sealed(record.codec):
            return replace(stored, sealed_with=sealed_bytes(body, record))
        payload(body, record, memoryview(bytearray(record.payload_bytes)))
        return stored


def _patiently(work: Callable[[], T]) -> T:
    """What the work comes to; it is done again, after a longer pause each time, where the server asks for fewer calls:
    it serves engines meanwhile."""
    for pause_s in PAUSES_S:
        try:
            return work()
        except Busy:
            time.sleep(random.uniform(0.5, 1.0) * pause_s)
    return work()

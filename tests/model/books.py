"""What the test believes: the dumb model beside the store, and the blocks that it speaks of.

Owns the names of all blocks, the bytes that may be served under each, and what was listed after the last step. Used by
the machine of ``test_store.py``. Imports ``tiers``.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from terracekv.tests.blocks import like_numbers
from terracekv.tests.model.world import World
from terracekv.tiers.block import block_id, block_keys, namespace_id
from terracekv.tiers.checksum import checksum
from terracekv.tiers.codec import decode as decode_payload
from terracekv.tiers.codec_id import Codec
from terracekv.tiers.entry import name_of
from terracekv.tiers.errors import Damaged
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.segment import Record, decode
from terracekv.tiers.slots import RECORD_BYTES, Slot
from terracekv.tiers.tier import PAGE

BLOCK_TOKENS = 4


@dataclass(frozen=True, repr=False)
class Model:
    """A namespace with two prompts that begin alike."""

    wanted: Namespace
    chains: tuple[tuple[bytes, ...], ...]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.wanted.model)

    @property
    def id(self) -> bytes:
        return self.wanted.id

    def ids_of(self, keys: Iterable[bytes]) -> list[bytes]:
        return [block_id(key, shard) for key in keys for shard in range(self.wanted.shards)]

    @property
    def ids(self) -> list[bytes]:
        return self.ids_of(self.keys)

    @property
    def keys(self) -> list[bytes]:
        return list(dict.fromkeys(key for chain in self.chains for key in chain))


def model(name: str, block_bytes: int, shards: int, blocks: int) -> Model:
    seed = namespace_id(model=name, revision="1", dtype="bf16", layout=bytes(32), block_tokens=BLOCK_TOKENS)
    wanted = Namespace(
        id=seed, number=0, epoch=0, model=name, block_tokens=BLOCK_TOKENS, shards=shards, block_bytes=block_bytes
    )
    prompt = list(range(BLOCK_TOKENS * blocks))
    other = prompt[: BLOCK_TOKENS * 2] + [token + 100 for token in prompt[BLOCK_TOKENS * 2 :]]
    return Model(wanted, tuple(tuple(block_keys(seed, tokens, BLOCK_TOKENS)) for tokens in (prompt, other)))


MODELS = (model("narrow", 5_000, 1, 6), model("wide", 12_000, 2, 4))
"""Slots of two and of three pages; a slab has six."""


def payload(id: bytes, epoch: int, version: int, size: int) -> bytes:
    """Bytes that say whose they are. Every second version gets smaller when it is coded."""
    noise = hashlib.shake_128(id + bytes([epoch]) + version.to_bytes(4, "little")).digest(size)
    return like_numbers(noise) if version % 2 else noise


@dataclass
class Books:
    """What may be served and what is listed."""

    right: dict[tuple[bytes, int], set[bytes]] = field(default_factory=dict)
    """By id and epoch: bytes that a commit named."""
    rotten: set[bytes] = field(default_factory=set)
    """Bytes that the test itself spoiled: they may lie there, and may not be served."""
    may_tear: bool = False
    """Whether in this step wrong bytes may have come under a good header, for the first read to notice: a rebuild asks
    headers only, and so does the saving of blocks that were hit."""
    spoiled: set[bytes] = field(default_factory=set)
    """Ids of which the test spoiled a record, or had it spoiled by a read: they may leave the disk."""
    headless: set[tuple[int, int]] = field(default_factory=set)
    """Segment and page of headers that the test spoiled."""
    forgotten: set[bytes] = field(default_factory=set)
    """Deleted and not stored since."""
    epochs: dict[bytes, int] = field(default_factory=dict)
    """Of each namespace after the last step."""
    on_gpu: set[bytes] = field(default_factory=set)
    in_host: set[bytes] = field(default_factory=set)
    on_disk: dict[bytes, int] = field(default_factory=dict)
    """Listed after the last step, with the segment."""
    segments: list[int] = field(default_factory=list)
    versions: int = 0

    def fresh(self, id: bytes, namespace: Namespace) -> bytes:
        """New bytes for a block, which may be served from now on under its namespace's epoch."""
        self.versions += 1
        made = payload(id, namespace.epoch, self.versions, namespace.block_bytes)
        self.right.setdefault((id, namespace.epoch), set()).add(made)
        self.forgotten.discard(id)
        return made

    def is_right(self, id: bytes, epoch: int, found: bytes) -> bool:
        return found in self.right.get((id, epoch), ())


@dataclass(frozen=True)
class Seen:
    """What the tiers list for present epochs now, read past their verbs, so that looking changes nothing."""

    host: dict[bytes, Slot]
    disk: dict[bytes, tuple[int, int]]
    """Segment and page."""
    gpu: dict[bytes, Slot]


def present(world: World) -> Iterator[tuple[Model, Namespace]]:
    for each in MODELS:
        namespace = world.tiers.namespaces.get(each.id)
        assert namespace is not None
        yield each, namespace


def look(world: World) -> Seen:
    entries = dict(world.disk._catalog.entries())
    host: dict[bytes, Slot] = {}
    gpu: dict[bytes, Slot] = {}
    disk: dict[bytes, tuple[int, int]] = {}
    for each, namespace in present(world):
        for tier, listed in ((world.tiers.host, host), (world.gpu, gpu)):
            if tier is not None and namespace.stamp in tier._spaces:
                for id, place in tier._spaces[namespace.stamp].order.places():
                    listed[id] = tier._table.slot(place * RECORD_BYTES)
        for id in each.ids:
            entry = entries.get(name_of(namespace.stamp, id))
            if entry is not None and entry.stamp == namespace.stamp:
                disk[id] = (entry.segment, entry.page)
    return Seen(host, disk, gpu)


def check_bytes(world: World, books: Books, seen: Seen) -> None:
    """Promise 1: what is listed is readable and right. What the test spoiled may lie there until somebody reads it."""
    host = world.tiers.host
    for each, namespace in present(world):
        size = namespace.block_bytes
        for id in each.ids:
            slot, place, near = seen.host.get(id), seen.disk.get(id), seen.gpu.get(id)
            assert not (slot or place or near) or id not in books.forgotten, "a deleted block is listed"
            if near is not None:
                assert books.is_right(id, namespace.epoch, world.on_gpu(near, size)), "the GPU lists wrong bytes"
            if slot is not None:
                found = bytes(host.payload(slot, size))
                spoiled = found in books.rotten and host.unverified(slot)
                assert books.is_right(id, namespace.epoch, found) or spoiled, "host lists wrong bytes"
            if place is not None and place not in books.headless:
                record, found = read(world, place, size)
                assert record == (id, namespace.id, namespace.epoch), f"the disk lists another's record: {record}"
                entry = world.disk._catalog.get(name_of(namespace.stamp, id))
                if books.may_tear and record and entry is not None and checksum(found) != entry.checksum:
                    books.rotten.add(found)
                    books.spoiled.add(id)
                good = books.is_right(id, namespace.epoch, found) or found in books.rotten
                assert good, "the disk lists wrong bytes"


def read(world: World, place: tuple[int, int], size: int) -> tuple[tuple[bytes, bytes, int] | None, bytes]:
    """A record as it lies in its file: whose it says it is, and its payload."""
    head, stored = lying(world, place, size)
    if head is None:
        return None, stored
    return (head.id, head.namespace_id, head.epoch), stored if head.codec == Codec.RAW else unpacked(head, stored, size)


def lying(world: World, place: tuple[int, int], size: int) -> tuple[Record | None, bytes]:
    """A record's header, and its stored bytes, which are no more than ``size``."""
    segment, page = place
    with open(world.disk._files.path(segment), "rb") as file:
        file.seek(page * PAGE)
        head = decode(file.read(PAGE))
        return head, file.read(size if head is None else head.stored_bytes)


def unpacked(head: Record, stored: bytes, size: int) -> bytes:
    """What coded bytes stand for; they themselves when they stand for nothing."""
    source = io.BytesIO(stored)
    payload = bytearray(size)

    def fill(view: memoryview) -> None:
        view[:] = source.read(len(view))

    try:
        decode_payload(Codec(head.codec), fill, head.stored_bytes, memoryview(payload))
    except Damaged:
        return stored
    return bytes(payload)


def check_lookups(world: World, seen: Seen) -> None:
    """Lookup counts the leading blocks of which all shards are listed, and nothing else."""
    for each, namespace in present(world):
        for chain in each.chains:
            found = world.store.lookup(namespace, chain)
            on_gpu, to_host = seen.gpu.keys(), seen.gpu.keys() | seen.host.keys()
            near, above, whole = (
                [all(block_id(key, n) in listed for n in range(namespace.shards)) for key in chain]
                for listed in (on_gpu, to_host, to_host | seen.disk.keys())
            )
            assert found.blocks == leading(whole), f"lookup says {found.blocks}, listed are {whole}"
            assert found.per_tier["host"] == leading(above)
            assert found.per_tier.get("gpu", 0) == leading(near)
            assert sum(found.split.values()) == found.blocks
            assert (found.first_miss is None) == (found.blocks == len(chain)) == (found.reason is None)


def leading(whole: Iterable[bool]) -> int:
    count = 0
    for each in whole:
        if not each:
            break
        count += 1
    return count

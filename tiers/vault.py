"""The vault of one tier: records sealed on their way down, and opened on their way up, where there is a key.

Owns memory for work under way. Called by the tiers that store records, from any worker thread. Imports ``checksum``,
``codec_id``, ``coder``, ``errors``, ``scratch``, ``segment`` and ``tier``; ``seal`` is its caller's to load, so that a
daemon without keys loads no library for it.

Whoever needs memory of the coder and of the vault takes the coder's first: two threads never wait for each other.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terracekv.tiers.checksum import checksum as checksum_of
from terracekv.tiers.codec_id import SEALED, Codec, inner, is_sealed
from terracekv.tiers.coder import MEMORY_BYTES, Coder, Stored
from terracekv.tiers.errors import Damaged, TierDown
from terracekv.tiers.scratch import Scratch
from terracekv.tiers.segment import Record, pages_of
from terracekv.tiers.tier import PAGE

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

OVERHEAD_BYTES = 36
"""What sealing adds: key id, nonce and tag."""
_ABOUT = struct.Struct("<34s32sIHQ")


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a record is made of: the first ``size`` bytes of ``view``, the codec's number and the header's checksum,
    which is of the payload, or of the sealed bytes where they are. What follows in ``view`` may be written as padding.
    """

    codec: int
    size: int
    view: memoryview
    checksum: int


class Vault:
    """With ``keys`` everything is sealed that is stored from now on; without, what was sealed before does not open."""

    def __init__(self, coder: Coder, keys: "Keys | None" = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self._coder = coder
        self._keys = keys
        self._scratch = Scratch(memory_bytes)
        self.sealed_blocks = 0

    @contextmanager
    def sealed(self, about: Record, stored: Stored, payload: memoryview, deadline: float) -> Iterator[Sealed]:
        """What to store of a block, within the context. ``about`` is the record with the payload's checksum; its codec
        and stored bytes do not matter. TierDown when there is no memory, or the payload is not what was committed."""
        if self._keys is None:
            yield Sealed(stored.codec, stored.size, stored.view, about.checksum)
            return
        room_bytes = pages_of(stored.size + OVERHEAD_BYTES) * PAGE
        with self._scratch.lend(room_bytes, deadline) as room:
            if room is None:
                raise TierDown(f"no memory to seal a block of {about.payload_bytes} bytes")
            codec = stored.codec | SEALED
            said = _about(replace(about, codec=codec))
            size = self._keys.seal(about.namespace_id, said, stored.view[: stored.size], room)
            # Looked at afterwards: what is sealed bears no checksum of its payload, and sealing may have had to wait.
            if checksum_of(payload[: about.payload_bytes]) != about.checksum:
                raise TierDown(f"block {about.id.hex()} has changed in host before it could be sealed")
            room[size:] = bytes(room_bytes - size)  # of another block, until now
            self.sealed_blocks += 1
            yield Sealed(codec, size, room, checksum_of(room[:size]))

    def restore(
        self, record: Record, fill: Callable[[memoryview], None], into: memoryview, about: str, deadline: float
    ) -> None:
        """Fill ``into`` with the payload of a sealed record. ``fill`` is given whole pages, for its stored bytes to
        come first in them. Damaged, as ``coder.restore``; TierDown when there is no memory."""
        assert is_sealed(record.codec) and len(into) == record.payload_bytes
        plain_bytes, codec = record.stored_bytes - OVERHEAD_BYTES, inner(record.codec)
        raw = codec == Codec.RAW
        if plain_bytes <= 0 or plain_bytes > len(into) or (raw and plain_bytes != len(into)):
            raise Damaged(f"{about} is sealed, {record.stored_bytes} bytes for a payload of {len(into)}")
        room_bytes = pages_of(record.stored_bytes) * PAGE
        with (
            nullcontext(into) if raw else self._coder.scratch.lend(plain_bytes, deadline) as plain,
            self._scratch.lend(room_bytes, deadline) as room,
        ):
            if room is None or plain is None:
                raise TierDown(f"no memory to open a block of {len(into)} bytes")
            fill(room)
            self._open(record, room[: record.stored_bytes], plain, about)
            if not raw:
                coded = replace(record, codec=codec, stored_bytes=plain_bytes)
                self._coder.decode(coded, plain, into, about, checked=False)

    def _open(self, record: Record, sealed: memoryview, plain: memoryview, about: str) -> None:
        if self._keys is None:
            raise Damaged(f"{about} is sealed, and there is no key here", "set encryption.key_file")
        if checksum_of(sealed) != record.checksum:
            raise Damaged(f"{about} has other bytes than were stored")
        try:
            self._keys.open(record.namespace_id, _about(record), sealed, plain)
        except Damaged as damage:
            raise Damaged(f"{about} {damage.message}", damage.hint) from damage

    def is_locked(self, sealed: memoryview) -> bool:
        """Whether the key of these sealed bytes is not here."""
        return self._keys is None or not self._keys.has(sealed)

    def check(self) -> None:
        """AssertionError unless, when idle, all lent memory is back."""
        assert self._scratch.lent == 0, f"{self._scratch.lent} buffers are lent"


def _about(record: Record) -> bytes:
    """What of a record is authenticated with its bytes: all but where and when it was written."""
    head = _ABOUT.pack(record.id, record.namespace_id, record.epoch, record.codec, record.payload_bytes)
    return b"terracekv/sealed/1\0" + head

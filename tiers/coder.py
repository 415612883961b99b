"""The codec of one tier at work: what is stored for a payload, and the payload of what was stored.

Owns the tier's chooser and its memory for work under way. Called by the tiers that code their blocks and by
``s3_audit``, from any worker thread. Imports ``checksum``, ``chooser``, ``codec_id``, ``errors``, ``namespace``,
``scratch``, ``segment`` and ``tier``, and ``codec`` only where blocks are coded: its libraries are loaded when needed.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from terracekv.tiers.checksum import RunningChecksum
from terracekv.tiers.chooser import Chooser
from terracekv.tiers.codec_id import Codec, is_sealed, known
from terracekv.tiers.errors import Damaged
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.scratch import Scratch
from terracekv.tiers.segment import Record, pages_of
from terracekv.tiers.tier import PAGE

MEMORY_BYTES = 64 << 20
"""For blocks that are being coded or decoded, of one tier. A block that is larger is stored raw."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of a record: the first ``size`` of ``view``. What follows in ``view`` may be written as padding."""

    codec: Codec
    size: int
    view: memoryview


def coded_bytes_max(payload_bytes: int) -> int:
    """What the coded bytes of a payload may take, in whole pages: records are padded to pages, so less than a page
    saved is nothing saved."""
    return (pages_of(payload_bytes) - 1) * PAGE


def restore(
    record: Record, read: Callable[[memoryview], None], into: memoryview, about: str, *, checked: bool = True
) -> None:
    """Fill ``into`` with the payload of a record. ``read`` fills the view it is given with the next of its stored
    bytes, or raises; ``about`` names the record in errors.

    Nothing beside ``into`` is touched. Damaged when it is not the payload of which the header has the checksum; not
    ``checked`` where the bytes were authenticated and the checksum is not the payload's.
    """
    from terracekv.tiers.codec import decode

    assert len(into) == record.payload_bytes
    if not known(record.codec) or is_sealed(record.codec):
        raise Damaged(f"{about} is of codec {record.codec}, which this version does not know")
    running = RunningChecksum()
    try:
        decode(Codec(record.codec), read, record.stored_bytes, into, running.add)
    except Damaged as damage:
        raise Damaged(f"{about}: {damage.message}") from damage
    if checked and running.value != record.checksum:
        raise Damaged(f"{about} has other bytes than were stored")


class Coder:
    """``mode`` is that of ``Chooser``. In mode ``off`` it still decodes what was coded before."""

    def __init__(self, mode: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self.chooser = Chooser(mode)
        self.scratch = Scratch(memory_bytes)
        if mode != "off":  # at the start, and not while the first block waits
            importlib.import_module("terracekv.tiers.codec")

    @contextmanager
    def stored(self, namespace: Namespace, payload: memoryview, deadline: float) -> Iterator[Stored]:
        """What to store for a block: coded bytes in lent memory, where coding is chosen and saves a page, else
        ``payload`` as it is, which may be longer than the block. ``deadline`` (of ``time.monotonic``) is how long
        memory is waited for."""
        size = namespace.block_bytes
        codec = self.chooser.codec(namespace)
        room_bytes = coded_bytes_max(size)
        if codec is not Codec.RAW and room_bytes:
            with self.scratch.lend(room_bytes, deadline) as room:
                coded = None if room is None else self._encode(namespace, codec, payload[:size], room)
                if room is not None and coded is not None:
                    yield Stored(codec, coded, room)
                    return
        yield Stored(Codec.RAW, size, payload)

    def decode(self, record: Record, coded: memoryview, into: memoryview, about: str, *, checked: bool = True) -> None:
        """``restore`` of a record whose stored bytes are ``coded``."""
        position = 0

        def read(view: memoryview) -> None:
            nonlocal position
            view[:] = coded[position : position + len(view)]
            position += len(view)

        started = time.perf_counter()
        restore(record, read, into, about, checked=checked)
        self.chooser.decoded(len(into), time.perf_counter() - started)

    def _encode(self, namespace: Namespace, codec: Codec, payload: memoryview, room: memoryview) -> int | None:
        from terracekv.tiers.codec import encode

        started = time.perf_counter()
        count = encode(codec, payload, room)
        self.chooser.coded(namespace, len(payload), count, time.perf_counter() - started)
        if count is not None:  # of another block, until now
            padding = pages_of(count) * PAGE - count
            room[count : count + padding] = bytes(padding)
        return count

    def report(self) -> dict[str, int | float | str | None]:
        """For the status."""
        return self.chooser.report()

    def check(self) -> None:
        """AssertionError unless, when idle, all lent memory is back."""
        assert self.scratch.lent == 0, f"{self.scratch.lent} buffers are lent"

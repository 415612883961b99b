"""Whether an answer of the daemon can be true: each is checked against what was asked, once, before anything acts on
it.

Pure: ``Terms`` owns a few numbers of one session. Called by ``connection.py`` with each answer. Imports
``daemon.protocol`` and ``tiers.block``.

A daemon may err, be of another version, or be another program on its socket: none of that may hurt an engine. What is
said in words ends up in logs and in the labels of metrics, so a reason is one short word.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terracekv.daemon.protocol import (
    Acquire,
    Commit,
    Committed,
    Failed,
    Found,
    Hello,
    Leased,
    Lookup,
    Ready,
    Request,
    Reserve,
    Reserved,
    Slot,
    Welcome,
)
from terracekv.tiers.block import KEY_BYTES

NUMBER_MAX = (1 << 63) - 1
"""What the kernel takes for a size, and for the place of a lock."""
PATH_CHARS_MAX = 4096
REASON_CHARS_MAX = 64
TIERS_MAX = 16

Asked = Found | Leased | Reserved | Committed


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session can be told of: bytes of a block, of the arena, of the slot table and of a GPU's memory. One that
    does not ``copy``, a scheduler's, gets no slots. Before Welcome there is nothing."""

    block_bytes: int = 0
    arena_bytes: int = 0
    slots_bytes: int = 0
    gpu_bytes: int = 0
    copies: bool = False

    @classmethod
    def of(cls, hello: Hello, welcome: Welcome) -> "Terms":
        gpu_bytes = welcome.gpu.size_bytes if welcome.gpu is not None else 0
        return cls(
            welcome.block_bytes, welcome.arena_bytes, welcome.slots_bytes, gpu_bytes, copies=hello.shard is not None
        )

    def wrong_answer(self, answer: Asked, request: Request) -> str | None:
        """What in the answer to a request cannot be; None when all of it can."""
        if isinstance(answer, Found) and isinstance(request, Lookup):
            return _wrong_found(answer, len(request.keys) // KEY_BYTES)
        if isinstance(answer, Leased) and isinstance(request, Acquire):
            return self._wrong_leased(answer, len(request.keys) // KEY_BYTES, request.gpu)
        if isinstance(answer, Reserved) and isinstance(request, Reserve):
            return self._wrong_reserved(answer, len(request.keys) // KEY_BYTES)
        if isinstance(answer, Committed) and isinstance(request, Commit):
            asked = set(request.indices)
            for name, indices in (("stored", answer.stored), ("durable", answer.durable)):
                if not _some_of(indices, asked):
                    return f"{name} has what was not committed, or one of it twice"
            return None
        return f"is no answer to {type(request).__name__}"

    def wrong_notice(self, notice: Ready | Failed, pending: set[int], failed: Iterable[int] = ()) -> str | None:
        """The same of what comes unasked about a lease, of which these are ``pending`` and these have ``failed``."""
        if isinstance(notice, Failed):
            if not _some_of(notice.indices, pending, failed):  # a block fails once for each of its shards
                return "names a block that is not pending, or one twice"
            return None if _reason(notice.why) else "why is no short word"
        if not _some_of(notice.indices, pending):
            return "names a block that is not pending, or one twice"
        if len(notice.slots) != (len(notice.indices) if self.copies else 0) or None in notice.slots:
            return f"has {len(notice.slots)} slots for {len(notice.indices)} blocks, or one that is none"
        return self._wrong_slots(notice.slots, False)

    def _wrong_leased(self, answer: Leased, count: int, gpu: bool) -> str | None:
        if not 0 <= answer.blocks <= count:
            return f"{answer.blocks} blocks of the {count} that were asked for"
        if len(answer.slots) != (count if self.copies else 0):
            return f"{len(answer.slots)} slots for {count} blocks"
        if not _some_of(answer.pending, set(range(answer.blocks)) if answer.pending else ()):
            return "pending names a block that is not leased, or one twice"
        if self.copies and any(answer.slots[index] is not None for index in answer.pending):
            return "a block is pending and has a slot"
        return self._wrong_slots(answer.slots, gpu)

    def _wrong_reserved(self, answer: Reserved, count: int) -> str | None:
        if len(answer.slots) != count:
            return f"{len(answer.slots)} slots for {count} blocks"
        without = {index for index, slot in enumerate(answer.slots) if slot is None}
        if len(answer.present) + len(answer.refused) != len(without) or without != {*answer.present, *answer.refused}:
            return "a block without a slot must be present or refused, and no other"
        if not all(map(_reason, answer.refused.values())):
            return "the reason of a refusal is no short word"
        if len({slot.offset for slot in answer.slots if slot is not None}) != count - len(without):
            return "two blocks have the same slot"
        return self._wrong_slots(answer.slots, False)

    def _wrong_slots(self, slots: Iterable[Slot | None], gpu: bool) -> str | None:
        """All that are not in the arena and the table, or in the GPU's memory where that was asked for."""
        last, last_gpu, last_record = (
            self.arena_bytes - self.block_bytes, self.gpu_bytes - self.block_bytes, self.slots_bytes - 8,
        )  # fmt: skip
        for slot in slots:
            if slot is None:
                continue
            if slot.gpu:
                if not gpu or not 0 <= slot.offset <= last_gpu:
                    return f"a slot at {slot.offset} of a GPU's memory, of which there are {self.gpu_bytes} bytes"
            elif not (0 <= slot.offset <= last and 0 <= slot.record <= last_record):
                return f"a slot at {slot.offset}, record {slot.record}, is outside the arena or the slot table"
        return None


def wrong_welcome(welcome: Welcome, hello: Hello) -> str | None:
    """What in the answer to Hello cannot be; None when all of it can."""
    if len(welcome.namespace_id) != KEY_BYTES:
        return f"namespace_id has {len(welcome.namespace_id)} bytes, and should have {KEY_BYTES}"
    if welcome.block_bytes != hello.layout.block_bytes:
        return f"block_bytes is {welcome.block_bytes}, and the layout has {hello.layout.block_bytes}"
    for name in ("arena_bytes", "slots_bytes"):
        if not 0 < getattr(welcome, name) <= NUMBER_MAX:
            return f"{name} is {getattr(welcome, name)}, and should be positive"
    if not 0 <= welcome.lock_byte <= NUMBER_MAX:
        return f"lock_byte is {welcome.lock_byte}, which no file has"
    for name in ("arena", "slots"):
        if "\0" in getattr(welcome, name) or len(getattr(welcome, name)) > PATH_CHARS_MAX:
            return f"{name} is no path"
    if welcome.gpu is not None and not 0 < welcome.gpu.size_bytes <= NUMBER_MAX:
        return f"gpu.size_bytes is {welcome.gpu.size_bytes}, and should be positive"
    return None


def _wrong_found(answer: Found, count: int) -> str | None:
    if not 0 <= answer.blocks <= count:
        return f"{answer.blocks} blocks of the {count} that were asked for"
    if len(answer.per_tier) > TIERS_MAX or not all(0 <= reach <= count for reach in answer.per_tier.values()):
        return f"per_tier has a number that is none of {count} blocks, or more tiers than there are"
    if answer.first_miss is not None and not 0 <= answer.first_miss <= count:
        return f"first_miss is {answer.first_miss} of {count} blocks"
    if answer.reason is not None and not _reason(answer.reason):
        return "reason is no short word"
    if not 0 <= answer.load_ms < math.inf:  # nor what is not a number
        return f"load_ms is {answer.load_ms}"
    return None


def _some_of(indices: Sequence[int], *known: Iterable[int]) -> bool:
    """Whether they are some of the known ones, each once."""
    named = set(indices)
    return len(named) == len(indices) and not named.difference(*known)


def _reason(text: str) -> bool:
    return 0 < len(text) <= REASON_CHARS_MAX and text.isascii() and text.isidentifier()

"""Slots, keys, deadlines and words as they go over the engine door's socket.

Pure; called by the engine door on the event loop. Imports ``protocol``, ``sessions`` and ``tiers``.
"""

from terracekv.daemon import protocol
from terracekv.daemon.sessions import Lease
from terracekv.tiers.errors import BadRequest
from terracekv.tiers.slots import Slot

DEADLINE_MS_MAX = 600_000
ANSWER_MS = 100.0
"""Kept of a deadline for the way back, or a tenth of it if that is less."""


def wire(slot: Slot, gpu: bool = False) -> protocol.Slot:
    """A slot as it goes over the socket."""
    return protocol.Slot(slot.offset, slot.record, slot.generation, gpu)


def slots_of(lease: Lease, count: int) -> list[protocol.Slot | None]:
    """What can be read now, by index of the ``count`` that were asked for."""
    slots: list[protocol.Slot | None] = [None] * count
    for held, gpu in ((lease.slots, False), (lease.near, True)):
        for index, slot in held.items():
            slots[index] = wire(slot, gpu)
    return slots


def distinct(keys: bytes) -> list[bytes]:
    """Keys of a chain, apart; BadRequest when one comes twice, which no chain has."""
    apart = protocol.split_keys(keys)
    if len(set(apart)) != len(apart):
        raise BadRequest("the same key twice in one request", "send each block of a chain once")
    return apart


def shown(text: str, characters: int) -> str:
    """What an engine says of itself, fit for the status and for one line of the log."""
    return "".join(each if each.isprintable() else "?" for each in text[:characters])


def within_s(deadline_ms: int) -> float:
    """How long an answer may wait for somebody, so that it arrives before the deadline."""
    deadline_ms = min(max(deadline_ms, 0), DEADLINE_MS_MAX)
    return max(0.0, deadline_ms - min(deadline_ms / 10, ANSWER_MS)) / 1e3

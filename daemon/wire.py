"""Slots and keys as they go over the engine door's socket.

Pure; called by the engine door on the event loop. Imports ``protocol``, ``sessions`` and ``tiers``.
"""

from terracekv.daemon import protocol
from terracekv.daemon.sessions import Lease
from terracekv.tiers.errors import BadRequest
from terracekv.tiers.slots import Slot


def wire(slot: Slot, gpu: bool = False) -> protocol.Slot:
    """A slot as it goes over the socket."""
    return protocol.Slot(slot.offset, slot.record, slot.generation, gpu)


def slots_of(lease: Lease) -> list[protocol.Slot | None]:
    """What can be read now, by index."""
    slots: list[protocol.Slot | None] = [None] * len(lease.ids)
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

"""What a look at stored blocks found: is every one what it should be?

Owns nothing but the form of the answer. Made by the tiers' ``audit`` in a worker thread, a bounded piece at a time, so
that nobody else waits long; passed on by the doors. Imports the standard library only.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Audit:
    """``next`` is where to go on; None at the end. ``passed_over``: blocks that nobody can ask for any more, of flushed
    namespaces, and whose room is not taken back yet. ``locked``: of those checked, blocks whose sealed bytes are what
    was stored, and whose key is not here: they stay for who has it. ``wrong`` says of each block, by its id in hex,
    what is wrong with it; it was forgotten, so that it is stored anew when it is next computed, unless its tier says
    otherwise."""

    checked: int = 0
    passed_over: int = 0
    locked: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    next: str | None = None


def slab_after(cursor: str | None, slabs: int) -> int | None:
    """The number that a cursor of a tier of slots stands for; None when there is no such slab."""
    number = int(cursor) if cursor and cursor.isascii() and cursor.isdigit() and len(cursor) < 9 else 0
    return number if number < slabs else None


def id_after(cursor: str | None) -> bytes:
    """The name in a tier's index that a cursor stands for; empty, before all names, when it is none."""
    return bytes.fromhex(cursor) if cursor and not len(cursor) % 2 else b""

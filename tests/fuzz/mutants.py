"""Hostile bytes from a seed: the same seed makes the same bytes, so a failure is repeated by its number.

Owns the kept corpus (``corpus/``) and a generator of chance. Called by the other fuzzers. Standard library only.
"""

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
"""Numbers at which types end."""


def corpus(name: str) -> list[bytes]:
    """What was kept under a name: beginnings worth mutating, and all that once went wrong."""
    return [bytes.fromhex(line["hex"]) for line in json.loads((CORPUS / f"{name}.json").read_text())]


class Mutants:
    """``random`` is the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one_in(self, times: int) -> bool:
        return self.random.randrange(times) == 0

    def noise(self, size: int) -> bytes:
        return self.random.randbytes(size)

    def mutated(self, data: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
        """The same with one to four things wrong with it."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            self._once(changed, others)
        return bytes(changed)

    def _once(self, data: bytearray, others: Sequence[bytes]) -> None:
        pick = self.random
        at = pick.randrange(len(data) + 1)
        match pick.randrange(9):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << pick.randrange(8)
            case 2 if at < len(data):
                data[at] = pick.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, pick.randrange(256)))
            case 3:
                del data[at : at + pick.choice((1, 2, 8, len(data)))]
            case 4:
                data[at:at] = pick.randbytes(pick.choice((1, 2, 4, 32)))
            case 5:
                data[at:at] = data[at : at + pick.choice((1, 4, 33))]
            case 6:
                form = pick.choice(("<B", "<H", ">H", "<I", ">I", "<Q", ">Q"))
                number = struct.pack(form, pick.choice(EDGES) % (1 << 8 * struct.calcsize(form)))
                data[at : at + len(number)] = number
            case 7:
                other = pick.choice(others)
                cut = pick.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case _:
                end = min(len(data), at + pick.choice((2, 8, 64)))
                data[at:end] = bytes(end - at)

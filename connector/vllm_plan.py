"""What the two halves say to each other: a step's loads and stores, and what has become of earlier ones.

Pure data. Made in the scheduler's process, used in the workers', and back. Standard library only: vLLM carries it
pickled in classes of its own, so it holds bytes and arrays and no tokens.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field


def pages(numbers: list[int]) -> "array[int]":
    """Page numbers, compact."""
    return array("i", numbers)


@dataclass(frozen=True, slots=True)
class Load:
    """Copy tokens [``start``, ``end``) of a request out of the arena. ``keys`` are those of the blocks that hold them,
    ``tables[g]`` the pages of exactly these tokens in group g. Without keys it is one that cannot be done."""

    request: str
    keys: bytes
    start: int
    end: int
    tables: tuple["array[int]", ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the blocks from number ``first`` on. ``keys`` are those of the whole chain from its beginning, ``tables[g]``
    the pages of blocks ``first`` and following in group g."""

    job: int
    keys: bytes
    first: int
    tables: tuple["array[int]", ...]


@dataclass(slots=True)
class Step:
    """From the scheduler half to every worker, once a step."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """From the workers to the scheduler half: results of one rank, or of all added up.

    ``stored[job]`` counts the ranks that are done with a store, ``incomplete`` has the jobs of which some rank stored
    less than all, with the reason. ``failed[request]`` is (blocks that came, why the next one did not): the least of
    all ranks.
    """

    stored: Counter[int] = field(default_factory=Counter)
    incomplete: dict[int, str] = field(default_factory=dict)
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, other: "Results") -> "Results":
        """Both ranks' results."""
        failed = dict(self.failed)
        for request, (blocks, why) in other.failed.items():
            failed[request] = min((blocks, why), failed.get(request, (blocks, why)))
        return Results(self.stored + other.stored, self.incomplete | other.incomplete, failed)

    def __bool__(self) -> bool:
        return bool(self.stored or self.failed)

"""The tiers that are held to the contract. A tier joins by adding its opener to ``OPENERS``.

An opener gets an empty folder, the namespaces and the bytes that the tier should hold at least, and yields the tier.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from terracekv.tests.blocks import registered
from terracekv.tiers.arena import Arena
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import SlotTable
from terracekv.tiers.tier import Tier

HOLDS_BYTES = 8 << 20

Opener = Callable[[Path, Namespaces, int], AbstractContextManager[Tier]]


@contextmanager
def open_disk(folder: Path, namespaces: Namespaces, holds_bytes: int, direct: str = "auto") -> Iterator[Tier]:
    with closing(
        DiskTier(
            folder / "disk",
            capacity_bytes=holds_bytes + (6 << 20),
            segment_bytes=1 << 20,
            direct=direct,
            namespaces=namespaces,
            free_floor_bytes=0,
        )
    ) as tier:
        yield tier


@contextmanager
def open_buffered_disk(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    with open_disk(folder, namespaces, holds_bytes, "off") as tier:
        yield tier


@contextmanager
def open_host(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    slab_bytes = 1 << 20
    arena = Arena(folder / "host", size_bytes=holds_bytes, slab_bytes=slab_bytes)
    table = SlotTable(folder / "host" / "slots", arena_bytes=holds_bytes, slab_bytes=slab_bytes, adopt=arena.adopted)
    with closing(HostTier(arena, table, namespaces)) as tier:
        arena.prepare()
        yield tier


OPENERS: dict[str, Opener] = {"disk": open_disk, "disk-buffered": open_buffered_disk, "host": open_host}


@pytest.fixture
def namespaces(tmp_path: Path) -> Namespaces:
    return Namespaces(tmp_path / "namespaces.json")


@pytest.fixture
def namespace(namespaces: Namespaces) -> Namespace:
    return registered(namespaces, 1)


@pytest.fixture(params=OPENERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path, namespaces: Namespaces) -> Iterator[Tier]:
    with OPENERS[request.param](tmp_path, namespaces, HOLDS_BYTES) as opened:
        yield opened
        opened.check()

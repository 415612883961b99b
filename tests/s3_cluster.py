"""Stores of several nodes on one loop, over one bucket of the stub.

Owns what it opens. Called by tests. Imports ``daemon`` and ``tiers`` through ``stores``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.stores import World, ids_of, key
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Outcome

CHAIN = list(range(8))
KEYS = [key(index) for index in CHAIN]
RETURN_S = 30.0
"""In which the breaker closes after the server's return."""


class Cluster:
    """Opens nodes that share the stub's bucket; each has a host, a disk unless told otherwise, and a loop in common."""

    def __init__(self, stub: S3Stub, shm: Path, folder: Path) -> None:
        self.stub = stub
        self._shm = shm
        self._folder = folder

    def settings(self, **more: Any) -> S3Settings:
        usual: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint": self.stub.endpoint,
            "credentials_file": str(self.stub.credentials),
        }
        usual |= {"read_timeout_s": 1.0, "connect_timeout_s": 1.0, "timeout_s": 4.0, "workers": 4, "codec": "off"}
        return S3Settings(**(usual | more))

    @asynccontextmanager
    async def node(self, label: str, *, slabs: int = 4, disk: bool = False, **options: Any) -> Any:
        s3 = {name[3:]: options.pop(name) for name in list(options) if name.startswith("is_")}
        shm, folder = self._shm / label, self._folder / label
        shm.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        world = World(shm, folder, slabs=slabs, shards=1, disk=disk, s3=self.settings(**s3), **options)
        try:
            if not options.get("down"):
                assert await world.mover.load(world.store.far.tier.probe)  # type: ignore[union-attr]
            yield world
            self.stub.switches.stall = False
            await asyncio.wait_for(world.balanced(), 30)
        finally:
            self.stub.switches.stall = False
            world.close()

    def run(self, story: Callable[["Cluster"], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(story(self), 60))


def opened_cluster(stub: S3Stub, shm_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Cluster]:
    """A fixture, once a module has made it one."""
    yield Cluster(stub, shm_dir, tmp_path)
    caplog.get_records("call").clear()


async def come(true: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"did not come: {what}"
        await asyncio.sleep(0.01)


async def loaded(w: World, *indices: int) -> list[Slot | Outcome]:
    """What comes of an acquire; leases are given back."""
    results = await w.store.promoter.gather(w.namespace, ids_of(*indices))
    for index, slot in zip(indices, results, strict=True):
        assert not isinstance(slot, Slot) or w.right(slot, ids_of(index)[0])
    w.host.release([slot for slot in results if isinstance(slot, Slot)])
    return results

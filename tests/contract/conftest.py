"""The tiers that are held to the contract. A tier joins by adding its opener to ``OPENERS``.

An opener gets an empty folder, the namespaces and the bytes that the tier should hold at least, and yields the tier.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.kernels.cuda import NoCuda, devices
from terracekv.tests.blocks import registered
from terracekv.tests.gpu_tiers import gpu_tier
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.s3_stub import BUCKET, S3Stub, s3_stub
from terracekv.tests.seaweed import Seaweed, program, seaweed
from terracekv.tiers.arena import Arena
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.s3 import S3Tier
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.slots import SlotTable
from terracekv.tiers.tier import Tier

HOLDS_BYTES = 8 << 20

Opener = Callable[[Path, Namespaces, int], AbstractContextManager[Tier]]


@contextmanager
def open_disk(folder: Path, namespaces: Namespaces, holds_bytes: int, **settings: Any) -> Iterator[Tier]:
    with closing(
        DiskTier(
            folder / "disk",
            capacity_bytes=holds_bytes + (6 << 20),
            segment_bytes=1 << 20,
            namespaces=namespaces,
            free_floor_bytes=0,
            **settings,
        )
    ) as tier:
        yield tier


@contextmanager
def open_buffered_disk(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    with open_disk(folder, namespaces, holds_bytes, direct="off") as tier:
        yield tier


@contextmanager
def open_coded_disk(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    with open_disk(folder, namespaces, holds_bytes, codec="on") as tier:
        yield tier


@contextmanager
def open_sealed_disk(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    pytest.importorskip("cryptography")
    from terracekv.tiers.seal import Keys

    with open_disk(folder, namespaces, holds_bytes, codec="on", keys=Keys([bytes(32)])) as tier:
        yield tier


@contextmanager
def open_host(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    slab_bytes = 1 << 20
    arena = Arena(folder / "host", size_bytes=holds_bytes, slab_bytes=slab_bytes)
    table = SlotTable(folder / "host" / "slots", arena_bytes=holds_bytes, slab_bytes=slab_bytes, adopt=arena.adopted)
    with closing(HostTier(arena, table, namespaces)) as tier:
        arena.prepare()
        yield tier


@contextmanager
def open_gpu(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    fake = FakeCupy(eager=True)
    with gpu_tier(folder, fake, namespaces, holds_bytes) as tier:
        yield tier
    assert not fake.left


@contextmanager
def open_device(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    try:
        (device, *_) = devices()
    except NoCuda as error:
        pytest.skip(str(error))
    table = SlotTable(folder / "gpu-slots", arena_bytes=holds_bytes, slab_bytes=1 << 20, adopt=False)
    with closing(table), closing(GpuTier(device, table, namespaces, size_bytes=holds_bytes)) as tier:
        yield tier


@contextmanager
def open_s3(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    with s3_stub(folder) as server, open_bucket(server, namespaces) as tier:
        yield tier


@contextmanager
def open_real_s3(folder: Path, namespaces: Namespaces, holds_bytes: int) -> Iterator[Tier]:
    if program() is None:
        pytest.skip("SeaweedFS is not installed")
    with seaweed(folder) as server, open_bucket(server, namespaces) as tier:
        yield tier


@contextmanager
def open_bucket(server: S3Stub | Seaweed, namespaces: Namespaces) -> Iterator[Tier]:
    settings = S3Settings(BUCKET, endpoint=server.endpoint, credentials_file=str(server.credentials))
    with closing(S3Tier(settings, namespaces=namespaces)) as tier:
        assert tier.probe()
        yield tier


OPENERS: dict[str, Opener] = {
    "disk": open_disk,
    "disk-buffered": open_buffered_disk,
    "disk-coded": open_coded_disk,
    "disk-sealed": open_sealed_disk,
    "host": open_host,
    "gpu": open_gpu,
    "s3": open_s3,
}
DEVICE_OPENERS: dict[str, Opener] = {"gpu-device": open_device}
"""Those that need a GPU."""
REAL_OPENERS: dict[str, Opener] = {"s3-server": open_real_s3}
"""Those that start a server of their own."""


@pytest.fixture
def namespaces(tmp_path: Path) -> Namespaces:
    return Namespaces(tmp_path / "namespaces.json")


@pytest.fixture
def namespace(namespaces: Namespaces) -> Namespace:
    return registered(namespaces, 1)


@pytest.fixture(
    params=[
        *OPENERS,
        *(pytest.param(label, marks=pytest.mark.s3) for label in REAL_OPENERS),
        *(pytest.param(label, marks=pytest.mark.gpu) for label in DEVICE_OPENERS),
    ]
)
def tier(request: pytest.FixtureRequest, tmp_path: Path, namespaces: Namespaces) -> Iterator[Tier]:
    with (OPENERS | REAL_OPENERS | DEVICE_OPENERS)[request.param](tmp_path, namespaces, HOLDS_BYTES) as opened:
        yield opened
        opened.check()

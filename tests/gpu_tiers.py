"""A gpu tier for tests, on a fake GPU: small, checked when all went well, and nothing of the GPU left.

Owns the folder that a test gives. Called by tests. Imports ``tiers``.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from terracekv.kernels.pinned import Pinned
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import device_on
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.slots import SlotTable

SLAB_BYTES = 1 << 20


@contextmanager
def gpu_tier(
    folder: Path,
    fake: FakeCupy,
    namespaces: Namespaces,
    size_bytes: int,
    *,
    slab_bytes: int = SLAB_BYTES,
    host: Pinned | None = None,
) -> Iterator[GpuTier]:
    table = SlotTable(folder / "gpu-slots", arena_bytes=size_bytes, slab_bytes=slab_bytes, adopt=False)
    with closing(table):
        made = GpuTier(device_on(fake), table, namespaces, size_bytes=size_bytes, host=host)
        with closing(made) as tier:
            yield tier

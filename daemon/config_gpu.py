"""The settings of the gpu tier, as they are written in the section ``[gpu]``.

Owns nothing; called by ``config`` where all settings are read, and by ``recovery`` where the tier is opened. Imports
msgspec, ``config_s3`` for kinds of values, ``tiers.budget``, ``errors`` and ``tier``, and so nothing of CUDA.
"""

from typing import Annotated

from msgspec import Meta, Struct

from terracekv.daemon.config_s3 import Count, Seconds, Size
from terracekv.tiers.budget import GIB, show
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.tier import PAGE

Share = Annotated[float, Meta(gt=0, le=1)]


class Gpu(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one GPU for the hottest blocks. ``device`` is a UUID, its beginning, or a number of this process."""

    enabled: bool = False
    device: str = ""
    size: Size = GIB
    uses: Count = 3
    window: Seconds = 60.0
    bus_share: Share = 0.1
    strict: bool = False


def check_gpu(gpu: Gpu) -> None:
    """What no GPU can give. ConfigError names the setting."""
    if gpu.enabled and gpu.size < PAGE:
        raise ConfigError(
            f"gpu.size is {gpu.size} bytes while gpu.enabled is true",
            f"set {show(GIB)}, say, or gpu.enabled to false for no gpu tier",
        )
    if gpu.device.startswith("MIG-"):
        raise ConfigError(
            f"gpu.device is {gpu.device}, a slice of a GPU, whose memory other processes cannot open",
            "name a whole GPU by its UUID (nvidia-smi -L), or set gpu.enabled to false",
        )

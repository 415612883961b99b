"""Opening what an earlier daemon left, in an order in which each step stands on the one before.

Owns nothing; runs once, before the event loop. Imports ``tiers``, ``config``, ``config_s3``,
``gpus`` and ``sessions``.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from terracekv.daemon.config import Config
from terracekv.daemon.config_s3 import settings_of
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.sessions import read_secret
from terracekv.tiers.arena import Arena
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.errors import ConfigError, NoGpu, NoRoom
from terracekv.tiers.folder import claim
from terracekv.tiers.gpu import open_gpu
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.numa import choose
from terracekv.tiers.nvml import Nvml
from terracekv.tiers.slots import SlotTable, table_fits

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Everything below the store. ``state_lock`` is the descriptor that keeps other daemons out of the state folder."""

    state_lock: int
    namespaces: Namespaces
    arena: Arena
    table: SlotTable
    host: HostTier
    disk: DiskTier | None
    secret: bytes
    gpus: Gpus
    s3: "S3Tier | None" = None

    def close(self) -> None:
        """Leave all of it adoptable."""
        self.gpus.close()
        if self.gpus.tier is not None:
            self.gpus.tier.close()
        if self.s3 is not None:
            self.s3.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()
        os.close(self.state_lock)


def open_tiers(config: Config) -> Tiers:
    """Own the folders, adopt the arena, open the disk. ``config`` is resolved.

    Raises InUse, NoRoom, Damaged, ConfigError, or OSError when a folder cannot be used at all.
    """
    state = config.daemon.state_dir
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whoever writes namespaces.json beside us could undo a flush. The lock is on the folder itself.
    state_lock = claim(os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), state, "daemon.state_dir")
    try:
        return _open(config, state, state_lock)
    except BaseException:
        os.close(state_lock)
        raise


def _open(config: Config, state: Path, state_lock: int) -> Tiers:
    assert config.host.size and config.host.slab
    slab = config.host.slab
    size = config.host.size // slab * slab
    slots = config.daemon.runtime_dir / "slots"
    node, why = choose(config.host.numa)
    log.info("the arena's memory comes from %s: %s", "anywhere" if node is None else f"node {node}", why)
    arena = Arena(
        config.daemon.runtime_dir,
        size_bytes=size,
        slab_bytes=slab,
        prefault=config.host.prefault,
        adopt=table_fits(slots, arena_bytes=size, slab_bytes=slab),
        numa_node=node,
    )
    try:
        namespaces = Namespaces(state / "namespaces.json")
        secret = read_secret(state / "secret")
        table = SlotTable(slots, arena_bytes=size, slab_bytes=slab, adopt=arena.adopted)
        host = HostTier(arena, table, namespaces, eviction=config.host.eviction)
        if host.adopted_blocks:
            log.info("adopted %d blocks in host", host.adopted_blocks)
        disk = None
        if config.disk.enabled:
            assert config.disk.size is not None
            disk = DiskTier(
                config.disk_path,
                capacity_bytes=config.disk.size,
                segment_bytes=config.disk.segment,
                direct=config.disk.direct,
                codec=config.disk.codec,
                namespaces=namespaces,
                free_floor_bytes=config.disk.free_floor,
            )
        s3 = _open_s3(config, namespaces) if config.s3.enabled else None
        gpus = _open_gpu(config, arena, slab, namespaces) if config.gpu.enabled else Gpus()
        return Tiers(state_lock, namespaces, arena, table, host, disk, secret, gpus, s3)
    except BaseException:
        arena.close()
        raise


def _open_gpu(config: Config, arena: Arena, slab_bytes: int, namespaces: Namespaces) -> Gpus:
    """Without a GPU the daemon serves from its other tiers, and says why; under ``gpu.strict`` it does not start."""
    wanted, nvml = config.gpu, Nvml()
    try:
        tier = open_gpu(
            wanted.device,
            size_bytes=wanted.size,
            slab_bytes=slab_bytes,
            slots=config.daemon.runtime_dir / "gpu-slots",
            arena=arena.view,
            namespaces=namespaces,
        )
    except (NoGpu, NoRoom) as error:
        if wanted.strict:
            raise
        log.warning("no gpu tier, blocks are served from host: %s", error)
        return Gpus(None, state=error.kind, reason=str(error), nvml=nvml, strict=wanted.strict)
    gpus = Gpus(tier, nvml=nvml, strict=wanted.strict)
    if gpus.reason is not None and wanted.strict:
        tier.close()
        raise NoGpu(gpus.reason, "gpu.strict is true: set it to false to serve such engines from host")
    if gpus.reason is not None:
        log.warning("engines cannot share the gpu tier and are served from host: %s", gpus.reason)
    return gpus


def _open_s3(config: Config, namespaces: Namespaces) -> "S3Tier":
    """Its libraries take as much memory as the rest of the daemon: they are loaded where they are used."""
    try:
        from terracekv.tiers.s3 import S3Tier
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"s3.enabled is true and {missing.name} is not installed", 'pip install "terracekv[s3]"'
        ) from None
    return S3Tier(settings_of(config.s3), namespaces=namespaces)

"""Opening what an earlier daemon left, in an order in which each step stands on the one before.

Owns nothing; runs once, before the event loop. Imports ``tiers``, ``config``,
``config_encryption``, ``config_s3``, ``gpus`` and ``sessions``.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from terracekv.daemon.config import Config
from terracekv.daemon.config_encryption import open_keys
from terracekv.daemon.config_s3 import settings_of
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.sessions import read_secret
from terracekv.tiers.arena import Arena
from terracekv.tiers.budget import filesystem_type
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.errors import ConfigError, NoGpu, NoRoom
from terracekv.tiers.folder import claim
from terracekv.tiers.gpu import open_gpu
from terracekv.tiers.host import HostTier
from terracekv.tiers.journal import Journal
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.numa import choose
from terracekv.tiers.nvml import Nvml
from terracekv.tiers.slots import SlotTable, table_fits

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier
    from terracekv.tiers.seal import Keys

journal = Journal(__name__)

NETWORK = ("9p", "afs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
"""File systems on which another machine may write too, and a map of a file is not the same everywhere."""


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
        """Leave all of it adoptable, whatever one of them has to complain of."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(os.close, self.state_lock)
            last_first.callback(self.host.close)
            for tier in (self.disk, self.s3, self.gpus.tier):
                if tier is not None:
                    last_first.callback(tier.close)
            last_first.callback(self.gpus.close)


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
    where = "may lie on any NUMA node" if node is None else f"lies on NUMA node {node}"
    journal.info("TKV-START", f"the arena {where} ({why})")
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
            text = f"adopted {host.adopted_blocks} blocks in host"
            journal.info("TKV-ADOPTED", text, blocks=host.adopted_blocks)
        keys = open_keys(config.encryption)
        disk = None
        if config.disk.enabled:
            _warn_of_network(config.disk_path)
            assert config.disk.size is not None
            disk = DiskTier(
                config.disk_path,
                capacity_bytes=config.disk.size,
                segment_bytes=config.disk.segment,
                direct=config.disk.direct,
                codec=config.disk.codec,
                namespaces=namespaces,
                free_floor_bytes=config.disk.free_floor,
                keys=keys,
            )
        s3 = _open_s3(config, namespaces, keys) if config.s3.enabled else None
        gpus = _open_gpu(config, arena, slab, namespaces) if config.gpu.enabled else Gpus()
        return Tiers(state_lock, namespaces, arena, table, host, disk, secret, gpus, s3)
    except BaseException:
        arena.close()
        raise


def _warn_of_network(folder: Path) -> None:
    """The index is a database in a mapped file: behind a network its locks and its pages may not hold."""
    kind = filesystem_type(folder if folder.exists() else folder.parent)
    if kind in NETWORK:
        text = f"{folder} is on {kind}, behind a network: point disk.path at a disk of this machine"
        journal.warning("TKV-DISK-REMOTE", text, tier="disk")


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
        journal.warning(error.event, f"no gpu tier, blocks are served from host: {error}")
        return Gpus(None, state=error.kind, reason=str(error), nvml=nvml, strict=wanted.strict)
    gpus = Gpus(tier, nvml=nvml, strict=wanted.strict)
    if gpus.reason is not None and wanted.strict:
        tier.close()
        raise NoGpu(gpus.reason, "gpu.strict is true: set it to false to serve such engines from host")
    if gpus.reason is not None:
        text = f"engines cannot share the gpu tier and are served from host: {gpus.reason}"
        journal.warning("TKV-GPU-NOT-SHARED", text)
    return gpus


def _open_s3(config: Config, namespaces: Namespaces, keys: "Keys | None") -> "S3Tier":
    """Its libraries take as much memory as the rest of the daemon: they are loaded where they are used."""
    try:
        from terracekv.tiers.s3 import S3Tier
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"s3.enabled is true and {missing.name} is not installed", 'pip install "terracekv[s3]"'
        ) from None
    return S3Tier(settings_of(config.s3), namespaces=namespaces, keys=keys)

"""What ``terracekv bench`` measures with: a daemon and an engine of its own, beside whatever runs here.

Owns two processes, two folders and a prefix of the bucket; all are gone when it closes. Called by ``payoff`` in the
command's own process. Imports ``config``, ``http_client``, ``payoff_models`` and ``tiers``. The engine is a process of
another room (``terracekv.connector.payoff``), which is told what to do line by line.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from terracekv.daemon.config import Config, load_config, require_folders
from terracekv.daemon.http_client import Door
from terracekv.daemon.payoff_models import Geometry
from terracekv.tiers.budget import DAEMON_BYTES, MIB, SHM_MARGIN_BYTES, Budget, filesystem_type
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.slots import slot_bytes_for
from terracekv.tiers.tier import PAGE

SLAB_BYTES = 64 * MIB
ENGINE_BYTES = 768 * MIB
"""What the engine's process takes at most: two windows, and what is made to fill them."""
START_S = 60.0
END_S = 60.0
SETTLE_S = 120.0
PLAIN = (
    *("daemon.http", "daemon.token_file", "access.file", "access.tls_cert", "access.tls_key"),
    *("access.uids", "access.gids", "access.socket_owner", "access.socket_group"),
)
"""Settings of who may come in: nobody else does, and what is measured does not depend on them."""


class BenchTrouble(TerraceError):
    """A process of the bench did not do its part."""

    kind = "bench"

    def __init__(self, message: str, hint: str = "run it again while the machine is idle") -> None:
        super().__init__(message, hint)


class Sizes:
    """Just enough of each tier for prompts of ``tokens``: what runs here already keeps its room."""

    def __init__(self, geometry: Geometry, block_tokens: int, tokens: int, segment_bytes: int) -> None:
        from terracekv.tiers.disk import least_capacity_bytes

        slot = slot_bytes_for(geometry.token_bytes * block_tokens)
        self.blocks = tokens // block_tokens
        of_slab = max(1, SLAB_BYTES // slot)
        self.slab = of_slab * slot
        self.host = (-(-self.blocks // of_slab) + 1) * self.slab
        record = slot + 4 * PAGE
        self.segment = max(segment_bytes, -(-2 * record // PAGE) * PAGE)
        self.disk = least_capacity_bytes(self.segment) + self.segment + 2 * self.blocks * record

    def shortage(self, config: Config, room: Budget) -> str | None:
        """What there is too little of, if anything."""
        free = {
            "memory": (self.host + DAEMON_BYTES + ENGINE_BYTES, room.memory.available_bytes),
            str(room.shm.path): (self.host + SHM_MARGIN_BYTES, room.shm.free_bytes),
        }
        if config.disk.enabled:
            free[str(room.disk.path)] = (self.disk + config.disk.free_floor, room.disk.free_bytes)
        for what, (asked, there) in free.items():
            if asked > there:
                return f"{what}: {asked / MIB:,.0f} MiB wanted, {max(0, there) / MIB:,.0f} MiB free"
        return None


class Stand:
    """``config`` is that of ``file`` and ``flags``; what is measured has the same, but for folders and sizes."""

    def __init__(
        self, config: Config, file: Path | None, flags: Mapping[str, str], geometry: Geometry, sizes: Sizes
    ) -> None:
        self.left: str | None = None
        """What could not be removed, after the end."""
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            near = _made(config.daemon.runtime_dir.parent, undo)
            self.folder = Path(tempfile.mkdtemp(prefix="terracekv-bench-", dir=near))
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            changes = dict.fromkeys(PLAIN, "") | {
                "daemon.runtime_dir": str(self.folder / "run"),
                "daemon.state_dir": str(self.folder / "state"),
                "gpu.enabled": "false",
                "access.own_user": "true",
                "host.size": str(sizes.host),
                "host.slab": str(sizes.slab),
                "daemon.queue": str(sizes.host),
                "s3.queue": str(sizes.host),
                "s3.admission": "all",
                "s3.prefill_tokens_per_s": "0",
                "disk.admission": "all",
            }
            if config.disk.enabled:
                path = tempfile.mkdtemp(prefix="terracekv-bench-", dir=_made(config.disk_path, undo))
                undo.callback(shutil.rmtree, path, ignore_errors=True)
                changes |= {"disk.path": path, "disk.size": str(sizes.disk), "disk.segment": str(sizes.segment)}
            if config.s3.enabled:
                name = f"terracekv-bench-{secrets.token_hex(4)}"
                changes["s3.prefix"] = f"{config.s3.prefix}/{name}" if config.s3.prefix else name
            self.config = load_config(file, dict(flags) | changes)
            require_folders(self.config)
            if config.s3.enabled:
                undo.callback(self._empty_bucket)
            named = ["--config", str(file.absolute())] if file else []
            sets = [part for key, value in (dict(flags) | changes).items() for part in ("--set", f"{key}={value}")]
            self._daemon = self._start(["-m", "terracekv.daemon", *named, *sets], "daemon", undo)
            self.door = Door(self.config.daemon.runtime_dir)
            self._wait()
            self._engine = self._start(["-m", "terracekv.connector.payoff"], "engine", undo)
            self._undo = undo.pop_all()
        self._namespace = ""
        self._geometry = geometry
        self._tokens: Sequence[int] = ()

    def __enter__(self) -> "Stand":
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def join(self, tokens: Sequence[int], block_tokens: int) -> dict[str, Any]:
        """The engine joins the daemon, with the prompt that it will ask for."""
        about = self.order(
            do="join",
            socket=str(self.config.daemon.runtime_dir / "engine.sock"),
            model=self._geometry.name,
            dtype=self._geometry.dtype,
            layers=self._geometry.layers,
            heads=self._geometry.heads,
            dim=self._geometry.dim,
            item_bytes=self._geometry.item_bytes,
            block_tokens=block_tokens,
            tokens=list(tokens),
        )
        self._namespace, self._tokens = about["namespace_id"], tokens
        return about

    def order(self, **order: Any) -> dict[str, Any]:
        """One order to the engine, and its answer."""
        pipes: tuple[IO[str] | None, IO[str] | None] = self._engine.stdin, self._engine.stdout
        assert pipes[0] is not None and pipes[1] is not None
        try:
            pipes[0].write(json.dumps(order) + "\n")
            pipes[0].flush()
            answer = pipes[1].readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise BenchTrouble(f"the bench's engine ended at {order['do']}: {self._tail('engine')}")
        return dict(json.loads(answer))

    def modes(self) -> dict[str, str]:
        """Tiers from the top down, and how they work."""
        status = self.door.ask("GET", "/v1/status")
        return {name: str(tier["mode"]) for name, tier in status["tiers"].items()}

    def given(self, tier: str) -> int:
        """Blocks that the engine was given from a tier, since the daemon's start."""
        return int(self.door.ask("GET", "/v1/status")["lookups"]["loaded"][tier])

    def held(self, blocks: int, block_tokens: int) -> dict[str, int]:
        """Leading blocks of the prompt that can be had from each tier or above it."""
        asked = {"namespace": self._namespace, "tokens": list(self._tokens[: blocks * block_tokens])}
        found = self.door.ask("POST", "/v1/lookup", asked)
        return {name: int(reach["blocks"]) for name, reach in found["tiers"].items()}

    def force_out(self, tiers: Sequence[str], blocks: int, block_tokens: int) -> None:
        """Empty the upper ``tiers``, so that the prompt comes from the one below. BenchTrouble when it does not go."""
        until = time.monotonic() + SETTLE_S
        while True:
            for tier in reversed(tiers):  # what is on its way down arrives before host is emptied
                self.door.ask("POST", "/v1/flush", {"namespace": self._namespace, "tier": tier})
            held = self.held(blocks, block_tokens)
            if not any(held[tier] for tier in tiers):
                return
            if time.monotonic() > until:
                raise BenchTrouble(f"the prompt does not leave {' and '.join(tiers)}: {held}")

    def drop_pages(self) -> str:
        """Put the disk tier's files out of memory, as far as can be; how that went."""
        self.door.ask("POST", "/v1/sync")
        folder = self.config.disk_path
        if filesystem_type(folder) == "tmpfs":
            return "disk.path is tmpfs: it is memory, and was read from there"
        for path in folder.rglob("*"):
            if path.is_file():
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "the page cache was dropped (posix_fadvise) before each load; a cache inside the device was not"

    def _start(self, what: Sequence[str], name: str, undo: contextlib.ExitStack) -> "subprocess.Popen[str]":
        """In a session of its own: Ctrl-C is ours to deal with."""
        pipe = subprocess.PIPE if name == "engine" else subprocess.DEVNULL
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *what],
                stdin=pipe,
                stdout=pipe if name == "engine" else log,
                stderr=log,
                text=True,
                cwd=self.folder,
                start_new_session=True,
            )
        undo.callback(_ended, process)
        return process

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                self.door.exchange("GET", "/readyz", timeout_s=1.0)
                return
            except TerraceError as error:
                if self._daemon.poll() is not None:
                    raise BenchTrouble(
                        f"the bench's daemon ended: {self._tail('daemon')}",
                        "it has your settings: mend what it names, then run this again",
                    ) from None
                if time.monotonic() > until:
                    raise BenchTrouble(f"the bench's daemon is not ready after {START_S:g} s: {error}") from None
            time.sleep(0.05)

    def _tail(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return " ".join(lines[-3:]) or "it said nothing"

    def _empty_bucket(self) -> None:
        """Remove what the bench put under its own prefix, and nothing else."""
        from terracekv.daemon.bucket_view import opened

        root = f"{self.config.s3.prefix}/"
        assert "terracekv-bench-" in root
        try:
            bucket = opened(self.config.s3)
            with contextlib.closing(bucket):
                for found in list(bucket.list(root, self.config.s3.timeout)):
                    bucket.delete(found.key, time.monotonic() + self.config.s3.timeout)
        except TerraceError as error:
            self.left = f"objects under {root} of bucket {self.config.s3.bucket} are left: {error.message}"


def _made(folder: Path, undo: contextlib.ExitStack) -> Path:
    """The folder, made with its parents if it was not there; what was made goes again, if nobody else used it."""
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=0o700)
            undo.callback(_removed, path)
    return folder


def _removed(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _ended(process: "subprocess.Popen[str]") -> None:
    """Politely, then not."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()

"""The daemon's life: open the tiers, open the doors, serve until told to stop, leave everything adoptable.

Owns the process: signals, threads that are not the mover's, and the order of starting and stopping. Run as
``terracekv serve`` or ``python -m terracekv.daemon``. Imports the other modules of this room.
"""

import argparse
import asyncio
import gc
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from terracekv.daemon.config import Config, load_config, require_folders, resolve, summary, survey
from terracekv.daemon.distant import Distant
from terracekv.daemon.engine_door import EngineDoor
from terracekv.daemon.http_door import HttpDoor
from terracekv.daemon.lookup_log import log_to
from terracekv.daemon.mover import Mover
from terracekv.daemon.near import Near
from terracekv.daemon.own_socket import nobody_listens
from terracekv.daemon.recovery import Tiers, open_tiers
from terracekv.daemon.store import Store
from terracekv.tiers import failpoint
from terracekv.tiers.errors import ConfigError, TerraceError
from terracekv.tiers.heat import BusShare, Heat

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier

log = logging.getLogger("terracekv.daemon")

SWITCH_S = 1e-4
"""How long a thread may hold the interpreter while another waits: a lookup should not wait for a worker."""
HOUSEKEEPING_S = 1.0
PROBE_S = 1.0
"""The doors open after so long even if the bucket has not answered yet."""


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Errors of the start are printed with what to do."""
    _log_to_stderr(config.daemon.log_level.upper())
    started = time.monotonic()
    sys.setswitchinterval(SWITCH_S)
    failpoint.arm(config.failpoints)
    try:
        require_folders(config)
        nobody_listens(config.daemon.runtime_dir / "engine.sock")
        room = survey(config)
        config = resolve(config, room)
        log.info("%s", summary(config, room))
        tiers = open_tiers(config)
    except (TerraceError, OSError) as error:
        print(f"terracekv: {error}", file=sys.stderr)
        return 1
    try:
        return uvloop.run(_serve(config, tiers, started))
    except TerraceError as error:
        print(f"terracekv: {error}", file=sys.stderr)
        return 1
    finally:
        tiers.close()


def _log_to_stderr(level: str) -> None:
    """Libraries never below INFO: what they tell a debugger has signatures and session tokens in it."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=line, stream=sys.stderr)
    logging.getLogger().setLevel(max(logging.INFO, logging.getLogger().level))
    logging.getLogger("terracekv").setLevel(level)


async def _serve(config: Config, tiers: Tiers, started: float) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    assert config.daemon.queue is not None
    mover = Mover(threads=config.daemon.io_threads, queue_bytes=config.daemon.queue)
    background = _background(tiers)
    far = _distant(config, tiers)
    movers = [mover, far.mover] if far is not None else [mover]
    store = Store(
        namespaces=tiers.namespaces,
        host=tiers.host,
        disk=tiers.disk,
        mover=mover,
        admission=config.disk.admission,
        far=far,
        near=_near(config, tiers, mover),
    )
    engine = EngineDoor(
        config.daemon.runtime_dir / "engine.sock",
        store=store,
        table=tiers.table,
        arena=tiers.arena.path,
        secret=tiers.secret,
        gpus=tiers.gpus,
    )
    engine.sessions.demand.log = log_to(config.daemon.lookup_log)
    http = HttpDoor(store=store, sessions=engine.sessions, config=config, started=started, gpus=tiers.gpus)
    probing = None
    try:
        if tiers.s3 is not None:
            probing = await _probe(tiers.s3, movers[-1], stop)
        await engine.listen()
        await http.listen()
    except BaseException:
        await _end_distant(tiers, store)
        for each in movers:
            each.close()
        raise
    for thread in background:
        thread.start()
    keeper = loop.create_task(_keep_house(store, engine, http))
    gc.collect()
    gc.freeze()  # what lives from here on is small; what was loaded need not be looked at again and again
    doors = " and ".join(filter(None, (str(engine.path), str(http.path), config.daemon.http)))
    log.info("ready after %.0f ms: %s", (time.monotonic() - started) * 1e3, doors)
    if tiers.arena.filesystem != "tmpfs":
        log.warning(
            "%s is %s, not tmpfs: the host tier is no faster than that", engine.path.parent, tiers.arena.filesystem
        )
    await stop.wait()
    log.info("stopping: taking no more work")
    keeper.cancel()  # the doors' files are gone from now on because we remove them
    until = loop.time() + config.daemon.drain_s
    await asyncio.gather(engine.close(config.daemon.drain_s), http.close(config.daemon.drain_s))
    try:
        await asyncio.wait_for(asyncio.gather(*(each.drain() for each in movers)), max(0.1, until - loop.time()))
    except TimeoutError:
        left = sum(each.queue_bytes for each in movers)
        log.warning("%d bytes of write-through were not written within daemon.drain_s: they are cut off", left)
    tiers.arena.stop()
    await store.forgetting.close()
    await _end_distant(tiers, store)
    for each in movers:
        each.close()
    for thread in background:
        thread.join(1.0)
    log.info("stopped; the arena stays warm in %s", config.daemon.runtime_dir)
    return _verdict(probing)


def _background(tiers: Tiers) -> list[threading.Thread]:
    """Work of the start that nobody waits for, not begun yet."""
    threads = [threading.Thread(target=_prepare, args=(tiers,), name="arena-prepare", daemon=True)]
    if tiers.disk is not None and tiers.disk.rebuilding:
        threads.append(threading.Thread(target=tiers.disk.rebuild, name="disk-rebuild", daemon=True))
    return threads


def _prepare(tiers: Tiers) -> None:
    """In a thread: give the arena its pages, and then let the GPU copy to and from them without a detour."""
    tiers.gpus.watch()
    tiers.arena.prepare()
    if tiers.gpus.tier is not None:
        tiers.gpus.tier.pin()


def _near(config: Config, tiers: Tiers, mover: Mover) -> Near | None:
    """The gpu tier with what makes blocks go up, if it was opened."""
    if tiers.gpus.tier is None:
        return None
    return Near(
        tiers.gpus.tier,
        namespaces=tiers.namespaces,
        host=tiers.host,
        mover=mover,
        heat=Heat(uses=config.gpu.uses, window_s=config.gpu.window),
        share=BusShare(config.gpu.bus_share),
    )


def _distant(config: Config, tiers: Tiers) -> Distant | None:
    """The bucket with workers of its own, if there is one."""
    if tiers.s3 is None:
        return None
    assert config.s3.queue is not None
    mover = Mover(threads=config.s3.threads + 1, queue_bytes=config.s3.queue)
    rate = config.s3.prefill_tokens_per_s
    return Distant(tiers.s3, mover, admission=config.s3.admission, prefill_tokens_per_s=rate)


async def _probe(tier: "S3Tier", mover: Mover, stop: asyncio.Event) -> "asyncio.Future[ConfigError | bool]":
    """Try the bucket out. ConfigError at once when it can never be used so; a slow server is not waited for, and when
    that turns out to be unusable later on, the daemon stops."""

    def work() -> ConfigError | bool:
        try:
            return tier.probe()
        except ConfigError as error:
            return error

    def came(done: "asyncio.Future[ConfigError | bool]") -> None:
        if not done.cancelled() and done.exception() is None and isinstance(done.result(), ConfigError):
            log.error("the bucket cannot be used: %s", done.result())
            stop.set()

    probing = mover.load(work)
    await asyncio.wait([probing], timeout=PROBE_S)
    if probing.done() and probing.exception() is None and isinstance(error := probing.result(), ConfigError):
        raise error
    probing.add_done_callback(came)
    return probing


def _verdict(probing: "asyncio.Future[ConfigError | bool] | None") -> int:
    """The exit status of a daemon that was told to stop, or stopped because its bucket turned out to be unusable."""
    if probing is None or not probing.done() or probing.cancelled() or probing.exception() is not None:
        return 0
    return int(isinstance(probing.result(), ConfigError))


async def _end_distant(tiers: Tiers, store: Store) -> None:
    """Closing the tier cuts off what its workers still have to do."""
    if tiers.s3 is not None and store.far is not None:
        await store.mover.load(tiers.s3.close)
        store.far.close()


async def _keep_house(store: Store, engine: EngineDoor, http: HttpDoor) -> None:
    """What must happen now and then without anybody asking."""
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        try:
            await store.keep_house()
            if (lookups := engine.sessions.demand.log) is not None and lookups.due:
                await store.mover.load(lookups.write)
            gone = engine.missing()
            if gone and "engine door" not in http.not_ready:
                reason = f"{', '.join(gone)} in {engine.path.parent} was removed: no engine can join until a restart"
                http.not_ready["engine door"] = reason
                log.error("%s", reason)
        except Exception:
            log.exception("housekeeping failed")


def main() -> int:
    """``python -m terracekv.daemon``: the same as ``terracekv serve``, without the command line's libraries."""
    parser = argparse.ArgumentParser(prog="python -m terracekv.daemon")
    parser.add_argument("--config", type=Path, help="a TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, dict(setting.partition("=")[::2] for setting in arguments.set))
    except TerraceError as error:
        print(f"terracekv: {error}", file=sys.stderr)
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main())

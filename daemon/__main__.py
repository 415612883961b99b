"""The daemon's life: open the tiers, open the doors, serve until told to stop, leave everything adoptable.

Owns the process: signals, threads that are not the mover's, and the order of starting and stopping. Run as
``terracekv serve`` or ``python -m terracekv.daemon``. Imports the other modules of this room.
"""

import argparse
import asyncio
import errno
import gc
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from terracekv.daemon import tasks
from terracekv.daemon.access import Access
from terracekv.daemon.config import Config, load_config, require_folders, resolve, summary, survey, version
from terracekv.daemon.descriptors import raise_limit, stand_in
from terracekv.daemon.distant import Distant
from terracekv.daemon.engine_door import EngineDoor
from terracekv.daemon.heartbeat import Heartbeat
from terracekv.daemon.http_door import HttpDoor
from terracekv.daemon.logs import to_stderr
from terracekv.daemon.lookup_log import log_to
from terracekv.daemon.mover import Mover, heard
from terracekv.daemon.near import Near
from terracekv.daemon.own_socket import nobody_listens
from terracekv.daemon.recovery import Tiers, open_tiers
from terracekv.daemon.store import Store
from terracekv.daemon.watchdog import Watchdog
from terracekv.tiers import failpoint
from terracekv.tiers.errors import ConfigError, NoRoom, TerraceError, TierStuck
from terracekv.tiers.heat import BusShare, Heat
from terracekv.tiers.host import SHORTAGE
from terracekv.tiers.journal import Journal
from terracekv.tiers.steady import Steady

if TYPE_CHECKING:
    from terracekv.tiers.s3 import S3Tier

journal = Journal("terracekv.daemon")

SWITCH_S = 1e-4
"""How long a thread may hold the interpreter while another waits: a lookup should not wait for a worker."""
HOUSEKEEPING_S = 1.0
ENDS = (signal.SIGTERM, signal.SIGINT)
END_S = 20.0
"""At the end a worker may take so long with what it does: longer than a server that hangs keeps one of the bucket's."""
HINTS = {
    errno.EMFILE: "let the process open more files: ulimit -n, or LimitNOFILE= in its unit",
    errno.ENFILE: "the machine has no more open files to give: raise fs.file-max",
    errno.ENOSPC: "daemon.runtime_dir, daemon.state_dir or disk.path is on a file system that is full: df shows which",
    errno.EDQUOT: "this user may not write more where daemon.runtime_dir, daemon.state_dir or disk.path is: see quota",
    errno.EROFS: "daemon.runtime_dir, daemon.state_dir or disk.path is on a file system that is read-only, perhaps "
    "after an error of its medium: findmnt shows which, dmesg why",
    errno.EIO: "what daemon.runtime_dir, daemon.state_dir or disk.path is on cannot be read or written: see dmesg",
    errno.ELOOP: "a link stands where the daemon keeps a file of its own: remove it",
}
"""What to do about errors of the system that do not say it."""
PROBE_S = 1.0
"""The doors open after so long even if the bucket has not answered yet."""


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Errors of the start are printed with what to do."""
    stand_in()
    to_stderr(config.daemon.log_level.upper(), config.daemon.log_format)
    started = time.monotonic()
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # until there is somebody who answers to it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a start as SIGTERM does, without a traceback
    sys.setswitchinterval(SWITCH_S)
    raise_limit()
    failpoint.arm(config.failpoints)
    try:
        require_folders(config)
        nobody_listens(config.daemon.runtime_dir / "engine.sock")
        room = survey(config)
        config = resolve(config, room)
        journal.info("TKV-START", summary(config, room), version=version())
        tiers = open_tiers(config)
    except (TerraceError, OSError) as error:
        return _failed(error)
    try:
        return uvloop.run(_serve(config, tiers, started))
    except (TerraceError, OSError) as error:
        return _failed(error)
    finally:
        for number in (*ENDS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # an interpreter that ends lets go of handlers, and would die of it
        tiers.close()


def _failed(error: TerraceError | OSError) -> int:
    """Say why there is no daemon; the exit status."""
    hint = HINTS.get(error.errno or 0) if isinstance(error, OSError) else None
    print(f"terracekv: {error}" + (f" ({hint})" if hint else ""), file=sys.stderr)
    return 1


async def _serve(config: Config, tiers: Tiers, started: float) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ENDS:
        loop.add_signal_handler(number, stop.set)
    tasks.hear(loop)
    access = Access(config)
    background = _background(tiers)
    store, movers = _store(config, tiers)
    _set_quotas(access, store)
    heart = Heartbeat(store)
    engine, http = _doors(config, tiers, store, access, heart, started)
    watchdog = Watchdog(heart)
    probing = None
    try:
        if tiers.s3 is not None:
            probing = await _probe(tiers.s3, movers[-1], stop)
        await _open(engine, http)
    except BaseException:
        await _end(tiers, store, movers)
        raise
    for thread in background:
        thread.start()
    watchdog.start()
    loop.add_signal_handler(signal.SIGHUP, _reread, access, engine, http, True)
    work = tasks.keep(lambda: _keep_house(store, engine, http, access), "housekeeper", HOUSEKEEPING_S)
    keeper = tasks.begin(work, "housekeeper")
    gc.collect()
    gc.freeze()  # what lives from here on is small; what was loaded need not be looked at again and again
    doors = " and ".join(filter(None, (str(engine.path), str(http.path), config.daemon.http)))
    journal.info("TKV-READY", f"ready after {(time.monotonic() - started) * 1e3:.0f} ms: {doors}", pid=os.getpid())
    if (filesystem := tiers.arena.filesystem) != "tmpfs":
        text = f"{engine.path.parent} is {filesystem}, not tmpfs: the host tier is no faster than that"
        journal.warning("TKV-NOT-TMPFS", text)
    await stop.wait()
    journal.info("TKV-STOPPING", "stopping: taking no more work")
    keeper.cancel()  # the doors' files are gone from now on because we remove them
    until = loop.time() + config.daemon.drain_s
    await asyncio.gather(engine.close(config.daemon.drain_s), http.close(config.daemon.drain_s))
    try:
        await asyncio.wait_for(asyncio.gather(*(each.drain() for each in movers)), max(0.1, until - loop.time()))
    except TimeoutError:
        left = sum(each.queue_bytes for each in movers)
        text = f"{left} bytes of write-through were not written within daemon.drain_s: they are cut off"
        journal.warning("TKV-CUT-OFF", text, bytes=left)
    tiers.arena.stop()
    await store.forgetting.close()
    watchdog.stop()
    ended = await _end(tiers, store, movers)
    for thread in background:
        thread.join(1.0)
    verdict = _verdict(probing)
    if not ended:
        text = f"{'; '.join(heart.standing) or 'a worker'}: it is not waited for; the next start adopts what there is"
        journal.warning("TKV-STUCK-AT-EXIT", text)
        sys.stderr.flush()
        os._exit(verdict)  # what is stuck holds its tier: closing that would hang as well
    journal.info("TKV-STOPPED", f"stopped; the arena stays warm in {config.daemon.runtime_dir}")
    return verdict


async def _open(engine: EngineDoor, http: HttpDoor) -> None:
    """Open both doors, or neither."""
    await engine.listen()
    try:
        await http.listen()
    except BaseException:
        await engine.close(0)
        raise


def _store(config: Config, tiers: Tiers) -> tuple[Store, list[Mover]]:
    """The tiers as one, and a mover for each thing that may hang, so that nothing else hangs with it."""
    assert config.daemon.queue is not None
    threads, stuck_s = config.daemon.io_threads, config.daemon.stuck_s
    host = Mover(threads=threads, queue_bytes=1, name="host", stuck_s=stuck_s)
    disk = Mover(threads=threads, queue_bytes=config.daemon.queue, name="disk", stuck_s=stuck_s)
    state = Mover(threads=1, queue_bytes=1, name="state", stuck_s=stuck_s)
    near, far = _near(config, tiers), _distant(config, tiers)
    store = Store(
        namespaces=tiers.namespaces,
        host=tiers.host,
        disk=tiers.disk,
        mover=host,
        disk_mover=disk,
        state_mover=state,
        admission=config.disk.admission,
        far=far,
        near=near,
    )
    return store, [host, disk, state, *(lower.mover for lower in (near, far) if lower is not None)]


def _doors(
    config: Config, tiers: Tiers, store: Store, access: Access, heart: Heartbeat, started: float
) -> tuple[EngineDoor, HttpDoor]:
    """Both doors, closed yet."""
    engine = EngineDoor(
        config.daemon.runtime_dir / "engine.sock",
        store=store,
        table=tiers.table,
        arena=tiers.arena.path,
        secret=tiers.secret,
        access=access,
        gpus=tiers.gpus,
    )
    engine.sessions.demand.log = log_to(config.daemon.lookup_log, tiers.secret)
    http = HttpDoor(
        store=store,
        sessions=engine.sessions,
        config=config,
        started=started,
        gpus=tiers.gpus,
        heart=heart,
        access=access,
    )
    return engine, http


def _background(tiers: Tiers) -> list[Steady]:
    """Work of the start that nobody waits for, not begun yet."""
    threads = [Steady("arena-prepare", partial(_prepare, tiers))]
    if tiers.disk is not None and tiers.disk.rebuilding:
        threads.append(Steady("disk-rebuild", tiers.disk.rebuild))
    return threads


def _prepare(tiers: Tiers) -> None:
    """In a thread: give the arena its pages, and then let the GPU copy to and from them without a detour."""
    tiers.gpus.watch()
    tiers.arena.prepare()
    if tiers.arena.last_error is not None:
        journal.error(NoRoom("").event, f"host tier: {tiers.arena.last_error} ({SHORTAGE})", tier="host")
    if tiers.gpus.tier is not None:
        tiers.gpus.tier.pin()


def _near(config: Config, tiers: Tiers) -> Near | None:
    """The gpu tier with what makes blocks go up, if it was opened."""
    if tiers.gpus.tier is None:
        return None
    assert config.daemon.queue is not None
    mover = Mover(threads=2, queue_bytes=config.daemon.queue, name="gpu", stuck_s=config.daemon.stuck_s)
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
    stuck_s = config.s3.timeout + config.s3.read_timeout + config.daemon.stuck_s  # it has deadlines of its own
    mover = Mover(threads=config.s3.threads + 1, queue_bytes=config.s3.queue, name="s3", stuck_s=stuck_s)
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
            journal.error(ConfigError("").event, f"the bucket cannot be used: {done.result()}")
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


async def _end(tiers: Tiers, store: Store, movers: list[Mover]) -> bool:
    """End the workers; closing the bucket cuts off what those of it still have to do. Whether all have ended."""
    ended = True
    if tiers.s3 is not None and store.far is not None:
        try:
            await store.mover.ask(tiers.s3.close, END_S, "the bucket's last answer")
        except TierStuck as stuck:
            journal.warning(stuck.event, str(stuck), tier="s3")
            ended = False
        ended &= store.far.close(END_S)
    for mover in movers:
        ended &= mover.close(END_S if not mover.stalled_s else 0.0)
    return ended


def _reread(access: Access, engine: EngineDoor, http: HttpDoor, force: bool = False) -> None:
    """Tokens and tenants may have changed: with them who may go on, and how much each may keep."""
    access.tls.refresh(force=force)
    if access.refresh(force=force):
        _set_quotas(access, engine.store)
        engine.end_unknown()
        http.end_unknown()


def _set_quotas(access: Access, store: Store) -> None:
    """A tenant that holds more than it may now gives way with its next block."""
    for name, shares in store.shares.items():
        shares.limits = access.table.quotas[name]


async def _keep_house(store: Store, engine: EngineDoor, http: HttpDoor, access: Access) -> None:
    """What must happen now and then without anybody asking. What may have to wait for a tier comes last."""
    _reread(access, engine, http)
    if (lookups := engine.sessions.demand.log) is not None and lookups.due:
        lookups.writing = store.state_mover.load(partial(lookups.write, lookups.take()))
        lookups.writing.add_done_callback(heard)
    gone = engine.missing()
    if gone and "engine door" not in http.not_ready:
        reason = f"{', '.join(gone)} in {engine.path.parent} was removed: no engine can join until a restart"
        http.not_ready["engine door"] = reason
        journal.error("TKV-FILES-GONE", reason)
    if store.far is not None:  # an engine that was idle while another node flushed must not wake up to what was flushed
        store.far.used.update(session.namespace.id for session in engine.sessions.open.values())
    await store.keep_house()


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

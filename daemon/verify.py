"""``terracekv verify``: is every stored block what it should be, in every tier?

Owns the folders for as long as it looks, when no daemon runs. Called by ``cli`` in its own process. Imports ``config``,
``config_encryption``, ``http_client``, ``tiers`` and, where there is a bucket, ``bucket_view``.

Beside a daemon it asks that one, a bounded number of blocks at a time, so that engines hardly notice. Without a daemon
it opens the folders as the daemon would, and compares the books, too, which only hold still when nobody works. The
bucket is read from here in both cases: it belongs to no daemon.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from terracekv.daemon.config import Config, slab_of, survey
from terracekv.daemon.config_encryption import open_keys
from terracekv.daemon.http_client import Door, NotRunning
from terracekv.tiers.arena import Arena
from terracekv.tiers.audit import Audit
from terracekv.tiers.disk import DiskTier, least_capacity_bytes
from terracekv.tiers.errors import BadRequest, TerraceError
from terracekv.tiers.folder import claim
from terracekv.tiers.host import HostTier
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.slots import SlotTable, table_fits

TIERS = ("gpu", "host", "disk", "s3")
IN_PLACE = "no daemon runs"
ROOM_BYTES = 1 << 30
"""What the catalog may grow by if it must be rebuilt."""
SHOWN_MAX = 20
"""Wrong blocks of a tier that are shown to a person one by one."""


@dataclass(slots=True)
class Report:
    """What was found in one tier. ``trouble`` ended the look before its end; ``skipped`` says why there was none."""

    tier: str
    through: str
    checked: int = 0
    passed_over: int = 0
    locked: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    books: str | None = None
    """How the tier's books differ from what is there; None when they do not, or were not compared."""
    trouble: str | None = None
    skipped: str | None = None
    done: str = "forgotten: stored anew when next computed"

    @property
    def bad(self) -> bool:
        """Whether anything is wrong, or could not be looked at."""
        return bool(self.wrong or self.books or self.trouble)

    def take(self, found: Audit) -> None:
        """Add what one more look found."""
        self.checked += found.checked
        self.passed_over += found.passed_over
        self.locked += found.locked
        self.wrong |= found.wrong

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        names = ("tier", "through", "checked", "passed_over", "locked", "wrong", "books", "trouble", "skipped")
        return {name: getattr(self, name) for name in names} | {"done": self.done if self.wrong else None}

    def lines(self) -> Iterator[str]:
        """For a person."""
        if self.skipped:
            yield f"{self.tier}: not looked at: {self.skipped}"
            return
        yield f"{self.tier}: {self.checked:,} blocks checked, {len(self.wrong):,} wrong ({self.through})"
        if self.passed_over:
            yield f"  {self.passed_over:,} passed over, of flushed namespaces"
        if self.locked:
            yield f"  {self.locked:,} sealed with a key that is not here, so not opened (encryption.key_file)"
        for why in [*self.wrong.values()][:SHOWN_MAX]:
            yield f"  {why}"
        if len(self.wrong) > SHOWN_MAX:
            yield f"  and {len(self.wrong) - SHOWN_MAX:,} more (--json has all)"
        if self.wrong:
            yield f"  done: {self.done}"
        if self.books:
            yield f"  books: {self.books}"
        if self.trouble:
            yield f"  not all could be looked at: {self.trouble}"


def checked(config: Config, tiers: list[str] | None) -> Iterator[Report]:
    """One report a tier, of all tiers or of those named. Silent or Answered when there is a daemon that cannot be
    asked."""
    if unknown := set(tiers or ()) - set(TIERS):
        raise BadRequest(f"no tier {', '.join(sorted(unknown))}", f"tiers are {', '.join(TIERS)}")
    missing = dict.fromkeys(tiers or ())
    for report in _reports(config, tiers or [*TIERS]):
        missing.pop(report.tier, None)
        yield report
    for tier in missing:  # who names one is told that nothing of it was looked at
        why = "s3.enabled is false here" if tier == "s3" else f"there is no {tier} tier"
        yield Report(tier, "not at all", skipped=f"{why}; give this command the daemon's settings if there should be")


def _reports(config: Config, wanted: list[str]) -> Iterator[Report]:
    """Of the tiers that there are."""
    door = Door(config.daemon.runtime_dir)
    try:
        door.greet()
        running = [*door.ask("GET", "/v1/status")["tiers"]]
    except NotRunning:
        yield from _offline(config, wanted)
    else:
        for tier in running:
            if tier in wanted and tier != "s3":
                yield _asked(door, tier)
    if "s3" in wanted and config.s3.enabled:
        yield _bucket(config)


def _asked(door: Door, tier: str) -> Report:
    report = Report(tier, "through the daemon")
    after: str | None = None
    try:
        while True:
            answer = door.ask("POST", "/v1/verify", {"tier": tier, "after": after})
            found = msgspec.convert(answer, Audit)  # of a daemon of an earlier version, what that one says
            report.take(found)
            after = found.next
            if after is None:
                return report
    except TerraceError as error:
        report.trouble = str(error)
        return report


def _offline(config: Config, wanted: list[str]) -> Iterator[Report]:
    """As the daemon would open them, but nothing is made, and nothing evicted for a smaller size. InUse when a daemon
    is just starting."""
    state = config.daemon.state_dir
    if not (state / "namespaces.json").exists():
        yield from (
            Report(tier, IN_PLACE, skipped=f"no daemon ever ran with {state}") for tier in wanted if tier != "s3"
        )
        return
    lock = claim(os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), state, "daemon.state_dir")
    try:
        namespaces = Namespaces(state / "namespaces.json")
        if "host" in wanted:
            yield _host(config, namespaces)
        if "disk" in wanted and config.disk.enabled:
            yield _disk(config, namespaces)
    finally:
        os.close(lock)


def _host(config: Config, namespaces: Namespaces) -> Report:
    report = Report("host", IN_PLACE)
    runtime, size = config.daemon.runtime_dir, survey(config).arena_size
    slab_bytes = slab_of(size) if config.host.slab is None else config.host.slab
    slots = runtime / "slots"
    if not size or size % slab_bytes or not table_fits(slots, arena_bytes=size, slab_bytes=slab_bytes):
        report.skipped = f"there is no arena in {runtime}, or one of other settings"
        return report
    arena = Arena(runtime, size_bytes=size, slab_bytes=slab_bytes, prefault=False)
    host = HostTier(arena, SlotTable(slots, arena_bytes=size, slab_bytes=slab_bytes, adopt=True), namespaces)
    try:
        host.reap()
        return _looked(report, host.audit, host.check)
    finally:
        host.close()


def _disk(config: Config, namespaces: Namespaces) -> Report:
    report = Report("disk", IN_PLACE)
    segments = config.disk_path / "segments"
    if not segments.is_dir():
        report.skipped = f"there are no segments in {config.disk_path}"
        return report
    there = sum(file.stat().st_size for file in segments.iterdir())
    room = max(config.disk.size or 0, 2 * there + ROOM_BYTES, least_capacity_bytes(config.disk.segment))
    disk = DiskTier(
        config.disk_path,
        capacity_bytes=room,
        segment_bytes=config.disk.segment,
        direct=config.disk.direct,
        namespaces=namespaces,
        free_floor_bytes=0,
        keys=open_keys(config.encryption),
    )
    try:
        disk.rebuild()
        return _looked(report, disk.audit, disk.check)
    finally:
        disk.close()


def _looked(report: Report, audit: Callable[[str | None], Audit], check: Callable[[], None]) -> Report:
    found = audit(None)
    report.take(found)
    while found.next is not None:
        found = audit(found.next)
        report.take(found)
    try:
        check()
    except AssertionError as error:
        report.books = str(error) or "they do not add up"
    return report


def _bucket(config: Config) -> Report:
    from terracekv.daemon.bucket_view import chosen, verified

    report = Report("s3", "in the bucket", done="left: nobody is served it, and the next put replaces it")
    try:
        for row in verified(*chosen(config, None), keys=open_keys(config.encryption)):
            report.checked += 1
            report.locked += row["locked"]
            if row["problem"] is not None:
                report.wrong[f"{row['key']}.{row['shard']}"] = row["problem"]
    except TerraceError as error:
        report.trouble = str(error)
    return report

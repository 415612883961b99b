"""What is promised of every tier and daemon, looked at when a test lets go of it: what is listed can be read, the books
balance, nothing is larger than it may be.

Owns the list of what was found broken during a test. ``watch`` is called once, by the tests' common fixtures; what it
patches runs in whatever thread closes a tier. Imports ``tiers`` and the harness.

A medium that a test makes fail is no broken promise; a store that a test damages on purpose is, and such a test says so
by ``@pytest.mark.breaks("why")``.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from terracekv.tests.harness import Daemon
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.entry import id_of
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.host import HostTier
from terracekv.tiers.slots import RECORD_BYTES
from terracekv.tiers.tier import Outcome

SAMPLE = 8
"""Blocks of each kind that are read."""
WHOLE = 1000
"""Tiers of more blocks are not compared block by block."""
IDLE_S = 5.0

broken: list[str] = []
"""Filled by whatever closes; taken by the fixture after each test."""
_unwatched = threading.local()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """For a test that looks itself at all that is looked at here, and in which looking has consequences: what is read
    is found damaged, or reaches a line at which the test has its daemon killed."""
    _unwatched.now = True
    try:
        yield
    finally:
        _unwatched.now = False


def watch() -> None:
    """From here on every tier is looked at before it closes, and every daemon before it is ended. Again is nothing: the
    common fixtures are loaded by pytest, and once more by tests that need a name of theirs."""
    if hasattr(HostTier.close, "__wrapped__"):
        return
    for kind, look in ((HostTier, host), (GpuTier, slots), (DiskTier, disk)):
        kind.close = _before(kind.close, look, lambda tier: getattr(tier, "_closed", False))  # type: ignore[method-assign]
    Daemon.kill = _before(Daemon.kill, daemon, lambda one: not one.alive)  # type: ignore[method-assign]
    Daemon.term = _before(Daemon.term, daemon, lambda one: not one.alive)  # type: ignore[method-assign]


def _before(method: Callable[..., Any], look: Callable[[Any], None], over: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looked_at(self: Any, *arguments: Any, **options: Any) -> Any:
        if not (over(self) or getattr(_unwatched, "now", False)):
            try:
                look(self)
            except AssertionError as error:
                broken.append(f"{type(self).__name__}: {error or 'its check failed'}")
            except (OSError, TerraceError):
                pass  # a test has made its medium fail
        return method(self, *arguments, **options)

    return looked_at


def slots(tier: HostTier | GpuTier) -> None:
    """Books and bounds of a tier whose blocks lie in slots."""
    tier.check()
    status = tier.status()
    assert status.used_bytes <= status.capacity_bytes, f"{status.used_bytes} of {status.capacity_bytes} bytes are used"


def host(tier: HostTier) -> None:
    """The same, and some of what is listed has the bytes that were committed."""
    slots(tier)
    for space in list(tier._spaces.values()):
        for id, place in islice(space.order.places(), SAMPLE):
            held = tier._table.sealed(place * RECORD_BYTES)
            slot = tier._table.slot(held.record)
            if held.record not in tier._unverified:
                found = checksum(tier.payload(slot, held.payload_bytes))
                assert found == held.checksum, f"block {id.hex()} is listed and has other bytes"


def disk(tier: DiskTier) -> None:
    """Books, bounds, and some of what is listed."""
    status = tier.status()
    assert status.used_bytes <= status.capacity_bytes, f"{status.used_bytes} of {status.capacity_bytes} bytes are used"
    if status.blocks <= WHOLE:
        tier.check()
    for name, entry in tier._catalog.entries(limit=SAMPLE):
        id = id_of(name)
        namespace = next((n for n in tier._namespaces if entry is not None and n.stamp == entry.stamp), None)
        if namespace is not None and entry is not None:
            into = memoryview(bytearray(max(namespace.block_bytes, entry.payload_bytes)))
            outcome = tier.get(namespace, id, into) if namespace.registered else Outcome.MISS
            assert outcome is not Outcome.DAMAGED, f"block {id.hex()} is listed and damaged"


def daemon(one: Daemon) -> None:
    """What its status says of tiers and sessions, if it is able to say anything."""
    state = _status(one)
    if state is None:
        return
    for label, tier in state["tiers"].items():
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        assert not capacity or used <= capacity, f"{label}: {used} of {capacity} bytes are used"


def _status(one: Daemon) -> Any:
    """None when it stands still, is starting or ending."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{one.pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] in "TtZ":
                return None
    if not (one.runtime / "http.sock").is_socket():
        return None
    answer: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, AssertionError, json.JSONDecodeError):
            answer.append(one.http("/v1/status"))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(IDLE_S)
    return answer[0][1] if answer and answer[0][0] == 200 else None


def taken() -> list[str]:
    """What was found since the last call."""
    found = broken[:]
    broken.clear()
    return found

"""Each call that a tier makes of its medium fails now and then, in each way: right bytes or none, and books balance."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from terracekv.tests.blocks import get, name, payload_of, put, verified
from terracekv.tests.disks import PER_SEGMENT, Disks
from terracekv.tests.faults import CALLS, CATALOG, DISK, HOST, FaultLayer
from terracekv.tests.harness import Daemon
from terracekv.tiers import failpoint
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.errors import TerraceError
from terracekv.tiers.tier import Outcome

CAP = 6 << 20
LARGER = 8 << 20
BLOCKS = 6 * PER_SEGMENT
FRESH = 8
ERRORS = ("errno:EIO", "errno:ENOSPC", "errno:EPERM", "errno:EINVAL")
MOVES = [f"os.p{way}v={what}" for way in ("read", "write") for what in ("short", "flip")]
FAULTS = [f"{call}={error}" for call in (*DISK, *CATALOG) for error in ERRORS] + MOVES
ENDS = (Outcome.STORED, Outcome.PRESENT, Outcome.FULL, Outcome.FAILED)


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultLayer]:
    yield FaultLayer(monkeypatch.setattr)
    failpoint.disarm()


def sometimes(fault: str, share: float) -> str:
    call, _, action = fault.partition("=")
    return f"{call}%{share}={action}"


def right(tier: DiskTier, disk: Disks, index: int) -> None:
    """What comes is right, whatever does not."""
    outcome, found = get(tier, disk.namespace, name(index))
    assert outcome is not Outcome.HIT or found == payload_of(name(index), disk.namespace.id)


def work(tier: DiskTier, disk: Disks, dice: random.Random) -> None:
    """Puts that evict, and gets of what is there."""
    for index in range(BLOCKS):
        assert put(tier, disk.namespace, name(index)) in ENDS
        right(tier, disk, dice.randrange(index + 1))
        if index % 50 == 0:
            try:
                tier.sync()
            except (OSError, TerraceError):
                continue


@pytest.mark.fault(1)
@pytest.mark.fault(10)
@pytest.mark.fault(37)
@pytest.mark.breaks("calls still fail while the tier is closed")
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_call_fails_the_disk_tier_serves_right_bytes_or_none_and_recovers(
    tmp_path: Path, layer: FaultLayer, fault: str
) -> None:
    disk, dice = Disks(tmp_path), random.Random(fault)
    random.seed(fault)
    with closing(disk.open(CAP)) as tier:
        failpoint.arm(sometimes(fault, 0.2))
        work(tier, disk, dice)
        failpoint.disarm()
        tier.check()
        for index in range(BLOCKS):  # what is damaged is found out, and not listed any more
            right(tier, disk, index)
        verified(tier, disk.namespace, map(name, range(BLOCKS)))
        fresh = list(map(name, range(BLOCKS, BLOCKS + FRESH)))
        assert [put(tier, disk.namespace, id) for id in fresh] == [Outcome.STORED] * FRESH
        assert verified(tier, disk.namespace, fresh) == FRESH
        tier.check()
        failpoint.arm(sometimes(fault, 0.5))
    failpoint.disarm()
    with closing(disk.open(CAP)) as tier:
        tier.rebuild()
        tier.check()
        verified(tier, disk.namespace, map(name, range(BLOCKS)))


@pytest.mark.fault(1)
@pytest.mark.parametrize("fault", [f"{call}=errno:EIO" for call in (*DISK, *CATALOG)] + MOVES)
def test_what_cannot_be_opened_or_used_now_is_there_later(tmp_path: Path, layer: FaultLayer, fault: str) -> None:
    """Every call fails, and did so: a fault that never comes would prove nothing."""
    disk = Disks(tmp_path)
    with closing(disk.open(CAP)) as tier:
        for index in range(BLOCKS):
            put(tier, disk.namespace, name(index))
        listed = set(index for index in range(BLOCKS) if tier.leading(disk.namespace, [name(index)]))
    failpoint.arm(fault)
    try:
        with closing(disk.open(LARGER)) as tier:
            for index in range(BLOCKS, 3 * BLOCKS):
                put(tier, disk.namespace, name(index))
                get(tier, disk.namespace, name(index))
                listed &= {index for index in listed if tier.leading(disk.namespace, [name(index)])}
    except (OSError, TerraceError):
        pass
    failpoint.disarm()
    call, _, action = fault.partition("=")
    assert f"{call} {action if action in ('short', 'flip') else 'error'}" in layer.fired
    with closing(disk.open(LARGER)) as tier:
        tier.rebuild()
        if "read" not in call:
            assert {index for index in listed if tier.leading(disk.namespace, [name(index)])} == listed
        for index in range(3 * BLOCKS):
            right(tier, disk, index)
        verified(tier, disk.namespace, map(name, range(BLOCKS)))
        tier.check()


@pytest.mark.long
@pytest.mark.parametrize("code", ["EPERM"])
@pytest.mark.parametrize("call", [call for call in CALLS if call in (*DISK, *CATALOG, *HOST)])
def test_a_daemon_that_cannot_start_says_why_in_a_line_and_starts_when_it_can(
    shm_dir: Path, tmp_path: Path, call: str, code: str
) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        with daemon.client() as client:
            keys = client.chain(1, 4)
            assert client.put(keys, durable=True).durable == 4
        daemon.kill()
        daemon.program = ["-m", "terracekv.tests.faulty_daemon"]
        daemon.failpoints = f"{call}=errno:{code}"
        since = len(daemon.tail(10_000))
        try:
            daemon.start()
        except AssertionError:
            assert daemon.wait() == 1
        said = daemon.tail(10_000)[since:]
        assert "Traceback" not in said
        if daemon.alive:
            daemon.kill()
        else:
            assert "terracekv: " in said.splitlines()[-1]
        daemon.failpoints = ""
        daemon.start()
        with daemon.client() as client:
            assert client.get(keys).blocks == 4

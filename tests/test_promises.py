"""The look at promises after every test finds what is broken, and nothing else."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from terracekv.tests import promises
from terracekv.tests.blocks import name, put
from terracekv.tests.disks import Disks
from terracekv.tests.hosts import BLOCK, host_in
from terracekv.tiers import failpoint
from terracekv.tiers.tier import PAGE


def test_a_sound_tier_closes_without_a_word(shm_dir: Path, tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    with host_in(shm_dir) as host, closing(disks.open()) as disk:
        assert put(host, host.namespace, name(1)) == put(disk, disks.namespace, name(1)) == "stored"
    assert promises.taken() == []


def test_other_bytes_in_a_listed_slot_are_found(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        put(host, host.namespace, name(1))
        (slot,) = host.held(host.namespace, [name(1)])
        host.payload(slot, BLOCK)[7] ^= 1
        host.release([slot])
    (found,) = promises.taken()
    assert name(1).hex() in found


def test_a_lease_that_nobody_holds_is_found(shm_dir: Path) -> None:
    with host_in(shm_dir) as host:
        put(host, host.namespace, name(1))
        (slot,) = host.held(host.namespace, [name(1)])
        host._leases[slot.record + 128] = 1
        host.close()
        host._leases.clear()
        (found,) = promises.taken()
        assert "leases" in found
        host.check = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [50, PAGE + 77], ids=["header", "payload"])
def test_a_listed_record_that_is_damaged_is_found(tmp_path: Path, at: int) -> None:
    disks = Disks(tmp_path)
    with closing(disks.open()) as disk:
        put(disk, disks.namespace, name(1))
        file = os.open(disks.files()[0], os.O_RDWR)
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1]), at)
        os.close(file)
    assert len(promises.taken()) == 1


def test_a_medium_that_fails_has_broken_no_promise(tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    with closing(disks.open()) as disk:
        put(disk, disks.namespace, name(1))
        failpoint.arm("segment.read=errno:EIO")
        disk.close()
        failpoint.disarm()
    assert promises.taken() == []

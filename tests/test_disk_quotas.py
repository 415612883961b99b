"""How disk keeps a tenant within its quota beside others, and beside its own blocks that are on their way."""

import shutil
import threading
from contextlib import closing

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, in_threads
from terracekv.tests.disks import Disks
from terracekv.tests.test_quotas import RECORD, STORED, disk, fill, listed, owned
from terracekv.tiers.entry import Place

__all__ = ["disk"]


def test_who_looks_for_the_oldest_blocks_of_one_tenant_holds_up_no_other(
    disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be far apart, among all that the disk holds."""
    red, blue = (owned(disk.namespaces, n, tenant, BLOCK_BYTES) for n, tenant in ((11, "red"), (12, "blue")))
    looking, goes_on = threading.Event(), threading.Event()
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": RECORD, "blue": RECORD}
        fill(tier, red, 0, 1)
        oldest = tier.shares._oldest

        def slow(tenant: str, wanted_bytes: int) -> list[Place]:
            if tenant == "red":
                looking.set()
                assert goes_on.wait(30)
            return oldest(tenant, wanted_bytes)

        def others() -> None:
            assert looking.wait(30)
            assert fill(tier, blue, 10, 12) == [STORED] * 2
            goes_on.set()

        monkeypatch.setattr(tier.shares, "_oldest", slow)
        in_threads(lambda: fill(tier, red, 1, 2), others)
        assert listed(tier, red) == [1] and listed(tier, blue) == [11]
        tier.check()


def test_a_block_for_which_there_is_no_room_beside_those_on_their_way_evicts_nothing(disk: Disks) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": 2 * RECORD}
        fill(tier, red, 0, 1)
        with tier.shares.admitted(red, RECORD) as first:
            with tier.shares.admitted(red, 2 * RECORD) as second:
                assert first and not second
            assert listed(tier, red) == [0]
        tier.check()


def test_blocks_that_a_rebuild_lists_behind_those_looked_at_make_room_too(disk: Disks) -> None:
    """They lie before those that were put while it was not done, which were the oldest that were known."""
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        assert fill(tier, red, 0, 4) == [STORED] * 4
    shutil.rmtree(disk.path / "catalog")
    with closing(disk.open()) as tier:
        assert tier.rebuilding
        tier.shares.limits = {"red": 2 * RECORD}
        assert fill(tier, red, 4, 7) == [STORED] * 3
        assert listed(tier, red) == [5, 6]
        assert tier.rebuild() == 4 and listed(tier, red) == [0, 1, 2, 3, 5, 6]
        assert fill(tier, red, 7, 8) == [STORED]
        assert tier.shares.of("red") <= 2 * RECORD
        tier.check()

"""Hot blocks and the share of the bus that they may take; time is given, never waited for."""

from terracekv.tiers.heat import BusShare, Heat


def test_a_block_is_hot_after_so_many_uses_within_the_window() -> None:
    heat = Heat(uses=3, window_s=10)
    assert [heat.used([b"a"], now) for now in (0, 1, 2)] == [[], [], [b"a"]]
    assert heat.used([b"b", b"a"], 3) == [b"a"]


def test_uses_of_the_window_before_still_count_and_older_ones_do_not() -> None:
    heat = Heat(uses=2, window_s=10)
    heat.used([b"a"], 0)
    assert heat.used([b"a"], 12) == [b"a"]
    heat.used([b"b"], 19)
    assert heat.used([b"b"], 31) == []
    heat.used([b"c"], 32)
    assert heat.used([b"c"], 500) == []


def test_a_chain_used_once_is_not_hot_by_having_many_blocks() -> None:
    heat = Heat(uses=2, window_s=10)
    assert heat.used([bytes([n]) for n in range(200)], 0) == []


def test_memory_is_bounded_and_known_blocks_go_on_being_counted() -> None:
    heat = Heat(uses=2, window_s=10, blocks_max=5)
    heat.used([bytes([n]) for n in range(100)], 0)
    assert heat.used([bytes([n]) for n in range(100)], 1) == [bytes([n]) for n in range(5)]
    assert len(heat._now) == 5


def test_copies_take_no_more_than_their_share_of_time() -> None:
    share = BusShare(0.1, window_s=1.0)
    spent, now = 0.0, 0.0
    while now < 100:
        if share.allows(now):
            share.spent(0.05)
            spent += 0.05
        now += 0.01
    assert 9.0 < spent < 10.5


def test_a_rest_does_not_save_up_more_than_one_windows_share() -> None:
    share = BusShare(0.1, window_s=1.0)
    assert share.allows(0)
    assert share.allows(1000)
    share.spent(0.1)
    assert not share.allows(1000)
    assert share.allows(1000.01)

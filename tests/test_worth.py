"""The gate before a tier that is slower than computing."""

import pytest

from terracekv.tiers.worth import MARGIN, Worth

TOKENS, SIZE = 2048, 64 << 20
"""Computed in 2 s at 1024 tokens/s."""


@pytest.mark.fault(128)
@pytest.mark.parametrize(
    ("bytes_per_s", "rtt_s", "offered"), [(64 << 20, 0.01, True), (8 << 20, 0.01, False), (64 << 20, 3.0, False)]
)
def test_a_prefix_is_offered_only_when_loading_it_is_faster(bytes_per_s: float, rtt_s: float, offered: bool) -> None:
    assert Worth(1024).load(TOKENS, SIZE, bytes_per_s, rtt_s) is offered


@pytest.mark.fault(128)
def test_short_prefixes_suffer_from_latency_and_long_ones_do_not() -> None:
    worth = Worth(1024)
    assert not worth.load(256, SIZE // 8, 1 << 30, 0.5)
    assert worth.load(TOKENS * 8, SIZE * 8, 1 << 30, 0.5)


@pytest.mark.fault(128)
def test_around_the_border_the_answer_of_before_stands() -> None:
    worth = Worth(1024)
    border = SIZE / 2.0
    slow, fast = border / (MARGIN * 0.95), border * (MARGIN * 0.95)
    assert [worth.load(TOKENS, SIZE, rate, 0.0) for rate in (slow, fast, slow)] == [True] * 3
    assert not worth.load(TOKENS, SIZE, border / (MARGIN * 1.05), 0.0)
    assert [worth.load(TOKENS, SIZE, rate, 0.0) for rate in (slow, fast, slow)] == [False] * 3
    assert worth.load(TOKENS, SIZE, border * (MARGIN * 1.05), 0.0)


def test_without_a_declared_or_measured_rate_everything_is_offered() -> None:
    assert Worth(None).load(TOKENS, SIZE, 1.0, 100.0)
    assert Worth(1024).load(TOKENS, SIZE, None, None)

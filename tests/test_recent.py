"""The memory of what was lately asked: right, and never larger than it says."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from terracekv.daemon import recent
from terracekv.daemon.recent import LOOKUPS, PERIOD_S, PERIODS, Recent
from terracekv.daemon.stats import Found
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import Miss

SPACE = Namespace(b"a" * 32, 1, 0, "m", "r", "bf16", bytes(32), 16, 1, 4096)
HALF = Found(2, {"host": 1, "disk": 2}, {"host": 1, "disk": 1}, 8192, 1.5, 2, Miss.EVICTED)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds since 1970, to be moved by the test."""
    now = [1_000_000.0 * PERIOD_S]
    monkeypatch.setattr(recent, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    yield now


def test_what_is_asked_in_one_period_adds_up_and_a_quiet_one_is_left_out(clock: list[float]) -> None:
    memory = Recent()
    for seconds in (0, PERIOD_S - 1, 3 * PERIOD_S):
        clock[0] = 1_000_000.0 * PERIOD_S + seconds
        memory.add(SPACE, 4, HALF)
    first, second = memory.all.history()
    assert first | {"at": 0} == {
        "at": 0,
        "lookups": 2,
        "asked_blocks": 8,
        "asked_tokens": 128,
        "matched_blocks": {"host": 2, "disk": 2},
        "matched_tokens": {"host": 32, "disk": 32},
    }
    assert (second["at"] - first["at"], second["lookups"]) == (3 * PERIOD_S, 1)
    assert memory.all.history(1) == [second]


def test_a_clock_that_is_set_back_moves_nothing(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Recent()
    memory.add(SPACE, 4, HALF)
    monkeypatch.setattr(recent, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: clock[0]))
    memory.add(SPACE, 4, HALF)
    assert len(memory.all.history()) == 1


def test_rows_after_a_number_are_the_new_ones(clock: list[float]) -> None:
    memory = Recent()
    for _ in range(5):
        memory.add(SPACE, 4, HALF)
    assert [row["number"] for row in memory.all.since(3)] == [4, 5] and memory.all.since(5) == []
    (row,) = memory.all.since(4)
    assert row["first_miss"] == {"index": 2, "reason": "evicted"} and row["split"] == {"host": 1, "disk": 1}


def test_a_tenant_that_was_forgotten_meanwhile_begins_anew(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "TENANTS_MAX", 1)
    memory = Recent()
    red, blue = replace(SPACE, tenant="red"), replace(SPACE, tenant="blue")
    for space in (red, red, blue, red):
        memory.add(space, 4, HALF)
    assert [row["number"] for row in memory.of("red").since(2)] == [1]


def test_it_is_of_a_bounded_size_and_forgets_who_asked_longest_ago(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "TENANTS_MAX", 2)
    monkeypatch.setattr(recent, "NAMESPACES_MAX", 2)
    memory = Recent()
    spaces = [replace(SPACE, id=bytes([n]) * 32, tenant=f"t{n}") for n in range(3)]
    for space in (spaces[0], spaces[1], spaces[0], spaces[2]):
        memory.add(space, 4, HALF)
    assert [len(memory.of(space.tenant).lookups) for space in spaces] == [2, 0, 1]
    assert [memory.use(space.id).lookups for space in spaces] == [2, 0, 1]
    for _ in range(PERIODS + LOOKUPS):
        clock[0] += PERIOD_S
        memory.add(SPACE, 4, HALF)
    assert (len(memory.all.lookups), len(memory.all.periods)) == (LOOKUPS, PERIODS)
    assert (len(memory._tenants), len(memory._uses)) == (2, 2)


def test_a_namespace_that_nobody_knows_is_told_by_the_name_that_was_asked_for(clock: list[float]) -> None:
    memory = Recent()
    memory.add(Namespace(b"", 0, 0, model="no/such"), 3, Found(0, {}, {}, 0, 0.0, 0, Miss.UNKNOWN_NAMESPACE))
    (row,) = memory.all.since(0)
    assert (row["model"], row["namespace_id"], row["tenant"]) == ("no/such", None, None)
    assert not memory._uses

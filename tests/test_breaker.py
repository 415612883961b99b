"""The circuit breaker and the limit on calls at once."""

import threading
import time

import pytest

from terracekv.tests.blocks import in_threads
from terracekv.tiers.breaker import Breaker, NotTried, State, Throttle
from terracekv.tiers.errors import TierDown

WHY = TierDown("no answer")


def state_of(breaker: Breaker) -> State:
    return breaker.state


def closed(breaker: Breaker) -> Breaker:
    """After a first trial that went well."""
    breaker.begin_trial()
    breaker.end_trial(None)
    return breaker


def test_until_a_first_trial_it_refuses_and_nobody_else_is_told_to_try() -> None:
    breaker = Breaker()
    with pytest.raises(NotTried, match="not answered yet"):
        breaker.check()
    assert state_of(breaker) is State.OPEN and not breaker.opened.is_set()
    assert state_of(closed(breaker)) is State.CLOSED and breaker.times_opened == 0
    breaker.check()


def test_a_first_trial_that_fails_is_an_opening() -> None:
    breaker = Breaker()
    breaker.begin_trial()
    breaker.end_trial(WHY)
    assert state_of(breaker) is State.OPEN and breaker.opened.is_set() and breaker.times_opened == 1
    assert breaker.reason == "no answer" and breaker.pause_s == 0.5


def test_it_opens_after_failures_in_a_row_and_refuses_at_once() -> None:
    breaker = closed(Breaker(failures_max=3))
    for _ in range(2):
        breaker.failed(WHY)
    breaker.worked()
    for _ in range(2):
        breaker.failed(WHY)
        breaker.check()
    assert state_of(breaker) is State.CLOSED
    breaker.failed(WHY)
    assert state_of(breaker) is State.OPEN and breaker.opened.is_set()
    with pytest.raises(NotTried, match="no answer"):
        breaker.check()
    assert breaker.refused == 1


def test_only_a_trial_closes_it_and_calls_are_refused_meanwhile() -> None:
    breaker = closed(Breaker())
    breaker.trip(WHY)
    breaker.worked()
    assert state_of(breaker) is State.OPEN
    breaker.begin_trial()
    assert state_of(breaker) is State.HALF_OPEN
    with pytest.raises(NotTried):
        breaker.check()
    breaker.end_trial(None)
    assert state_of(breaker) is State.CLOSED and breaker.reason is None and not breaker.opened.is_set()
    breaker.check()


def test_failures_of_before_do_not_count_once_a_trial_has_closed_it() -> None:
    breaker = closed(Breaker(failures_max=3))
    for _ in range(3):
        breaker.failed(WHY)
    for _ in range(2):
        closed(breaker).failed(WHY)
        assert state_of(breaker) is State.CLOSED
        breaker.trip(WHY)


def test_trials_that_fail_become_rarer_up_to_a_limit_and_start_anew() -> None:
    breaker = closed(Breaker(pause_s_min=0.5, pause_s_max=4.0))
    breaker.trip(WHY)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.pause_s)
        breaker.begin_trial()
        breaker.end_trial(WHY)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    breaker.begin_trial()
    breaker.end_trial(None)
    breaker.trip(WHY)
    assert breaker.pause_s == 0.5 and breaker.times_opened == 2


def test_calls_wait_for_their_turn_and_never_exceed_the_limit() -> None:
    throttle = Throttle(3)
    running = seen = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, seen
        for _ in range(20):
            with throttle.slot(time.monotonic() + 30):
                with lock:
                    running += 1
                    seen = max(seen, running)
                time.sleep(0.0005)
                with lock:
                    running -= 1

    in_threads(*[work] * 8)
    assert seen == 3 and throttle.running == 0


def test_no_turn_before_the_deadline_is_an_error_and_takes_no_turn() -> None:
    throttle = Throttle(1)
    with throttle.slot(time.monotonic() + 30):
        with pytest.raises(TierDown, match="no turn"), throttle.slot(time.monotonic() + 0.01):
            pass
        assert throttle.running == 1
    assert throttle.running == 0


def test_slow_down_halves_the_limit_once_a_second_and_success_raises_it_again() -> None:
    now = 0.0
    throttle = Throttle(16, lambda: now)
    for _ in range(10):
        throttle.slow()
    assert throttle.limit == 8
    for second in range(1, 10):
        now = float(second)
        throttle.slow()
    assert throttle.limit == 1
    for _ in range(200):
        throttle.worked()
    assert throttle.limit == 16

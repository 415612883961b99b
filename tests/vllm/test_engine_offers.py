"""What is offered to the scheduler, when, and why no more: waits, leases, and whether a load is worth it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from terracekv.connector import vllm_start
from terracekv.connector.client import Client
from terracekv.connector.leases import Held
from terracekv.connector.vllm_lookups import Answer
from terracekv.connector.vllm_worth import Prefill, Worth
from terracekv.tests.harness import Daemon, until
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, Pool, Request, prompt

Make = Callable[..., Engine]


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def answered(engine: Engine, request: Request, computed: int = 0) -> int | None:
    """What the scheduler is told once the lookup has come back."""
    assert engine.half is not None
    tracked = engine.half._requests[request.request_id]
    until(lambda: tracked.answer is None or tracked.answer.found is not None, "the lookup comes back")
    return engine.half.matched(request, computed)


@pytest.fixture
def warm(engine: Make) -> Iterator[Engine]:
    """An engine whose daemon has 10 blocks of prompt 0."""
    with engine() as first:
        first.ask(prompt("first", 10 * BLOCK))
        first.idle()
        yield first


def test_the_last_token_is_never_offered_and_no_half_page(warm: Engine) -> None:
    for tokens, offered in {1: 0, 4: 0, 5: 0, 8: 4, 9: 8, 13: 8, 80: 76, 81: 80, 200: 80}.items():
        request = warm.add(prompt(f"{tokens}", tokens))
        assert answered(warm, request) == offered
        warm.abort(request)


def test_an_offer_is_the_same_however_often_it_is_asked_for_and_counts_from_what_vllm_has(warm: Engine) -> None:
    request = warm.add(prompt("a", 60))
    assert [answered(warm, request, computed) for computed in (0, 8, 0, 32, 56, 60, 0)] == [56, 48, 56, 24, 0, 0, 56]
    assert _leases(warm) == 1
    warm.abort(request)


def test_a_lease_ends_with_the_plan_the_request_and_its_time(warm: Engine, engine: Make) -> None:
    assert warm.half is not None
    aborted = warm.add(prompt("a", 60))
    answered(warm, aborted)
    until(lambda: _leases(warm) == 1, "it is leased")
    warm.abort(aborted)
    until(lambda: _leases(warm) == 0, "an abort releases it")
    shrunk = warm.add(prompt("b", 60))
    answered(warm, shrunk)
    shrunk.tables = [[]]
    warm.half.allocated(shrunk, _blocks(shrunk), 0)
    until(lambda: _leases(warm) == 0, "a plan that needs none releases it")
    warm.abort(shrunk)
    warm.ask(prompt("c", 60))
    until(lambda: _leases(warm) == 0, "a load that is over releases it")
    with engine(lease_s=1, wait_ms=900, load_deadline_ms=0) as hasty:
        hasty.add(waiting := prompt("d", 60))
        until(lambda: _leases(hasty) == 0, "one that nobody comes for expires")
        hasty.abort(waiting)


def test_a_lookup_that_takes_longer_than_its_budget_is_not_waited_for(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with engine(clock=clock, lookup_budget_ms=20) as first:
        assert first.half is not None
        monkeypatch.setattr(first.half._lookups, "_find", lambda *_: None)
        request = first.add(prompt("a", 60))
        clock.now = time.monotonic()
        assert first.half.matched(request, 0) is None
        clock.now += 1
        assert first.half.matched(request, 0) == 0
        assert first.half.take_stats()["skipped/deadline"] == 1
        first.abort(request)


@pytest.mark.fault(129)
def test_a_hit_of_a_few_tokens_is_not_fetched(engine: Make) -> None:
    with engine(min_tokens=32) as first:
        first.ask(prompt("a", 80))
        first.idle()
        small, large = first.add(prompt("b", 30)), first.add(prompt("c", 33))
        assert (answered(first, small), answered(first, large)) == (0, 32)
        assert answered(first, large, 8) == 0
        assert first.half is not None and first.half.take_stats()["skipped/too_few"] == 2
        first.abort(small)
        first.abort(large)


@pytest.fixture
def demoted(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that has the first 4 of 10 blocks of prompt 0 in host, and the others on disk only."""
    with Daemon(shm_dir, tmp_path, host__prefault="false") as daemon:
        with Engine(daemon.socket) as first:
            first.ask(prompt("a", 80))
            first.idle()
        until(lambda: daemon.http("/v1/status")[1]["tiers"]["disk"]["blocks"] == 10, "all is on disk")
        daemon.kill()
        for path in shm_dir.iterdir():
            path.unlink()
        daemon.start()
        with Engine(daemon.socket) as second:
            second.ask(prompt("b", 33))
        yield daemon


@pytest.mark.fault(129)
def test_what_is_on_disk_is_waited_for_and_no_more_of_it_than_one_likes(demoted: Daemon) -> None:
    for most, loaded in {2 * BLOCK: 6 * BLOCK, 0: 10 * BLOCK}.items():
        with Engine(demoted.socket, wait_tokens_max=most) as engine:
            asked = prompt("a", 81, answer_tokens=1, kv_transfer_params={"terracekv": {"write": False}})
            engine.ask(asked)
            assert asked.answer == truth(asked) and asked.loaded_tokens == loaded


@pytest.mark.fault(129)
def test_blocks_that_do_not_come_up_in_time_cut_the_prefix(demoted: Daemon) -> None:
    clock = Clock()
    with Engine(demoted.socket, clock=clock, wait_ms=1000) as hasty:
        assert hasty.half is not None
        request = hasty.add(prompt("a", 81))
        tracked = hasty.half._requests["a"]
        until(lambda: tracked.answer is not None and tracked.answer.held is not None, "leased")
        answer = tracked.answer
        assert answer is not None and answer.held is not None
        until(lambda: answer.held is not None and not answer.held.pending, "all of it is up")
        answer.held.pending |= {6, 7}  # as if the disk were slow
        until(lambda: answer.found is not None, "found")
        clock.now = answer.found or 0.0
        assert hasty.half.matched(request, 0) is None, "worth waiting for"
        clock.now += 2
        assert hasty.half.matched(request, 0) == 6 * BLOCK
        answer.held.failed |= {3}
        clock.now -= 2
        assert hasty.half.matched(request, 0) == 3 * BLOCK, "what has failed is not waited for"
        hasty.abort(request)


@pytest.mark.parametrize("trouble", ["answers do not last", "answers do not come", "blocks do not come up"])
def test_whatever_happens_a_request_waits_no_longer_than_its_time_in_all(
    warm: Engine, engine: Make, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    clock = Clock()
    with engine(clock=clock, lookup_budget_ms=500, wait_ms=1500) as second:
        half = second.half
        assert half is not None
        rising = Held(None, 1, 7, {0})  # type: ignore[arg-type]
        answers = {
            "answers do not come": lambda: Answer(clock.now),
            "answers do not last": lambda: Answer(clock.now, clock.now, 7, held=rising),
            "blocks do not come up": lambda: Answer(clock.now, clock.now, 7, held=rising),
        }
        lasting_s = 0.0 if trouble == "answers do not last" else 0.4
        monkeypatch.setattr(half._lookups, "ask", lambda *_: answers[trouble]())
        monkeypatch.setattr(half._lookups, "lasts", lambda answer: clock.now < answer.asked + lasting_s)
        request = second.add(prompt("a", 60))
        began = clock.now
        while half.matched(request, 0) is None:
            clock.now += 0.1
            assert clock.now < began + 3, "it waits for ever"
        assert half.take_stats()["skipped/deadline"] == 1
        monkeypatch.undo()
        second.abort(request)


@pytest.mark.fault(128)
def test_what_loads_slower_than_it_is_computed_is_not_offered_and_near_the_border_answers_do_not_tremble() -> None:
    prefill = Prefill()
    worth = Worth(prefill)
    assert worth.load(1000, 1e9), "nothing measured yet"
    prefill.begin({"a": 1000, "b": 1}, 0.0)
    prefill.end(1.0)
    assert prefill.tokens_per_s == 1000
    assert [worth.load(1000, ms) for ms in (900, 1100, 1200, 1300)] == [True, True, True, False]
    assert [worth.load(1000, ms) for ms in (1200, 1000, 850, 790, 1200)] == [False, False, False, True, True]


@pytest.mark.fault(128)
def test_the_speed_of_prefill_is_measured_over_steps_that_were_one() -> None:
    prefill = Prefill()
    for scheduled, seconds in (
        ({"a": 1, "b": 1}, 5.0),
        ({"a": 63}, 5.0),
        ({str(n): 1 for n in range(20)} | {"a": 80}, 5.0),
    ):
        prefill.begin(scheduled, 0.0)
        prefill.end(seconds)
    assert prefill.tokens_per_s is None
    prefill.begin({"a": 500}, 10.0)
    prefill.end(11.0)
    prefill.begin({"a": 500}, 10.5)  # steps that overlap: the second began before the first ended
    prefill.end(12.0)
    assert prefill.tokens_per_s == 500
    assert Prefill(declared=7.0).tokens_per_s == 7.0


@pytest.mark.fault(128)
def test_an_engine_that_computes_faster_than_the_daemon_loads_computes(engine: Make) -> None:
    with engine() as first:
        first.ask(prompt("a", 80))
    with engine(prefill_tokens_per_s=1e12) as fast:
        asked = prompt("b", 80)
        assert fast.ask(asked) == [truth(asked)]
        assert asked.loaded_tokens == 0
        assert fast.half is not None and fast.half.take_stats()["skipped/too_slow"] == 1


@pytest.mark.fault(30)
def test_a_block_of_which_one_rank_has_stored_its_part_is_not_there(engine: Make) -> None:
    with engine(ranks=2) as first:
        asked = first.add(prompt("a", 50))
        worker = first.ranks[1].half
        store, worker.store = worker.store, lambda step, wait=False: worker._stored_nothing(step)  # type: ignore
        worker._stored_nothing = lambda step: [worker._stored(one, "full") for one in step.stores]  # type: ignore
        first.run()
        first.idle()
        worker.store = store  # type: ignore[method-assign]
    with engine(ranks=2) as second:
        again = prompt("b", 50)
        assert second.ask(again) == [truth(again, ranks=2)]
        assert again.loaded_tokens == 0 and asked.answer == again.answer


@pytest.mark.fault(94)
def test_a_cache_that_all_ranks_hold_alike_is_stored_once_and_read_by_all(daemon: Daemon, engine: Make) -> None:
    def blocks() -> int:
        return int(daemon.http("/v1/status")[1]["tiers"]["host"]["blocks"])

    before = blocks()
    with engine(ranks=4, replicas=4) as first:
        first.ask(prompt("a", 80))
        first.idle()
        assert blocks() - before == 10
        again = prompt("b", 80)
        assert first.ask(again) == [truth(again, ranks=4, replicas=4)]
        assert again.loaded_tokens == 76
        assert [rank.half.take_stats()["stores"] > 0 for rank in first.ranks] == [True, False, False, False]


@pytest.mark.fault(126)
def test_four_ranks_of_different_speed_do_the_same(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Client):
        def load(self, *args: Any) -> Any:
            time.sleep(numbers.random() / 20)
            return super().load(*args)

    numbers = Random(126)

    monkeypatch.setattr(vllm_start, "Client", Slow)
    with engine(ranks=4, pages=500) as first:
        first.ask(*(prompt(f"{n}", 40, seed=n) for n in range(6)))
        first.idle()
        again = [prompt(f"{n} again", 40, seed=n) for n in range(6)]
        assert first.ask(*again) == [truth(request, ranks=4) for request in again]
        assert all(request.loaded_tokens == 36 for request in again)


@pytest.mark.fault(60)
def test_two_engines_in_one_process_do_not_meet(engine: Make) -> None:
    with engine() as one, engine(revision="another") as other:
        first, second = one.add(prompt("same id", 50)), other.add(prompt("same id", 50, seed=1))
        for _ in range(50):
            one.step()
            other.step()
        one.run()
        other.run()
        assert first.answer == truth(first) and second.answer == truth(second)


def test_pages_that_stores_read_are_not_reused_when_their_request_is_gone() -> None:
    pool = Pool(10)
    taken = pool.take(3)
    assert taken is not None
    pool.touch([pool.blocks[page] for page in taken])
    pool.free_blocks([pool.blocks[page] for page in taken])
    assert not set(taken) & set(pool.free)


def _leases(engine: Engine) -> int:
    assert engine.half is not None
    return len(engine.half._lookups._session._held)


def _blocks(request: Request) -> Any:
    class Blocks:
        def get_block_ids(self) -> list[list[int]]:
            return request.tables

    return Blocks()

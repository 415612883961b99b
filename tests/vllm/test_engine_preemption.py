"""Any order of arrivals, preemptions, aborts and refused stores: right answers, and no page held in the end."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terracekv.connector import vllm_start
from terracekv.connector.client import Client, Copy, Stored
from terracekv.connector.vllm_plan import Results, Store
from terracekv.connector.vllm_scheduler import Shape
from terracekv.connector.vllm_stores import Stores
from terracekv.tests.harness import Daemon
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, PAGE, Pool, Request, prompt

_models = itertools.count()
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("refuse"), st.integers(0, 1), st.just(0)),
    ),
    max_size=25,
)


class Moody(Client):
    refuses = False

    def store(self, keys: list[bytes], gather: Copy, durable: bool = False, *, first: int = 0) -> Stored:  # type: ignore[override]
        if Moody.refuses:
            return Stored(refused=len(keys), why="full")
        return super().store(keys, gather, durable, first=first)


@pytest.mark.fault(17)
@pytest.mark.fault(18)
@pytest.mark.parametrize(
    "kind", [{}, {"windows": (None, 16)}, {"older": True}], ids=["full attention", "hybrid", "an older vLLM"]
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
def test_whatever_happens_answers_are_right(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], acts: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr(vllm_start, "Client", Moody)
    Moody.refuses = False
    requests: list[Request] = []
    with Engine(daemon.socket, model=f"preemption {next(_models)}", pages=50, chunk=24, **kind) as engine:
        for act, number, tokens in acts:
            if act == "add":
                # Few seeds and many lengths: prefixes are shared all the time.
                requests.append(engine.add(prompt(f"{len(requests)}", tokens, seed=number, answer_tokens=number + 1)))
            elif act == "step":
                for _ in range(number):
                    engine.step()
            elif act == "preempt" and engine.running:
                engine.preempt(engine.running[number % len(engine.running)])
            elif act == "abort" and requests:
                if (gone := requests[number % len(requests)]).status not in ("finished", "aborted"):
                    engine.abort(gone)
            elif act == "refuse":
                Moody.refuses = bool(number)
        engine.idle()
        for request in requests:
            if request.status != "aborted":
                assert request.answer == truth(request, **kind)
        assert engine.half is not None and not engine.half.stores._held and not engine.half._leaving


def test_more_requests_than_there_are_pages_for_all_come_to_their_end(daemon: Daemon) -> None:
    with Engine(daemon.socket, model="crowded", pages=40, chunk=32) as engine:
        requests = [prompt(f"{n}", 50, seed=n % 3, answer_tokens=30) for n in range(8)]
        assert engine.ask(*requests) == [truth(request) for request in requests]
        assert any(request.loaded_tokens for request in requests)


def test_pages_are_waited_for_only_where_a_store_is_the_last_to_hold_one() -> None:
    pool = Pool(20)
    stores = Stores(Shape(page_tokens=(PAGE,), block_tokens=BLOCK, align=PAGE), 1.0)
    stores.bind(pool)
    pages = pool.take(4)
    assert pages is not None and not stores.frees
    of_request = [pool.blocks[number] for number in pages]
    for job in (b"a", b"b"):  # two requests that have the same pages
        assert isinstance(stores.plan("a", [job * 32, job * 16], 0, [pages], 0.0), Store)
    assert stores.under_way == 2 and not stores.frees, "the request goes on, and keeps them"
    pool.free_blocks(of_request[3:])
    assert stores.frees, "the last page is held by the two stores alone"
    list(stores.done(Results(stored=Counter({1: 1}))))
    assert stores.frees
    list(stores.done(Results(stored=Counter({2: 1}))))
    assert not stores.frees and len(pool.free) == 16

"""Both halves of the vLLM connector, between a miniature of vLLM and a real daemon: what is computed once is loaded."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from terracekv.tests.harness import Daemon, until
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, PAGE, Request, prompt

Make = Callable[..., Engine]
KINDS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"ranks": 2},
    "a replicated cache": {"ranks": 2, "replicas": 2},
    "a sliding window beside full attention": {"windows": (None, 24)},
    "a vLLM before 0.30": {"older": True},
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 3, 200])
def test_what_one_engine_computed_another_loads(engine: Make, settings: dict[str, Any], tokens: int) -> None:
    expected = truth(prompt("0", tokens), **settings)
    with engine(**settings) as first:
        assert first.ask(prompt("a", tokens)) == [expected]
    with engine(**settings) as second:
        again = prompt("b", tokens)
        assert second.ask(again) == [expected]
    # A whole prompt is stored to its last block, and of that all but the last token's page is loaded.
    assert again.loaded_tokens == min(tokens // BLOCK * BLOCK, (tokens - 1) // PAGE * PAGE)


@pytest.mark.parametrize("local", [PAGE, BLOCK, 3 * PAGE, 9 * BLOCK, 10 * BLOCK])
def test_only_what_vllm_has_not_got_itself_is_loaded_from_the_midst_of_a_block_too(engine: Make, local: int) -> None:
    with engine() as first:
        first.ask(prompt("a", 10 * BLOCK + 1))
    with engine() as second:
        again = prompt("b", 10 * BLOCK + 1, local=local)
        assert second.ask(again) == [truth(again)]
        assert again.loaded_tokens == 10 * BLOCK - local


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_block_that_a_window_passed_over_before_it_was_whole_is_not_stored(engine: Make, chunk: int) -> None:
    windows = (None, 2)
    with engine(windows=windows, chunk=chunk) as first:
        asked = prompt("a", 5 * BLOCK)
        assert first.ask(asked) == [truth(asked, windows=windows)]
    with engine(windows=windows) as second:
        again = prompt("b", 5 * BLOCK)
        assert second.ask(again) == [truth(again, windows=windows)]
        assert bool(again.loaded_tokens) == (chunk == 64)


def wait_for(event: threading.Event) -> None:
    """So that the thread that computes keys does nothing else."""
    event.wait(30)


@pytest.mark.parametrize("windows", [(None, 24), (None,)], ids=["a window", "none"])
def test_a_request_that_only_stores_is_computed_when_its_keys_are_there(
    engine: Make, windows: tuple[int | None, ...]
) -> None:
    keys_may_come = threading.Event()
    with engine(windows=windows) as first:
        assert first.half is not None
        first.half._lookups._work.put(lambda: wait_for(keys_may_come))
        first.add(prompt("a", 10 * BLOCK, kv_transfer_params={"terracekv": {"read": False}}))
        try:
            for _ in range(20):
                first.step()
        finally:
            keys_may_come.set()
    with engine(windows=windows) as second:
        again = prompt("b", 10 * BLOCK + 1)
        assert second.ask(again) == [truth(again, windows=windows)]
        assert again.loaded_tokens == 10 * BLOCK


def test_a_request_that_only_stores_waits_for_its_keys_no_longer_than_for_a_lookup(engine: Make) -> None:
    keys_may_come = threading.Event()
    now = time.monotonic()
    with engine(windows=(None, 24), clock=lambda: now) as hasty:
        assert hasty.half is not None
        hasty.half._lookups._work.put(lambda: wait_for(keys_may_come))
        hasty.add(prompt("a", 10 * BLOCK, kv_transfer_params={"terracekv": {"read": False}}))
        try:
            assert not hasty.step()
            now += 60
            assert hasty.step()
        finally:
            keys_may_come.set()


def test_a_prompt_that_is_computed_in_chunks_is_stored_on_the_way(engine: Make) -> None:
    with engine(chunk=12) as first:
        long = first.add(prompt("a", 100))
        while long.num_computed_tokens < 60:
            first.step()
        until(lambda: first.step() is not None and not _under_way(first), "its stores are done")
        with engine() as second:
            early = prompt("b", 100)
            second.ask(early)
            assert early.loaded_tokens >= 48
    assert long.answer == early.answer == truth(prompt("0", 100))


def test_a_chat_that_grows_turn_by_turn_loads_all_that_was_said(engine: Make) -> None:
    tokens = prompt("0", 20).all_token_ids
    for turn in range(5):
        with engine() as fresh:
            request = Request(f"{turn}", list(tokens), answer_tokens=12)
            fresh.ask(request)
            assert request.answer == truth(Request("0", list(tokens), answer_tokens=12))
            if turn:
                assert request.loaded_tokens >= (len(tokens) - 8) // BLOCK * BLOCK - BLOCK
            tokens = [*request.all_token_ids, 7, 8, 9]


def test_an_answer_is_not_stored_where_it_should_not_be(engine: Make) -> None:
    with engine(store_output=False) as first:
        said = prompt("a", 2 * BLOCK, answer_tokens=4 * BLOCK)
        first.ask(said)
    with engine() as second:
        whole = Request("b", list(said.all_token_ids))
        second.ask(whole)
    assert whole.loaded_tokens == 2 * BLOCK


def test_the_kv_of_the_last_sampled_token_which_nobody_has_computed_is_never_stored(engine: Make) -> None:
    with engine() as first:
        said = prompt("a", 2 * BLOCK - 3, answer_tokens=3)  # its last token would fill the second block
        first.ask(said)
        assert said.num_tokens == 2 * BLOCK
    with engine() as second:
        whole = Request("b", [*said.all_token_ids, 1])
        second.ask(whole)
    assert whole.loaded_tokens == BLOCK and whole.answer == truth(Request("0", [*said.all_token_ids, 1]))


def test_requests_that_share_a_prefix_at_once_all_get_their_own_answers(engine: Make) -> None:
    shared = prompt("0", 5 * BLOCK).all_token_ids
    asked = [Request(f"{n}", [*shared, *([n] * (n % 5 + 1))]) for n in range(16)]
    expected = [truth(request) for request in asked]
    with engine(pages=600) as first:
        assert first.ask(*asked) == expected
    again = [
        Request(f"{n}", list(request.all_token_ids[: request.num_prompt_tokens])) for n, request in enumerate(asked)
    ]
    with engine(pages=600) as second:
        assert second.ask(*again) == expected
        assert all(request.loaded_tokens == 5 * BLOCK for request in again)


def test_one_request_can_keep_itself_out_of_the_cache(engine: Make) -> None:
    with engine() as first:
        first.ask(prompt("a", 50, kv_transfer_params={"terracekv": {"write": False}}))
        cold = prompt("b", 50)
        first.ask(cold)
        assert cold.loaded_tokens == 0
        fresh = prompt("c", 50, kv_transfer_params={"terracekv": {"read": False}})
        first.ask(fresh)
        assert fresh.loaded_tokens == 0
        odd = prompt("d", 50, kv_transfer_params={"terracekv": {"writes": False}})
        first.ask(odd)
        assert first.half is not None and first.half.take_stats()["skipped/params"] == 1
        assert cold.answer == fresh.answer == odd.answer == truth(prompt("0", 50))


def test_a_wish_that_is_not_understood_is_counted_each_time_and_logged_once_for_each_kind(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: dict[str, list[Any]] = {
        "has 'typo": [{f"typo {n}": False} for n in range(5)],
        "has a ttl_s that it cannot have: ": [{"ttl_s": value} for value in (-1, 1e300, "x\nforged line")],
        "has a read that": [{"read": 0}, {"read": "x" * 100_000}],
        "has a write that": [{"write": None}],
        "and should be an object": [[], "read"],
    }
    with engine() as first:
        for number, wish in enumerate(wishes := [wish for kind in kinds.values() for wish in kind]):
            asked = prompt(f"{number}", 20, kv_transfer_params={"terracekv": wish})
            assert first.ask(asked) == [truth(asked)]
        assert first.half is not None and first.half.take_stats()["skipped/params"] == len(wishes)
    lines = [record.getMessage() for record in caplog.records if "is not cached" in record.getMessage()]
    assert [sum(kind in line for line in lines) for kind in kinds] == [1] * len(kinds) == [1] * len(lines)
    assert all("\n" not in line and len(line) < 400 for line in lines)


def test_one_request_can_ask_that_its_blocks_stay_in_host(daemon: Daemon, engine: Make) -> None:
    def leased() -> int:
        return int(daemon.http("/v1/status")[1]["tiers"]["host"]["leased_blocks"])

    with engine() as first:
        first.ask(prompt("a", 50, kv_transfer_params={"terracekv": {"ttl_s": 3600}}))
        first.idle()
        until(lambda: leased() == 6, "its blocks are pinned")


def test_another_connectors_parameters_are_none_of_our_business(engine: Make) -> None:
    with engine() as first:
        first.ask(prompt("a", 50))
        first.idle()
        asked = prompt("b", 50, kv_transfer_params={"do_remote_decode": True})
        first.ask(asked)
    assert asked.loaded_tokens == 48


def test_a_drafter_that_needs_hidden_states_gets_one_page_less(engine: Make) -> None:
    with engine() as first:
        first.ask(prompt("a", 6 * BLOCK + 1))
    with engine(eagle=True) as second:
        asked = prompt("b", 6 * BLOCK + 1)
        second.ask(asked)
    assert asked.loaded_tokens == 6 * BLOCK - PAGE


def test_hits_are_told_by_tier(engine: Make) -> None:
    with engine() as first:
        first.ask(prompt("a", 50))
    with engine() as second:
        asked = prompt("b", 50)
        second.add(asked)
        until(lambda: second.step() is not None and asked.loaded_tokens, "it is loaded")
        assert second.half is not None and second.half.loaded(asked) == {"host": 48}
        second.run()
        assert second.half.take_stats()["hit_tokens/host"] == 48
        counts = second.ranks[0].half.take_stats()
        assert counts["load_tokens"] == 48 and counts["load_bytes"] == 48 * 16 and counts["loads"] == 1


def _under_way(engine: Engine) -> int:
    assert engine.half is not None
    return engine.half.stores.under_way

"""What an engine does with a store beside it, scenario by scenario: the tokens are those of vLLM alone, and what can be
loaded is loaded.

Every request is answered by a second vLLM without a connector too, in the same process and in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests.harness import Daemon, until
from terracekv.tests.vllm_engine import ANSWER, BLOCK, PAGE, Engine, expected, expected_of, plain, prompt

MODULE_S = 300
SETTINGS = {"host__size": "128MiB", "host__slab": "8MiB", "disk__size": "256MiB", "disk__segment": "16MiB"}

pytestmark = pytest.mark.timeout(MODULE_S)


@pytest.fixture(scope="module", autouse=True)
def reference() -> None:
    plain()


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path, **SETTINGS) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as started:
        yield started


def whole(tokens: int) -> int:
    """Tokens of the whole blocks of a prompt, its last token left out."""
    return (tokens - 1) // BLOCK * BLOCK


def stored(daemon: Daemon, tier: str = "host") -> int:
    """Blocks in a tier."""
    blocks: int = daemon.http("/v1/status")[1]["tiers"][tier]["blocks"]
    return blocks


def forget_host(daemon: Daemon, blocks: int, failpoints: str = "") -> None:
    """A daemon that has these blocks on disk and in no other tier, as after a reboot."""
    until(lambda: stored(daemon, "disk") == blocks, "all is on disk")
    daemon.kill()
    for path in daemon.runtime.iterdir():
        path.unlink()
    daemon.restart(failpoints=failpoints)


def rejoin(engine: Engine) -> None:
    """Wait until the engine has a session again; it looks for one by itself."""
    probe = prompt(4 * BLOCK + 1, 999)

    def hits() -> bool:
        engine.forget()
        return engine.answer(probe).cached > 0

    until(hits, "the engine joins by itself")


def test_what_was_stored_is_loaded_and_the_answer_is_the_same(engine: Engine) -> None:
    tokens = prompt(1000, 1)
    assert engine.answer(tokens)[:2] == (expected(tokens), 0)
    engine.forget()
    assert engine.answer(tokens)[:2] == (expected(tokens), whole(1000))


def test_an_engine_that_was_started_again_loads_what_the_one_before_stored(daemon: Daemon) -> None:
    tokens = prompt(1000, 2)
    for cached in (0, whole(1000)):
        with Engine(daemon.socket) as engine:
            assert engine.answer(tokens)[:2] == (expected(tokens), cached)


@pytest.mark.fault(60)
def test_of_two_engines_at_one_daemon_the_second_never_computes_what_the_first_stored(
    daemon: Daemon, engine: Engine
) -> None:
    with Engine(daemon.socket) as other:
        for seed in (3, 4):
            tokens = prompt(900, seed)
            first, second = (engine, other) if seed == 3 else (other, engine)
            assert first.answer(tokens)[:2] == (expected(tokens), 0)
            assert second.answer(tokens)[:2] == (expected(tokens), whole(900))


def test_blocks_on_disk_are_waited_for_and_other_requests_go_on_meanwhile(daemon: Daemon, engine: Engine) -> None:
    tokens, other = prompt(1000, 5), prompt(40, 6)
    engine.answer(tokens)
    forget_host(daemon, whole(1000) // BLOCK, failpoints="segment.read=sleep:0.2")
    rejoin(engine)
    engine.forget()
    engine.offers.clear()
    slow, quick = engine.ask(tokens), engine.ask(other)
    assert engine.finish(quick)[0].tokens == expected(other)
    assert slow not in engine.finished
    assert engine.finish(slow)[0][:2] == (expected(tokens), whole(1000))
    assert None in {offer for offer, _ in engine.offers}


@pytest.mark.parametrize("tokens", [16 * BLOCK, 16 * BLOCK + 1])
def test_a_prompt_that_is_stored_whole_is_computed_from_its_last_token_on(engine: Engine, tokens: int) -> None:
    ids = prompt(tokens, 7)
    engine.answer(ids)
    engine.forget()
    answer = engine.answer(ids)
    assert answer.tokens == expected(ids)
    assert tokens - BLOCK <= answer.cached < tokens


def test_a_prompt_of_less_than_a_block_passes_by(engine: Engine) -> None:
    ids = prompt(BLOCK - 1, 8)
    for _ in range(2):
        assert engine.answer(ids)[:2] == (expected(ids), 0)
        engine.forget()


def test_a_long_prompt_is_stored_chunk_by_chunk_while_it_is_computed(daemon: Daemon) -> None:
    tokens = prompt(2500, 9)
    with Engine(daemon.socket, max_num_batched_tokens=320) as engine:
        name = engine.ask(tokens)
        for _ in range(5):
            engine.step()
        until(lambda: stored(daemon) > 0, "the first chunks are stored")
        assert name not in engine.finished
        assert engine.finish(name)[0][:2] == (expected(tokens), 0)
        engine.forget()
        assert engine.answer(tokens)[:2] == (expected(tokens), whole(2500))


@pytest.mark.fault(18)
def test_requests_that_are_preempted_and_resumed_answer_as_ever_and_store_nothing_wrong(daemon: Daemon) -> None:
    prompts, new = [prompt(300, 20 + n) for n in range(5)], 80
    with Engine(daemon.socket, num_gpu_blocks_override=52, max_model_len=1024) as engine:
        free = engine.pages_free
        answers = engine.finish(*(engine.ask(tokens, new) for tokens in prompts))
        assert [answer.tokens for answer in answers] == expected_of(prompts, new)
        assert engine.preemptions > 0
        engine.settle()
        assert engine.pages_free == free
    with Engine(daemon.socket) as engine:
        for tokens, answer in zip(prompts, answers, strict=True):
            grown = tokens + answer.tokens
            assert engine.answer(grown)[:2] == (expected(grown), whole(len(grown) - 1))


@pytest.mark.fault(17)
def test_a_request_that_is_aborted_during_its_load_gives_its_pages_back_when_the_load_has_ended(
    daemon: Daemon, engine: Engine
) -> None:
    tokens, other = prompt(1000, 30), prompt(300, 31)
    engine.answer(tokens)
    engine.forget()
    free = engine.pages_free
    engine.on_load = daemon.stop  # the worker's copy cannot begin
    name, beside = engine.ask(tokens), engine.ask(other)
    while not any(offer for offer, _ in engine.offers):
        engine.step()
    engine.on_load = lambda: None
    engine.abort(name)
    assert engine.finish(beside)[0].tokens == expected(other)
    daemon.cont()
    engine.settle()
    assert engine.pages_free == free
    engine.forget()
    assert engine.answer(tokens).tokens == expected(tokens)


@pytest.mark.fault(17)
def test_requests_that_are_aborted_while_their_blocks_are_stored_leave_nothing_wrong(
    daemon: Daemon, engine: Engine
) -> None:
    free = engine.pages_free
    prompts = [prompt(1500, 40 + n) for n in range(4)]
    daemon.stop()
    names = [engine.ask(tokens, 50) for tokens in prompts]
    for _ in range(3):
        engine.step()
    for name in names:
        engine.abort(name)
    over = [prompt(1500, 50 + n) for n in range(4)]  # their pages are wanted at once
    answers = engine.finish(*(engine.ask(tokens) for tokens in over))
    assert [answer.tokens for answer in answers] == expected_of(over)
    daemon.cont()
    engine.settle()
    assert engine.pages_free == free
    rejoin(engine)
    for tokens in prompts + over:
        engine.forget()
        assert engine.answer(tokens).tokens == expected(tokens)


def test_a_chat_grows_turn_by_turn_and_each_turn_loads_all_before_it(engine: Engine) -> None:
    chat = prompt(150, 60)
    for turn in range(6):
        engine.forget()
        answer = engine.answer(chat, 40)
        assert answer.tokens == expected(chat, 40)
        known = 0 if turn == 0 else len(chat) - 30 - 1  # the last token of an answer has no KV
        assert answer.cached >= known // BLOCK * BLOCK
        chat = chat + answer.tokens + prompt(30, 70 + turn)


def test_sixteen_requests_at_once_with_common_beginnings_answer_as_ever(daemon: Daemon) -> None:
    beginnings = [prompt(512, 80 + n) for n in range(4)]
    prompts = [beginnings[n % 4] + prompt(100 + 13 * n, 90 + n) for n in range(16)]
    for started in range(2):
        with Engine(daemon.socket, max_num_batched_tokens=1024) as engine:
            free = engine.pages_free
            answers = engine.finish(*(engine.ask(tokens) for tokens in prompts))
            assert [answer.tokens for answer in answers] == expected_of(prompts)
            assert not started or all(a.cached >= whole(len(t)) for a, t in zip(answers, prompts, strict=True))
            engine.settle()
            assert engine.pages_free == free


@pytest.mark.fault(28)
def test_a_salt_is_a_world_of_its_own(engine: Engine) -> None:
    tokens = prompt(700, 110)
    for salt in ("blue", "green", None):
        engine.forget()
        assert engine.answer(tokens, salt=salt)[:2] == (expected(tokens), 0), salt
    for salt in ("blue", "green", None):
        engine.forget()
        assert engine.answer(tokens, salt=salt)[:2] == (expected(tokens), whole(700)), salt


def test_a_request_may_ask_not_to_be_read_or_not_to_be_written(daemon: Daemon, engine: Engine) -> None:
    tokens = prompt(700, 111)
    engine.answer(tokens, params={"terracekv": {"write": False}})
    assert stored(daemon) == 0
    engine.forget()
    assert engine.answer(tokens).cached == 0
    engine.forget()
    assert engine.answer(tokens, params={"terracekv": {"read": False}})[:2] == (expected(tokens), 0)
    engine.forget()
    assert engine.answer(tokens).cached == whole(700)


@pytest.mark.parametrize("page, block", [(PAGE, PAGE), (PAGE, 8 * PAGE), (4 * PAGE, 4 * PAGE)])
def test_blocks_and_pages_of_other_sizes(daemon: Daemon, page: int, block: int) -> None:
    tokens = prompt(1100, 120)
    with Engine(daemon.socket, options={"block_tokens": block}, block_size=page) as engine:
        engine.answer(tokens)
        engine.forget()
        assert engine.answer(tokens)[:2] == (expected(tokens), 1099 // block * block)
    assert len(expected(tokens)) == ANSWER


def test_engines_whose_pages_differ_in_size_share_nothing_though_their_blocks_do_not(daemon: Daemon) -> None:
    """Some backends put the tokens of a page behind other axes: two pages are then not one of twice the size."""
    tokens = prompt(700, 121)
    for page in (PAGE, 2 * PAGE):
        for cached in (0, whole(700)):
            with Engine(daemon.socket, block_size=page) as engine:
                assert engine.answer(tokens)[:2] == (expected(tokens), cached), page

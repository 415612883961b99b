"""Whose KV it is: two requests share a block only when everything that shapes it is the same."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.connector.vllm_chain import Adapters, Chain
from terracekv.connector.vllm_identity import adapter_digest
from terracekv.tests.harness import until
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, Request, prompt
from terracekv.tiers.block import block_keys

Make = Callable[..., Engine]
_numbers = count(1)
NAMESPACE = bytes(range(32))


def adapter(folder: Path, weights: bytes, name: str = "adapter", number: int | None = None) -> SimpleNamespace:
    """Without ``number`` it has one of its own."""
    folder.mkdir(parents=True)
    (folder / "adapter_model").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_name=name, lora_int_id=number or next(_numbers), lora_path=str(folder))


def item(identifier: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def keys(request: Request, weights: bytes = b"") -> list[bytes]:
    chain = Chain(request, BLOCK, weights)
    chain.begin(NAMESPACE, Adapters())
    return chain.keys


def loaded(engine: Engine, request: Request) -> int:
    """Tokens loaded for a request, whose answer must be right."""
    engine.ask(request)
    assert request.answer == truth(request)
    engine.idle()
    return request.loaded_tokens


@pytest.mark.fault(23)
def test_base_and_adapters_never_share_and_each_finds_its_own(engine: Make, tmp_path: Path) -> None:
    loras = [None, adapter(tmp_path / "a", b"a"), adapter(tmp_path / "b", b"b")]
    with engine() as first:
        for number, lora in enumerate(loras):
            assert loaded(first, prompt(f"cold {number}", 50, lora_request=lora)) == 0
        for number, lora in enumerate(loras):
            assert loaded(first, prompt(f"warm {number}", 50, lora_request=lora)) == 48


@pytest.mark.fault(24)
def test_an_adapter_is_what_it_holds_and_not_what_it_is_called(engine: Make, tmp_path: Path) -> None:
    with engine() as first:
        assert loaded(first, prompt("1", 50, lora_request=adapter(tmp_path / "a", b"weights"))) == 0
        same = adapter(tmp_path / "elsewhere", b"weights", name="another name")
        assert loaded(first, prompt("2", 50, lora_request=same)) == 48
        changed = adapter(tmp_path / "b", b"other weights")
        assert loaded(first, prompt("3", 50, lora_request=changed)) == 0
        (Path(changed.lora_path) / "adapter_model").write_bytes(b"third weights")
        assert loaded(first, prompt("4", 50, lora_request=changed)) == 0, "rewritten in place"


@pytest.mark.fault(24)
@pytest.mark.parametrize("change", ["rewritten in place", "another folder under the same number"])
def test_an_adapter_whose_files_changed_under_its_number_is_not_cached(
    engine: Make, tmp_path: Path, change: str
) -> None:
    """vLLM goes on with what it has read: what it computes belongs to the first, and the files say the second."""
    one = adapter(tmp_path / "a", b"first")
    with engine() as first:
        assert loaded(first, prompt("1", 50, lora_request=one)) == 0
        if change == "rewritten in place":
            second = one
            (tmp_path / "a" / "adapter_model").write_bytes(b"second")
        else:
            second = adapter(tmp_path / "b", b"second", number=one.lora_int_id)
        for number in range(2):
            assert loaded(first, prompt(f"2{number}", 50, lora_request=second)) == 0, "it cannot be known which it is"
        (tmp_path / "a" / "adapter_model").write_bytes(b"first")
        assert loaded(first, prompt("3", 50, lora_request=one)) == 0, "vLLM may have read the second meanwhile"
        assert first.half is not None and first.half.take_stats()["skipped/adapter_unreadable"] == 3
    with engine() as other:
        assert loaded(other, prompt("4", 50, lora_request=adapter(tmp_path / "c", b"second"))) == 0, "never stored"
        assert loaded(other, prompt("5", 50, lora_request=adapter(tmp_path / "d", b"first"))) == 48


def test_an_adapter_that_cannot_be_read_is_not_cached(engine: Make, tmp_path: Path) -> None:
    gone = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path / "nowhere"))
    with engine() as first:
        for number in range(2):
            assert loaded(first, prompt(f"{number}", 50, lora_request=gone)) == 0
        assert first.half is not None and first.half.take_stats()["skipped/adapter_unreadable"] == 2
    with pytest.raises(ValueError, match="no adapter"):
        adapter_digest(str(tmp_path))


@pytest.mark.fault(23)
def test_keys_without_extras_are_those_that_a_router_computes() -> None:
    request = prompt("a", 50)
    assert keys(request) == block_keys(NAMESPACE, request.all_token_ids, BLOCK)


@pytest.mark.fault(26)
def test_a_picture_counts_with_all_its_bits_and_its_place(engine: Make) -> None:
    picture, twin = "ab" * 32, "ab" * 31 + "cd"
    with engine() as first:
        assert loaded(first, prompt("1", 50, mm_features=[item(picture, 20, 10)])) == 0
        assert loaded(first, prompt("2", 50, mm_features=[item(picture, 20, 10)])) == 48
        assert loaded(first, prompt("3", 50, mm_features=[item(twin, 20, 10)])) == 2 * BLOCK, (
            "the text before is shared"
        )
        assert loaded(first, prompt("4", 50, mm_features=[item(picture, 21, 10)])) == 2 * BLOCK
    assert keys(prompt("5", 50, mm_features=[item(picture, 20, 10)]))[:2] == keys(prompt("6", 50))[:2]


@pytest.mark.fault(26)
def test_pictures_that_bear_numbers_instead_of_names_are_not_cached(engine: Make) -> None:
    """The first picture after a start is called as the first after the start before, whatever it shows."""
    first_picture = [item("renderer0-mm-1-image-0", 20, 10)]
    without: dict[str, Any] = {"items_cache_gb": 0.0, "prefix_caching": False}
    for start in range(2):
        with engine(**without) as started:
            assert loaded(started, prompt(f"picture {start}", 50, mm_features=first_picture)) == 0
            assert loaded(started, prompt(f"text {start}", 50)) == 48 * start, "only words"
            assert started.half is not None and started.half.take_stats()["skipped/unnamed_items"] == 1
    one_cache: list[dict[str, Any]] = [{"items_cache_gb": 0.0}, {"prefix_caching": False}]
    for with_one in one_cache:
        with engine(**with_one) as named:
            loaded(named, prompt("a", 50, mm_features=[item(f"{with_one}", 20, 10)]))
            assert loaded(named, prompt("b", 50, mm_features=[item(f"{with_one}", 20, 10)])) == 48


@pytest.mark.fault(27)
def test_keys_are_whole_sha_256_digests_of_the_whole_prefix() -> None:
    import hashlib

    tokens = list(range(2 * BLOCK))
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    count = BLOCK.to_bytes(4, "little")
    first = hashlib.sha256(NAMESPACE + count + packed[: 4 * BLOCK]).digest()
    second = hashlib.sha256(first + count + packed[4 * BLOCK :]).digest()
    assert keys(Request("a", tokens)) == [first, second]


@pytest.mark.fault(28)
def test_salts_keep_tenants_apart_and_one_tenants_requests_together(engine: Make) -> None:
    with engine() as first:
        for salt in (None, "tenant a", "tenant b"):
            assert loaded(first, prompt(f"cold {salt}", 50, cache_salt=salt)) == 0
        for salt in (None, "tenant a", "tenant b"):
            assert loaded(first, prompt(f"warm {salt}", 50, cache_salt=salt)) == 48


@pytest.mark.fault(15)
def test_after_a_change_of_weights_nothing_older_is_found(engine: Make) -> None:
    with engine() as first:
        loaded(first, prompt("a", 50))
        assert first.half is not None
        first.half.weights_changed(b"epoch 2")
        assert loaded(first, prompt("b", 50)) == 0
        assert loaded(first, prompt("c", 50)) == 48
    with engine() as later:
        assert loaded(later, prompt("d", 50)) == 48, "an engine with the weights of before"
    with engine(reset="keep") as sleeping:
        assert sleeping.half is not None
        sleeping.half.weights_changed(b"the same weights, back from sleep")
        assert loaded(sleeping, prompt("e", 50)) == 48


@pytest.mark.fault(15)
@pytest.mark.parametrize("state", ["waiting", "found", "running", "answering", "preempted"])
def test_a_request_that_lives_through_a_change_of_weights_begins_anew_under_the_new_ones(
    engine: Make, state: str
) -> None:
    with engine() as first:
        first.ask(prompt("before", 80))
    with engine() as second:
        asked = prompt("a", 80, answer_tokens=20)
        if state in ("waiting", "found"):
            second.add(asked)
        else:
            second.add(asked)
            until(lambda: second.step() is not None and asked.status == "running", "it runs")
        half = second.half
        assert half is not None
        if state == "found":
            tracked = half._requests["a"]
            until(lambda: tracked.answer is not None and tracked.answer.found, "its lookup has come back")
        while state in ("answering", "preempted") and len(asked.answer) < 9:
            second.step()
        if state == "preempted":
            second.preempt(asked)
        said, asked.loaded_tokens = len(asked.answer), 0
        second.reset(b"epoch 2")
        second.run()
        assert asked.loaded_tokens == 0, "what was computed before was loaded"
        assert asked.answer[said:] == truth(asked, weights=b"epoch 2", said=said)
        second.idle()
        until(lambda: not half._lookups._holding and not half._lookups._session._held, "nothing is leased")
        again = prompt("b", 80)
        assert second.ask(again) == [truth(again, weights=b"epoch 2")]
        assert again.loaded_tokens == 76, "it was stored for those that come after"
    with engine() as third:
        assert loaded(third, prompt("c", 80)) == 76, "under the weights of before"


@pytest.mark.fault(15)
@pytest.mark.parametrize("state", ["loading", "running"])
def test_kv_of_both_weights_is_stored_for_nobody(engine: Make, state: str) -> None:
    with engine() as first:
        first.ask(prompt("before", 80))
    with engine(chunk=16) as second:
        asked = second.add(prompt("a", 80 if state == "loading" else 120, answer_tokens=20))
        wanted = "loading" if state == "loading" else "running"
        until(lambda: second.step() is not None and asked.status == wanted, "it is under way")
        second.reset(b"epoch 2", running=False)
        second.idle()
        whole = Request("b", list(asked.all_token_ids))
        assert second.ask(whole) == [truth(whole, weights=b"epoch 2")]
        assert whole.loaded_tokens == 0
    with engine() as third:
        after = Request("c", list(asked.all_token_ids))
        assert third.ask(after) == [truth(after)], "under the weights of before"


class Embeds:
    """A tensor of prompt embeddings, of one number a token."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> "Embeds":
        return Embeds(self.numbers[part])

    def detach(self) -> "Embeds":
        return self

    cpu = float = contiguous = numpy = detach

    def tobytes(self) -> bytes:
        return repr(self.numbers).encode()


def test_prompts_of_embeddings_share_what_is_equal() -> None:
    def embedded(numbers: list[float], tokens: list[bool] | None = None) -> list[bytes]:
        return keys(Request("a", [0] * len(numbers), prompt_embeds=Embeds(numbers), prompt_is_token_ids=tokens))

    numbers = [token / 2 for token in range(3 * BLOCK)]
    changed = [*numbers[: 2 * BLOCK], 0.0, *numbers[2 * BLOCK + 1 :]]
    assert embedded(numbers)[:2] == embedded(changed)[:2]
    assert embedded(numbers)[2] != embedded(changed)[2]
    assert embedded(numbers)[0] != keys(Request("b", [0] * 3 * BLOCK))[0]
    none = [False] * 3 * BLOCK
    one = [*none[: 2 * BLOCK], True, *none[2 * BLOCK + 1 :]]
    assert embedded(numbers, none)[:2] == embedded(numbers, one)[:2]
    assert embedded(numbers, none)[2] != embedded(numbers, one)[2], "there stands token 0, and not an embedding"


def test_generated_tokens_go_on_with_the_chain_of_the_prompt(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", b"a")
    whole = prompt("a", 5 * BLOCK, lora_request=lora, mm_features=[item("x", 3, 2)], cache_salt="s")
    part = prompt("b", 2 * BLOCK + 3, lora_request=lora, mm_features=[item("x", 3, 2)], cache_salt="s")
    chain = Chain(part, BLOCK, b"w")
    chain.begin(NAMESPACE, Adapters())
    assert len(chain.keys) == 2
    part.all_token_ids += whole.all_token_ids[2 * BLOCK + 3 :]
    chain.extend(5)
    assert chain.keys == keys(whole, b"w")

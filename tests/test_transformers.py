"""Prefix caching for transformers: whatever is loaded, missed or broken, the output is that of a run without it."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from terracekv.connector import transformers as connector
from terracekv.connector.client import Client
from terracekv.connector.layout import Blocks, Plane
from terracekv.connector.report import tokens_by_tier
from terracekv.connector.transformers import RoomyLayer, TerraceCache
from terracekv.tests.tiny_engine import (
    BLOCK,
    MODEL,
    VOCABULARY,
    MemoryClient,
    answer,
    answer_with,
    cached,
    prompt,
    tiny,
    use_memory_client,
)

STEADY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory_client(monkeypatch)


def test_a_prompt_seen_before_is_loaded_but_for_its_last_part() -> None:
    cache, ids = cached(MODEL), prompt(5 * BLOCK + 3)
    expected = answer(MODEL, ids)
    cold, first = answer_with(cache, ids)
    warm, second = answer_with(cache, ids)
    assert cold == warm == expected
    assert (first.loaded_tokens, first.computed_tokens, first.stored_blocks, first.why) == ({}, 43, 5, "absent")
    assert (second.loaded_tokens, second.computed_tokens, second.stored_blocks) == ({"host": 40}, 3, 0)
    assert second.why is None
    assert second.ttft_ms > second.lookup_ms + second.load_ms > 0
    assert cache.client.stores == [(5, 5)]  # type: ignore[union-attr]


def test_the_time_to_the_first_token_is_not_that_to_the_last() -> None:
    clock = connector._FirstToken()
    assert not clock(prompt(3), None).any()
    first = clock.ttft_ms
    assert not clock(prompt(4), None).any()
    assert clock.ttft_ms == first > 0


def test_a_cold_run_computes_the_very_same_floats_as_without_a_cache() -> None:
    ids = prompt(37)
    plain = DynamicCache(config=MODEL.config)
    with torch.no_grad():
        logits = MODEL(ids, cache=plain, use_cache=True, logits_to_keep=1).logits[:, -1]
    prefilled = cached(MODEL).prefill(ids)
    assert torch.equal(prefilled.logits, logits)
    for ours, theirs in zip(prefilled.cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_kv_is_bit_for_bit_what_was_stored_and_logits_are_close(dtype: torch.dtype) -> None:
    model, ids = tiny(dtype=dtype), prompt(4 * BLOCK + 5)
    cold = cached(model).prefill(ids)
    warm = cached(model).prefill(ids)
    assert warm.report.loaded_tokens == {"host": 4 * BLOCK}
    for before, after in zip(cold.cache.layers, warm.cache.layers, strict=True):
        assert torch.equal(before.keys[:, :, : 4 * BLOCK], after.keys[:, :, : 4 * BLOCK])
        assert torch.equal(before.values[:, :, : 4 * BLOCK], after.values[:, :, : 4 * BLOCK])
    torch.testing.assert_close(warm.logits, cold.logits, rtol=1e-3, atol=1e-4 if dtype is torch.float32 else 0.2)


@pytest.mark.fault(91)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
)
def test_bytes_of_any_dtype_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """uint8 stands for formats that pack two 4-bit values into a byte; NaNs with payloads are among the bytes."""
    shape = (2, 3, 3 * BLOCK, 10)
    bits = random.Random(str(dtype)).randbytes(math.prod(shape) * dtype.itemsize)
    stored = torch.frombuffer(bytearray(bits), dtype=dtype).view(shape)
    loaded = torch.zeros_like(stored)

    def blocks(kv: torch.Tensor) -> Blocks:
        head, token = (stride * dtype.itemsize for stride in kv.stride()[1:3])
        return Blocks.of([Plane(p.data_ptr(), 3, 3 * BLOCK, 10, (head, token)) for p in kv], BLOCK, dtype.itemsize)

    for index in (2, 0, 1):
        payload = bytearray(2 * 3 * BLOCK * 10 * dtype.itemsize)
        blocks(stored).gather(index, memoryview(payload))
        blocks(loaded).scatter(index, memoryview(payload))
    assert loaded.view(torch.uint8).numpy().tobytes() == bits


@pytest.mark.fault(13)
@given(shared=st.integers(0, 3 * BLOCK + 2), first=st.integers(0, 2 * BLOCK), second=st.integers(0, 2 * BLOCK))
@STEADY
def test_exactly_the_shared_full_blocks_before_the_last_token_are_loaded(shared: int, first: int, second: int) -> None:
    MemoryClient.blocks.clear()
    cache = cached(MODEL)
    common = prompt(shared)
    one = torch.cat([common, torch.tensor([[5]]), prompt(first, 1)], dim=1)
    two = torch.cat([common, torch.tensor([[6]]), prompt(second, 2)], dim=1)
    cache.prefill(one)
    prefilled = cache.prefill(two)
    expected = shared // BLOCK * BLOCK
    assert sum(prefilled.report.loaded_tokens.values()) == expected
    assert prefilled.report.computed_tokens == two.shape[1] - expected
    torch.testing.assert_close(prefilled.logits, MODEL(two).logits[:, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.fault(13)
def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed_nevertheless() -> None:
    cache, ids = cached(MODEL), prompt(3 * BLOCK)
    expected, _ = answer_with(cache, ids)
    warm, report = answer_with(cache, ids)
    assert warm == expected
    assert (report.loaded_tokens, report.computed_tokens, report.why) == ({"host": 2 * BLOCK}, BLOCK, None)
    assert set(MemoryClient.blocks) == set(cache.client.keys(ids[0].tolist()))  # type: ignore[union-attr]


def test_a_prompt_without_a_full_block_before_its_end_asks_nobody() -> None:
    for tokens in (1, BLOCK - 1, BLOCK):
        ids = prompt(tokens)
        text, report = answer_with(cached(MODEL), ids)
        assert text == answer(MODEL, ids)
        assert (report.why, report.computed_tokens) == ("shorter_than_block", tokens)


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_load_that_fails_midway_is_computed_from_there(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = cached(MODEL), prompt(4 * BLOCK + 2)
    expected = answer(MODEL, ids)
    cache.prefill(ids)
    monkeypatch.setattr(MemoryClient, "good", good)
    text, report = answer_with(cache, ids)
    assert text == expected
    assert sum(report.loaded_tokens.values()) == good * BLOCK
    assert report.computed_tokens == 4 * BLOCK + 2 - good * BLOCK
    assert report.why == "damaged"


def test_without_a_daemon_the_engine_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connector, "Client", Client)
    cache, ids = TerraceCache(MODEL, socket=tmp_path / "none.sock", block_tokens=BLOCK), prompt(4 * BLOCK)
    try:
        text, report = answer_with(cache, ids)
    finally:
        cache.close()
    assert text == answer(MODEL, ids)
    assert (report.why, report.loaded_tokens, report.stored_blocks) == ("no_daemon", {}, 0)
    assert cache.prefill(ids).report.why == "closed"


def test_answers_are_stored_only_when_that_is_asked() -> None:
    cache, ids = cached(MODEL), prompt(2 * BLOCK - 1)
    text, report = answer_with(cache, ids)
    assert report.stored_blocks == 1
    text, report = answer_with(cache, ids, store_output=True)
    assert report.stored_blocks == 2  # 15 tokens and 11 of the answer: the KV of its last token was never computed
    follow_up = torch.tensor([text + [7, 8, 9]])
    longer, report = answer_with(cache, follow_up)
    assert longer == answer(MODEL, follow_up)
    assert report.loaded_tokens == {"host": 3 * BLOCK}


def test_an_answer_that_outgrows_its_room_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "AHEAD_TOKENS_MAX", 2)
    cache, ids = cached(MODEL), prompt(3 * BLOCK + 1)
    expected = answer(MODEL, ids)
    assert answer_with(cache, ids, store_output=True)[0] == expected
    text, report = answer_with(cache, ids)
    assert text == expected
    assert report.loaded_tokens == {"host": 3 * BLOCK}
    grown, report = answer_with(cache, torch.tensor([expected]))
    assert grown == answer(MODEL, torch.tensor([expected]))
    assert report.loaded_tokens == {"host": 4 * BLOCK}


def test_a_cache_returned_by_prefill_serves_a_loop_of_ones_own() -> None:
    cache, ids = cached(MODEL), prompt(2 * BLOCK + 3)
    expected = answer(MODEL, ids)
    cache.prefill(ids)
    kv, logits, report = cache.prefill(ids, ahead_tokens=12)
    assert report.loaded_tokens == {"host": 2 * BLOCK}
    tokens = ids[0].tolist()
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(logits.argmax()))
            logits = MODEL(torch.tensor([tokens[-1:]]), cache=kv, use_cache=True).logits[:, -1]
    assert tokens == expected


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_returned_by_prefill_serves_also_where_its_memory_cannot_be_written(inference: bool) -> None:
    """With gradients, and outside the inference mode that it was made in."""
    ids, more = prompt(3 * BLOCK), prompt(2, seed=1)
    with torch.inference_mode(inference):
        ours = cached(MODEL).prefill(ids, ahead_tokens=8).cache
    with torch.set_grad_enabled(not inference):
        for token in more[0]:
            output = MODEL(token.view(1, 1), **{"past_key_values": ours}, use_cache=True)
    torch.testing.assert_close(
        output.logits[:, -1], MODEL(torch.cat([ids, more], 1)).logits[:, -1], rtol=1e-3, atol=1e-4
    )
    if not inference:
        output.logits.sum().backward()
        MODEL.zero_grad()


def test_a_prompt_gets_the_memory_of_the_last_one_unless_that_is_still_in_use() -> None:
    cache = cached(MODEL)
    first = cache.prefill(prompt(4 * BLOCK, 1))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in first.cache.layers]
    place = first.cache.layers[0].keys.data_ptr()
    second = cache.prefill(prompt(4 * BLOCK, 2))
    assert second.cache.layers[0].keys.data_ptr() != place
    for layer, (keys, values) in zip(first.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    place = second.cache.layers[0].keys.data_ptr()
    one_tensor = second.cache.layers[-1].values
    del second
    assert cache.prefill(prompt(4 * BLOCK, 3)).cache.layers[0].keys.data_ptr() != place
    del one_tensor
    places = {cache.prefill(prompt(n, 4)).cache.layers[0].keys.data_ptr() for n in (4 * BLOCK, 5, 3 * BLOCK + 1)}
    assert len(places) == 1


def test_an_all_ones_mask_and_criteria_of_the_callers_own_are_honoured() -> None:
    cache, ids = cached(MODEL), prompt(3 * BLOCK + 2)
    seen: list[int] = []

    def stop_after_four(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= ids.shape[1] + 4])

    for _ in range(2):
        text, report = answer_with(cache, ids, attention_mask=torch.ones_like(ids), stopping_criteria=[stop_after_four])
        assert len(text) == ids.shape[1] + 4
    assert report.loaded_tokens == {"host": 3 * BLOCK}
    assert seen == 2 * [ids.shape[1] + n for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("gradients", [False, True])
@given(st.lists(st.sampled_from(("append 1", "append 3", "crop", "repeat", "select", "reorder", "reset")), max_size=8))
@STEADY
def test_a_roomy_layer_is_a_dynamic_layer_whatever_is_done_to_it(gradients: bool, steps: list[str]) -> None:
    with torch.set_grad_enabled(gradients):  # with them its room is never written to
        alike_after(steps)


def alike_after(steps: list[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    plain, roomy = DynamicLayer(), RoomyLayer(*torch.full((2, 1, 2, 10, 4), 9.0))
    batch = 1
    for step in steps:
        if step.startswith("append"):
            keys, values = torch.rand(2, batch, 2, int(step[-1]), 4, generator=generator)
            for one, other in zip(plain.update(keys, values), roomy.update(keys, values), strict=True):
                assert torch.equal(one, other)
            continue
        for layer in (plain, roomy):
            if step == "crop" and layer.get_seq_length():
                layer.crop(-1)
            elif step == "repeat":
                layer.batch_repeat_interleave(2)
            elif step == "select":
                layer.batch_select_indices(torch.tensor([0]))
            elif step == "reorder":
                layer.reorder_cache(torch.arange(batch - 1, -1, -1))
            elif step == "reset":
                layer.reset()
        batch = plain.keys.shape[0] if plain.is_initialized and plain.keys.dim() == 4 else 1
        assert plain.get_seq_length() == roomy.get_seq_length()
        if plain.get_seq_length():
            assert torch.equal(plain.keys, roomy.keys) and torch.equal(plain.values, roomy.values)


def test_tokens_are_counted_by_the_highest_tier_that_has_them() -> None:
    assert tokens_by_tier({"host": 3, "disk": 5}, 5, 16) == {"host": 48, "disk": 32}
    assert tokens_by_tier({"host": 3, "disk": 5}, 4, 16) == {"host": 48, "disk": 16}
    assert tokens_by_tier({"host": 0, "disk": 5, "s3": 9}, 7, 1) == {"disk": 5, "s3": 2}
    assert tokens_by_tier({"host": 3}, 0, 16) == {}


PICTURE = 190
"""The token that stands for a part of a picture."""


def seeing() -> PreTrainedModel:
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    special = {"image_token_id": PICTURE, "vision_start_token_id": 192, "vision_end_token_id": 193}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)).eval()


def test_a_prompt_of_text_after_one_with_a_picture_is_that_of_a_model_that_saw_none() -> None:
    model, ids, longer = seeing(), prompt(5 * BLOCK + 1) % PICTURE, prompt(8 * BLOCK + 1) % PICTURE
    expected, logits = answer(model, ids), model(longer).logits[:, -1]
    cache = cached(model)
    cache.prefill(ids)

    def look() -> None:
        """Two prompts at once, each with a picture: the tokens behind it stand nearer than their number says."""
        seen = torch.tensor([[5, 192, *[PICTURE] * 16, 193, 7]] * 2)
        pixels, grid = torch.randn(2 * 64, 3 * 2 * 4 * 4), torch.tensor([[1, 8, 8]] * 2)
        model.generate(
            seen, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(seen == PICTURE).int(), max_new_tokens=2
        )
        assert model.model.rope_deltas.any()

    look()
    text, report = answer_with(cache, ids)
    assert text == expected and report.loaded_tokens == {"host": 5 * BLOCK}
    for _ in range(2):  # what was stored after a picture is as good
        look()
        torch.testing.assert_close(cache.prefill(longer).logits, logits, rtol=1e-3, atol=1e-4)

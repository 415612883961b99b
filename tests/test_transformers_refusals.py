"""What the transformers connector never caches, or never takes for the same: models and calls, each by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from terracekv.connector.transformers_model import Weights
from terracekv.connector.transformers_weights import weights_digest
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


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory_client(monkeypatch)


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: tiny(seed=1), id="other weights"),
        pytest.param(lambda: tiny(dtype=torch.bfloat16), id="other dtype"),
        pytest.param(lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), id="other config"),
    ],
)
def test_blocks_of_another_model_are_misses(other: Callable[[], PreTrainedModel]) -> None:
    ids = prompt(4 * BLOCK)
    cached(MODEL).prefill(ids)
    assert cached(MODEL).prefill(ids).report.loaded_tokens == {"host": 3 * BLOCK}
    report = cached(other()).prefill(ids).report
    assert (report.loaded_tokens, report.why) == ({}, "absent")


def test_the_digest_of_weights_is_that_of_their_bytes_and_notices_one_changed_element() -> None:
    one, two = tiny(), tiny()
    for model in (one, two):
        model.register_buffer("odd", torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert weights_digest(one) == weights_digest(two)
    with torch.no_grad():
        for name, tensor in two.named_parameters():
            place = tensor.view(-1)[tensor.numel() * 2 // 3 : tensor.numel() * 2 // 3 + 1]
            before = place.clone()
            place += 2**-10
            assert weights_digest(one) != weights_digest(two), name
            place.copy_(before)
        assert weights_digest(one) == weights_digest(two)
        two.get_buffer("odd")[2] = 4
        assert weights_digest(one) != weights_digest(two)
        two.get_buffer("odd")[2] = 3
        embedding = two.get_parameter("model.embed_tokens.weight")
        for other in (48, 51, 150):  # in the same row of words, and in others
            embedding[[50, other]] = embedding[[other, 50]]
            assert weights_digest(one) != weights_digest(two), other
            embedding[[50, other]] = embedding[[other, 50]]
        assert weights_digest(one) == weights_digest(two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_digest_of_weights_has_those_that_a_quantized_layer_has_packed() -> None:
    def quantized(model: PreTrainedModel) -> PreTrainedModel:
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    one, two, other = tiny(), tiny(), tiny()
    with torch.no_grad():
        other.get_parameter("model.layers.1.self_attn.k_proj.weight")[3] *= -1
    assert weights_digest(quantized(one)) == weights_digest(quantized(two)) != weights_digest(quantized(other))


def sliding() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=12, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def stretched() -> PreTrainedModel:
    return tiny(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_position_embeddings=16)


def encoder() -> PreTrainedModel:
    """As a BERT is made for generating when nobody said that it is a decoder."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        is_decoder=False, initializer_range=0.3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return BertLMHeadModel(config).eval()


def adapted() -> PreTrainedModel:
    model = tiny()
    model.peft_config = {}
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (sliding, "DynamicSlidingWindowLayer"),
        (stretched, "rope_type dynamic"),
        (adapted, "adapters"),
        (encoder, "depends on the tokens after it"),
        (lambda: tiny(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ],
)
def test_a_model_whose_kv_is_not_its_prefix_alone_runs_without_a_cache_and_says_so(
    make: Callable[[], PreTrainedModel], named: str
) -> None:
    ids = prompt(5 * BLOCK)
    cache = cached(make())
    assert named in str(cache.unfit)
    text, report = answer_with(cache, ids)
    assert text == answer(make(), ids)
    assert named in report.why
    assert (report.loaded_tokens, report.stored_blocks, report.computed_tokens) == ({}, 0, 5 * BLOCK)
    assert named in str(cache.prefill(ids).report.why)
    assert MemoryClient.blocks == {}


def test_several_answers_to_one_prompt_are_not_cached() -> None:
    output, report = cached(MODEL).generate(prompt(3 * BLOCK), do_sample=True, num_return_sequences=2, max_new_tokens=2)
    assert output.shape == (2, 3 * BLOCK + 2)
    assert report.why == "sample of 2: only one sequence at a time is cached"


def test_the_namespace_bears_the_dtype_of_k_and_v() -> None:
    assert cached(MODEL).client.dtype == "float32"  # type: ignore[union-attr]
    assert cached(tiny(dtype=torch.bfloat16)).client.dtype == "bfloat16"  # type: ignore[union-attr]


def test_what_changes_kv_beside_the_weights_is_seen_at_each_call() -> None:
    model, ids = tiny(), prompt(5 * BLOCK)
    cache, expected = cached(model), answer(model, ids)
    steered = model.model.layers[1].register_forward_hook(lambda layer, inputs, output: output + 1.0)
    text, report = answer_with(cache, ids)
    assert text == answer(model, ids) != expected
    assert "a hook on model.layers.1" in report.why and "a hook" in str(cached(model).unfit)
    steered.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in answer_with(cache, ids)[1].why
    assert MemoryClient.blocks == {}
    model.generate(ids, max_new_tokens=1, output_hidden_states=True, return_dict_in_generate=True)  # leaves hooks
    assert answer_with(cache, ids)[0] == expected
    assert answer_with(cache, ids)[1].loaded_tokens == {"host": 4 * BLOCK}


def reloaded(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny(seed=1).state_dict())


def replaced(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny(seed=1).state_dict(), assign=True)


def trained(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.k_proj.weight")[0, 0] += 1.0


def merged(model: PreTrainedModel) -> None:
    """As adapters are merged: past torch's own count of writes."""
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    weight.data += torch.ones_like(weight)


@pytest.mark.parametrize("change", [reloaded, replaced, trained, merged, lambda model: model.to(torch.bfloat16)])
def test_a_model_whose_weights_were_changed_is_offered_nothing_of_before(
    change: Callable[[PreTrainedModel], None],
) -> None:
    model, ids = tiny(), prompt(5 * BLOCK)
    cache = cached(model)
    cache.prefill(ids)
    change(model)
    stored = len(MemoryClient.blocks)
    text, report = answer_with(cache, ids)
    assert text == answer(model, ids)
    assert "make a new TerraceCache" in str(report.why) and len(MemoryClient.blocks) == stored
    assert cached(model).prefill(ids).report.loaded_tokens == {}


def test_weights_without_bytes_in_memory_are_not_read_to_see_whether_they_changed() -> None:
    model = tiny()
    model.register_buffer("unused", torch.empty(4096, device="meta"), persistent=False)
    model.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
    seen = Weights(model)
    assert not seen.changed(model)
    with torch.no_grad():
        next(model.parameters())[0] += 1
    assert seen.changed(model)


def test_a_weight_that_is_not_read_to_see_a_change_is_known_from_another_in_its_place() -> None:
    """As of one that does not lie in a row, or is packed by its layer."""
    model = tiny()
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))

    def in_columns(weight: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(weight.t().contiguous().t(), requires_grad=False)

    layer.weight = in_columns(layer.weight.detach())
    assert not layer.weight.is_contiguous()
    before, seen = layer.weight, Weights(model)
    assert not seen.changed(model)
    layer.weight = in_columns(before + 1)
    assert seen.changed(model)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    assert "T5ForConditionalGeneration" in str(cached(T5ForConditionalGeneration(config).eval()).unfit)


def padded() -> dict[str, Any]:
    mask = torch.ones(1, 5 * BLOCK, dtype=torch.long)
    mask[0, :3] = 0
    return {"attention_mask": mask}


def twice(model: PreTrainedModel, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """A way of decoding that keeps two sequences in the cache that it is given."""
    cache = inputs["cache"]
    model(input_ids[:, cache.get_seq_length() :], cache=cache)
    cache.batch_repeat_interleave(2)
    return input_ids


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (padded, "attention_mask"),
        (lambda: {"generation_config": GenerationConfig(pad_token_id=int(prompt(5 * BLOCK)[0, 3]))}, "attention_mask"),
        (lambda: {"position_ids": torch.arange(1, 5 * BLOCK + 1)[None]}, "position_ids"),
        (lambda: {"attention_mask": torch.full((1, 5 * BLOCK), 2)}, "attention_mask"),  # positions are sums of it
        (lambda: {"attention_mask": torch.ones(1, 6 * BLOCK, dtype=torch.long)}, "attention_mask"),
        (lambda: {"num_beams": 2}, "beam_search"),
        (lambda: {"num_beams": 2, "num_return_sequences": 2}, "beam_search"),
        (lambda: {"cache_implementation": "static"}, "cache_implementation"),
        (lambda: {"use_cache": False}, "use_cache"),
        (lambda: {"cache": DynamicCache(config=MODEL.config)}, "cache:"),
        (lambda: {"output_hidden_states": True}, "output_hidden_states"),
        (lambda: {"custom_generate": twice}, "custom_generate"),
    ],
)
def test_a_call_that_brings_more_than_token_ids_runs_without_a_cache_and_says_so(
    call: Callable[[], dict[str, Any]], named: str
) -> None:
    cache, ids = cached(MODEL), prompt(5 * BLOCK)
    cache.prefill(ids)
    text, report = answer_with(cache, ids, **call())
    assert text == answer(MODEL, ids, **call())
    assert named in report.why
    assert (report.loaded_tokens, report.stored_blocks) == ({}, 0)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"pad_token_id": int(prompt(5 * BLOCK)[0, 3])}, "attention_mask"),
        ({"num_beams": 2}, "beam_search"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_settings_of_the_models_own_hold_where_those_of_a_call_leave_them_open(
    own: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODEL, "generation_config", GenerationConfig(**own))
    ids, mine = prompt(5 * BLOCK), GenerationConfig(do_sample=False, max_new_tokens=12)
    output, report = cached(MODEL).generate(ids, generation_config=mine)
    assert torch.equal(output, MODEL.generate(ids, generation_config=mine))
    assert named in str(report.why)
    assert MemoryClient.blocks == {}


def test_several_prompts_at_once_and_a_model_in_training_are_not_cached() -> None:
    cache = cached(MODEL)
    assert "one prompt at a time" in str(cache.prefill(prompt(4 * BLOCK).view(2, -1)).report.why)
    MODEL.train()
    try:
        assert "training" in str(cache.prefill(prompt(4 * BLOCK)).report.why)
    finally:
        MODEL.eval()
    assert MemoryClient.blocks == {}

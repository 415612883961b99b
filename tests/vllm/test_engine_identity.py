"""Whose KV it is: two requests share a block only when everything that shapes it is the same."""

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.connector import vllm_weights
from terracekv.connector.vllm_chain import Adapters, Chain
from terracekv.connector.vllm_identity import adapter_digest, facts, fingerprint, model_name, revision
from terracekv.connector.vllm_weights import weights_digest
from terracekv.tests.harness import until
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, Request, prompt
from terracekv.tiers.block import block_keys

Make = Callable[..., Engine]
LONG_AGO_S = 3600.0
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
            until(lambda: second.step() is not None and asked.status == "running", "it runs", 10)
        half = second.half
        assert half is not None
        if state == "found":
            tracked = half._requests["a"]
            until(lambda: tracked.answer is not None and tracked.answer.found, "its lookup has come back", 10)
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
        until(lambda: not half._lookups._holding and not half._lookups._session._held, "nothing is leased", 10)
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
        until(lambda: second.step() is not None and asked.status == wanted, "it is under way", 10)
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


def config(**changes: Any) -> SimpleNamespace:
    rope = {"rope_type": changes.get("rope", "default")}
    about = {"hidden": changes.get("hidden", 8), "rope_parameters": rope, "_x": object()}
    hf = SimpleNamespace(_commit_hash=None, to_dict=lambda: about)
    model = SimpleNamespace(
        model=changes.get("model", "org/name"), dtype="torch.bfloat16", quantization=None, hf_config=hf, revision=None,
        max_model_len=changes.get("context", 4096), multimodal_config=changes.get("multimodal"),
        quantization_config=changes.get("scheme"), model_class_overrides=changes.get("classes", {}),
    )  # fmt: skip
    cache = SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto"), calculate_kv_scales=changes.get("scales"))
    parallel = SimpleNamespace(
        tensor_parallel_size=changes.get("tp", 1), pipeline_parallel_size=changes.get("pp", 1), data_parallel_size=1
    )
    load = SimpleNamespace(
        load_format=changes.get("load", "auto"),
        ignore_patterns=None,
        model_loader_extra_config=changes.get("extra", {}),
    )
    return SimpleNamespace(
        model_config=model, cache_config=cache, parallel_config=parallel, load_config=load,
        lora_config=changes.get("lora"),
    )  # fmt: skip


def told(backend: str = "FLASH_ATTN", version: str = "0.32.0", layout: str = "LBHNC", **changes: Any) -> str:
    pages = [changes.get("page", [16, 1, 8, 16, 256])]
    backends = {"layer": backend}
    return fingerprint(facts(config(**changes), version=version, backends=backends, cache_layout=layout, pages=pages))


def test_whatever_shapes_a_page_is_part_of_its_name() -> None:
    plain = told()
    assert plain == told(version="0.32.3"), "a repaired release keeps its cache"
    assert plain == told(lora=SimpleNamespace(target_modules=None)), "adapters are told apart request by request"
    others = [
        told(backend="FLASHINFER"), told(version="0.33.0"), told(layout="LBNHC"), told(hidden=9), told(tp=2),
        told(pp=2), told(cache_dtype="fp8"), told(backend="CPU_ATTN"),
        told(page=[32, 1, 8, 32, 256]), told(page=[32, 2, 8, 16, 256]),
        told(scheme={"ignore": ["v_proj"]}), told(scheme={"ignore": ["k_proj"]}), told(classes={"A": "other:A"}),
        told(lora=SimpleNamespace(target_modules=["q_proj"])),
        told(load="dummy"), told(load="pt"), told(load="tensorizer", extra={"tensorizer_uri": "elsewhere"}),
        told(load="tensorizer", extra={"tensorizer_uri": "a third place"}),
    ]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)
    with pytest.raises(ValueError, match="differ from run to run"):
        told(scales=True)


def test_what_an_engine_makes_of_pictures_is_part_of_the_name() -> None:
    made: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"do_resize": False}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ]
    assert len({told(), *(told(multimodal=SimpleNamespace(**settings)) for settings in made)}) == 5
    assert told(multimodal=SimpleNamespace()) == told(multimodal=SimpleNamespace(mm_processor_cache_gb=8))


def test_a_models_context_is_part_of_the_name_where_its_kv_depends_on_it() -> None:
    assert told(context=1024) == told(context=8192)
    assert told(rope="longrope", context=1024) != told(rope="longrope", context=8192)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_weights_are_told_apart_by_what_is_in_their_files(tmp_path: Path) -> None:
    for name, weights in {"a": b"1" * 10_000, "b": b"1" * 9_999 + b"2", "c": b"1" * 10_000}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))
    a, b, c = (weights_digest(tmp_path / name) for name in "abc")
    assert a == c != b and len(a) == 32
    local = config(model=str(tmp_path / "a"))
    assert (model_name(local), revision(local)) == ("a", a)
    assert (model_name(local, "given"), revision(local, "given")) == ("given", "given")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no weights"):
        weights_digest(tmp_path / "empty")


def test_a_download_is_known_by_its_commit_and_by_nothing_that_moves_on() -> None:
    download = config()
    for moving in (None, "main", "v1.0"):
        download.model_config.revision = moving
        with pytest.raises(ValueError, match="set `revision`"):
            revision(download)
    download.model_config.hf_config._commit_hash = "0123456789" * 4
    assert revision(download) == "0123456789" * 4
    download.model_config.hf_config_path = "org/config-only"
    with pytest.raises(ValueError, match="set `revision`"):
        revision(download)
    download.model_config.revision = "9876543210" * 4
    assert revision(download) == "9876543210" * 4, "of the weights and not of the config"


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "two files"])
def test_any_byte_of_the_weights_counts_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    monkeypatch.setattr(vllm_weights, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(vllm_weights, "CHUNK_BYTES", 1 << 12)
    weights = Random(1).randbytes(1_000_003)

    def digest(content: bytes) -> str:
        half = len(content) // 2 if sharded else len(content)
        for number, part in enumerate((content[:half], content[half:])):
            if part:
                (tmp_path / f"model-{number}.safetensors").write_bytes(part)
        return weights_digest(tmp_path)

    plain = digest(weights)
    for at in [0, *Random(2).sample(range(len(weights)), 12), len(weights) - 1]:
        changed = weights[:at] + bytes([weights[at] ^ 1]) + weights[at + 1 :]
        assert digest(changed) != plain, f"byte {at}"
    assert digest(weights) == plain
    assert digest(weights[:-1]) != plain


def test_weights_are_read_once_and_again_whenever_their_file_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    whole = vllm_weights._read_whole

    def counted(path: Path) -> bytes:
        reads.append(path)
        return whole(path)

    monkeypatch.setattr(vllm_weights, "_read_whole", counted)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1" * 1000)
    first = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == first and len(reads) == 2, "written just now: not remembered yet"
    monkeypatch.setattr(vllm_weights, "SETTLED_S", -LONG_AGO_S)
    assert [weights_digest(tmp_path) for _ in range(3)] == [first] * 3 and len(reads) == 3
    before = file.stat()
    file.write_bytes(b"2" * 1000)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of file times ticks every few milliseconds
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_digest(tmp_path) != first, "same size, inode and time of modification"
    file.write_bytes(b"1" * 1000)
    assert weights_digest(tmp_path) == first


def test_without_a_home_or_with_a_damaged_memory_weights_are_read_anew(tmp_path: Path, home: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1" * 1000)
    first = weights_digest(tmp_path)
    (home / "file").write_text("")
    assert weights_digest(tmp_path, cache=home / "file" / "no folder") == first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_weights, "SETTLED_S", -LONG_AGO_S)
        weights_digest(tmp_path)
        notes = [note for note in (home / ".cache" / "terracekv" / "weights").iterdir() if note.name != "lock"]
        assert len(notes) == 1 and notes[0].stat().st_size
        notes[0].write_text(notes[0].read_text()[:-30])
        assert weights_digest(tmp_path) == first

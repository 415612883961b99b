"""What an engine's KV is called: a namespace says everything that shapes a page, weights by their bytes or commit."""

import json
import os
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.connector import vllm_weights
from terracekv.connector.vllm_identity import facts, fingerprint, model_name, revision
from terracekv.connector.vllm_weights import weights_digest

LONG_AGO_S = 3600.0


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
        lora_config=changes.get("lora"), speculative_config=changes.get("drafter"),
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


def test_on_a_cpu_engines_with_adapters_are_apart_since_their_base_prompts_may_be_adapted_too() -> None:
    adapters = SimpleNamespace(target_modules=None)
    assert told(backend="CPU_ATTN") != told(backend="CPU_ATTN", lora=adapters)


def test_what_an_engine_makes_of_pictures_is_part_of_the_name() -> None:
    made: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"do_resize": False}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ]
    assert len({told(), *(told(multimodal=SimpleNamespace(**settings)) for settings in made)}) == 5
    assert told(multimodal=SimpleNamespace()) == told(multimodal=SimpleNamespace(mm_processor_cache_gb=8))


def test_a_drafter_is_known_by_its_weights_or_commit_and_not_by_its_place(tmp_path: Path) -> None:
    for name, weights in {"a": b"1" * 1000, "b": b"1" * 999 + b"2", "c": b"1" * 1000}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    (tmp_path / "made up").mkdir()

    def with_drafter(model: str, commit: str | None = None, method: str = "eagle", **more: Any) -> str:
        draft = SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=commit))
        return told(drafter=SimpleNamespace(method=method, model=model, draft_model_config=draft, **more))

    a, b, c = (with_drafter(str(tmp_path / name)) for name in "abc")
    assert a == c != b
    (tmp_path / "a" / "model.safetensors").write_bytes(b"3" * 1000)
    others = [
        with_drafter(str(tmp_path / "a")), with_drafter(str(tmp_path / "made up")), with_drafter("org/draft"),
        with_drafter("org/draft", "0" * 40), with_drafter("org/draft", "1" * 40),
        with_drafter("org/name", method="mtp"), with_drafter("org/draft", "0" * 40, quantization="fp8"),
    ]  # fmt: skip
    assert len({told(), a, b, *others}) == 3 + len(others)


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

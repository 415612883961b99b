"""Whose KV it is: the name of the model and of everything else that shapes the bytes of a page.

Pure, but for the files that it reads. Called by the worker half when the engine starts; the scheduler half takes over
what the workers say. Imports ``vllm_weights``; of vLLM's configuration it reads attributes, and knows no class.
"""

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terracekv.connector.vllm_weights import weights_digest

VOLATILE = {"transformers_version", "name_or_path", "torch_dtype", "dtype"}
"""Of a model's config: what says where it was read or by what, and not what it is."""
BY_CONTEXT = ("longrope", "llama4")
"""In the config of models whose KV depends on how long a context the engine allows: on the factors of their rotary
embeddings, say."""

OF_ITEMS = (
    "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Settings of an engine that decide what becomes of a picture, and that its name does not tell."""


def model_name(config: Any, given: str = "") -> str:
    """As given, or as vLLM has it; of a folder only its last part, so that it is the same wherever the folder is."""
    name = given or str(config.model_config.model)
    return Path(name).name if Path(name).is_dir() else name


def revision(config: Any, given: str = "") -> str:
    """Which weights: as given, the commit that they were downloaded at, or a digest of the files."""
    model = config.model_config
    folder = Path(str(model.model))
    if given:
        return given
    if folder.is_dir():
        return weights_digest(folder)
    if folder.is_file():
        return weights_digest(folder.parent, [folder])
    commits = [getattr(model, "revision", None)]
    if not getattr(model, "hf_config_path", None):  # else it is the commit of the config, which lies elsewhere
        commits.append(getattr(model.hf_config, "_commit_hash", None))
    for commit in commits:
        if re.fullmatch("[0-9a-f]{40,64}", str(commit)):  # no branch or tag, which moves on
            return str(commit)
    raise ValueError(f"the commit of {model.model!r} is not known: set `revision` in kv_connector_extra_config")


def facts(
    config: Any, *, version: str, backends: Mapping[str, str], cache_layout: str | None, pages: list[list[int]]
) -> dict[str, Any]:
    """What besides model and revision decides the bytes of a page, by name: people read it in the log.

    ``backends`` maps a layer to its attention backend, ``pages`` is what ``page_shapes`` says. Raises
    ValueError for what makes KV differ from run to run.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError("calculate_kv_scales: the scales of fp8 KV differ from run to run")
    hf = {key: value for key, value in model.hf_config.to_dict().items() if key not in VOLATILE and key[0] != "_"}
    text = json.dumps(hf, sort_keys=True, default=str)
    found: dict[str, Any] = {
        "vllm": ".".join(version.split(".")[:2]),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "kv_dtype": str(cache.cache_dtype),
        "kv_skip_layers": str(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "cache_layout": str(cache_layout),
        "pages": pages,
        "weights": _read_how(getattr(config, "load_config", None)),
        "backends": sorted(set(backends.values())),
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "enable_expert_parallel",
        "data_parallel_size",
    ):
        found[name] = getattr(parallel, name, 1)
    for name in ("quantization_config", "model_class_overrides"):
        if given := getattr(model, name, None):
            found[name] = _told(given)
    lora = getattr(config, "lora_config", None)
    if modules := getattr(lora, "target_modules", None):
        found["lora_modules"] = sorted(modules)
    if (multimodal := getattr(model, "multimodal_config", None)) is not None:
        found["multimodal"] = _told({name: getattr(multimodal, name, None) for name in OF_ITEMS})
    if any(name in text for name in BY_CONTEXT):
        found["max_model_len"] = model.max_model_len
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None:
        found["drafter"] = _drafter(speculative, str(model.model))
    if any("CPU" in backend for backend in backends.values()):
        found["isa"] = cpu_flags()
        # In a batch of both, vLLM's LoRA for CPUs also adds an adapter's share to prompts that have none.
        found["lora"] = lora is not None
    return found


def items_named(config: Any) -> bool:
    """Whether multimodal items bear names of what they are. Without any cache of its own vLLM numbers them instead, and
    begins at 1 with each start."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    cached = config.cache_config.enable_prefix_caching or getattr(multimodal, "mm_processor_cache_gb", 1) > 0
    return multimodal is None or bool(cached)


def _read_how(load: Any) -> list[str]:
    """How weights come out of the files: made up, from other files of the folder, from another place."""
    names = ("load_format", "ignore_patterns", "model_loader_extra_config")
    return [_told(getattr(load, name, None)) for name in names]


def _drafter(speculative: Any, model: str) -> list[str]:
    """Which drafter, whose KV is in the pages too: of a folder its weights, of a download its commit as well."""
    name = str(getattr(speculative, "model", None))
    draft = getattr(speculative, "draft_model_config", None)
    commits = [getattr(speculative, "revision", None), getattr(getattr(draft, "hf_config", None), "_commit_hash", None)]
    which = f"{name} {commits}"
    if name == model:
        which = "the model's own"
    elif Path(name).is_dir():
        with contextlib.suppress(ValueError):  # it has none, and is made up
            which = weights_digest(Path(name))
    return [str(speculative.method), which, str(getattr(speculative, "quantization", None))]


def _told(setting: Any) -> str:
    return json.dumps(setting, sort_keys=True, default=str)


def fingerprint(found: Mapping[str, Any]) -> str:
    """16 hex digits that differ whenever any fact does."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def cpu_flags() -> str:
    """What of this processor decides how the CPU backend packs K and V inside a page."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "unknown"
    known = ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2", "asimd", "bf16")
    return ",".join(flag for flag in known if flag in words)


def kv_dtype(config: Any) -> str:
    """``bfloat16``, ``fp8_e4m3`` ...: what elements of K and V are."""
    cache_dtype = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype


def adapter_digest(path: str) -> bytes:
    """32 bytes over the content of a LoRA adapter's folder: the same on every host, whatever its name and place.

    Raises OSError when it cannot be read, ValueError when there is nothing in it.
    """
    digest = hashlib.sha256(b"terracekv/adapter/1\0")
    files = sorted(file for file in Path(path).iterdir() if file.name.startswith("adapter_") and file.is_file())
    if not files:
        raise ValueError(f"no adapter in {path}")
    for file in files:
        with open(file, "rb") as content:
            inner = hashlib.file_digest(content, "sha256").digest()
        digest.update(file.name.encode() + b"\0" + inner)
    return digest.digest()


def offset_in_block(offset: int) -> bytes:
    """Where a multimodal item begins, counted from the block's first token; an item may have begun before it."""
    return struct.pack("<i", offset)

"""Whether a model's KV is that of the prefix alone, and what of earlier prompts it still keeps.

Owns nothing. Called by ``transformers.py`` when its cache is made
and at each prompt. Imports torch and transformers.
"""

from itertools import chain
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def forget_pictures(model: PreTrainedModel) -> None:
    """Models that see pictures keep how far the last prompt's moved the positions behind them, and add it where a cache
    is not empty: to a prompt of tokens alone they would add that of another."""
    for module in model.modules():
        if isinstance(kept := getattr(module, "rope_deltas", None), torch.Tensor):
            module.rope_deltas = torch.zeros_like(kept[:1])


def unfit(model: PreTrainedModel) -> str | None:
    """What in this model makes the KV of a prefix depend on more than the prefix, or not be plain K and V."""
    if model.config.is_encoder_decoder or not model.can_generate():
        return f"{type(model).__name__}: only decoders that generate are cached"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention: earlier tokens see later ones"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type", part.get("type")) in ("dynamic", "longrope"):
            return "rope_type dynamic or longrope: the KV of a prefix depends on the length of the whole prompt"
    kinds = {
        type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer
    }
    if kinds:
        return f"{', '.join(sorted(kinds))}: only plain full attention is cached"
    devices = {tensor.device.type for tensor in model.parameters()}
    if devices != {"cpu"}:
        return f"weights on {', '.join(sorted(devices))}: only models on the CPU are cached"
    return changed(model)


def changed(model: PreTrainedModel) -> str | None:
    """What changes KV beside the weights. Hooks of transformers' own only note what passes."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return "adapters: what they do to KV is not part of the namespace; merge them into the weights"
    for name, module in model.named_modules():
        for hook in chain(module._forward_pre_hooks.values(), module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                return f"a hook on {name or 'the model'}: what it does to KV is not part of the namespace"
    return None


def name_of(model: PreTrainedModel) -> str:
    """The config's name; of a folder only its last part, so that the same model elsewhere has the same name."""
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    return Path(name).name if Path(name).is_dir() else name

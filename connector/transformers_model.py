"""Whether a model's KV is that of the prefix alone, and whether the model still is the one that was named.

``Weights`` owns marks of a model's tensors, and none of these. Called by ``transformers.py`` when its cache is made
and at each prompt. Imports torch and transformers.
"""

import ctypes
from itertools import chain
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

GLIMPSE_BYTES = 16
"""Of the middle of each tensor: what merges into weights or trains them leaves none as it was."""


class Weights:
    """The weights of a model as they were: a change in place is noticed at the next prompt, some microseconds a tensor.

    torch counts writes but for those through ``.data``, of which only those are noticed that reach a tensor's middle.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._before = _marks(model)

    def changed(self, model: PreTrainedModel) -> bool:
        """Whether they are others by now."""
        return _marks(model) != self._before


def _marks(model: PreTrainedModel) -> list[tuple[int, int, bytes]]:
    return [_mark(tensor) for tensor in chain(model.parameters(), model.buffers())]


def _mark(tensor: torch.Tensor) -> tuple[int, int, bytes]:
    version = 0 if tensor.is_inference() else tensor._version
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    # What lies elsewhere, or nowhere (a buffer on "meta" that nobody uses), has no address here to read at.
    if not plain or tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
        return id(tensor), version, b""
    place, size = tensor.data_ptr(), tensor.nbytes
    return place, version, ctypes.string_at(place + size // 2, min(GLIMPSE_BYTES, size - size // 2))


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

"""Prefix caching for Hugging Face transformers: look up, load what is stored, prefill the rest, store what is new.

``TerraceCache`` owns a client and nothing of the model's. Called by the engine's one thread, one prompt at a time.
Imports torch, transformers, ``connector.client``, ``layout``, ``report``, ``transformers_model`` and
``transformers_weights``.

The output is that of a run without a cache: a block holds what this model computed for exactly this prefix, and the
last token of a prompt is always computed. Trouble with the daemon is a miss. A model or a call whose KV is more than
plain full attention over token ids runs as it would without us, and ``Report.why`` names what stood in the way.
"""

import contextlib
import inspect
import mmap
import time
import weakref
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from terracekv.connector.client import Client
from terracekv.connector.layout import Blocks, Plane, layout_of
from terracekv.connector.report import Report, tokens_by_tier
from terracekv.connector.transformers_model import Weights, changed, forget_pictures, name_of, unfit
from terracekv.connector.transformers_weights import weights_digest

AHEAD_TOKENS_MAX = 1024
"""Room kept for generated tokens beyond the prompt; past it a layer grows by concatenation, as it does without us."""


class Prefilled(NamedTuple):
    """A prompt, computed: ``logits`` are those of its last token, shape (1, vocabulary)."""

    cache: DynamicCache
    logits: torch.Tensor
    report: Report


class TerraceCache:
    """Prefix cache of one model. One prompt at a time; a prompt is a tensor of token ids of shape (1, tokens).

    The namespace names the model by ``name`` (default: the config's name), its weights by ``revision`` (default:
    ``weights_digest(model)``) and the dtype of K and V. A model whose weights are changed afterwards runs without a
    cache: it needs a new TerraceCache.
    ``client_options`` go to ``Client``: credential, strict, deadlines.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        socket: str | Path,
        block_tokens: int = 256,
        name: str | None = None,
        revision: str | None = None,
        **client_options: Any,
    ) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.unfit = unfit(model)
        """What makes this model one that is never cached; None for a model that is."""
        self.client: Client | None = None
        """The session with the daemon; None when this model is never cached."""
        self._weights: Weights | None = None
        self._memory = _Memory()
        parameters = inspect.signature(model.forward).parameters
        # Older versions of transformers know it by the second name only.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._forward = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        if self.unfit is None:
            kept = self._probe()
            if isinstance(kept, str):
                self.unfit = kept
            else:
                self._heads_dims, self._dtype = kept
                self._weights = Weights(model)
                self.client = Client(
                    socket,
                    model=name or name_of(model),
                    revision=revision or weights_digest(model),
                    dtype=str(self._dtype).removeprefix("torch."),
                    block_tokens=block_tokens,
                    layout=layout_of(
                        axes="HND",
                        packing="split",
                        layers=self._heads_dims,
                        block_tokens=block_tokens,
                        item_bytes=self._dtype.itemsize,
                    ),
                    **{"engine": "transformers"} | client_options,
                )

    def prefill(self, input_ids: torch.Tensor, *, ahead_tokens: int = 0) -> Prefilled:
        """Compute a prompt, whole, for a caller with a decoding loop of its own; ``ahead_tokens`` more are expected.

        Stores before it returns. Errors are those of the model's forward.
        """
        started = time.perf_counter()
        why = self._odd_prompt(input_ids)
        if why is None:
            cache, report = self._load(input_ids[0].tolist(), ahead_tokens)
        else:
            cache = DynamicCache(config=self.model.config)
            report = Report(input_ids.shape[-1], input_ids.shape[-1], why=why)
        rest = input_ids[:, -report.computed_tokens :]
        with torch.no_grad():
            output = self.model(rest, **{self._cache_name: cache}, use_cache=True, **self._forward)
        report.ttft_ms = _since(started)
        if why is None:
            self._store(input_ids[0].tolist(), cache, report)
        return Prefilled(cache, output.logits[:, -1], report)

    def generate(self, input_ids: torch.Tensor, *, store_output: bool = False, **kwargs: Any) -> tuple[Any, Report]:
        """``model.generate(input_ids, **kwargs)``, and what the cache did for it.

        The prompt's full blocks are stored after the last token; with ``store_output`` those of the answer too.
        Errors are those of ``model.generate``.
        """
        clock = _FirstToken()
        kwargs["stopping_criteria"] = StoppingCriteriaList([clock, *(kwargs.get("stopping_criteria") or ())])
        # What a caller leaves open is the model's own setting; how the two are joined differs from version to version.
        settings, for_model = self.model._prepare_generation_config(**{"generation_config": None} | kwargs)
        why = self._odd_prompt(input_ids) or self._odd_call(input_ids, settings, for_model)
        if why is not None:
            output = self.model.generate(input_ids, **kwargs)
            return output, Report(input_ids.shape[-1], input_ids.shape[-1], why=why, ttft_ms=clock.ttft_ms)
        tokens: list[int] = input_ids[0].tolist()
        cache, report = self._load(tokens, _ahead_tokens(settings, len(tokens)))
        output = self.model.generate(input_ids, **{self._cache_name: cache}, **kwargs)
        report.ttft_ms = clock.ttft_ms
        if store_output:
            sequence = output if isinstance(output, torch.Tensor) else output.sequences
            tokens = sequence[0, : cache.get_seq_length()].tolist()
        self._store(tokens, cache, report)
        return output, report

    def close(self) -> None:
        """End the session. Idempotent; prompts after it are computed without a cache."""
        if self.client is not None:
            self.client.close()
            self.client = None
        self.unfit = self.unfit or "closed"

    def _load(self, tokens: list[int], ahead_tokens: int) -> tuple[DynamicCache, Report]:
        """A cache with room for the prompt and ``ahead_tokens``, its leading blocks loaded where they are stored."""
        assert self.client is not None
        started = time.perf_counter()
        forget_pictures(self.model)
        report = Report(len(tokens), len(tokens))
        loadable = (len(tokens) - 1) // self.block_tokens
        keys = self.client.keys(tokens)[:loadable]
        found = self.client.lookup(keys) if keys else None
        report.lookup_ms = _since(started)
        if found is None:
            report.why = "no_daemon" if loadable else "shorter_than_block"
        elif found.blocks < loadable:
            report.why = found.reason

        started = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        cache.layers = self._roomy_layers(len(tokens) + min(ahead_tokens, AHEAD_TOKENS_MAX))
        blocks = 0
        if found is not None and found.blocks:
            _keep(cache, found.blocks * self.block_tokens)
            loaded = self.client.load(keys[: found.blocks], self._blocks(cache).scatter)
            blocks = loaded.blocks
            report.loaded_tokens = tokens_by_tier(found.per_tier, blocks, self.block_tokens)
            if blocks < found.blocks:
                report.why = loaded.why
            report.load_ms = _since(started)
        # What was scattered beyond the good blocks is outside the layers again, and will be overwritten.
        _keep(cache, blocks * self.block_tokens)
        report.computed_tokens -= blocks * self.block_tokens
        return cache, report

    def _store(self, tokens: list[int], cache: DynamicCache, report: Report) -> None:
        """Store the full blocks of ``tokens`` that are not stored yet."""
        assert self.client is not None
        started = time.perf_counter()
        full = len(tokens) // self.block_tokens
        if full * self.block_tokens > report.prompt_tokens - report.computed_tokens:
            keys = self.client.keys(tokens)[:full]
            if keys:
                report.stored_blocks = self.client.store(keys, self._blocks(cache).gather).stored
        report.store_ms = _since(started)

    def _roomy_layers(self, tokens: int) -> list["RoomyLayer"]:
        """Layers without content, all in one piece of memory, so that a block's runs lie at even distances."""
        shapes = [(2, 1, heads, tokens, dim) for heads, dim in self._heads_dims]
        sizes = [prod(shape) for shape in shapes]
        memory = self._memory.lend(sum(sizes), self._dtype).split(sizes)
        return [RoomyLayer(*part.view(shape)) for part, shape in zip(memory, shapes, strict=True)]

    def _blocks(self, cache: DynamicCache) -> Blocks:
        planes = []
        for layer, heads_dim in zip(cache.layers, self._heads_dims, strict=True):
            for tensor in (layer.keys, layer.values):
                batch, heads, tokens, dim = tensor.shape
                # What is copied is what was registered: a model that changes its KV meanwhile is a bug to stop at.
                assert (batch, (heads, dim), tensor.dtype, tensor.stride(3)) == (1, heads_dim, self._dtype, 1)
                strides = (tensor.stride(1) * tensor.itemsize, tensor.stride(2) * tensor.itemsize)
                planes.append(Plane(tensor.data_ptr(), heads, tokens, dim, strides))
        return Blocks.of(planes, self.block_tokens, self._dtype.itemsize)

    def _probe(self) -> tuple[list[tuple[int, int]], torch.dtype] | str:
        """(heads, dim) of each layer and the dtype of K and V as the model really keeps them, seen with one token;
        or what about them is not plain."""
        cache = DynamicCache(config=self.model.config)
        token = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            self.model(token, **{self._cache_name: cache}, use_cache=True, **self._forward)
        heads_dims = []
        for number, layer in enumerate(cache.layers):
            if layer.keys is None or layer.keys.dim() != 4 or layer.keys.shape[2] != 1:
                return f"layer {number} keeps no K and V of its own"
            if layer.keys.shape != layer.values.shape or layer.keys.dtype != layer.values.dtype:
                return f"layer {number}: K and V differ in shape or dtype"
            if layer.keys.device.type != "cpu" or layer.keys.dtype != cache.layers[0].keys.dtype:
                return (
                    f"layer {number}: KV of {layer.keys.dtype} on {layer.keys.device}; one dtype on the CPU is cached"
                )
            heads_dims.append((layer.keys.shape[1], layer.keys.shape[3]))
        if self._looks_ahead():
            return "the KV of a token depends on the tokens after it"
        return heads_dims, cache.layers[0].keys.dtype

    def _looks_ahead(self) -> bool:
        """Whether one token's K and V differ by more than rounding with what comes after it."""
        seen = []
        for last in (1, 2):
            cache = DynamicCache(config=self.model.config)
            with torch.no_grad():
                self.model(torch.tensor([[0, last]]), **{self._cache_name: cache}, use_cache=True, **self._forward)
            seen.append([kv[:, :, :1].float() for layer in cache.layers for kv in (layer.keys, layer.values)])
        return not all(
            torch.allclose(one, other, rtol=0.0, atol=0.01 * float(one.abs().max()), equal_nan=True)
            for one, other in zip(*seen, strict=True)
        )

    def _odd_prompt(self, input_ids: torch.Tensor) -> str | None:
        """What in this prompt, or in the model at this moment, keeps it from being cached."""
        if self.unfit is not None:
            return self.unfit
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            return f"input_ids of shape {tuple(input_ids.shape)}: one prompt at a time is cached"
        if self.model.training:
            return "the model is in training mode: dropout"
        if torch.is_autocast_enabled("cpu"):
            return "autocast: KV is rounded otherwise than without it"
        if self._weights is not None and self._weights.changed(self.model):
            return "the weights are others than when this cache was made: make a new TerraceCache"
        return changed(self.model)

    def _odd_call(self, input_ids: torch.Tensor, settings: GenerationConfig, others: Mapping[str, Any]) -> str | None:
        """What in a call of ``generate`` makes KV depend on more than the token ids, or needs a cache of its own.
        ``others`` are the arguments that are no generation settings."""
        known = {*inspect.signature(self.model.generate).parameters, "attention_mask"} - {"inputs", "kwargs"}
        for name in others:
            if name not in known:
                return f"{name}: only prompts that are token ids and nothing else are cached"
        mode = settings.get_generation_mode(others.get("assistant_model")).value
        sequences = settings.num_return_sequences or 1
        if mode not in ("greedy_search", "sample") or sequences > 1:
            return f"{mode} of {sequences}: only one sequence at a time is cached"
        for name in ("cache_implementation", "prefill_chunk_size"):
            if getattr(settings, name, None) is not None:
                return f"{name}: the call brings a cache or a prefill of its own"
        if others.get("custom_generate") is not None:
            return "custom_generate: what it does to a cache is its own"
        if settings.use_cache is False:
            return "use_cache is off"
        mask = others.get("attention_mask")
        pad, end = settings.pad_token_id, settings.eos_token_id
        if mask is None and pad is not None and pad not in (end if isinstance(end, list) else [end]):
            mask = input_ids != pad  # what generate makes of such a prompt
        if mask is not None and not (mask.shape == input_ids.shape and bool((mask == 1).all())):
            return "attention_mask: not a one for each token: padding moves the positions of the tokens after it"
        return None


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose K and V are the leading tokens of memory with room for more: appending copies only what is new,
    and loaded blocks are put straight where attention reads them.

    Once anything else has replaced ``keys`` (cropping, reordering, repeating), the room is used up, or torch does not
    let it be written to (with gradients, or outside the inference mode that it was made in), it grows by concatenation
    like the ``DynamicLayer`` that it is.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._room = (keys, values)
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.keep(0)

    def keep(self, tokens: int) -> None:
        """The first ``tokens`` tokens of the room are what this layer holds."""
        self._held = self.keys, self.values = tuple(memory[:, :, :tokens] for memory in self._room)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; see ``DynamicLayer``."""
        start = self.keys.shape[2] if self.is_initialized else 0
        end = start + key_states.shape[2]
        ours = self.keys is self._held[0] and self.values is self._held[1]
        barred = torch.is_grad_enabled() or self._room[0].is_inference() > torch.is_inference_mode_enabled()
        if not ours or barred or end > self._room[0].shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        for memory, states in zip(self._room, (key_states, value_states), strict=True):
            memory[:, :, start:end] = states
        self.keep(end)
        return self.keys, self.values


class _Memory:
    """Memory for one prompt's KV, lent again to the next once no tensor in it is left.

    A first write to fresh pages costs twice the copy itself even when they are huge, and far more in a virtual
    machine that took them back meanwhile.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lent: Callable[[], object | None] = lambda: None

    def lend(self, items: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised items in a row; what is lent already is never lent twice."""
        size = items * dtype.itemsize
        if self._memory is None or len(self._memory) < size or self._lent() is not None:
            # Rounded up for longer prompts to come: what is not written costs nothing.
            self._memory = mmap.mmap(-1, 1 << size.bit_length(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._memory)
        self._lent = weakref.ref(view)  # the tensor's storage keeps the view alive, and nothing else does
        return torch.frombuffer(view, dtype=dtype, count=items)


class _FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Never stops anything: ``generate`` asks it after each token, so it sees the moment of the first."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.ttft_ms = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.ttft_ms = self.ttft_ms or _since(self._started)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _ahead_tokens(settings: GenerationConfig, prompt_tokens: int) -> int:
    if settings.max_new_tokens is not None:
        return int(settings.max_new_tokens)
    return max(0, int(settings.max_length or 0) - prompt_tokens)


def _keep(cache: DynamicCache, tokens: int) -> None:
    for layer in cache.layers:
        layer.keep(tokens)


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000

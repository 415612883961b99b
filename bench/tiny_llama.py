"""A random Llama of five million weights, and adapters for it: an engine's scenarios in milliseconds, not minutes.

Made once into ``.models/`` by whoever asks first; random weights from a fixed seed, so it is the same everywhere.
Imports torch, transformers and safetensors.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from terracekv.bench.models import once

VOCABULARY = 4096
HIDDEN = 256
LAYERS = 4
HEADS = 4
KV_HEADS = 2
CONTEXT_TOKENS = 4096
SPREAD = 0.3
"""Of the weights: wide enough that greedy answers to different prompts differ from the first token."""
RANK = 8


def tiny_llama() -> Path:
    """Its folder. There is no tokenizer: prompts are token ids."""

    def make(folder: Path, scratch: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=SPREAD, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).float().save_pretrained(folder)

    return once(f"tiny-llama-{LAYERS}x{HIDDEN}", make)


def adapter(seed: int) -> Path:
    """The folder of a LoRA adapter for it, which changes K and V. Another seed, other weights."""

    def make(folder: Path, scratch: Path) -> None:
        numbers = torch.Generator().manual_seed(seed)
        wide = {"q_proj": HIDDEN, "k_proj": HIDDEN * KV_HEADS // HEADS, "v_proj": HIDDEN * KV_HEADS // HEADS}
        weights = {}
        for layer in range(LAYERS):
            for name, outputs in wide.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=numbers)
                weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=numbers)
        save_file(weights, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        settings |= {"target_modules": sorted(wide), "base_model_name_or_path": "tiny-llama"}
        (folder / "adapter_config.json").write_text(json.dumps(settings))

    return once(f"tiny-llama-{LAYERS}x{HIDDEN}-adapter-{seed}", make)

"""Which weights a model in memory has: a digest over all of them, as a part of its blocks' names.

Owns nothing. Called by ``transformers.py`` when its cache is made. Imports torch.
"""

import hashlib
import io
import json
from itertools import chain
from typing import Any

import torch

ROW_WORDS = 256
"""64-bit words that are summed up, each by a factor of its own."""
FACTORS = torch.tensor([pow(0x9E3779B97F4A7C15, i, 1 << 64) - (1 << 63) for i in range(1, ROW_WORDS + 1)]) | 1


def weights_digest(model: Any) -> str:
    """32 hex digits over the config of a transformers model and all that shapes KV in its state: name, shape, dtype,
    and of each row of ``ROW_WORDS`` 64-bit words a sum in which every word counts by its place.

    It reads all weights once, at memory speed. A change of any word or of their order is noticed; an edit made to keep
    the sums is not defended against: pass a ``revision`` where weights come from strangers.
    Another version of transformers may write another config, and so start with an empty cache.
    """
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers())):
        digest.update(f"\0{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // (8 * ROW_WORDS) * (8 * ROW_WORDS)
        sums = raw[:whole].view(torch.int64).view(-1, ROW_WORDS) @ FACTORS.to(raw.device)
        digest.update(sums.cpu().numpy().tobytes() + raw[whole:].cpu().numpy().tobytes())
    known = {name for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers())}
    for name, value in sorted(model.state_dict().items()):
        if name not in known:  # weights that a quantized layer has packed, and what else a layer keeps
            packed = io.BytesIO()
            torch.save(value, packed)
            digest.update(f"\0{name}\0".encode() + packed.getbuffer())
    return digest.hexdigest()[:32]

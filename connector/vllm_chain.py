"""The keys of one request's blocks: its tokens, and what besides them shapes their KV.

``Chain`` owns the keys that are known by now. Made by the scheduler half; the prompt's keys are computed by the lookup
thread, those of generated tokens one by one on the scheduler's. Imports ``tiers.block`` and ``vllm_identity``.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

from terracekv.connector.vllm_identity import adapter_digest, offset_in_block
from terracekv.tiers.block import EXTRA_LORA, EXTRA_MULTIMODAL, EXTRA_OTHER, block_keys

Extra = tuple[int, bytes]
ADAPTERS_MAX = 256


class Adapters:
    """Content digests of LoRA adapters, read once for each state of their files. Used by the lookup thread only.

    vLLM knows an adapter by its number, and goes on with what it read under it whatever becomes of the files: a number
    stands for what was in them at first. Once they held something else, nobody here can tell which of the two vLLM has.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], bytes] = {}
        self._numbers: dict[int, bytes | None] = {}
        """What each number stands for, and None for one that stood for two things; as many as adapters were used."""

    def digest(self, adapter: Any) -> bytes:
        """``adapter`` is vLLM's LoRARequest. Raises OSError or ValueError when it cannot be read, and ValueError when
        its number stood for something else before."""
        found = self._digest(adapter.lora_path)
        if self._numbers.setdefault(adapter.lora_int_id, found) != found:
            self._numbers[adapter.lora_int_id] = None
            raise ValueError(
                f"{adapter.lora_path}: adapter number {adapter.lora_int_id} was another one before, and which of them"
                " vLLM has cannot be known. Load changed weights from a new folder, as an adapter with a number of its"
                " own"
            )
        return found

    def _digest(self, path: str) -> bytes:
        states = [
            (entry.name, (stat := entry.stat()).st_ino, stat.st_size, stat.st_mtime_ns)
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name)
        ]
        key = (path, *states)
        if key not in self._known:
            if len(self._known) >= ADAPTERS_MAX:
                self._known.clear()
            self._known[key] = adapter_digest(path)
        return self._known[key]


@dataclass(slots=True, eq=False)
class Chain:
    """``request`` is vLLM's. ``weights`` sets apart what was computed after the weights were changed in place."""

    request: Any
    block_tokens: int
    weights: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    namespace: bytes | None = None
    """What the keys begin with; None until they are computed."""
    _lora: bytes | None = None

    def begin(self, namespace: bytes, adapters: Adapters) -> None:
        """Compute the keys of the tokens that there are. Lookup thread. Raises OSError or ValueError for an adapter
        that cannot be read or is not certain."""
        request = self.request
        if request.lora_request is not None:
            self._lora = adapters.digest(request.lora_request)
        tokens = list(request.all_token_ids)
        extras = self._extras(0, len(tokens) // self.block_tokens)
        self.keys = block_keys(namespace, tokens, self.block_tokens, extras)
        self.namespace = namespace

    def extend(self, blocks: int) -> None:
        """Compute keys up to ``blocks`` of them. Scheduler thread, after ``begin``."""
        assert self.namespace is not None
        have = len(self.keys)
        if blocks > have:
            tokens = self.request.all_token_ids[have * self.block_tokens : blocks * self.block_tokens]
            extras = {index - have: found for index, found in self._extras(have, blocks).items()}
            last = self.keys[-1] if have else self.namespace
            self.keys += block_keys(last, tokens, self.block_tokens, extras)

    def _extras(self, first: int, end: int) -> dict[int, list[Extra]]:
        """What besides tokens shapes blocks [first, end), block by block."""
        request = self.request
        embeds = getattr(request, "prompt_embeds", None)
        are_tokens = getattr(request, "prompt_is_token_ids", None) or ()
        items = getattr(request, "mm_features", None) or ()
        if self._lora is None and not items and embeds is None and not (first == 0 and self._roots()):
            return {}
        size = self.block_tokens
        extras: dict[int, list[Extra]] = {}
        for index in range(first, end):
            start = index * size
            found: list[Extra] = [(EXTRA_LORA, self._lora)] if self._lora is not None else []
            for item in items:
                place = item.mm_position
                if place.offset < start + size and place.offset + place.length > start:
                    digest = hashlib.sha256(item.identifier.encode()).digest()
                    found.append((EXTRA_MULTIMODAL, digest + offset_in_block(place.offset - start)))
            if index == 0:
                found += self._roots()
            if embeds is not None and start < len(embeds):
                which = bytes(are_tokens[start : start + size])  # of the others the token is 0, which is a token too
                found.append((EXTRA_OTHER, _digest(b"embeds", _bytes(embeds[start : start + size]) + which)))
            if found:
                extras[index] = found
        return extras

    def _roots(self) -> list[Extra]:
        """What sets whole prompts apart, once, in their first block: the chain carries it on."""
        found = []
        if salt := getattr(self.request, "cache_salt", None):
            found.append((EXTRA_OTHER, _digest(b"salt", str(salt).encode())))
        if self.weights:
            found.append((EXTRA_OTHER, _digest(b"weights", self.weights)))
        return found


def _digest(what: bytes, value: bytes) -> bytes:
    return hashlib.sha256(what + b"\0" + value).digest()


def _bytes(tensor: Any) -> bytes:
    """Of a tensor of floats; as float32, which every 16-bit float has its own value in."""
    found: bytes = tensor.detach().cpu().float().contiguous().numpy().tobytes()
    return found

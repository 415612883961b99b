"""What a token's KV is, by the name of a model or in numbers.

Pure. Called by ``payoff`` and ``cli_bench`` in the command's own process. Imports the standard library and ``errors``.
"""

import difflib
from dataclasses import dataclass, replace

from terracekv.tiers.errors import BadRequest

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV of one rank. ``heads`` is 0 for a latent of ``dim`` numbers a layer (MLA), which is K and V in one."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: str = "bfloat16"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """All layers."""
        return self.layers * (2 * self.heads or 1) * self.dim * self.item_bytes

    def shard(self, ranks: int) -> "Geometry":
        """What one of so many tensor-parallel ranks holds; fewer heads than ranks are held more than once, and a latent
        by all of them."""
        if ranks == 1 or not self.heads:
            return self
        if self.heads % ranks and ranks % self.heads:
            raise BadRequest(f"--tp {ranks} does not divide {self.heads} KV heads", "give the number of the engine")
        return replace(self, name=f"{self.name}, one of {ranks} ranks", heads=max(1, self.heads // ranks))


MODELS = {
    model.name.lower(): model
    for model in (
        Geometry("Llama-3.1-8B", 32, 8, 128),
        Geometry("Llama-3.1-70B", 80, 8, 128),
        Geometry("Llama-3.1-405B", 126, 8, 128),
        Geometry("Llama-3.2-1B", 16, 8, 64),
        Geometry("Llama-3.2-3B", 28, 8, 128),
        Geometry("Mistral-7B", 32, 8, 128),
        Geometry("Qwen2.5-7B", 28, 4, 128),
        Geometry("Qwen2.5-72B", 80, 8, 128),
        Geometry("Qwen3-8B", 36, 8, 128),
        Geometry("Qwen3-32B", 64, 8, 128),
        Geometry("Qwen3-30B-A3B", 48, 4, 128),
        Geometry("Qwen3-235B-A22B", 94, 4, 128),
        Geometry("DeepSeek-V3", 61, 0, 576),
        Geometry("DeepSeek-R1", 61, 0, 576),
    )
}
"""As their published configurations have them."""


def geometry_of(
    name: str | None, *, layers: int | None, heads: int | None, dim: int | None, dtype: str | None, ranks: int
) -> Geometry:
    """By name, or in numbers. BadRequest for what is neither."""
    if dtype is not None and dtype not in ITEM_BYTES:
        raise BadRequest(f"--dtype {dtype} is not known", f"it is one of {', '.join(ITEM_BYTES)}")
    given = [number for number in (layers, heads, dim) if number is not None]
    if given and (name is not None or layers is None or dim is None):
        raise BadRequest(
            "a geometry is a name, or all of --layers, --kv-heads and --head-dim",
            "for MLA leave out --kv-heads: --head-dim is then that of the latent, rope included (512 + 64)",
        )
    if layers is not None and dim is not None:
        shape = f"{heads or 'latent'} x {dim}"
        return Geometry(f"{layers} layers of {shape}", layers, heads or 0, dim, dtype or "bfloat16").shard(ranks)
    found = MODELS.get((name or "Llama-3.1-8B").lower())
    if found is None:
        near = difflib.get_close_matches((name or "").lower(), MODELS, 1, 0.4)
        known = ", ".join(model.name for model in MODELS.values())
        hint = f"did you mean {MODELS[near[0]].name}? " if near else ""
        raise BadRequest(f"no geometry is called {name}", f"{hint}known are {known}; or give --layers and so on")
    return (replace(found, dtype=dtype) if dtype else found).shard(ranks)

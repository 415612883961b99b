"""The codec on real KV: SmolLM2-135M over this project's design page, in the number formats that engines keep KV in.

How much smaller, and how fast in one thread (processor time, so that neighbours do not count). Needs torch and the
model; says so and measures nothing where they are not.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import zstandard

from terracekv.bench.figures import core_rate, note, report
from terracekv.kernels.planes import merge, split
from terracekv.tiers.codec import CHUNK_BYTES, decode, encode
from terracekv.tiers.codec_id import Codec, codec_for

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "design.md"
BLOCK_TOKENS = 256
BLOCKS = 4
ROUNDS = 5
WANTED_RATIO = 1.40


def blocks() -> dict[str, list[bytes]]:
    """Blocks of KV by dtype: one prompt's, computed in bfloat16 and in float32; the others are made from the latter."""
    import torch

    from terracekv.bench.small_model import load

    model, tokenizer = load()
    tokens = tokenizer(DOCUMENT.read_text(), return_tensors="pt").input_ids[:, : BLOCKS * BLOCK_TOKENS]
    made: dict[str, list[bytes]] = {}

    def keep(dtype: str, tensors: list[torch.Tensor]) -> None:
        for number in range(BLOCKS):
            part = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            runs = [tensor[0, :, part].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
            made.setdefault(dtype, []).append(b"".join(runs))

    def computed(dtype: torch.dtype) -> list[torch.Tensor]:
        with torch.inference_mode():
            cache = model.to(dtype)(tokens, use_cache=True).past_key_values
        return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]

    full = computed(torch.float32)
    keep("float32", full)
    keep("float16", [tensor.half() for tensor in full])
    keep("float8_e4m3fn", [tensor.to(torch.float8_e4m3fn) for tensor in full])
    keep("int8", [(tensor / tensor.abs().max() * 127).round().to(torch.int8) for tensor in full])
    keep("bfloat16", computed(torch.bfloat16))
    return made


def measure(dtype: str, payloads: list[bytes]) -> None:
    codec = codec_for(dtype)
    size = len(payloads[0])
    room = memoryview(bytearray(size + size // 8))
    back = memoryview(bytearray(size))
    stored = plain = 0
    for payload in payloads:
        count = encode(codec, memoryview(payload), room)
        assert count is not None
        read = reader(room)
        decode(codec, read, count, back)
        assert back == payload, "the codec is not lossless"
        stored += count
        plain += len(zstandard.ZstdCompressor(1).compress(payload))
    total = size * len(payloads)
    block = memoryview(payloads[0])
    count = encode(codec, block, room) or 0
    report(
        f"codec ratio, {dtype} KV of SmolLM2-135M",
        total / stored,
        "x",
        "zstd level 1 on the whole block",
        total / plain,
        len(payloads),
        encode_gb_per_s=round(core_rate(lambda: encode(codec, block, room), size, ROUNDS), 3),
        decode_gb_per_s=round(core_rate(lambda: decode(codec, reader(room), count, back), size, ROUNDS), 3),
        block_bytes=size,
    )
    if dtype == "bfloat16" and total / stored < WANTED_RATIO:
        note(f"codec: {total / stored:.3f} is less than the {WANTED_RATIO} that was wanted")


def reader(stored: memoryview) -> Callable[[memoryview], None]:
    position = 0

    def read(view: memoryview) -> None:
        nonlocal position
        view[:] = stored[position : position + len(view)]
        position += len(view)

    return read


def planes() -> None:
    """The copy alone, chunk by chunk as the codec does it."""
    payload = memoryview(bytearray(range(256)) * (CHUNK_BYTES // 256))
    apart = memoryview(bytearray(CHUNK_BYTES))
    back = memoryview(bytearray(CHUNK_BYTES))
    for codec in (Codec.PLANES_16, Codec.PLANES_32):
        width = codec.width

        def splits(width: int = width) -> None:
            for _ in range(200):
                split(payload, width, apart)

        def merges(width: int = width) -> None:
            for _ in range(200):
                merge(apart, width, back)

        report(
            f"split into {width} planes", core_rate(splits, 200 * CHUNK_BYTES, ROUNDS), "GB/s of a core", runs=ROUNDS
        )
        report(f"merge of {width} planes", core_rate(merges, 200 * CHUNK_BYTES, ROUNDS), "GB/s of a core", runs=ROUNDS)


def main() -> None:
    planes()
    if not all(importlib.util.find_spec(library) for library in ("torch", "transformers", "gguf")):
        note("codec: torch, transformers and gguf are not installed, real KV is not measured")
        return
    for dtype, payloads in blocks().items():
        measure(dtype, payloads)


if __name__ == "__main__":
    main()

"""Names of blocks: the golden vectors, what must differ, and what must not be named at all."""

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides
from terracekv.tiers.block import (
    BLOCK_ID_BYTES,
    EXTRA_LORA,
    EXTRA_MULTIMODAL,
    TOKEN_MAX,
    block_id,
    block_keys,
    namespace_id,
    shard_of,
)
from terracekv.tiers.block import field as encoded

VECTORS = Path(__file__).parent / "vectors" / "block_keys.json"
COMPUTE = """
import json, sys
from terracekv.tiers.block import block_keys, namespace_id
for case in json.load(open(sys.argv[1])):
    names = case["namespace"]
    for raw in ("layout", "salt"):
        if raw in names:
            names[raw] = bytes.fromhex(names[raw])
    extras = {int(i): [(t, bytes.fromhex(d)) for t, d in e] for i, e in case.get("extras", {}).items()}
    seed = namespace_id(**names)
    print(seed.hex(), *(key.hex() for key in block_keys(seed, case["tokens"], names["block_tokens"], extras)))
"""


def golden() -> list[str]:
    return [" ".join([case["namespace_id"], *case["keys"]]) for case in json.loads(VECTORS.read_text())]


@pytest.mark.fault(19)
@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_golden_vectors_come_out_of_every_process(seed: str) -> None:
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", COMPUTE, str(VECTORS)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert out.splitlines() == golden()


def layout(axes: str = "NHD", heads: int = 8, layers: int = 2, block_tokens: int = 4) -> Layout:
    shape = (block_tokens, heads, 16) if axes == "NHD" else (heads, block_tokens, 16)
    return Layout(axes, "split", 2, (LayerGroup(layers, shape, dense_strides(shape, 2)),))


@dataclass(frozen=True)
class Identity:
    """All that can tell one prompt's KV from another's."""

    model: str = "m"
    revision: str = "r1"
    dtype: str = "bfloat16"
    layout: Layout = field(default_factory=layout)
    block_tokens: int = 4
    salt: bytes = b""
    extras: tuple[tuple[int, bytes], ...] = ()

    def ids(self, shard: int = 0) -> list[bytes]:
        names = {n: getattr(self, n) for n in ("model", "revision", "dtype", "block_tokens", "salt")}
        seed = namespace_id(layout=self.layout.digest(), **names)
        keys = block_keys(seed, range(16), self.block_tokens, {0: self.extras} if self.extras else None)
        return [block_id(key, shard) for key in keys]


BASE = Identity()
IMAGE = bytes(30) + b"\x01\x02"
VARIANTS: dict[str, Identity] = {
    "base": BASE,
    "another model": replace(BASE, model="m2"),
    "another revision of the weights": replace(BASE, revision="r2"),
    "the same weights by another digest": replace(BASE, revision="sha256:00"),
    "model and revision run together": replace(BASE, model="mr", revision="1"),
    "another KV dtype": replace(BASE, dtype="float16"),
    "quantised KV": replace(BASE, dtype="fp8_e4m3"),
    "KV quantised by another policy": replace(BASE, dtype="fp8_e4m3/per-token"),
    "quantised weights": replace(BASE, revision="r1/awq"),
    "another block size": replace(BASE, block_tokens=8, layout=layout(block_tokens=8)),
    "another order of axes": replace(BASE, layout=layout("HND")),
    "half the heads, as one of two tensor ranks": replace(BASE, layout=layout(heads=4)),
    "half the layers, as one of two pipeline ranks": replace(BASE, layout=layout(layers=1)),
    "adapter A": replace(BASE, extras=((EXTRA_LORA, b"A" * 32),)),
    "adapter B": replace(BASE, extras=((EXTRA_LORA, b"B" * 32),)),
    "tenant A": replace(BASE, salt=b"A"),
    "tenant B": replace(BASE, salt=b"B"),
    "an image": replace(BASE, extras=((EXTRA_MULTIMODAL, IMAGE + bytes(4)),)),
    "an image alike in its low 16 bits": replace(BASE, extras=((EXTRA_MULTIMODAL, b"\x07" + IMAGE[1:] + bytes(4)),)),
    "the image one token later": replace(BASE, extras=((EXTRA_MULTIMODAL, IMAGE + b"\x01\0\0\0"),)),
    "the image under adapter A": replace(BASE, extras=((EXTRA_LORA, b"A" * 32), (EXTRA_MULTIMODAL, IMAGE + bytes(4)))),
}


@pytest.mark.fault(22)
@pytest.mark.fault(20)
@pytest.mark.fault(23)
@pytest.mark.fault(24)
@pytest.mark.fault(26)
def test_whatever_shapes_the_kv_is_part_of_the_name() -> None:
    for one, other in combinations(VARIANTS, 2):
        assert not set(VARIANTS[one].ids()) & set(VARIANTS[other].ids()), f"{one} and {other} share a block"


@pytest.mark.fault(30)
def test_ranks_of_one_engine_never_share_an_id() -> None:
    shards = [BASE.ids(shard) for shard in range(4)]
    assert len({id for ids in shards for id in ids}) == 4 * len(shards[0])
    assert all(len(id) == BLOCK_ID_BYTES and shard_of(id) == shard for shard, ids in enumerate(shards) for id in ids)


@pytest.mark.fault(24)
def test_the_same_identity_has_the_same_names_again() -> None:
    """The pair of the matrix: if every name were new each time, it would pass and nothing would ever hit."""
    for name, identity in VARIANTS.items():
        assert identity.ids() == replace(identity).ids(), name


@pytest.mark.fault(26)
def test_an_extra_changes_its_block_and_all_later_ones_and_none_before() -> None:
    seed, tokens = bytes(32), range(16)
    plain = block_keys(seed, tokens, 4)
    marked = block_keys(seed, tokens, 4, {2: [(EXTRA_MULTIMODAL, IMAGE + bytes(4))]})
    assert marked[:2] == plain[:2]
    assert not set(marked[2:]) & set(plain)


@given(tokens=st.lists(st.integers(0, TOKEN_MAX), max_size=70), block_tokens=st.integers(1, 17), data=st.data())
@pytest.mark.fault(13)
def test_only_full_blocks_have_keys_and_a_prefix_has_the_prefix_of_the_keys(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    keys = block_keys(bytes(32), tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    cut = data.draw(st.integers(0, len(tokens)))
    assert block_keys(bytes(32), tokens[:cut], block_tokens) == keys[: cut // block_tokens]


@given(tokens=st.lists(st.integers(0, TOKEN_MAX), min_size=8, max_size=40), data=st.data())
def test_one_other_token_changes_its_block_and_all_later_ones(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = [*tokens]
    other[place] ^= 1
    before, after = block_keys(bytes(32), tokens, 4), block_keys(bytes(32), other, 4)
    assert before[: place // 4] == after[: place // 4]
    assert not set(before[place // 4 :]) & set(after[place // 4 :])


@given(tokens=st.lists(st.integers(0, TOKEN_MAX), max_size=40))
def test_however_the_tokens_are_held_the_keys_are_the_same(tokens: list[int]) -> None:
    expected = block_keys(bytes(32), tokens, 3)
    holders: list[Any] = [tuple(tokens), array("I", tokens), array("Q", tokens), np.array(tokens, np.uint32)]
    holders += [np.array(tokens, np.int64), np.array(tokens * 2, np.uint32)[: len(tokens)]]
    strided = np.zeros(2 * len(tokens), np.uint32)
    strided[::2] = tokens
    for holder in [*holders, strided[::2]]:
        assert block_keys(bytes(32), holder, 3) == expected


@pytest.mark.parametrize(
    "bad", [[-1], [2**32], [1.5], ["1"], [None], np.array([-1]), np.array([[1, 2]]), np.array([0.5])]
)
def test_what_is_no_token_is_refused(bad: Sequence[int]) -> None:
    with pytest.raises(ValueError):
        block_keys(bytes(32), bad, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: block_keys(b"short", [1], 1),
        lambda: block_keys(bytes(32), [1], 0),
        lambda: namespace_id(model="m", revision="", dtype="d", layout=bytes(31), block_tokens=4),
        lambda: namespace_id(model="m", revision="", dtype="d", layout=bytes(32), block_tokens=0),
    ],
)
def test_what_cannot_be_part_of_a_name_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=9)), max_size=4))
def test_no_two_lists_of_fields_have_the_same_bytes(fields: list[tuple[int, bytes]]) -> None:
    """Decoding gives back exactly what was encoded, so the encoding is one to one."""
    packed = b"".join(encoded(tag, value) for tag, value in fields)
    decoded = []
    while packed:
        size = int.from_bytes(packed[1:5], "little")
        decoded.append((packed[0], packed[5 : 5 + size]))
        packed = packed[5 + size :]
    assert decoded == fields

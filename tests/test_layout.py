"""From what an engine has to the protocol's layout, and to the place of block i in its tensors."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from terracekv.connector.layout import Blocks, Plane, layout_of
from terracekv.daemon.protocol import LayerGroup

Floats = npt.NDArray[np.float32]
TOKENS = 4
FIVE = {
    "HND": layout_of(axes="HND", packing="split", layers=[(3, 8)] * 2, block_tokens=TOKENS, item_bytes=2),
    "NHD": layout_of(axes="NHD", packing="split", layers=[(3, 8)] * 2, block_tokens=TOKENS, item_bytes=2),
    "fused": layout_of(axes="NHD", packing="fused", layers=[(3, 16)] * 2, block_tokens=TOKENS, item_bytes=2),
    "latent": layout_of(axes="ND", packing="latent", layers=[(48,)] * 2, block_tokens=TOKENS, item_bytes=2),
    "narrow": layout_of(axes="HND", packing="split", layers=[(3, 16)] * 2, block_tokens=TOKENS, item_bytes=1),
}


def plane(array: Floats) -> Plane:
    """An array of heads, tokens, dim."""
    heads, tokens, dim = array.shape
    return Plane(array.ctypes.data, heads, tokens, dim, (array.strides[0], array.strides[1]))


def random_array(seed: int, heads: int, tokens: int, dim: int) -> Floats:
    return np.random.default_rng(seed).random((heads, tokens, dim), np.float32)


@pytest.mark.fault(5)
def test_layouts_of_equal_size_have_different_names() -> None:
    assert {name: layout.block_bytes for name, layout in FIVE.items()} == dict.fromkeys(FIVE, 2 * 2 * 3 * 4 * 8 * 2)
    assert len({layout.digest() for layout in FIVE.values()}) == len(FIVE)


def test_layers_that_look_alike_form_a_group_in_the_order_of_the_model() -> None:
    layers = [(2, 8), (2, 8), (1, 8), (2, 8)]
    layout = layout_of(axes="HND", packing="split", layers=layers, block_tokens=TOKENS, item_bytes=4)
    assert layout.groups == (
        LayerGroup(2, (2, 4, 8), (128, 32, 4)),
        LayerGroup(1, (1, 4, 8), (128, 32, 4)),
        LayerGroup(1, (2, 4, 8), (128, 32, 4)),
    )
    assert layout.block_bytes == 2 * sum(heads * TOKENS * dim * 4 for heads, dim in layers)


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"axes": "HDN"}, "layout.axes"),
        ({"packing": "interleaved"}, "layout.packing"),
        ({"packing": "latent"}, "layout.axes"),
        ({"layers": []}, "layout.groups"),
        ({"layers": [(3, 8, 2)]}, r"layout.groups\[0\].shape"),
        ({"layers": [(3, 0)]}, r"layout.groups\[0\].shape"),
        ({"item_bytes": 0}, "layout.item_bytes"),
    ],
)
def test_an_unknown_layout_is_refused_by_the_name_of_the_field(changes: dict[str, object], field: str) -> None:
    known = {"axes": "HND", "packing": "split", "layers": [(3, 8)], "block_tokens": TOKENS, "item_bytes": 2}
    layout_of(**known)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        layout_of(**(known | changes))  # type: ignore[arg-type]


def test_a_block_is_k_then_v_of_each_layer_head_by_head() -> None:
    shapes = [(2, 8), (2, 8), (1, 8), (3, 6)]
    layout = layout_of(axes="HND", packing="split", layers=shapes, block_tokens=TOKENS, item_bytes=4)
    tensors = [random_array(i, heads, 3 * TOKENS + 1, dim) for i, (heads, dim) in enumerate(shapes * 2)]
    planes = [tensors[layer + len(shapes) * v] for layer in range(len(shapes)) for v in (0, 1)]
    blocks = Blocks.of([plane(t) for t in planes], TOKENS, 4)
    for index in (2, 0, 1):
        payload = bytearray(layout.block_bytes)
        blocks.gather(index, memoryview(payload))
        expected = b"".join(t[:, index * TOKENS : (index + 1) * TOKENS].tobytes() for t in planes)
        assert bytes(payload) == expected


def test_blocks_come_back_into_tensors_of_another_length_and_leave_the_rest_alone() -> None:
    source = [random_array(i, 2, 2 * TOKENS, 8) for i in range(4)]
    room = np.full((4, 2, 5 * TOKENS + 3, 8), 7, np.float32)
    stored = Blocks.of([plane(t) for t in source], TOKENS, 4)
    loaded = Blocks.of([plane(t) for t in room], TOKENS, 4)
    payload = bytearray(random.Random(1).randbytes(4 * 2 * TOKENS * 8 * 4 + 64))
    canary = bytes(payload[-64:])
    for index in (0, 1):
        stored.gather(index, memoryview(payload))
        loaded.scatter(index, memoryview(payload))
    assert payload[-64:] == canary
    assert np.array_equal(room[:, :, : 2 * TOKENS], np.stack(source))
    assert (room[:, :, 2 * TOKENS :] == 7).all()


def test_a_block_past_the_end_of_the_tensors_is_refused() -> None:
    blocks = Blocks.of([plane(random_array(0, 2, 3 * TOKENS - 1, 8))], TOKENS, 4)
    payload = memoryview(bytearray(2 * TOKENS * 8 * 4))
    blocks.gather(1, payload)
    with pytest.raises(ValueError, match="memory of 2"):
        blocks.gather(2, payload)


def test_tokens_that_are_not_dense_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes apart, not 32"):
        Blocks.of([plane(random_array(0, 2, 16, 8)[:, ::2])], TOKENS, 4)

"""The engine door's messages: layouts refused by name, frames that come back as they went, the probe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terracekv.daemon import protocol
from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides
from terracekv.tiers.block import block_keys, namespace_id

SHAPE = (4, 8, 16)
GROUP = LayerGroup(2, SHAPE, dense_strides(SHAPE, 2))
GOOD = Layout("NHD", "split", 2, (GROUP,))


def fake(axes: str = "NHD", packing: str = "split", item_bytes: int = 2, *groups: LayerGroup) -> Layout:
    return Layout(axes, packing, item_bytes, groups)


FAKES = {
    "layout.axes": fake("DHN", "split", 2, GROUP),
    "layout.packing": fake("NHD", "interleaved", 2, GROUP),
    "layout.item_bytes": fake("NHD", "split", 0, GROUP),
    "layout.groups": fake("NHD", "split", 2),
    "layout.groups[1].strides": fake("NHD", "split", 2, GROUP, LayerGroup(2, SHAPE, (4096, 32, 2))),
    "layout.groups[0].shape": fake("NHD", "split", 2, LayerGroup(2, (5, 8, 16), dense_strides((5, 8, 16), 2))),
    "layout.groups[0].layers": fake("NHD", "split", 2, LayerGroup(0, SHAPE, GROUP.strides)),
}


@pytest.mark.fault(5)
@pytest.mark.parametrize("field", FAKES)
def test_an_unknown_layout_is_refused_by_the_name_of_the_field(field: str) -> None:
    assert GOOD.problem(4) is None
    problem = FAKES[field].problem(4)
    assert problem is not None and problem.startswith(f"{field}:")


@pytest.mark.fault(5)
def test_axes_that_do_not_go_with_the_packing_are_refused() -> None:
    shape = (4, 16)
    latent = LayerGroup(2, shape, dense_strides(shape, 2))
    assert fake("ND", "latent", 2, latent).problem(4) is None
    assert "does not go with" in str(fake("ND", "split", 2, latent).problem(4))
    assert "does not go with" in str(fake("NHD", "latent", 2, GROUP).problem(4))


@pytest.mark.fault(5)
def test_a_block_of_one_layout_is_a_miss_under_another() -> None:
    shape = (8, 4, 16)
    others = [
        fake("HND", "split", 2, LayerGroup(2, shape, dense_strides(shape, 2))),
        fake("NHD", "fused", 2, GROUP),
        fake("NHD", "split", 1, LayerGroup(2, SHAPE, dense_strides(SHAPE, 1))),
        fake("NHD", "split", 2, LayerGroup(1, SHAPE, GROUP.strides), LayerGroup(1, SHAPE, GROUP.strides)),
        fake("NHD", "split", 2, LayerGroup(3, SHAPE, GROUP.strides)),
    ]
    chains = []
    for layout in (GOOD, *others):
        seed = namespace_id(model="m", revision="", dtype="bf16", layout=layout.digest(), block_tokens=4)
        chains.append(set(block_keys(seed, range(8), 4)))
    assert len(set().union(*chains)) == 2 * len(chains)


def test_the_bytes_of_a_block_are_those_of_its_planes() -> None:
    assert GOOD.block_bytes == 2 * 2 * 4 * 8 * 16 * 2
    assert fake("NHD", "fused", 2, GROUP).block_bytes == GOOD.block_bytes // 2
    shape = (4, 16)
    assert fake("ND", "latent", 2, LayerGroup(3, shape, dense_strides(shape, 2))).block_bytes == 3 * 4 * 16 * 2


@pytest.mark.fault(19)
def test_the_probe_is_this_very_key() -> None:
    """Written out: two releases whose probes differ hash differently, and must not share blocks."""
    assert protocol.PROBE.hex() == "cc6c4d142e01e54e7280d48b29d5de9abec8ce3379392d585cc1261038620682"


def test_the_digest_of_a_layout_is_the_same_in_every_release() -> None:
    assert GOOD.digest().hex() == "df58feba1722a2584dce5b44b7a256a1387f985c732881ac75494b0df08357d0"
    assert GOOD.digest(shards=1) == GOOD.digest() != GOOD.digest(shards=2) != GOOD.digest(shards=4)
    assert GOOD.digest(shards=2).hex() == "dcb4bbc53d9c21b1d2f2c21babb5509660e77c53f78d712a562e6295066f7463"


keys = st.binary(max_size=200)
numbers = st.integers(0, 2**32 - 1)
requests = st.one_of(
    st.builds(protocol.Lookup, numbers, keys, numbers),
    st.builds(protocol.Acquire, numbers, keys, numbers),
    st.builds(protocol.Release, numbers),
    st.builds(protocol.Reserve, numbers, keys),
    st.builds(protocol.Commit, numbers, numbers, st.lists(numbers, max_size=5), st.booleans()),
    st.builds(protocol.Abort, numbers),
    st.builds(protocol.Prefetch, keys),
)
slots = st.lists(st.none() | st.builds(protocol.Slot, numbers, numbers, numbers), max_size=4)
indices = st.lists(numbers, max_size=4)
answers = st.one_of(
    st.builds(protocol.Refused, st.text(), st.text()),
    st.builds(protocol.Leased, numbers, numbers, numbers, slots, indices),
    st.builds(protocol.Ready, numbers, indices, slots),
    st.builds(protocol.Failed, numbers, indices, st.text()),
    st.builds(protocol.Reserved, numbers, numbers, slots, indices, st.dictionaries(numbers, st.text(), max_size=3)),
    st.builds(protocol.Committed, numbers, indices, indices),
    st.builds(protocol.Error, numbers, st.text(), st.text(), st.text()),
)


def body(frame: bytes) -> bytes:
    (length,) = protocol.LENGTH.unpack_from(frame)
    assert length == len(frame) - protocol.LENGTH.size
    return frame[protocol.LENGTH.size :]


@given(requests)
def test_a_request_comes_back_as_it_went(message: protocol.Request) -> None:
    assert protocol.request_decoder.decode(body(protocol.frame(message))) == message


@given(answers)
def test_an_answer_comes_back_as_it_went(message: protocol.Answer) -> None:
    assert protocol.answer_decoder.decode(body(protocol.frame(message))) == message


def test_hello_carries_the_whole_layout() -> None:
    hello = protocol.Hello(protocol.VERSION, protocol.PROBE, "m", "r", "bf16", 4, GOOD, 2, 1, 7, b"key", "engine 1")
    assert protocol.request_decoder.decode(body(protocol.frame(hello))) == hello


def test_keys_are_split_where_they_were_joined() -> None:
    chain = block_keys(bytes(32), range(12), 4)
    assert protocol.split_keys(b"".join(chain)) == chain
    with pytest.raises(ValueError, match="33 bytes"):
        protocol.split_keys(bytes(33))

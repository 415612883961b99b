"""The codec: lossless on any bytes, safe on any input, one context per thread. And when it is used."""

import ast
import random
import struct
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from terracekv.tests.blocks import in_threads, registered
from terracekv.tiers import chooser, codec
from terracekv.tiers.chooser import AGAIN_EVERY, TRIES, Chooser
from terracekv.tiers.codec import CHUNK_BYTES, decode, encode
from terracekv.tiers.codec_id import Codec, codec_for, known
from terracekv.tiers.errors import Damaged
from terracekv.tiers.namespace import Namespace, Namespaces

CANARY = 0xA5
CODED = [Codec.PLANES_16, Codec.PLANES_32, Codec.PLANES_8]


def numbers(kind: str, count: int, seed: int = 0) -> bytes:
    """Normally distributed numbers, as KV is by and large."""
    values = np.random.default_rng(seed).normal(0, 1, count).astype(np.float32)
    match kind:
        case "float32":
            return values.tobytes()
        case "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case "float16":
            return values.astype(np.float16).tobytes()
        case "float8_e4m3fn":
            return (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes()
        case _:
            return np.clip(values * 20, -128, 127).astype(np.int8).tobytes()


def coded(number: Codec, payload: bytes, room: int | None = None) -> bytes | None:
    into = memoryview(bytearray(len(payload) + 1024 if room is None else room))
    size = encode(number, memoryview(payload), into)
    return None if size is None else bytes(into[:size])


def decoded(number: Codec, stored: bytes, size: int) -> bytes:
    """The payload; AssertionError when a byte around the destination changes or more is read than there is."""
    position = 0
    around = memoryview(bytearray([CANARY]) * (size + 128))

    def read(view: memoryview) -> None:
        nonlocal position
        assert position + len(view) <= len(stored)
        view[:] = stored[position : position + len(view)]
        position += len(view)

    parts: list[int] = []
    try:
        decode(number, read, len(stored), around[64 : 64 + size], lambda part: parts.append(len(part)))
    finally:
        assert bytes(around[:64]) == bytes(around[64 + size :]) == bytes([CANARY]) * 64
    assert position == len(stored) and sum(parts) == size
    return bytes(around[64 : 64 + size])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_every_number_format_comes_back_bit_for_bit(kind: str) -> None:
    payload = numbers(kind, 150_001)
    stored = coded(codec_for(kind), payload)
    assert stored is not None and decoded(codec_for(kind), stored, len(payload)) == payload
    assert len(stored) < len(payload)


@settings(max_examples=60, deadline=None)
@given(
    number=st.sampled_from([*CODED, Codec.RAW]),
    size=st.integers(0, 3000) | st.integers(CHUNK_BYTES - 5, CHUNK_BYTES + 5) | st.integers(0, 3 * CHUNK_BYTES),
    seed=st.integers(0, 2**32),
    alphabet=st.integers(1, 256),
)
def test_any_bytes_of_any_size_come_back(number: Codec, size: int, seed: int, alphabet: int) -> None:
    payload = bytes(value % alphabet for value in random.Random(seed).randbytes(size))
    stored = payload if number is Codec.RAW else coded(number, payload)
    assert stored is not None and decoded(number, stored, size) == payload


def test_exponents_shrink_and_mantissas_are_left_alone() -> None:
    payload = numbers("bfloat16", 1 << 20)
    stored = coded(Codec.PLANES_16, payload)
    assert stored is not None and len(payload) / len(stored) > 1.4
    assert len(payload) / len(stored) > 1.05 * len(payload) / len(zstandard.ZstdCompressor(1).compress(payload))


def test_planes_of_zeros_shrink_too_wherever_they_are() -> None:
    """bf16 kept as fp32 has nothing in its two lower planes."""
    payload = b"".join(b"\0\0" + number for number in np.split(np.frombuffer(numbers("bfloat16", 50_000), "V2"), 1)[0])
    stored = coded(Codec.PLANES_32, payload)
    assert stored is not None and len(payload) / len(stored) > 2.5
    assert decoded(Codec.PLANES_32, stored, len(payload)) == payload


def test_noise_does_not_fit_into_less_room_and_says_so() -> None:
    payload = random.Random(5).randbytes(300_000)
    assert coded(Codec.PLANES_16, payload, len(payload) - 4096) is None


@settings(max_examples=200, deadline=None)
@given(data=st.data(), number=st.sampled_from(CODED), seed=st.integers(0, 1000))
def test_hostile_input_is_damage_and_never_a_byte_outside(data: st.DataObject, number: Codec, seed: int) -> None:
    payload = numbers("bfloat16", 5_000, seed)
    stored = bytearray(coded(number, payload) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(stored) - 1) | st.integers(0, 4 * number.width + 20))
        stored[where] = data.draw(st.integers(0, 255))
    stored = stored[: data.draw(st.integers(0, len(stored)))] + data.draw(st.binary(max_size=20))
    try:
        decoded(number, bytes(stored), len(payload))
    except Damaged:
        return


@pytest.mark.parametrize(
    "lie",
    [
        struct.pack("<II", 1 << 31 | 40, 500) + b"x" * 540,
        struct.pack("<II", 1 << 31, 500) + b"x" * 500,
        struct.pack("<II", 501, 499) + b"x" * 1000,
        struct.pack("<II", (1 << 31) - 1, 500) + b"x" * 1000,
        struct.pack("<II", 500, 500) + b"x" * 1001,
        struct.pack("<II", 500, 500) + b"x" * 999,
        b"",
    ],
    ids=["not zstd", "empty zstd", "sizes", "huge", "too long", "too short", "nothing"],
)
def test_sizes_that_contradict_themselves_are_damage(lie: bytes) -> None:
    with pytest.raises(Damaged):
        decoded(Codec.PLANES_16, lie, 1000)


def test_a_frame_that_wants_a_mountain_of_memory_is_refused_unread() -> None:
    bomb = zstandard.ZstdCompressor(19).compress(bytes(64 << 20))
    assert len(bomb) < 50_000
    stored = struct.pack("<II", 50_000, 1 << 31 | len(bomb)) + bytes(50_000) + bomb
    with pytest.raises(Damaged, match="size"):
        decoded(Codec.PLANES_16, stored, 100_000)


@pytest.mark.fault(130)
def test_eight_threads_round_trip_two_thousand_blocks_each() -> None:
    payloads = [numbers("bfloat16", 1500, seed) for seed in range(8)]

    def work(seed: int) -> None:
        payload = payloads[seed]
        into = memoryview(bytearray(len(payload) + 64))
        back = memoryview(bytearray(len(payload)))
        for _ in range(2000):
            size = encode(Codec.PLANES_16, memoryview(payload), into)
            position = 0

            def read(view: memoryview) -> None:
                nonlocal position
                view[:] = into[position : position + len(view)]
                position += len(view)

            assert size is not None
            decode(Codec.PLANES_16, read, size, back)
            assert back == payload

    in_threads(*(partial(work, seed) for seed in range(8)))


@pytest.mark.fault(130)
def test_contexts_are_made_for_one_thread_and_kept_nowhere_else() -> None:
    """Every call that makes one stands in the class of what each thread has for itself."""
    tree = ast.parse(Path(codec.__file__).read_text())
    makers = {"ZstdCompressor", "ZstdDecompressor"}

    def calls(node: ast.AST) -> int:
        return sum(isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] in makers for n in ast.walk(node))

    own = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["threading.local"]
    ]
    assert calls(tree) == sum(map(calls, own)) == 2
    seen = set[int]()
    kept: list[object] = []

    def look() -> None:
        kept.append(codec._mine.compressor)
        seen.add(id(codec._mine.compressor))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4


def test_dtypes_get_the_width_of_their_numbers() -> None:
    assert codec_for("torch.bfloat16") is codec_for("float16") is codec_for("bf16") is Codec.PLANES_16
    assert codec_for("float32") is Codec.PLANES_32
    assert codec_for("float8_e5m2") is codec_for("int8") is Codec.PLANES_8
    assert codec_for("float64") is Codec.RAW
    assert known(1) and not known(4)


# Whether to compress.


@pytest.fixture
def namespace(tmp_path: Path) -> Namespace:
    return registered(Namespaces(tmp_path / "namespaces.json"), 1)


BLOCK = 8 << 20
FAST, SLOW = 1e10, 1e8
"""Bytes per second, beside a codec of 1e9."""


def run(choice: Chooser, namespace: Namespace, link: float, blocks: int, ratio: float = 1.45) -> int:
    """How many of so many blocks were coded, over a link of that speed and with a codec of 1e9 bytes/s."""
    count = 0
    for _ in range(blocks):
        use = choice.codec(namespace)
        if use is not Codec.RAW:
            count += 1
            choice.coded(namespace, BLOCK, int(BLOCK / ratio), BLOCK / 1e9)
            choice.decoded(BLOCK, BLOCK / 2e9)
        size = BLOCK if use is Codec.RAW else int(BLOCK / ratio)
        choice.sent(size, size / link)
        choice.received(size, size / link)
        choice.stored(use)
    return count


def test_a_slow_link_makes_compression_pay_and_a_fast_one_does_not(namespace: Namespace) -> None:
    slow, fast = Chooser(), Chooser()
    assert run(slow, namespace, SLOW, 50) == 50
    assert slow.chosen(namespace) and slow.report()["codec_chosen_namespaces"] == 1
    assert run(fast, namespace, FAST, 50) == TRIES
    assert not fast.chosen(namespace)
    report = fast.report()
    assert report["codec_ratio"] == pytest.approx(1.45, abs=0.01)
    assert report["codec_encode_bytes_per_s"] == pytest.approx(1e9)
    assert (report["coded_blocks"], report["raw_blocks"]) == (TRIES, 50 - TRIES)


def test_what_does_not_get_smaller_is_stored_raw_after_the_first_blocks(namespace: Namespace) -> None:
    assert run(Chooser(), namespace, SLOW, 50, ratio=1.0) == TRIES


def test_it_is_tried_again_now_and_then_and_a_change_is_noticed(namespace: Namespace) -> None:
    choice = Chooser()
    run(choice, namespace, FAST, TRIES)
    assert run(choice, namespace, FAST, 2 * AGAIN_EVERY) == 2
    assert run(choice, namespace, SLOW, 3 * AGAIN_EVERY) > AGAIN_EVERY
    assert choice.chosen(namespace)
    run(choice, namespace, FAST, 3 * AGAIN_EVERY)
    assert not choice.chosen(namespace)


def test_a_small_change_of_the_link_changes_nothing(namespace: Namespace) -> None:
    choice = Chooser()
    border = (1 - 1 / 1.45) * 2 / (1 / 1e9 + 1 / 2e9)
    run(choice, namespace, border * 0.7, 400)
    assert choice.chosen(namespace)
    run(choice, namespace, border * 1.03, 800)
    assert choice.chosen(namespace)


def test_the_setting_overrules_measurement(namespace: Namespace) -> None:
    assert run(Chooser("off"), namespace, SLOW, 9) == 0
    assert run(Chooser("on"), namespace, FAST, 9) == 9


def test_the_memory_of_namespaces_is_bounded(tmp_path: Path) -> None:
    choice = Chooser()
    for number in range(2 * chooser._NAMESPACES_MAX):
        choice.codec(Namespace(id=number.to_bytes(32), number=number, epoch=0, dtype="bfloat16", block_bytes=1))
    assert len(choice._states) == chooser._NAMESPACES_MAX

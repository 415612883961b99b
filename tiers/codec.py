"""Lossless compression of blocks on their way down: byte planes, each stored as zstd or raw. The only zstandard import.

Owns one compressor, one decompressor and a little scratch memory per thread, never shared: such a context has no
lock, and two threads in one corrupt both their data. Called by tiers' callers from any worker thread.
Imports ``codec_id``, ``errors`` and ``kernels.planes``.

A coded payload is a sequence of chunks, each of which holds ``CHUNK_BYTES`` of the payload (the last one the rest):

    u32le word of each plane: bit 31 set for zstd, below it the plane's stored bytes | the planes | bytes of no element

Chunks fit a core's cache, need no memory of a block's size to decode, and each says nothing but sizes that can be
checked before a byte is written: what a chunk must expand to is known from its position alone.
"""

import struct
import threading
from collections.abc import Callable

import zstandard

from terracekv.kernels.planes import merge, split
from terracekv.tiers.codec_id import Codec
from terracekv.tiers.errors import Damaged

CHUNK_BYTES = 128 << 10
"""Part of the format of codecs 1 to 3."""
RAW_PART_BYTES = 2 << 20
"""Raw bytes are read and handed on in such parts: few calls, which on two busy cores costs less than what a smaller
part, still in the processor's cache, would save."""
_ZSTD = 1 << 31
_SAMPLE_BYTES = 4096
_PARAMETERS = zstandard.ZstdCompressionParameters(
    # Exponents repeat in frequency, not in sequence: a table of 256 entries and matches of 7 bytes or more leave
    # almost all to the entropy coder, which is faster than level 1 and, on this data, smaller.
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=8,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
)


class _Mine(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()
        self.planes = memoryview(bytearray(CHUNK_BYTES))
        self.packed = memoryview(bytearray(CHUNK_BYTES))


_mine = _Mine()


def encode(codec: Codec, payload: memoryview, into: memoryview) -> int | None:
    """Code ``payload`` into ``into``: the bytes written, or None when they would be more than ``into`` has."""
    width = codec.width
    assert width, "raw bytes are not coded"
    end = 0
    for start in range(0, len(payload), CHUNK_BYTES):
        chunk = payload[start : start + CHUNK_BYTES]
        count = len(chunk) // width
        split(chunk[: count * width], width, _mine.planes)
        parts = [_pack(_mine.planes[i * count : (i + 1) * count], last=i == width - 1) for i in range(width)]
        parts.append(chunk[count * width :])
        words = [len(part) | (0 if len(part) == count else _ZSTD) for part in parts[:width]]
        size = 4 * width + sum(map(len, parts))
        if end + size > len(into):
            return None
        struct.pack_into(f"<{width}I", into, end, *words)
        end += 4 * width
        for part in parts:
            into[end : end + len(part)] = part
            end += len(part)
    return end


def decode(
    codec: Codec,
    read: Callable[[memoryview], None],
    stored_bytes: int,
    into: memoryview,
    done: Callable[[memoryview], None] = lambda part: None,
) -> None:
    """Fill ``into`` with the payload that ``stored_bytes`` bytes hold. ``read`` fills the view it is given with the
    next of them, or raises; ``done`` is told each part of ``into`` in order, as soon as it is filled.

    Never writes outside ``into`` nor reads more than ``stored_bytes``, whatever they say. Damaged when they contradict
    themselves; the bytes of ``into`` then mean nothing.
    """
    if codec is Codec.RAW:
        if stored_bytes != len(into):
            raise Damaged(f"{stored_bytes} raw bytes stand for {len(into)}")
        for start in range(0, len(into), RAW_PART_BYTES):
            read(into[start : start + RAW_PART_BYTES])
            done(into[start : start + RAW_PART_BYTES])
        return
    width = codec.width
    source = _Source(read, stored_bytes)
    for start in range(0, len(into), CHUNK_BYTES):
        chunk = into[start : start + CHUNK_BYTES]
        count = len(chunk) // width
        words = struct.unpack(f"<{width}I", source.take(_mine.packed[: 4 * width]))
        for index, word in enumerate(words):
            _unpack(source, word, _mine.planes[index * count : (index + 1) * count])
        merge(_mine.planes, width, chunk[: count * width])
        if len(chunk) > count * width:
            source.take(chunk[count * width :])
        done(chunk)
    if source.left:
        raise Damaged(f"{source.left} bytes follow the last chunk")


class _Source:
    """Counts what is read, so that a lying size cannot make us read beyond the record."""

    def __init__(self, read: Callable[[memoryview], None], left: int) -> None:
        self._read = read
        self.left = left

    def take(self, view: memoryview) -> memoryview:
        if len(view) > self.left:
            raise Damaged(f"a chunk wants {len(view)} bytes where {self.left} are left")
        self.left -= len(view)
        self._read(view)
        return view


def _pack(plane: memoryview, *, last: bool) -> memoryview | bytes:
    """A plane as zstd where that is smaller. Mantissas are noise as a rule: only a sample of theirs is tried."""
    if not last and len(plane) > 4 * _SAMPLE_BYTES:
        sample = plane[:_SAMPLE_BYTES]
        if len(_mine.compressor.compress(sample)) > len(sample) * 15 // 16:
            return plane
    packed = _mine.compressor.compress(plane)
    return packed if len(packed) < len(plane) else plane


def _unpack(source: _Source, word: int, plane: memoryview) -> None:
    size = word & ~_ZSTD
    if not word & _ZSTD:
        if size != len(plane):
            raise Damaged(f"a raw plane of {size} bytes stands for {len(plane)}")
        if size:
            source.take(plane)
        return
    if not 0 < size < len(plane):
        raise Damaged(f"a packed plane of {size} bytes stands for {len(plane)}")
    packed = source.take(_mine.packed[:size])
    try:
        # The frame is asked first how much memory it wants: it could name any amount.
        if zstandard.get_frame_parameters(packed).content_size != len(plane):
            raise Damaged("a packed plane has another size than its place")
        plane[:] = _mine.decompressor.decompress(packed, max_output_size=len(plane), allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise Damaged(f"a packed plane cannot be unpacked: {error}") from error

"""The codecs by the numbers that records bear, and which of them fits which numbers.

Pure functions and one enumeration, without the libraries that do the coding: what only looks at records loads none of
those. Called by tiers from any thread. Standard library only.
"""

from enum import IntEnum

SEALED = 0x8000
"""Set in a record's number where its bytes are sealed; the rest names the codec of what was sealed."""


class Codec(IntEnum):
    """How stored bytes become the payload; the number is in the record."""

    RAW = 0
    PLANES_16 = 1
    """Two planes: bf16, fp16."""
    PLANES_32 = 2
    """Four planes: fp32."""
    PLANES_8 = 3
    """One plane: fp8, int8."""

    @property
    def width(self) -> int:
        """Bytes of an element; 0 for RAW."""
        return (0, 2, 4, 1)[self]


def is_sealed(number: int) -> bool:
    """Whether a record's bytes are sealed."""
    return bool(number & SEALED)


def inner(number: int) -> int:
    """The codec of what was sealed, or of what was not."""
    return number & ~SEALED


def known(number: int) -> bool:
    """Whether this version can decode the codec of a record; a sealed one takes the key, too."""
    return any(inner(number) == codec for codec in Codec)


def codec_for(dtype: str) -> Codec:
    """The codec that fits a namespace's KV dtype (``bfloat16``, ``float8_e4m3fn``, ``int8`` ...); any is lossless on
    any bytes, so a dtype of another name only compresses less."""
    for digits, codec in (("64", Codec.RAW), ("32", Codec.PLANES_32), ("16", Codec.PLANES_16), ("8", Codec.PLANES_8)):
        if digits in dtype.removeprefix("torch."):
            return codec
    return Codec.PLANES_16

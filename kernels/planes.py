"""Byte planes: the first bytes of all elements together, then all second bytes, and so on. Lossless, any bit pattern.

Owns nothing; pure functions, called from any thread (NumPy lets go of the interpreter lock). Imports NumPy.

Neighbouring numbers of a KV cache have like exponents and unlike mantissas. Side by side they hide each other from a
compressor; apart, the plane with the exponents shrinks well and the others are known not to be worth trying. Casting
whole elements is several times faster than copying every second byte, because the processor does it in vectors.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_WORDS: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<u2", 4: "<u4"}
WIDTHS = tuple(_WORDS)
"""Bytes of an element that can be split."""


def split(payload: memoryview, width: int, planes: memoryview) -> None:
    """Write plane after plane of ``payload`` into the first ``len(payload)`` bytes of ``planes``.

    ``width`` is the bytes of an element, little-endian: the last plane has the exponents of floats. ``payload`` is
    whole elements, at any address; ValueError when it is not, or ``planes`` is too small or read-only.
    """
    words: npt.NDArray[Any] = np.frombuffer(payload, _WORDS[width])
    into = _bytes(planes, words.nbytes)
    count = words.size
    np.copyto(into[:count], words, casting="unsafe")
    for index in range(1, width):
        plane = into[index * count : (index + 1) * count]
        np.copyto(plane, np.right_shift(words, 8 * index), casting="unsafe")


def merge(planes: memoryview, width: int, into: memoryview) -> None:
    """The reverse of ``split``: fill ``into``, which is whole elements at any address, from its planes.

    ValueError when ``into`` is not whole elements or read-only, or ``planes`` holds too little.
    """
    words: npt.NDArray[Any] = np.frombuffer(into, _WORDS[width])
    if not words.flags.writeable:
        raise ValueError("elements cannot be merged into read-only memory")
    count = words.size
    if planes.nbytes < words.nbytes:
        raise ValueError(f"{planes.nbytes} bytes of planes for {words.nbytes} bytes of elements")
    source = np.frombuffer(planes, np.uint8, words.nbytes) if count else words.view(np.uint8)
    np.copyto(words, source[(width - 1) * count :])
    for index in range(width - 2, -1, -1):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, source[index * count : (index + 1) * count], out=words)


def _bytes(view: memoryview, size: int) -> npt.NDArray[np.uint8]:
    if view.nbytes < size:
        raise ValueError(f"{view.nbytes} bytes for {size} bytes of planes")
    array = np.frombuffer(view, np.uint8)
    if not array.flags.writeable:
        raise ValueError("planes cannot be written into read-only memory")
    return array

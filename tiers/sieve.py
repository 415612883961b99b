"""Which blocks a sample follows: those whose hash is below a threshold, the same ones whoever asks and whenever.

Owns a table of 256 bytes. Used by ``curve`` and ``contest``. Imports the standard library. (This is the sampling of
SHARDS: reuse among the blocks followed is reuse among all, scaled down.)
"""

KEY_BYTES = 32
MARK_BYTES = 16
"""Of a key, what a sample keeps. The first half of it decides whether it is followed, the second tells it apart."""
_SPACE = 1 << 64


class Sieve:
    """Lets the share ``rate`` of all keys through."""

    def __init__(self, rate: float) -> None:
        below = min(_SPACE - 1, max(1, int(rate * _SPACE)))
        self.rate = below / _SPACE
        self._below = below.to_bytes(8)
        self._table = bytes(byte <= self._below[0] for byte in range(256))

    def followed(self, keys: bytes) -> list[bytes]:
        """The marks of those of ``keys``, joined, that are let through. The others cost a few nanoseconds each: one
        byte of all keys is looked at in one go."""
        hits = keys[::KEY_BYTES].translate(self._table)
        at = hits.find(1)
        marks = []
        while at >= 0:
            mark = keys[at * KEY_BYTES : at * KEY_BYTES + MARK_BYTES]
            if mark < self._below:
                marks.append(mark)
            at = hits.find(1, at + 1)
        return marks

    def follows(self, mark: bytes) -> bool:
        """Whether a key that begins so is let through."""
        return mark < self._below

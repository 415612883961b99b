"""The one checksum of stored payloads and headers: xxh3-64. The only ``import xxhash``.

Pure function, called from any thread. The library lets go of the interpreter lock while it hashes a payload, so
a hash of megabytes delays nobody; it runs at several times the speed of a copy.
"""

from xxhash import xxh3_64, xxh3_64_intdigest


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of ``data`` as a u64."""
    return xxh3_64_intdigest(data)


class RunningChecksum:
    """The checksum of bytes that come in parts: each is hashed while it is still in the processor's cache. One
    thread's."""

    def __init__(self) -> None:
        self._hash = xxh3_64()

    def add(self, part: memoryview) -> None:
        """The next bytes."""
        self._hash.update(part)

    @property
    def value(self) -> int:
        """``checksum`` of all parts together."""
        return self._hash.intdigest()

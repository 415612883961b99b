"""The one checksum of stored payloads and headers: xxh3-64. The only ``import xxhash``.

Pure function, called from any thread. The library lets go of the interpreter lock while it hashes a payload, so
a hash of megabytes delays nobody; it runs at several times the speed of a copy.
"""

from xxhash import xxh3_64_intdigest


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of ``data`` as a u64."""
    return xxh3_64_intdigest(data)

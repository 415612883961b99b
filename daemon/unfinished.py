"""Frames that have begun and not ended: what they may take together.

Owns the count of one door. Called by its connections on the event loop. Imports nothing of us.

A frame may be large, and whoever sends half of one makes us keep it. One engine may do that with its longest prompt; a
thousand of them, or one program with a thousand connections, may not.
"""

SMALL_BYTES = 64 << 10
"""Never counted: a connection's own buffers take as much."""
BYTES_MAX = 32 << 20


class Unfinished:
    """Bytes kept for each connection whose frame is not whole yet."""

    def __init__(self) -> None:
        self._kept: dict[object, int] = {}
        self.bytes = 0

    def keep(self, connection: object, size_bytes: int) -> bool:
        """Note how much is kept for a connection now; False, and nothing noted for it, when that is too much."""
        self.bytes -= self._kept.pop(connection, 0)
        if size_bytes <= SMALL_BYTES:
            return True
        if self.bytes + size_bytes > BYTES_MAX:
            return False
        self._kept[connection] = size_bytes
        self.bytes += size_bytes
        return True

"""Traces: what was asked for, request by request, read from files of JSON lines.

Pure, but for the file. Used by ``simulate`` in the command line's process. Imports ``errors``. A line has
``hash_ids``, the hashes of a request's blocks from its head on, where each stands for all that precedes it too: the
form of the Mooncake traces and of ``daemon.lookup_log``; ``block_bytes`` is ours.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from terracekv.tiers.errors import BadRequest
from terracekv.tiers.sieve import KEY_BYTES

LINE = 'each line is an object with "hash_ids": [numbers]'


@dataclass(frozen=True, slots=True)
class Trace:
    """``chains`` of keys; ``block_bytes`` is the mean size, 0 where the trace does not tell."""

    chains: list[list[bytes]]
    unique: int
    asked: int
    block_bytes: int


def read_trace(path: Path) -> Trace:
    """All of a trace; BadRequest names the first line that is none."""
    keys: dict[int, bytes] = {}
    chains: list[list[bytes]] = []
    asked = sized = size = 0
    for number, hashes, block_bytes in _lines(path):
        chain = []
        for hashed in hashes:
            key = keys.get(hashed)
            if key is None:
                key = keys[hashed] = blake2b(str(hashed).encode(), digest_size=KEY_BYTES).digest()
            chain.append(key)
        if len(set(chain)) != len(chain):
            raise BadRequest(f"{path}, line {number}: a hash stands in it twice", "each block of a chain comes once")
        chains.append(chain)
        asked += len(chain)
        if block_bytes:
            sized += len(chain)
            size += block_bytes * len(chain)
    if not asked:
        raise BadRequest(f"{path} holds no request", "name a file of JSON lines with hash_ids")
    return Trace(chains, len(keys), asked, size // sized if sized else 0)


def _lines(path: Path) -> Iterator[tuple[int, list[int], int]]:
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                yield number, *_request(line, f"{path}, line {number}")
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", "name a file of JSON lines") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is no text", LINE) from None


def _request(line: str, where: str) -> tuple[list[int], int]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # the last: nested too deep
        raise BadRequest(f"{where} is not JSON: {error}", LINE) from None
    hashes = entry.get("hash_ids") if isinstance(entry, dict) else None
    if not isinstance(hashes, list) or not all(type(hashed) is int for hashed in hashes):
        raise BadRequest(f"{where} has no hash_ids that are whole numbers", LINE)
    block_bytes = entry.get("block_bytes", 0)
    if type(block_bytes) is not int or block_bytes < 0:
        raise BadRequest(f"{where}: block_bytes is {block_bytes!r}", "it is a whole number of bytes, or left out")
    return hashes, block_bytes

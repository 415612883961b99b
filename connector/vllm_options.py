"""What can be set: in ``kv_connector_extra_config`` for the engine, in ``kv_transfer_params`` for one request.

Pure, but for the tenant's secret, which is read from its file. Called when the engine starts and when a request comes.
Standard library only.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SOCKET = "/dev/shm/terracekv/engine.sock"
"""Where a daemon with the default settings listens."""
SOCKET_BYTES_MAX = 107
"""What the kernel takes for the name of a socket."""
NUMBER_MAX = {bool: 2, int: 1 << 31, float: math.inf}
"""Below it any setting is: milliseconds of 24 days, or more tokens than a prompt has."""
SHOWN_MAX = 200
"""Characters of a message that quotes what a client sent."""
TTL_S_MAX = 366 * 86_400
"""A year: what a client of the engine may ask for, and any clock can add."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one engine. Names end in their unit; docs/vllm.md says what each is for."""

    socket: str = SOCKET
    block_tokens: int = 0
    """0: the engine's own on a CPU, where every recomputed token costs milliseconds; else 256 or a little more."""
    model: str = ""
    revision: str = ""
    credential_file: str = ""
    lookup_budget_ms: int = 20
    wait_ms: int = 2000
    wait_tokens_max: int = 0
    """0: without bound."""
    min_tokens: int = 0
    load_deadline_ms: int = 1000
    """And a millisecond more for each MB."""
    store_deadline_ms: int = 2000
    """The same."""
    lease_s: int = 60
    pages_held: float = 0.25
    """Share of the engine's pages that stores under way may keep from being reused."""
    prefill_tokens_per_s: float = 0.0
    """0: measured."""
    store_output: bool = True
    reset: str = "forget"

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Options":
        """Raises ValueError, naming the key, for one that is unknown or has a value of the wrong kind."""
        known: dict[str, type] = {field.name: type(field.default) for field in fields(cls)}
        for key, value in given.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"kv_connector_extra_config: unknown key {key!r}{hint} Known keys: {', '.join(sorted(known))}"
                )
            kind = known[key]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ValueError(f"kv_connector_extra_config: {key} is {value!r}, and should be {kind.__name__}")
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"kv_connector_extra_config: {key} is {value}, and cannot be negative")
            if isinstance(value, (int, float)) and not value < NUMBER_MAX[kind]:
                raise ValueError(
                    f"kv_connector_extra_config: {key} is {value}, and should be a number below {NUMBER_MAX[kind]:g}"
                )
        options = cls(**given)
        wrong = options._wrong()
        if wrong is not None:
            raise ValueError(f"kv_connector_extra_config: {wrong}")
        credential(options.credential_file)
        return options

    def _wrong(self) -> str | None:
        """What is wrong with values of the right kind."""
        for name in ("socket", "model", "revision", "credential_file"):
            if "\0" in getattr(self, name):
                return f"{name} is {getattr(self, name)!r}, and cannot hold a NUL"
        if not 0 < len(self.socket.encode()) <= SOCKET_BYTES_MAX:
            return f"socket is {self.socket!r}, and should be a path of at most {SOCKET_BYTES_MAX} bytes"
        if self.reset not in ("forget", "keep"):
            return f"reset is {self.reset!r}, and should be 'forget' or 'keep'"
        if not 0 < self.pages_held <= 1:
            return f"pages_held is {self.pages_held}, and should be in (0, 1]"
        if self.wait_ms >= self.lease_s * 1000:
            return f"lease_s is {self.lease_s}, and should be longer than wait_ms, {self.wait_ms}"
        return None

    def suit(self, page_tokens: Iterable[int]) -> None:
        """Raises ValueError when blocks are not whole pages of every KV group."""
        for tokens in page_tokens:
            if self.block_tokens % tokens:
                raise ValueError(
                    f"kv_connector_extra_config: block_tokens is {self.block_tokens}, and should be a multiple of"
                    f" {tokens}, vLLM's own"
                )


def credential(file: str) -> bytes:
    """The tenant's secret in this file; b"" where no file is named. ValueError when there is none in it, so that no
    engine takes itself for another tenant, or for none."""
    try:
        secret = Path(file).read_bytes().strip() if file else b""
    except OSError as error:
        raise ValueError(f"credential_file: {file} cannot be read: {error.strerror}") from None
    if file and not secret:
        raise ValueError(f"credential_file: {file} is empty, and should hold the tenant's secret")
    return secret


class Misunderstood(ValueError):
    """A wish that is not understood. ``kind`` is one of a few, whatever clients send."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"kv_transfer_params: terracekv {what:.{SHOWN_MAX}}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request asks for: ``{"terracekv": {"read": false, "write": false, "ttl_s": 600}}``."""

    read: bool = True
    write: bool = True
    ttl_s: float = 0.0
    """Keep the prompt's blocks in host for so long."""

    @classmethod
    def read_from(cls, params: Mapping[str, Any] | None) -> "Wish":
        """Raises Misunderstood for what is not understood."""
        given = (params or {}).get("terracekv")
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise Misunderstood("object", f"is {given!r}, and should be an object")
        known = ("read", "write", "ttl_s")
        for key, value in given.items():
            if key not in known:
                raise Misunderstood("key", f"has {key!r}, which is unknown. Known keys: {', '.join(known)}")
            good = type(value) in (int, float) and 0 <= value <= TTL_S_MAX if key == "ttl_s" else type(value) is bool
            if not good:
                raise Misunderstood(key, f"has a {key} that it cannot have: {value!r}")
        return cls(**given)

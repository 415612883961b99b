"""Lies that a client can tell at the engine door: some for each field of each message, well-formed and plausible.

Owns the table of lies, and nothing that runs. Called by ``test_lying_client``. Imports ``daemon.protocol``, the harness
and ``liars``.
"""

import os
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.protocol import (
    Abort,
    Acquire,
    Commit,
    Committed,
    Error,
    Found,
    Hello,
    LayerGroup,
    Layout,
    Leased,
    Lookup,
    Opened,
    Pin,
    Prefetch,
    Refused,
    Release,
    Reserve,
    Welcome,
)
from terracekv.tests.harness import MIB, TOKENS, Wire, layout_of
from terracekv.tests.liars import Liar, Stage

BLOCK = 4096
FAR, HUGE = 2**62, 2**64 - 1
SOMEBODYS_GPU = "GPU-01010101-0101-0101-0101-010101010101"

Meets = Callable[["Liar", list[Any]], bool]


@dataclass(frozen=True)
class Lie:
    """``value`` of a field, and whether what came of it is what should. ``fills``: nobody else can store until it is
    over."""

    value: Callable[[Liar], Any]
    meets: Meets
    fills: bool = False


@dataclass(frozen=True)
class HelloLie:
    """A field of Hello, or of the layout in it, is ``value``."""

    value: Any
    meets: Callable[[Stage, Wire, Any], bool]


def refused(name: str) -> Callable[[Stage, Wire, Any], bool]:
    """By the name of the field."""
    return lambda stage, wire, answer: isinstance(answer, Refused) and answer.field == name and bool(answer.reason)


def apart(stage: Stage, wire: Wire, answer: Any) -> bool:
    """It is another namespace's session, and finds nothing there."""
    found = wire.ask(Lookup(1, b"".join(stage.kept), 1000))
    return answer.namespace_id != stage.honest.namespace_id and isinstance(found, Found) and not found.blocks


def welcome(stage: Stage, wire: Wire, answer: Any) -> bool:
    """It changes nothing of what the session gets, and the status has what the kernel says."""
    assert isinstance(answer, Welcome), answer
    told = next(each for each in stage.status()["sessions"] if each["session"] == answer.session)
    return (
        answer.namespace_id == stage.honest.namespace_id
        and answer.gpu is None
        and told["transport"] == "arena"
        and told["peer"]["pid"] == os.getpid()
        and len(told["engine"]) <= 128
        and told["engine"].isprintable()
        and len(told["gpu"] or "") <= 64
        and (told["gpu"] or "").isprintable()
    )


(_group,) = layout_of(BLOCK).groups
_shape, _strides = _group.shape, _group.strides

HELLO_LIES: dict[tuple[type[msgspec.Struct], str], list[HelloLie]] = {
    (Hello, "version"): [HelloLie(value, refused("version")) for value in (0, protocol.VERSION + 1, HUGE)],
    (Hello, "probe"): [HelloLie(bytes(32), refused("probe")), HelloLie(protocol.PROBE[:-1], refused("probe"))],
    (Hello, "model"): [HelloLie("M", apart), HelloLie("", refused("model")), HelloLie("m" * 2000, refused("model"))],
    (Hello, "revision"): [
        HelloLie("main", apart),
        HelloLie("r\n2026-01-01T00:00:00.000Z ERROR TKV-INTERNAL forged", refused("revision")),
        HelloLie("r" * 2000, refused("revision")),
    ],
    (Hello, "dtype"): [HelloLie("bf16", apart), HelloLie("u" * 2000, refused("dtype"))],
    (Hello, "block_tokens"): [
        HelloLie(0, refused("block_tokens")),
        HelloLie(FAR, refused("block_tokens")),
        HelloLie(2 * TOKENS, refused("layout.groups[0].shape")),
    ],
    (Hello, "layout"): [HelloLie(layout_of(2 * BLOCK), apart), HelloLie(layout_of(2 * MIB), refused("layout"))],
    (Layout, "axes"): [
        HelloLie("NHD", refused("layout.axes")),
        HelloLie("DN", refused("layout.axes")),
        HelloLie("N\n" * 500_000, refused("layout.axes")),
    ],
    (Layout, "packing"): [HelloLie("pages", apart), HelloLie("split", refused("layout.axes"))],
    (Layout, "item_bytes"): [
        HelloLie(0, refused("layout.item_bytes")),
        HelloLie(FAR, refused("layout.item_bytes")),
        HelloLie(2, refused("layout.groups[0].strides")),
    ],
    (Layout, "groups"): [HelloLie((), refused("layout.groups")), HelloLie((_group,) * 2, apart)],
    (LayerGroup, "layers"): [
        HelloLie(0, refused("layout.groups[0].layers")),
        HelloLie(2, apart),
        HelloLie(FAR, refused("layout")),
    ],
    (LayerGroup, "shape"): [
        HelloLie((TOKENS, 2 * BLOCK), refused("layout.groups[0].strides")),
        HelloLie((-TOKENS, BLOCK), refused("layout.groups[0].shape")),
        HelloLie((2 * TOKENS, BLOCK), refused("layout.groups[0].shape")),
    ],
    (LayerGroup, "strides"): [
        HelloLie((0, 1), refused("layout.groups[0].strides")),
        HelloLie((2 * _strides[0], 1), refused("layout.groups[0].strides")),
        HelloLie((FAR, -1), refused("layout.groups[0].strides")),
    ],
    (Hello, "shards"): [HelloLie(2, apart), HelloLie(0, refused("shards")), HelloLie(HUGE, refused("shards"))],
    (Hello, "shard"): [
        HelloLie(0, welcome),  # it is taken, by one engine or several: all have the same bytes
        HelloLie(None, welcome),
        HelloLie(1, refused("shard")),
        HelloLie(-1, refused("shard")),
    ],
    (Hello, "pid"): [HelloLie(value, welcome) for value in (0, 1, -5, FAR)],
    (Hello, "credential"): [HelloLie(b"another tenant's", apart)],
    (Hello, "engine"): [HelloLie("e\n ERROR forged", welcome), HelloLie("e" * 100_000, welcome)],
    (Hello, "gpu"): [HelloLie(SOMEBODYS_GPU, welcome), HelloLie("g\n" * 50_000, welcome)],
    (Hello, "access"): [HelloLie("read", welcome), HelloLie("admin", refused("access"))],
}


def silent(liar: Liar, came: list[Any]) -> bool:
    """Nothing comes of it."""
    return not came


def error(kind: str) -> Meets:
    """One answer, which names what to do."""
    return lambda liar, came: [type(each) for each in came] == [Error] and came[0].kind == kind and bool(came[0].hint)


def answered(kind: type[Any], blocks: int | None = None) -> Meets:
    """One answer under the id that was asked with, of so many blocks."""

    def meets(liar: Liar, came: list[Any]) -> bool:
        (answer,) = came
        return isinstance(answer, kind) and (blocks is None or answer.blocks == blocks)

    return meets


def with_id(id: int) -> Meets:
    return lambda liar, came: [each.id for each in came] == [id]


def apart_from_the_neighbours(liar: Liar, came: list[Any]) -> bool:
    """Nobody is given a slot that another is writing."""
    (answer,) = came
    theirs = {slot.record for slot in liar.stage.reserved.slots if slot is not None}
    return not theirs & {slot.record for slot in answer.slots if slot is not None}


def committed(*indices: int, durable: bool | None = None) -> Meets:
    def meets(liar: Liar, came: list[Any]) -> bool:
        (answer,) = came
        wanted = [*indices] if durable else []
        return isinstance(answer, Committed) and answer.stored == [*indices] and answer.durable == wanted

    return meets


def pins_are_bounded(liar: Liar, came: list[Any]) -> bool:
    pins = liar.stage.status()["pins"]
    return not came and pins["bytes"] <= pins["bytes_max"]


def no_gpu(liar: Liar, came: list[Any]) -> bool:
    told = liar.stage.session(liar.wire)
    return not came and told["transport"] == "arena" and len(told["transport_reason"] or "") < 1000


def same_id(kind: type[msgspec.Struct]) -> list[Lie]:
    """Ids are the client's own: one that is in use, or has no end, comes back as it is."""
    return [Lie(lambda liar, id=id: id, with_id(id)) for id in (0, 1, -3, FAR, HUGE)]  # type: ignore[misc]


def _kept(liar: Liar) -> bytes:
    return b"".join(liar.stage.kept)


def _held(liar: Liar) -> bytes:
    return b"".join(liar.stage.held)


def _many(liar: Liar) -> bytes:
    return b"".join(liar.stage.chain(3000))


def _deadlines(meets: Meets) -> list[Lie]:
    return [Lie(lambda liar, ms=ms: ms, meets) for ms in (0, -1, FAR, HUGE)]  # type: ignore[misc]


_NOT_THERE = error("not_found")
_TWICE = Lie(lambda liar: liar.fresh[0] * 1000, error("bad_request"))
_NEIGHBOURS_LEASE = Lie(lambda liar: liar.stage.lease.lease, silent)
_NEIGHBOURS_RESERVATION = Lie(lambda liar: liar.stage.reserved.reservation, silent)

LIES: dict[tuple[type[msgspec.Struct], str], list[Lie]] = {
    (Lookup, "id"): same_id(Lookup),
    (Lookup, "keys"): [
        Lie(lambda liar: liar.fresh[0] * 10_000, answered(Found, 10_000)),
        Lie(_kept, answered(Found)),
        Lie(_held, answered(Found, 0)),
        Lie(lambda liar: liar.fresh[0][:-1], error("bad_request")),
    ],
    (Lookup, "deadline_ms"): _deadlines(answered(Found, 1)),
    (Acquire, "id"): same_id(Acquire),
    (Acquire, "keys"): [_TWICE, Lie(_held, answered(Leased, 0)), Lie(_many, answered(Leased, 0))],
    (Acquire, "deadline_ms"): _deadlines(answered(Leased, 1)),
    (Acquire, "gpu"): [Lie(lambda liar: True, lambda liar, came: came[0].blocks == 1 and not came[0].slots[0].gpu)],
    (Release, "lease"): [
        _NEIGHBOURS_LEASE,
        *(Lie(lambda liar, handle=handle: handle, silent) for handle in (0, -1, FAR, HUGE)),  # type: ignore[misc]
    ],
    (Reserve, "id"): same_id(Reserve),
    (Reserve, "keys"): [
        _TWICE,
        Lie(_held, apart_from_the_neighbours),
        Lie(_kept, apart_from_the_neighbours),
        Lie(
            _many,
            lambda liar, came: apart_from_the_neighbours(liar, came) and set(came[0].refused.values()) == {"full"},
            fills=True,
        ),
    ],
    (Commit, "id"): same_id(Commit),
    (Commit, "reservation"): [
        Lie(lambda liar: liar.stage.reserved.reservation, _NOT_THERE),
        *(Lie(lambda liar, handle=handle: handle, _NOT_THERE) for handle in (0, -1, HUGE)),  # type: ignore[misc]
    ],
    (Commit, "indices"): [
        Lie(lambda liar: [0], _NOT_THERE),  # is committed
        Lie(lambda liar: [1, 1], _NOT_THERE),
        Lie(lambda liar: [1, 4], _NOT_THERE),
        Lie(lambda liar: [-1], _NOT_THERE),
        Lie(lambda liar: [HUGE], _NOT_THERE),
        Lie(lambda liar: [*range(100_000)], _NOT_THERE),
        Lie(lambda liar: [], committed()),
        Lie(lambda liar: [3, 1, 2], committed(3, 1, 2)),  # not written: its own harm
    ],
    (Commit, "durable"): [Lie(lambda liar: True, committed(1, durable=True))],
    (Abort, "reservation"): [
        _NEIGHBOURS_RESERVATION,
        *(Lie(lambda liar, handle=handle: handle, silent) for handle in (0, -1, FAR, HUGE)),  # type: ignore[misc]
    ],
    (Prefetch, "keys"): [Lie(lambda liar: liar.fresh[0] * 10_000, silent), Lie(_kept, silent), Lie(_many, silent)],
    (Pin, "keys"): [
        Lie(lambda liar: liar.fresh[0] * 10_000, pins_are_bounded),
        Lie(_kept, pins_are_bounded),
        Lie(_many, pins_are_bounded),
    ],
    (Pin, "ttl_ms"): [Lie(lambda liar, ms=ms: ms, pins_are_bounded) for ms in (0, -1, FAR, HUGE)],  # type: ignore[misc]
    (Opened, "why"): [Lie(lambda liar: None, no_gpu), Lie(lambda liar: "w" * 100_000, no_gpu)],
}


def fields(messages: Any = protocol.Request) -> Iterator[tuple[type[msgspec.Struct], str]]:
    """Of all messages that a client may send, and of what is in them, as the protocol defines them; or of others."""
    waiting = list(typing.get_args(messages))
    seen = set(waiting)
    while waiting:
        kind = waiting.pop(0)
        for each in msgspec.structs.fields(kind):
            yield kind, each.name
            for inner in _structs(each.type):
                if inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in typing.get_args(kind):
        yield from _structs(part)

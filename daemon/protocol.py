"""The engine door's messages: what they are, how they are framed, and how a layout is named.

Owns the wire format, nothing else. Used by the daemon on its event loop and by engines from any thread.
Imports msgspec and ``tiers.block``: an engine loads this module.

A frame is ``u32le length || msgpack``. A connection is a session. Keys travel concatenated (32 bytes each), never as
tokens. ``id`` is chosen by the client and comes back in the answer; deadlines are milliseconds from receipt.
A message grows at its end only, by fields that may be missing: so engines and daemons of one version understand each
other, whichever is newer.
"""

import hashlib
import struct
from typing import Annotated

import msgspec

from terracekv.tiers.block import KEY_BYTES, block_keys, field

VERSION = 1
FRAME_BYTES_MAX = 4 << 20
"""A prompt of 2 million tokens in 16-token blocks fits; more is refused before it is read."""
LENGTH = struct.Struct("<I")
PROBE = block_keys(bytes(32), range(8), 4)[-1]
"""A key of fixed tokens: engine and daemon compare it, so that two ways of hashing never meet."""

AXES = {"NHD": "tokens, heads, dim", "HND": "heads, tokens, dim", "ND": "tokens, dim"}
PLANES = {"split": 2, "fused": 1, "latent": 1, "pages": 1}
"""Planes of a layer in a payload: K then V; K and V side by side in one; one latent for both (MLA); whole pages of the
engine, whose inside only it knows."""


Axes = Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]
GROUPS_MAX = 1024
"""More kinds of layers than any model has: judging a list without end would keep everybody waiting."""


class LayerGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that look alike. ``shape`` counts elements and ``strides`` bytes of one plane of one layer of a block."""

    layers: int
    shape: Axes
    strides: Axes


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one shard of a block: for each group, each layer, each plane, a dense array.

    ``axes`` names the order of a plane's axes, ``packing`` how K and V lie, ``item_bytes`` the size of an element
    (formats below a byte count bytes as elements).
    """

    axes: str
    packing: str
    item_bytes: int
    groups: Annotated[tuple[LayerGroup, ...], msgspec.Meta(max_length=GROUPS_MAX)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one shard of a block."""
        total = 0
        for group in self.groups:
            elements = group.layers * PLANES[self.packing]
            for extent in group.shape:
                elements *= extent
            total += elements * self.item_bytes
        return total

    def digest(self, shards: int = 1) -> bytes:
        """32 bytes; differs whenever any field does, or the number of shards of which this is one's layout."""
        parts = [
            b"terracekv/layout/1\0",
            field(1, self.axes.encode()),
            field(2, self.packing.encode()),
            field(3, LENGTH.pack(self.item_bytes)),
        ]
        for group in self.groups:
            numbers = (group.layers, len(group.shape), *group.shape, *group.strides)
            parts.append(field(4, struct.pack(f"<{len(numbers)}q", *numbers)))
        if shards > 1:
            parts.append(field(5, LENGTH.pack(shards)))
        return hashlib.sha256(b"".join(parts)).digest()

    def problem(self, block_tokens: int) -> str | None:
        """What in this layout is unknown or contradicts itself, naming the field; None when it is understood."""
        if self.axes not in AXES:
            return f"layout.axes: {self.axes!r} is not one of {', '.join(AXES)}"
        if self.packing not in PLANES:
            return f"layout.packing: {self.packing!r} is not one of {', '.join(PLANES)}"
        if (self.axes == "ND") != (self.packing in ("latent", "pages")):
            return f"layout.axes: {self.axes!r} does not go with packing {self.packing!r}"
        if not 0 < self.item_bytes <= 16:
            return f"layout.item_bytes: {self.item_bytes} is not between 1 and 16"
        if not self.groups:
            return "layout.groups: empty"
        token_axis = 1 if self.axes == "HND" else 0
        for number, group in enumerate(self.groups):
            where = f"layout.groups[{number}]"
            if group.layers <= 0:
                return f"{where}.layers: {group.layers} is not positive"
            if len(group.shape) != len(self.axes) or min(group.shape) <= 0:
                return f"{where}.shape: {group.shape} is not ({AXES[self.axes]})"
            if group.shape[token_axis] != block_tokens:
                return f"{where}.shape: {group.shape} holds {group.shape[token_axis]} tokens, a block {block_tokens}"
            if group.strides != dense_strides(group.shape, self.item_bytes):
                return f"{where}.strides: {group.strides} is not dense for shape {group.shape}"
        return None


def dense_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Strides in bytes of a dense array whose last axis is the innermost."""
    strides = []
    step = item_bytes
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """First message of a session. ``shard`` is None for a scheduler, which leases blocks whole and copies nothing.

    ``credential`` names the tenant; the daemon derives the namespace's salt from it. ``pid`` is for people only.
    ``gpu`` is the UUID of the GPU that the engine's KV is on, empty without one. ``access`` is ``write``, or ``read``
    for a session that stores nothing: it gets the arena for reading only.
    """

    version: int
    probe: bytes
    model: str
    revision: str
    dtype: str
    block_tokens: int
    layout: Layout
    shards: int
    shard: int | None
    pid: int
    credential: bytes = b""
    engine: str = ""
    gpu: str = ""
    access: str = "write"


class Lookup(msgspec.Struct, tag="lookup", array_like=True):
    id: int
    keys: bytes
    deadline_ms: int


class Acquire(msgspec.Struct, tag="acquire", array_like=True):
    """Lease blocks; those below host are brought up and answered by Ready or Failed before the deadline. With ``gpu``
    the slots may be of the GPU's memory, once the engine has said that it has that open."""

    id: int
    keys: bytes
    deadline_ms: int
    gpu: bool = False


class Release(msgspec.Struct, tag="release", array_like=True):
    """Ends a lease; not answered. A lease that is already over is no error."""

    lease: int


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """Ask for slots to write. Name the whole chain from its first block: what is present is only touched, in an
    order that lets the tail be evicted before the head."""

    id: int
    keys: bytes


class Commit(msgspec.Struct, tag="commit", array_like=True):
    """Make written slots findable. ``indices`` are those of the Reserve's keys. With ``durable`` the answer waits
    until the blocks are in the lowest configured tier, or known not to get there."""

    id: int
    reservation: int
    indices: list[int]
    durable: bool = False


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Give back what is not committed of a reservation; not answered, idempotent."""

    reservation: int


class Prefetch(msgspec.Struct, tag="prefetch", array_like=True):
    """Bring blocks up into host in the background; not answered."""

    keys: bytes


class Pin(msgspec.Struct, tag="pin", array_like=True):
    """Keep blocks in host for ``ttl_ms``, as far as the daemon pins any more; not answered."""

    keys: bytes
    ttl_ms: int


class Opened(msgspec.Struct, tag="opened", array_like=True):
    """The engine tried to open the memory that Welcome offered: ``why`` it cannot, None when it has it open. Sent only
    after such an offer; not answered."""

    why: str | None = None


Request = Hello | Lookup | Acquire | Release | Reserve | Commit | Abort | Prefetch | Pin | Opened


class GpuMemory(msgspec.Struct, frozen=True, array_like=True):
    """The gpu tier's allocation: the GPU's UUID, CUDA's IPC handle, the bytes that slots may lie in, and bytes that no
    other daemon's allocation has, as its handle may be the same."""

    uuid: str
    handle: bytes
    size_bytes: int
    made: bytes = b""


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The session is open. The client maps ``arena``, for writing if it may write, and ``slots`` (the slot table) for
    reading: the two descriptors that come with this message, or else the files of these names. It holds a shared lock
    on byte ``lock_byte`` of ``slots`` for as long as it may write: see ``connector/arena.py``. ``gpu`` is offered to an
    engine on the GPU that has the gpu tier; else ``no_gpu`` says why not. Sizes in bytes."""

    session: int
    namespace_id: bytes
    epoch: int
    block_bytes: int
    arena: str
    arena_bytes: int
    slots: str
    slots_bytes: int
    lock_byte: int
    gpu: GpuMemory | None = None
    no_gpu: str | None = None


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """No session: ``field`` is the field of Hello that is at fault."""

    field: str
    reason: str


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A place in the arena: ``offset`` of the payload, ``record`` of its entry in the slot table, and the
    ``generation`` that the entry must still show after a copy for the copied bytes to mean anything.

    With ``gpu`` it is a place in the GPU's memory: ``block_bytes`` bytes at ``offset`` of the allocation that Welcome
    offered. It holds them until the lease ends, and means nothing once the session does."""

    offset: int
    record: int
    generation: int
    gpu: bool = False


class Found(msgspec.Struct, tag="found", array_like=True):
    """``blocks`` leading blocks are present; ``per_tier[t]`` of them, contiguous from the first, can be had from
    tier t or above. ``load_ms`` estimates their way up to the engine."""

    id: int
    blocks: int
    per_tier: dict[str, int]
    first_miss: int | None
    reason: str | None
    load_ms: float


class Leased(msgspec.Struct, tag="leased", array_like=True):
    """``slots[i]`` belongs to key i; None where nothing is leased (yet). ``pending`` indices are on their way up:
    Ready or Failed will name each of them. A scheduler's lease has no slots; ``blocks`` counts what it holds."""

    id: int
    lease: int
    blocks: int
    slots: list[Slot | None]
    pending: list[int]


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """Blocks of the lease that came up: ``slots[n]`` belongs to index ``indices[n]``."""

    lease: int
    indices: list[int]
    slots: list[Slot | None]


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """These blocks of the lease will not come; they are misses. ``why`` is an Outcome or Miss."""

    lease: int
    indices: list[int]
    why: str


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """``slots[i]`` is None where key i is present already or refused; ``refused`` maps an index to its Outcome."""

    id: int
    reservation: int
    slots: list[Slot | None]
    present: list[int]
    refused: dict[int, str]


class Committed(msgspec.Struct, tag="committed", array_like=True):
    """``stored`` of the asked indices are findable now; ``durable`` of them outlive the daemon's host memory."""

    id: int
    stored: list[int]
    durable: list[int]


class Error(msgspec.Struct, tag="error", array_like=True):
    """A request that was not done. ``id`` is that of the request, or 0 when none could be read."""

    id: int
    kind: str
    message: str
    hint: str


Answer = Welcome | Refused | Found | Leased | Ready | Failed | Reserved | Committed | Error

_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Request)
answer_decoder = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def split_keys(keys: bytes) -> list[bytes]:
    """Concatenated keys, apart. ValueError when the length is not a multiple of 32."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys: {len(keys)} bytes is not a multiple of {KEY_BYTES}")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]

"""Judging a Hello: which namespace an engine means, or what is wrong with how it introduced itself.

Pure; called by the engine door on the event loop. Imports ``protocol`` and ``tiers``.
"""

from terracekv.daemon import protocol
from terracekv.daemon.protocol import PROBE, VERSION
from terracekv.tiers.block import namespace_id
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import slot_bytes_for

SHARDS_MAX = 4096
NAME_MAX = 1024
ACCESSES = ("read", "write")


def judge(hello: protocol.Hello, *, slab_bytes: int, tenant: str, salt: bytes) -> protocol.Refused | Namespace:
    """The namespace that a Hello describes, or the first of its fields that cannot be meant. ``tenant`` and ``salt``
    are those of its credential."""
    if hello.version != VERSION:
        return protocol.Refused("version", f"this daemon speaks version {VERSION}, the engine {hello.version}")
    if hello.probe != PROBE:
        return protocol.Refused("probe", "engine and daemon compute different keys from the same tokens")
    if not hello.model:
        return protocol.Refused("model", "empty")
    for name in ("model", "revision", "dtype"):
        if len(getattr(hello, name)) > NAME_MAX:
            return protocol.Refused(name, f"longer than {NAME_MAX} characters")
        if not getattr(hello, name).isprintable():
            return protocol.Refused(name, "has characters that cannot be shown, as ends of lines")
    if not 0 < hello.block_tokens <= 1 << 20:
        return protocol.Refused("block_tokens", f"{hello.block_tokens} is not between 1 and {1 << 20}")
    problem = hello.layout.problem(hello.block_tokens)
    if problem is not None:
        return protocol.Refused(*problem.split(": ", 1))
    if not 0 < hello.shards <= SHARDS_MAX:
        return protocol.Refused("shards", f"{hello.shards} is not between 1 and {SHARDS_MAX}")
    if hello.access not in ACCESSES:
        return protocol.Refused("access", f"{hello.access[:40]!r} is not one of {', '.join(ACCESSES)}")
    if hello.shard is not None and not 0 <= hello.shard < hello.shards:
        return protocol.Refused("shard", f"{hello.shard} is not one of {hello.shards} shards")
    block_bytes = hello.layout.block_bytes
    if slot_bytes_for(block_bytes) > slab_bytes:
        return protocol.Refused(
            "layout",
            f"a block of {block_bytes} bytes is larger than a slab of {slab_bytes}: use fewer"
            " block_tokens, or a larger host.slab",
        )
    names = {"model": hello.model, "revision": hello.revision, "dtype": hello.dtype}
    layout = hello.layout.digest(hello.shards)
    return Namespace(
        id=namespace_id(**names, layout=layout, block_tokens=hello.block_tokens, salt=salt),
        number=0,
        epoch=0,
        **names,
        layout=layout,
        block_tokens=hello.block_tokens,
        shards=hello.shards,
        block_bytes=block_bytes,
        tenant=tenant,
    )

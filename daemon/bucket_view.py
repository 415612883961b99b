"""What the command line shows of a bucket, and does with it: beside running daemons, or without any.

Owns nothing. Called by ``cli`` and ``doctor`` in their own process, never by the daemon; what it imports of the tiers
brings boto3 along. Imports ``config``, ``config_s3`` and ``tiers``.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terracekv.daemon.config import Config
from terracekv.daemon.config_s3 import S3, settings_of
from terracekv.tiers import s3_audit
from terracekv.tiers.block import KEY_BYTES, shard_of
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import BadRequest, ConfigError, NotFound, TierDown
from terracekv.tiers.namespace import Namespace, Namespaces

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

PREFIX_DIGITS, ID_DIGITS = 8, 64


def opened(s3: S3) -> Bucket:
    """The bucket of the settings. ConfigError when there is none in them."""
    if not s3.bucket:
        raise ConfigError("s3.bucket is empty", "set s3.bucket, as --set s3.bucket=NAME")
    return Bucket(settings_of(s3))


def chosen(config: Config, name: str | None) -> tuple[Bucket, bytes | None]:
    """The bucket, and a namespace of it by its id in hex, a unique prefix of it (8 digits or more), or the name of a
    model that engines of this node have registered. None for None: all."""
    bucket = opened(config.s3)
    if name is None:
        return bucket, None
    ids = [namespace.id for namespace in _known(config.daemon.state_dir) if namespace.model == name]
    if not ids and re.fullmatch(f"[0-9a-fA-F]{{{PREFIX_DIGITS},{ID_DIGITS}}}", name):
        ids = [bytes.fromhex(name)] if len(name) == ID_DIGITS else s3_audit.begun_by(bucket, name.lower())
    if len(ids) > 1:
        shown = ", ".join(id.hex()[:16] for id in ids)
        raise BadRequest(f"{len(ids)} namespaces are called {name!r}", f"name one by its id: {shown}")
    if not ids:
        raise NotFound(
            f"no namespace {name!r} in the bucket",
            f"terracekv s3 stat lists them; a prefix of an id needs {PREFIX_DIGITS} digits, and models are known only "
            "where an engine used them",
        )
    return bucket, ids[0]


def listing(bucket: Bucket, namespace_id: bytes | None) -> Iterator[dict[str, Any]]:
    """All blocks, of one namespace or of all."""
    for stored in s3_audit.ls(bucket, namespace_id=namespace_id):
        yield _row(stored) | {"bytes": stored.about.size, "age_s": round(stored.about.age_s)}


def spaces(bucket: Bucket) -> list[dict[str, Any]]:
    """What each epoch of each namespace takes."""
    return [
        {
            "namespace_id": space.namespace_id.hex(),
            "epoch": space.epoch,
            "current": space.current,
            "objects": space.objects,
            "bytes": space.bytes,
            "oldest_s": round(space.oldest_s),
            "newest_s": round(space.newest_s),
        }
        for space in s3_audit.stat(bucket)
    ]


def verified(bucket: Bucket, namespace_id: bytes | None, keys: "Keys | None" = None) -> Iterator[dict[str, Any]]:
    """Every block, read and checked; ``problem`` is null when it is whole, ``locked`` says of a sealed one that none of
    ``keys`` sealed it. TierDown when one cannot be read: that is the link's fault or the server's, and says nothing of
    the blocks."""
    whole = damaged = 0
    try:
        for stored, problem in s3_audit.verify(bucket, namespace_id=namespace_id):
            whole, damaged = whole + (problem is None), damaged + (problem is not None)
            locked = bool(stored.sealed_with) and (keys is None or not keys.has(memoryview(stored.sealed_with)))
            yield _row(stored) | {"bytes": stored.about.size, "problem": problem, "locked": locked}
    except TierDown as error:
        raise TierDown(
            f"not all blocks could be read; until then {whole:,} were whole, {damaged:,} damaged: {error.message}",
            error.hint or "try again when the server answers",
        ) from error


def swept(bucket: Bucket, namespace_id: bytes | None, ttl_s: float, dry: bool) -> dict[str, Any]:
    """Delete what is older than ``ttl_s`` (0: however old), and what was flushed."""
    blocks, size = s3_audit.gc(bucket, ttl_s, dry=dry, namespace_id=namespace_id)
    return {"blocks": blocks, "bytes": size, "deleted": not dry}


def _row(stored: s3_audit.Stored) -> dict[str, Any]:
    place = stored.place
    names = {"namespace_id": place.namespace_id.hex(), "epoch": place.epoch}
    return names | {"key": place.id[:KEY_BYTES].hex(), "shard": shard_of(place.id)}


def _known(state_dir: Path) -> Iterable[Namespace]:
    """Namespaces of this node, with their models' names; none where no daemon ever ran."""
    path = state_dir / "namespaces.json"
    return Namespaces(path) if path.exists() else ()

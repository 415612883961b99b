"""What the command line shows of a bucket, and does with it: beside running daemons, or without any.

Owns nothing. Called by ``cli`` and ``doctor`` in their own process, never by the daemon; what it imports of the tiers
brings boto3 along. Imports ``config_s3`` and ``tiers``.
"""

from collections.abc import Iterator
from typing import Any

from terracekv.daemon.config_s3 import S3, settings_of
from terracekv.tiers import s3_audit
from terracekv.tiers.block import KEY_BYTES, shard_of
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import BadRequest, ConfigError, TierDown


def opened(s3: S3) -> Bucket:
    """The bucket of the settings. ConfigError when there is none in them."""
    if not s3.bucket:
        raise ConfigError("s3.bucket is empty", "set s3.bucket, as --set s3.bucket=NAME")
    return Bucket(settings_of(s3))


def listing(bucket: Bucket, namespace: str | None) -> Iterator[dict[str, Any]]:
    """All blocks, of one namespace (64 hex digits) or of all."""
    for stored in s3_audit.ls(bucket, namespace_id=_id(namespace)):
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


def verified(bucket: Bucket, namespace: str | None) -> Iterator[dict[str, Any]]:
    """Every block, read and checked; ``problem`` is null when it is whole. TierDown when one cannot be read: that is
    the link's fault or the server's, and says nothing of the blocks."""
    whole = damaged = 0
    try:
        for stored, problem in s3_audit.verify(bucket, namespace_id=_id(namespace)):
            whole, damaged = whole + (problem is None), damaged + (problem is not None)
            yield _row(stored) | {"bytes": stored.about.size, "problem": problem}
    except TierDown as error:
        raise TierDown(
            f"not all blocks could be read; until then {whole:,} were whole, {damaged:,} damaged: {error.message}",
            error.hint or "try again when the server answers",
        ) from error


def swept(bucket: Bucket, ttl_s: float, dry: bool) -> dict[str, Any]:
    """Delete what is older than ``ttl_s`` (0: however old), and what was flushed."""
    blocks, size = s3_audit.gc(bucket, ttl_s, dry=dry)
    return {"blocks": blocks, "bytes": size, "deleted": not dry}


def _row(stored: s3_audit.Stored) -> dict[str, Any]:
    place = stored.place
    names = {"namespace_id": place.namespace_id.hex(), "epoch": place.epoch}
    return names | {"key": place.id[:KEY_BYTES].hex(), "shard": shard_of(place.id)}


def _id(namespace: str | None) -> bytes | None:
    if namespace is None:
        return None
    try:
        id = bytes.fromhex(namespace)
    except ValueError:
        id = b""
    if len(id) != 32:
        raise BadRequest(f"{namespace!r} is not a namespace id", "64 hex digits; terracekv s3 stat lists them")
    return id

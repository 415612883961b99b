"""The settings of the s3 tier, as they are written in the section ``[s3]``.

Owns nothing; called by ``config`` where all settings are read, and by ``recovery`` and ``cli`` where the tier is
opened. Imports msgspec and ``tiers.s3_settings``, and so none of the tier's libraries.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from terracekv.tiers.errors import ConfigError
from terracekv.tiers.s3_settings import TTL_S_MAX, S3Settings, require_endpoint

Count = Annotated[int, Meta(ge=1, le=256)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Lifetime = Annotated[float, Meta(ge=0, le=TTL_S_MAX, description="seconds")]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
SizeOrAuto = Annotated[int | None, Meta(description="bytes, None for auto")]


class S3(Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket. Times in seconds; ``queue`` counts bytes of write-through that wait for it."""

    enabled: bool = False
    endpoint: str = ""
    region: str = "us-east-1"
    bucket: str = ""
    prefix: str = ""
    profile: str = ""
    credentials_file: str = ""
    ca_bundle: str = ""
    path_style: Literal["auto", "on", "off"] = "auto"
    create_bucket: bool = False
    unsigned_payload: bool = False
    threads: Count = 8
    queue: SizeOrAuto = None
    admission: Literal["all", "second_touch", "on_evict"] = "all"
    codec: Literal["auto", "on", "off"] = "auto"
    ttl: Lifetime = 0.0
    present_ttl: Seconds = 300.0
    absent_ttl: Seconds = 10.0
    epoch_ttl: Seconds = 30.0
    read_timeout: Seconds = 5.0
    timeout: Seconds = 30.0
    prefill_tokens_per_s: Rate = 0.0


def check_s3(s3: S3) -> None:
    """ConfigError for settings that can never work. The endpoint is looked at even while s3 is off: it is shown."""
    if s3.endpoint:
        require_endpoint(s3.endpoint)
    if s3.enabled:
        settings_of(s3)


def settings_of(s3: S3) -> S3Settings:
    """As the tier wants them. ConfigError names what is wrong."""
    if not s3.bucket:
        raise ConfigError("s3.bucket is empty while s3.enabled is true", "set s3.bucket, or s3.enabled to false")
    return S3Settings(
        bucket=s3.bucket,
        endpoint=s3.endpoint or None,
        region=s3.region,
        prefix=s3.prefix,
        profile=s3.profile or None,
        credentials_file=s3.credentials_file or None,
        path_style=None if s3.path_style == "auto" else s3.path_style == "on",
        create_bucket=s3.create_bucket,
        unsigned_payload=s3.unsigned_payload,
        ca_bundle=s3.ca_bundle or None,
        workers=s3.threads,
        head_workers=s3.threads,
        read_timeout_s=s3.read_timeout,
        timeout_s=s3.timeout,
        present_ttl_s=s3.present_ttl,
        absent_ttl_s=s3.absent_ttl,
        epoch_ttl_s=s3.epoch_ttl,
        ttl_s=s3.ttl,
        codec=s3.codec,
    )

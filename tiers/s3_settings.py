"""The settings of the s3 tier. Owns nothing; made by whoever reads the configuration, used from any thread.

Imports the standard library and ``errors``.
"""

import re
from dataclasses import dataclass

from terracekv.tiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is and how it is used. ``endpoint`` None is AWS. Times in seconds, sizes in bytes.

    ``profile`` and ``credentials_file`` name what boto3's own chain would look for elsewhere.
    """

    bucket: str
    endpoint: str | None = None
    region: str = "us-east-1"
    prefix: str = ""
    profile: str | None = None
    credentials_file: str | None = None
    path_style: bool | None = None
    """None: path style with an endpoint of your own, the host style that AWS wants without."""
    create_bucket: bool = False
    unsigned_payload: bool = False
    """Leave bodies out of the signature over plain http too; over TLS they always are."""
    ca_bundle: str | None = None
    workers: int = 8
    """Threads that get and put, and so the calls that run at once."""
    head_workers: int = 8
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 5.0
    """Silence after which a call has failed."""
    timeout_s: float = 30.0
    """The whole of a get or put, retries included."""
    present_ttl_s: float = 300.0
    absent_ttl_s: float = 10.0
    presence_entries: int = 1 << 17
    epoch_ttl_s: float = 30.0
    ttl_s: float = 0.0
    """Lifetime of objects, as the bucket's lifecycle rule or ``gc`` enforces it; 0 for none."""
    codec: str = "auto"
    codec_memory_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", self.bucket):
            raise ConfigError(f"{self.bucket!r} is not a bucket's name", "3 to 63 of a-z, 0-9, dot and dash")
        if not re.fullmatch(r"([A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*)?", self.prefix):
            raise ConfigError(
                f"s3 prefix {self.prefix!r} has characters that not every service keeps as they are",
                "letters, digits and !_.*'()- , parts joined by /, none at the ends",
            )
        if self.endpoint is not None and not re.match(r"https?://[^/]+", self.endpoint):
            raise ConfigError(
                f"s3 endpoint {self.endpoint!r} has no scheme",
                "a URL with scheme, host and port, as http://localhost:8333",
            )
        if self.codec not in ("auto", "on", "off"):
            raise ConfigError(f"s3 codec {self.codec!r} is unknown", "auto, on or off")

    @property
    def root(self) -> str:
        """What all our keys begin with."""
        return f"{self.prefix}/" if self.prefix else ""

"""The settings of the s3 tier. Owns nothing; made by whoever reads the configuration, used from any thread.

Imports the standard library and ``errors``.
"""

import os
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from terracekv.tiers.errors import ConfigError

TTL_S_MAX = 10 * 365 * 86400.0
_TIMES = (
    ("connect_timeout_s", 0.001, 3600.0),
    ("read_timeout_s", 0.001, 3600.0),
    ("timeout_s", 0.001, 3600.0),
    ("present_ttl_s", 0.0, 3600.0),
    ("absent_ttl_s", 0.0, 3600.0),
    ("epoch_ttl_s", 0.0, 3600.0),
    ("ttl_s", 0.0, TTL_S_MAX),
)
"""Each time with its bounds. No other number is let through: not infinity, and not what is no number."""


def require_endpoint(endpoint: str) -> None:
    """ConfigError unless a service can have this URL. A secret in it is not repeated."""
    if "@" in endpoint:
        raise ConfigError(
            f"s3.endpoint (the one that ends in {endpoint.rpartition('@')[2]!r}) has a user or password in it",
            "the endpoint is shown in logs and the status: put the keys into s3.credentials_file or the environment",
        )
    try:
        url = urlsplit(endpoint)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good or re.search(r"[?#\\\s\x00-\x1f\x7f-\U0010ffff]", endpoint):
        raise ConfigError(
            f"s3.endpoint {endpoint!r} is not the URL of a service",
            "scheme, host and port (1 to 65535) without ? and #, as http://localhost:8333",
        )


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
                f"s3.prefix {self.prefix!r} has characters that not every service keeps as they are",
                "letters, digits and !_.*'()- , parts joined by /, none at the ends",
            )
        if {".", ".."} & set(self.prefix.split("/")):
            raise ConfigError(f"s3.prefix {self.prefix!r}: services resolve . and ..", "choose other names")
        if not re.fullmatch(r"(?![0-9]+$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", self.region):
            raise ConfigError(f"s3.region {self.region!r} is not a region's name", "as us-east-1")
        if self.endpoint is not None:
            require_endpoint(self.endpoint)
        for name, least, most in _TIMES:
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"s3.{name.removesuffix('_s')} is {getattr(self, name)}", f"{least:g} to {most:g} seconds"
                )
        if self.codec not in ("auto", "on", "off"):
            raise ConfigError(f"s3 codec {self.codec!r} is unknown", "auto, on or off")

    def require_files(self) -> None:
        """ConfigError unless the files that are named can be read, and the certificates are some."""
        try:
            if self.credentials_file and not os.path.isfile(self.credentials_file):
                raise FileNotFoundError("there is no such file")
            if self.credentials_file:
                os.close(os.open(self.credentials_file, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"s3.credentials_file {self.credentials_file} cannot be read: {error.strerror or error}",
                'name the file that has the keys, or set s3.credentials_file to "" for where boto3 looks',
            ) from error
        try:
            if self.ca_bundle:
                ssl.create_default_context(cafile=self.ca_bundle)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"s3.ca_bundle {self.ca_bundle} cannot be used: {getattr(error, 'strerror', None) or error}",
                'name a PEM file of certificates, or set s3.ca_bundle to "" for those of the system',
            ) from error

    @property
    def root(self) -> str:
        """What all our keys begin with."""
        return f"{self.prefix}/" if self.prefix else ""

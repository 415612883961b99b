"""What an S3-compatible server's errors mean for us. Owns nothing; pure, any thread. Imports ``errors``."""

from collections.abc import Iterator
from contextlib import contextmanager

from terracekv.tiers.errors import TerraceError, TierDown

_TEXT_MAX = 300

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "RequestTimeTooSkewed", "InvalidSecurity"}
_BUSY = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_BUSY |= {"TooManyRequests", "ServiceUnavailable", "503", "429"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge", "507"}
MISSING = {"NoSuchKey", "404", "NotFound"}
_RACED = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_PERMISSIONS = {
    "head_object": "s3:GetObject",
    "get_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "copy_object": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "create_bucket": "s3:CreateBucket",
}


class Unreachable(TierDown):
    """The server did not answer in time, or with an error of its own."""

    own_event = "TKV-S3-UNREACHABLE"


class Busy(TierDown):
    """The server asks for fewer calls."""

    own_event = "TKV-S3-BUSY"


class Expired(TierDown):
    """The credentials have run out; fresh ones may be had."""

    own_event = "TKV-S3-EXPIRED"


class Refused(TierDown):
    """The server does not accept who we are."""

    own_event = "TKV-S3-REFUSED"


class Forbidden(TierDown):
    """The server knows us, but we may not do this; other calls may well succeed."""

    own_event = "TKV-S3-FORBIDDEN"


class NoBucket(TierDown):
    """There is no such bucket."""

    own_event = "TKV-S3-NO-BUCKET"


class Full(TierDown):
    """The server takes no more bytes; what it has can be read."""

    own_event = "TKV-S3-FULL"


class NotOffered(TierDown):
    """The server does not have this feature of S3."""

    own_event = "TKV-S3-NOT-OFFERED"


class Raced(TierDown):
    """A conditional write found that somebody else was quicker."""

    own_event = "TKV-S3-RACED"


@contextmanager
def answer_of(what: str) -> Iterator[None]:
    """For all that touches a server's answer: whatever it makes our libraries or our own reading raise is Unreachable.

    The one place for that, and one that must catch everything: what a portal, a proxy or half a server can answer is
    without end, and so are the errors that it leads to, in code that is not ours.
    """
    try:
        yield
    except (TerraceError, AssertionError):
        raise
    except OSError as error:
        raise Unreachable(plain(f"{what}: {error}")) from error
    except Exception as error:
        text = plain(f"{what}: this answer cannot be taken: {type(error).__name__}: {error}")
        raise Unreachable(text, "is s3.endpoint an S3 service?") from error


def plain(text: str) -> str:
    """One line of bounded length, whatever a server sent."""
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]} ..."


def error_of(operation: str, code: str, status: int, message: str) -> TierDown:
    """The error for an answer that is neither success nor an expected absence. ``code`` is S3's, ``status`` HTTP's."""
    text = plain(f"{operation}: {code}: {message}")
    if code in _EXPIRED:
        return Expired(text, "credentials are read again by themselves")
    if code == "NoSuchBucket" or (operation == "head_bucket" and status == 404):
        return NoBucket(text, "create the bucket, or set create_bucket")
    if code in _REFUSED or status == 401 or (operation == "head_bucket" and status == 400):
        return Refused(text, "check the key, the secret and the clock")
    if status == 403:
        return Forbidden(text, f"let the policy of the bucket allow {_PERMISSIONS.get(operation, operation)}")
    if code in _BUSY or status in (429, 503):
        return Busy(text)
    if code in _FULL or status == 507:
        return Full(text)
    if code in _RACED or status == 412:
        return Raced(text)
    if code == "NotImplemented" or status == 501:
        return NotOffered(text)
    return Unreachable(text)

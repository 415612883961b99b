"""One bucket of an S3-compatible service, one attempt at a time. The only boto3 and botocore imports.

Owns the client. Called by the s3 tier and its helpers from any thread; whoever retries, and when, is ``caller``.
Imports ``body``, ``errors``, ``journal``, ``s3_errors`` and ``s3_settings``.

What boto3 would do by default and why it is switched off: its checksums and trailers (other services reject them, or
store the framing as data), its own retries (they know no deadline), ``Expect: 100-continue`` (a round trip more), and
reading a body through three buffers.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from terracekv.tiers.body import CUT_OFF, PIECE_BYTES, Body, Object
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.journal import Journal
from terracekv.tiers.s3_errors import MISSING, Forbidden, NoBucket, Refused, Unreachable, answer_of, error_of, plain
from terracekv.tiers.s3_settings import S3Settings

EMPTY_PAGES_MAX = 1000
"""Of a list, one after the other: a service may pass over what was deleted, but not for ever."""
_ORDERS: tuple[Callable[[str], Any], ...] = (str, lambda key: key.split("/"))
"""In which a list may be: by characters, as S3 says; or folder by folder, as services do that keep names as paths."""
REQUESTS_MAX = 4
"""Of one call: botocore follows redirects, and each to the next without end."""
_FORBIDDEN_S = 60.0
"""A 403 on a name that may be missing is looked into once in so many seconds."""

journal = Journal(__name__)
# It would log a traceback for each answer whose headers it cannot read; what comes of that we say ourselves.
logging.getLogger("urllib3.connection").setLevel(logging.ERROR)


class _Upload:
    """Buffers as one file of known length: what botocore takes as a body, without joining them. The buffers it hands
    out may be larger than asked for: whoever asks sends or hashes whatever it gets."""

    def __init__(self, buffers: Sequence[memoryview | bytes], deadline: float, closed: threading.Event) -> None:
        self._pieces = [
            memoryview(buffer)[start : start + PIECE_BYTES]
            for buffer in buffers
            for start in range(0, len(buffer), PIECE_BYTES)
        ]
        self._length = sum(map(len, self._pieces))
        self._deadline = deadline
        self._closed = closed
        self._next = 0
        self.ended: TierDown | None = None
        """Why we ended it ourselves: what the client makes of that says something else."""

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True

    def read(self, size: int = -1) -> memoryview | bytes:
        if self._closed.is_set():
            self.ended = TierDown(CUT_OFF)
        elif time.monotonic() > self._deadline:
            self.ended = Unreachable("not sent in time")
        if self.ended is not None:
            raise TimeoutError(self.ended.message)
        if self._next == len(self._pieces):
            return b""
        self._next += 1
        return self._pieces[self._next - 1]

    def tell(self) -> int:
        return 0 if not self._next else sum(map(len, self._pieces[: self._next]))

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0 and offset == 0, "rewound only as a whole"
        self._next = 0
        return 0


class Bucket:
    """Methods make one attempt and raise what ``s3_errors.error_of`` makes of its answer. ``deadline`` is of
    ``time.monotonic``."""

    def __init__(self, settings: S3Settings) -> None:
        """Makes the client, before any thread needs it; connects to nobody yet. ConfigError for an unknown profile,
        and for files that cannot be read or mean nothing."""
        settings.require_files()
        self.settings = settings
        self._lock = threading.Lock()
        self._call = threading.local()
        self._forbidden_until = float("-inf")
        self._warned = set[str]()
        self._closed = threading.Event()
        self.generation = 0
        """Of the credentials; see ``refresh``."""
        self._client = self._connect()

    def refresh(self, seen: int) -> None:
        """Read the credentials anew from wherever they come, unless another thread has done so since ``seen``. Refused
        when they cannot be read, as while somebody writes them."""
        with self._lock:
            if self.generation == seen:
                try:
                    fresh = self._connect()
                except ConfigError as error:
                    raise Refused(error.message, error.hint) from error
                before, self._client = self._client, fresh
                self.generation += 1
                before.close()  # its idle connections; calls under way end on theirs

    def close(self) -> None:
        """Close idle connections; calls under way end before their next piece is sent or read, none begins."""
        self._closed.set()
        self._client.close()

    def head(self, key: str, deadline: float) -> Object | None:
        """None when there is no such object, or we may not know."""
        about: Object | None = self._ask("head_object", deadline, partial(_about, key), missing=True, Key=key)
        return about

    @contextmanager
    def get(self, key: str, deadline: float, **more: Any) -> Iterator[Body | None]:
        """The object's body, None when there is no such object. ``more``: ``Range``."""

        def begun(response: Any) -> Body:
            try:
                return Body(_about(key, response), response["Body"], deadline, self._timeout(deadline), self._closed)
            except BaseException:
                response["Body"].close()
                raise

        body: Body | None = self._ask("get_object", deadline, begun, missing=True, Key=key, **more)
        try:
            yield body
        finally:
            if body is not None:
                body.finish()

    def read(self, key: str, size_max: int, deadline: float) -> tuple[bytes, Object] | None:
        """A small object, whole or its first ``size_max`` bytes."""
        with self.get(key, deadline) as body:
            if body is None:
                return None
            content = memoryview(bytearray(min(body.about.size, size_max)))
            body.read_into(content)
            return bytes(content), body.about

    def put(self, key: str, buffers: Sequence[memoryview | bytes], deadline: float, **conditions: Any) -> None:
        """Store the buffers, one after the other. ``conditions``: ``IfNoneMatch``, ``IfMatch``; Raced when not met."""
        body = _Upload(buffers, deadline, self._closed)
        try:
            self._ask("put_object", deadline, Key=key, Body=body, ContentLength=len(body), **conditions)
        except Unreachable as error:
            if body.ended is None:
                raise
            raise type(body.ended)(f"{key}: {body.ended.message}") from error

    def delete(self, key: str, deadline: float) -> None:
        """No error when it is gone."""
        self._ask("delete_object", deadline, missing=True, Key=key)

    def renew(self, key: str, deadline: float) -> bool:
        """Begin an object's lifetime anew, by a copy inside the server; False when it is gone."""
        source = {"Bucket": self.settings.bucket, "Key": key}
        # A copy onto itself is only allowed when something about it changes.
        mark = {"renewed": datetime.now(UTC).isoformat(timespec="seconds")}
        copied = self._ask(
            "copy_object",
            deadline,
            missing=True,
            Key=key,
            CopySource=source,
            MetadataDirective="REPLACE",
            Metadata=mark,
        )
        return copied is not None

    def list(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Object]:
        """All objects whose keys begin so and come ``after`` a key, in the server's order; each page has ``deadline_s``
        seconds. Unreachable when the list has others, as of a server that does not heed what it is asked: what is
        listed may be deleted, and a list that begins anew has no end."""
        last, empty, orders = after, 0, _ORDERS
        more: dict[str, Any] = {"StartAfter": after} if after else {}
        while True:
            deadline = time.monotonic() + deadline_s
            rows, after = self._ask("list_objects_v2", deadline, _page, Prefix=prefix, MaxKeys=1000, **more)
            for row in rows:
                orders = tuple(order for order in orders if order(row.key) > order(last))
                if not row.key.startswith(prefix) or not orders:
                    raise Unreachable(
                        f"list_objects_v2: {plain(row.key)} is not what was asked for: is it an S3 service?"
                    )
                last = row.key
                yield row
            if after is None:
                return
            empty = 0 if rows else empty + 1
            if more.get("ContinuationToken") == after or empty > EMPTY_PAGES_MAX:
                raise Unreachable(f"list_objects_v2: the list does not go on after {plain(after)}")
            more = {"ContinuationToken": after}

    def found(self, deadline: float) -> bool | None:
        """Whether the bucket is there; None when we may not know. Refused, or Expired, when it is who we are."""
        try:
            self._ask("head_bucket", deadline)
        except NoBucket:
            return False
        except (Forbidden, Refused):
            # The answer to a HEAD has no body that would say why; that to a GET has.
            with self.get(f"{self.settings.root}terracekv.probe", deadline, Range="bytes=0-0") as body:
                return None if body is None else True
        return True

    def create(self, deadline: float) -> None:
        """Make the bucket."""
        region = self.settings.region
        where: dict[str, Any] = (
            {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        )
        self._ask("create_bucket", deadline, **where)

    def warn_once(self, event: str, text: str) -> None:
        """Say something in the log, the first time only."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        journal.warning(event, text, tier="s3")

    def _connect(self) -> Any:
        settings = self.settings
        session = botocore.session.Session()
        if settings.credentials_file:
            session.set_config_variable("credentials_file", settings.credentials_file)
        path_style = settings.path_style if settings.path_style is not None else settings.endpoint is not None
        tls = settings.endpoint is None or settings.endpoint.startswith("https:")
        config = Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            max_pool_connections=settings.workers + settings.head_workers + 1,
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            signature_version="s3v4",
            s3={
                "addressing_style": "path" if path_style else "auto",
                "payload_signing_enabled": not (tls or settings.unsigned_payload),
            },
        )
        try:
            client = boto3.Session(botocore_session=session, profile_name=settings.profile).client(
                "s3",
                endpoint_url=settings.endpoint,
                region_name=settings.region,
                config=config,
                verify=settings.ca_bundle or True,
            )
        except ProfileNotFound as error:
            raise ConfigError(f"s3.profile: {error}", "name a profile of the credentials file") from error
        except (BotoCoreError, ValueError, OSError) as error:
            raise ConfigError(
                plain(f"no S3 client can be made: {error}"), "see [s3] of the settings, and the files that boto3 reads"
            ) from error
        client.meta.events.register_last("request-created.s3", self._created)
        return client

    def _created(self, request: Any, **_: Any) -> None:
        """Runs in the calling thread, between signing and sending."""
        self._call.requests += 1
        if self._call.requests > REQUESTS_MAX:
            raise Unreachable("the server sends every request elsewhere", "is s3.endpoint an S3 service?")
        del request.headers["Expect"]  # no error when it is absent
        request.context["read_timeout"] = self._timeout(self._call.deadline)

    def _timeout(self, deadline: float) -> float:
        return max(0.01, min(self.settings.read_timeout_s, deadline - time.monotonic()))

    def _ask(
        self,
        operation: str,
        deadline: float,
        taken: Callable[[Any], Any] = lambda response: response,
        *,
        missing: bool = False,
        **parameters: Any,
    ) -> Any:
        """One call: what ``taken`` makes of its answer, None for a 404 where one is expected. TierDown."""
        with answer_of(operation):
            if self._closed.is_set():
                raise TierDown(f"{operation}: {CUT_OFF}")
            if time.monotonic() >= deadline:
                raise Unreachable(f"{operation}: no time is left")
            self._call.deadline, self._call.requests = deadline, 0
            try:
                return taken(getattr(self._client, operation)(Bucket=self.settings.bucket, **parameters))
            except ClientError as error:
                return self._refusal(error, operation, deadline, missing, parameters)
            except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, NoAuthTokenError) as error:
                raise Refused(plain(f"s3 credentials: {error}"), "set a profile, or what boto3 looks for") from error
            except BotoCoreError as error:
                raise Unreachable(plain(f"{operation}: {error}")) from error

    def _refusal(
        self, error: ClientError, operation: str, deadline: float, missing: bool, parameters: dict[str, Any]
    ) -> None:
        """What an answer means that is no success; None where it may be a missing object."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if operation == "head_object" and status in (400, 403):
            # The answer to a HEAD has no body that would say why.
            return self._forbidden(parameters["Key"], deadline)
        if missing and (code in MISSING or (code == "AccessDenied" and operation != "delete_object")):
            if code == "AccessDenied":
                self._warn_of_forbidden()
            return
        message = str(error.response.get("Error", {}).get("Message", ""))
        raise error_of(operation, code, status, message) from error

    def _forbidden(self, key: str, deadline: float) -> None:
        """A HEAD was answered 403 (or 400): the object is missing and we may not list, or our credentials are no good.
        A ranged GET tells, as its error has a body; asked once in a while, and a miss in between."""
        if time.monotonic() < self._forbidden_until:
            return
        with self.get(key, deadline, Range="bytes=0-0") as body:
            missing = body is None
        if missing:
            self._forbidden_until = time.monotonic() + _FORBIDDEN_S

    def _warn_of_forbidden(self) -> None:
        self.warn_once(
            Forbidden.own_event,
            f"bucket {self.settings.bucket} answers 403 where an object is missing or forbidden: taken as missing. "
            "Grant s3:ListBucket on the bucket (and s3:GetObject on its objects) to tell the two apart",
        )


def _about(key: str, response: Any) -> Object:
    size = int(response.get("ContentLength", -1))
    if size < 0:
        raise Unreachable(f"{key}: an answer without a length", "is s3.endpoint an S3 service?")
    modified = response.get("LastModified")
    age_s = max(0.0, (_server_time(response) - modified).total_seconds()) if modified else 0.0
    return Object(key, size, age_s, response.get("ETag", ""))


def _page(response: Any) -> tuple[list[Object], str | None]:
    """What a page of a list has, and what the next one is asked for with."""
    now = _server_time(response)
    rows = [
        Object(row["Key"], int(row["Size"]), (now - row["LastModified"]).total_seconds(), row.get("ETag", ""))
        for row in response.get("Contents", ())
    ]
    return rows, response["NextContinuationToken"] if response.get("IsTruncated") else None


def _server_time(response: Any) -> datetime:
    """The server's clock: ages are differences of two of its own times."""
    stated = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    try:
        return parsedate_to_datetime(stated).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return datetime.now(UTC)

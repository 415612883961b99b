"""Answers that no S3 server gives: of portals, proxies, other programs and half servers. None may be more than a tier
that is down and says why."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terracekv.tests.blocks import get, name, put
from terracekv.tests.s3_stub import S3Stub
from terracekv.tests.s3_tiers import Node, Nodes, soon, until
from terracekv.tiers import s3_audit
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.tier import Outcome

PAGE = b"<html><body>Welcome. Please log in.</body></html>"


def answer(status: str = "200 OK", *headers: str, body: bytes = b"", length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def listing(row: str = "", after: str = "") -> bytes:
    rows = f"<Contents>{row}</Contents>" if row else ""
    return answer(body=f"<ListBucketResult>{after}{rows}</ListBucketResult>".encode())


STRANGE = {
    "chunked": answer(
        "200 OK", "Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(PAGE), PAGE), length=False
    ),
    "chunks that are none": answer("200 OK", "Transfer-Encoding: chunked", body=b"zz\r\n" + PAGE, length=False),
    "no length": answer("200 OK", body=PAGE, length=False),
    "a length below zero": answer("200 OK", "Content-Length: -5", length=False),
    "a length that is no number": answer("200 OK", "Content-Length: many", body=PAGE, length=False),
    "two lengths": answer("200 OK", "Content-Length: 3", "Content-Length: 99", body=PAGE, length=False),
    "a length beyond all bytes": answer("200 OK", f"Content-Length: {10**12}", body=PAGE, length=False),
    "a length beyond all numbers": answer("200 OK", f"Content-Length: {10**40}", body=PAGE, length=False),
    "moved": answer("302 Found", "Location: http://127.0.0.1:1/login"),
    "moved to nowhere": answer("301 Moved Permanently"),
    "moved to another region": answer("307 Temporary Redirect", "x-amz-bucket-region: elsewhere"),
    "moved to no region": answer("301 Moved", "x-amz-bucket-region: a b"),
    "a date that is none": answer("200 OK", "Last-Modified: garbage"),
    "a date beyond all years": answer("200 OK", "Last-Modified: Mon, 01 Jan 99999 00:00:00 GMT", "Date: x"),
    "a clock beyond all years": answer("200 OK", "Date: Mon, 01 Jan 99999 00:00:00 +9999"),
    "nothing": b"",
    "half a line": b"HTTP/1.1 20",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "bytes of no protocol": bytes(range(256)) * 8,
    "a status that is none": answer("abc"),
    "a status beyond all": answer("999 Odd"),
    "a header without end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    "a header that is none": answer("200 OK", "\xff\xfe no colon"),
    "an error that is a page": answer("400 Bad Request", body=PAGE),
    "an error that is not XML": answer("500 Oops", body=b"<Error><Code>"),
    "an error without words": answer("418 Teapot"),
    "an error with too many words": answer(
        "400 No", body=b"<Error><Code>A</Code><Message>%b</Message></Error>" % (b"no\n" * 99_999)
    ),
    "XML in XML": answer("400 No", body=b"<Error><Code><Code>A</Code></Code><Message><a/></Message></Error>"),
    "another encoding": answer("200 OK", "Content-Encoding: gzip", body=b"not gzip"),
    "no room": answer("507 Insufficient Storage"),
    "not offered": answer("501 Not Implemented"),
    "not met": answer("412 Precondition Failed"),
    "nothing of it": answer("416 Range Not Satisfiable"),
    "nothing new": answer("304 Not Modified"),
    "no content": answer("204 No Content", length=False),
    "a part": answer("206 Partial Content", "Content-Range: bytes 5-1/*", body=PAGE),
    "a list of nothing known": listing("<Odd/>"),
    "a list without dates": listing("<Key>a</Key><Size>1</Size>"),
    "a list with dates that are none": listing("<Key>a</Key><Size>1</Size><LastModified>x</LastModified>"),
    "a list with sizes that are none": listing("<Key>a</Key><Size>x</Size>"),
    "a list that goes on nowhere": listing(after="<IsTruncated>true</IsTruncated>"),
    "a list that goes in a circle": listing(
        after="<IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>"
    ),
    "a page": answer(body=PAGE),
}


@pytest.fixture
def a(nodes: Nodes) -> Iterator[Node]:
    with nodes(timeout_s=2.0, read_timeout_s=0.3, epoch_ttl_s=0, ttl_s=1000) as opened:
        hasty(opened)
        yield opened


def calls(bucket: Bucket, at: Node) -> dict[str, Callable[[], object]]:
    """All that is asked of a bucket."""

    def read() -> None:
        with bucket.get("a", soon(0.5)) as body:
            if body is not None:
                body.read_into(memoryview(bytearray(10)))

    return {
        "found": lambda: bucket.found(soon(0.5)),
        "create": lambda: bucket.create(soon(0.5)),
        "head": lambda: bucket.head("a", soon(0.5)),
        "get": read,
        "read": lambda: bucket.read("a", 100, soon(0.5)),
        "put": lambda: bucket.put("a", [b"x" * 10], soon(0.5), IfNoneMatch="*"),
        "renew": lambda: bucket.renew("a", soon(0.5)),
        "delete": lambda: bucket.delete("a", soon(0.5)),
        "list": lambda: list(bucket.list("", 0.5)),
        "stat": lambda: s3_audit.stat(bucket, 0.5),
        "verify": lambda: list(s3_audit.verify(bucket, 0.5)),
        "gc": lambda: s3_audit.gc(bucket, 0, 0.5),
    }


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.fixture(autouse=True)
def forgotten(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Records with a traceback hold on to sockets."""
    yield
    caplog.get_records("call").clear()
    caplog.clear()


def hasty(at: Node) -> None:
    """Its trials follow one another quickly."""
    breaker = at.tier.breaker
    breaker.pause_s = breaker._pause_s_min = breaker._pause_s_max = 0.05


def down(call: Callable[[], object]) -> str | None:
    """What a call says that fails as it may; None when it does not."""
    try:
        call()
    except TierDown as error:
        assert "\n" not in str(error) and 5 < len(str(error)) < 500
        return str(error)
    return None


@pytest.mark.long
@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_answer_is_at_most_a_tier_that_is_down(
    a: Node, stub: S3Stub, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    put(a.tier, a.now, name(1))
    stub.switches.strange = STRANGE[kind]
    for call in calls(a.tier._bucket, a).values():
        down(call)
    for _ in range(3):
        assert get(a.tier, a.now, name(1))[0] in (Outcome.FAILED, Outcome.MISS, Outcome.DAMAGED)
        assert put(a.tier, a.now, name(2)) in (Outcome.FAILED, Outcome.FULL)
        assert a.tier.leading_remote(a.now, [name(3)], soon(0.5)) == 0
        a.tier.delete(a.now, [name(4)])
        a.tier.redate(a.now, [name(1)])
        a.tier.reclaim(a.now)
        with suppress(TierDown):
            a.tier.flush(a.now)
    status = a.tier.status()
    assert status.last_error and "\n" not in status.last_error and len(status.last_error) < 500
    stub.switches.strange = None
    until(lambda: a.tier.status().mode == "up", "it is up again")
    stored = (Outcome.STORED, Outcome.PRESENT)
    # First the bucket is told of the flush, and the epoch rises; and what was asked before may fail late.
    until(lambda: put(a.tier, a.now, name(5)) in stored, "blocks are stored again")
    assert get(a.tier, a.now, name(5))[0] is Outcome.HIT
    assert tracebacks(caplog) == []
    assert len(caplog.records) < 60, "the log is not flooded"


@pytest.mark.parametrize("kind", list(STRANGE)[::4])
def test_a_strange_answer_at_start_is_noticed_and_waited_out(
    nodes: Nodes, stub: S3Stub, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    stub.switches.strange = STRANGE[kind]
    with nodes(probe=False, timeout_s=2.0, read_timeout_s=0.3) as a:
        hasty(a)
        try:
            good = a.tier.probe(2.0)
        except ConfigError as error:
            assert "\n" not in str(error)
            return
        assert not good and a.tier.status().mode == "down" and a.tier.status().last_error
        stub.switches.strange = None
        until(lambda: a.tier.status().mode == "up", "it is up")
    assert tracebacks(caplog) == []
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 2


def test_an_answer_that_always_sends_elsewhere_is_not_followed_without_end(a: Node, stub: S3Stub) -> None:
    stub.switches.strange = STRANGE["moved"]
    for call in calls(a.tier._bucket, a).values():
        before = stub.asked.total()
        assert down(call) and stub.asked.total() - before <= 5


def test_a_portal_that_comes_between_does_not_close_the_breaker(a: Node, stub: S3Stub) -> None:
    a.tier.breaker.trip(TierDown("for the test"))
    stub.switches.strange = STRANGE["a page"]
    asked = stub.asked.total()
    until(lambda: stub.asked.total() >= asked + 2, "two trials are made")
    assert a.tier.status().mode == "down" and "comes back changed" in str(a.tier.status().last_error)
    stub.switches.strange = None
    until(lambda: a.tier.status().mode == "up", "it is gone")


HEADERS = st.sampled_from(
    [
        "Content-Length",
        "Last-Modified",
        "Date",
        "ETag",
        "Transfer-Encoding",
        "Connection",
        "Location",
        "x-amz-bucket-region",
    ]
    + [
        "Content-Encoding",
        "Content-Type",
        "x-amz-request-id",
        "Expires",
        "x-amz-missing-meta",
        "x-amz-expiration",
        "Age",
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "chunked", "close", "garbage", "Mon, 01 Jan 0000 00:00:00 GMT", "gzip", "1e9", "9" * 50]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
)
STATUSES = st.sampled_from(
    [100, 200, 200, 200, 204, 206, 301, 302, 304, 307, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503, 507, 599]
)
TAGS = st.sampled_from(
    [
        "ListBucketResult",
        "Contents",
        "Key",
        "Size",
        "LastModified",
        "ETag",
        "IsTruncated",
        "NextContinuationToken",
        "Error",
        "Code",
    ]
    + ["Message", "CopyObjectResult", "Region", "MaxKeys", "KeyCount"]
)
WORDS = st.sampled_from(
    [
        "",
        "a",
        "true",
        "1",
        "-1",
        "x y",
        "2020-01-01T00:00:00Z",
        "SlowDown",
        "NoSuchKey",
        "AccessDenied",
        "PermanentRedirect",
    ]
)
XML = st.recursive(
    WORDS,
    lambda inner: st.builds(lambda tag, parts: f"<{tag}>{''.join(parts)}</{tag}>", TAGS, st.lists(inner, max_size=4)),
)
BODIES = st.one_of(
    st.binary(max_size=200),
    XML.map(str.encode),
    st.lists(XML).map(lambda parts: f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()),
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    headers = [f"{draw(HEADERS)}: {draw(VALUES)}" for _ in range(draw(st.integers(0, 3)))]
    sent = answer(f"{draw(STATUSES)} Odd", *headers, body=draw(BODIES), length=draw(st.booleans()))
    return sent[: draw(st.integers(0, len(sent)))] if draw(st.integers(0, 9)) == 0 else sent


def test_no_answer_at_all_raises_anything_else(a: Node, stub: S3Stub) -> None:
    bucket = a.tier._bucket
    bucket.warn_once = lambda event, text: None  # type: ignore[method-assign]

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(sent=answers(), what=st.lists(st.sampled_from(sorted(calls(bucket, a))), min_size=1, max_size=4))
    def any_answer(sent: bytes, what: list[str]) -> None:
        stub.switches.strange = sent
        made: dict[str, Any] = calls(bucket, a)
        started = time.monotonic()
        for each in what:
            down(made[each])
        assert time.monotonic() - started < 30

    any_answer()
    stub.switches.strange = None

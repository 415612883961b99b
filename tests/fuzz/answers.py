"""Fuzzing what an S3 server answers: true answers with wrong lengths, headers, XML and bytes, and others that no server
gives.

Owns the server and the tier that it starts. Called by the test and by ``make fuzz``. Imports ``tiers``, the stub of an
S3 server and ``mutants``.

Whatever comes, a block is a hit with its own bytes or none, each call ends by its deadline with an outcome, and the
tier is up again once the server is itself.
"""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from terracekv.tests.blocks import get, name, payload_of, put
from terracekv.tests.fuzz.mutants import Mutants
from terracekv.tests.s3_stub import S3Stub, s3_stub
from terracekv.tests.s3_tiers import Node, node, soon, until
from terracekv.tiers import s3_audit
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.tier import Outcome

BLOCK_BYTES = 5000
BLOCKS = 4
CALL_S_MAX = 10.0
"""Far above the deadline of a call, for machines that do much else: what it tells is a call without end."""
ENDLESS_BYTES = 8 << 20
FAIL = (Outcome.FAILED, Outcome.MISS, Outcome.DAMAGED, Outcome.FULL, Outcome.STALE)
LISTING = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>1</Size>"
    b"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
)
ERRORS = (b"NoSuchKey", b"AccessDenied", b"SlowDown", b"ExpiredToken", b"PermanentRedirect", b"x" * 5000, b"")
LINES = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 206 Partial Content",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 301 Moved Permanently",
    b"HTTP/1.1 307 Temporary Redirect",
    b"HTTP/1.1 404 Not Found",
    b"HTTP/1.1 412 Precondition Failed",
    b"HTTP/1.1 500 Oops",
    b"HTTP/1.1 503 Slow Down",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 999 Odd",
)
HEADERS = (
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Range: bytes 5-1/*",
    b"Transfer-Encoding: chunked",
    b"Content-Encoding: gzip",
    b"Location: http://127.0.0.1:1/elsewhere",
    b"Location: ftp://[::",
    b"x-amz-bucket-region: elsewhere",
    b"Last-Modified: Mon, 01 Jan 99999 00:00:00 GMT",
    b"ETag: \xff\xfe",
    b"Connection: keep-alive",
)


class AnswerFuzz:
    """A tier over a server whose answers are made here."""

    def __init__(self, stub: S3Stub, at: Node, mutants: Mutants) -> None:
        self.stub = stub
        self.at = at
        self.mutants = mutants
        self.random = mutants.random
        self.outcomes: Counter[str] = Counter()
        breaker = at.tier.breaker
        breaker.pause_s = breaker._pause_s_min = breaker._pause_s_max = 0.02
        breaker._failures_max = 10
        for index in range(BLOCKS):
            assert put(at.tier, at.now, name(index)) is Outcome.STORED

    def one(self) -> None:
        """One of all that is asked of a bucket, answered wrongly."""
        if self.at.tier.status().mode != "up":
            self.stub.switches.strange = None
            until(lambda: self.at.tier.status().mode == "up", "it is up again")
        tier, now, index = self.at.tier, self.at.now, self.random.randrange(BLOCKS)
        self.stub.switches.strange_where = "" if self.mutants.one_in(4) else self.at.key(index)
        self.stub.switches.strange = self._answer(index)
        begun = time.monotonic()
        match self.random.randrange(7):
            case 0 | 1 | 2:
                outcome, found = get(tier, now, name(index))
                assert outcome is Outcome.HIT or outcome in FAIL, outcome
                assert outcome is not Outcome.HIT or found == payload_of(name(index), now.id, BLOCK_BYTES)
                self.outcomes[f"get {outcome}"] += 1
            case 3:
                self.stub.switches.strange_where = ""
                outcome = put(tier, now, name(self.random.randrange(1000, 2000)))
                self.outcomes[f"put {outcome}"] += 1
            case 4:
                self.stub.switches.strange_where = ""
                count = tier.leading_remote(now, [name(3000 + n) for n in range(4)], soon(1.0))
                assert 0 <= count <= 4
            case 5:
                with suppress(TierDown):
                    tier.flush(self.at.namespaces.raise_epoch(now.id) if self.mutants.one_in(8) else now)
                tier.reclaim(self.at.now)
                self.recovers()
            case _:
                with suppress(TierDown, ConfigError):
                    for _ in s3_audit.verify(tier._bucket, 1.0):
                        continue
        assert time.monotonic() - begun < CALL_S_MAX, "a call did not end"
        error = tier.status().last_error
        assert error is None or ("\n" not in error and len(error) < 1000), error

    def recovers(self) -> None:
        """The server is itself again: so is the tier, and what was stored is read."""
        self.stub.switches.strange = None
        tier = self.at.tier
        until(lambda: tier.status().mode == "up", "it is up again")
        until(lambda: put(tier, self.at.now, name(0)) in (Outcome.STORED, Outcome.PRESENT), "a block is stored")
        for index in range(BLOCKS):
            put(tier, self.at.now, name(index))
            assert get(tier, self.at.now, name(index)) == (
                Outcome.HIT,
                payload_of(name(index), self.at.now.id, BLOCK_BYTES),
            )

    def _answer(self, index: int) -> bytes:
        """The true answer to a GET of a block, or one of another kind, with at most three things wrong with it."""
        kept = self.stub.objects[self.at.key(index)].content if self.at.key(index) in self.stub.objects else b""
        error = b"<Error><Code>%b</Code><Message>m</Message></Error>" % self.random.choice(ERRORS)
        body = self.random.choice((kept, kept, kept, LISTING, error))
        wrong = self.random.sample(range(7), self.random.choice((0, 1, 1, 1, 2, 3)))
        if 0 in wrong:
            body = self.mutants.mutated(body, (LISTING, error))
        length = len(body) if 1 not in wrong else self.random.choice((len(body) + 1, len(body) // 2, 0, 10**15))
        line = self.random.choice(LINES) if 2 in wrong else LINES[0]
        lines = [line, b"Content-Length: %d" % length]
        if 3 in wrong:
            lines += self.random.sample(HEADERS, 2)
        if 4 in wrong:
            lines[1] = b"Transfer-Encoding: chunked"
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (self.random.choice((len(body), 2**40)), body)
        if 5 in wrong and self.mutants.one_in(20):
            body += self.mutants.noise(4096) * (ENDLESS_BYTES // 4096)
        answer = b"\r\n".join([*lines, b"", b""]) + body
        return self.mutants.mutated(answer) if 6 in wrong else answer


def fuzz_answers(folder: Path, *, count: int, seed: int) -> dict[str, object]:
    """``count`` wrong answers."""
    begun = time.monotonic()
    with s3_stub(folder) as stub:
        quick: dict[str, Any] = {"timeout_s": 1.0, "read_timeout_s": 0.2, "epoch_ttl_s": 0, "ttl_s": 1000}
        with node(folder / "a", stub.endpoint, stub.credentials, block_bytes=BLOCK_BYTES, **quick) as at:
            fuzz = AnswerFuzz(stub, at, Mutants(seed))
            try:
                for number in range(count):
                    fuzz.one()
                    if number % 50 == 49:
                        fuzz.recovers()
                fuzz.recovers()
            except BaseException as error:
                error.add_note(f"seed {seed}, answer {number}: {(stub.switches.strange or b'')[:2000]!r}")
                raise
    return {"answers": count, "outcomes": dict(fuzz.outcomes), "s": round(time.monotonic() - begun, 1)}

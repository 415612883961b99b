"""The s3 tier: blocks as objects of a bucket that all nodes of a cluster share. The object store is the cluster.

Owns the bucket's client and the thread that tries again while the bucket is down. Called by the daemon's worker
threads; ``leading``, ``knows`` and ``status`` also on its event loop, as they never touch the network. Imports
``breaker``, ``bucket``, ``caller``, ``codec_id``, ``coder``, ``epochs``, ``errors``, ``ledger``, ``namespace``,
``presence``, ``s3_errors``, ``s3_record``, ``s3_settings``, ``scout``, ``segment``, ``tier`` and ``vault``.

Objects are named by content and never change, so nodes need no coordination. An answer about presence is a hint: an
object may be stored, age out or rot at any time, and only a get tells. Within one node puts and deletes of a block
take turns, and what a slower question learned meanwhile is not noted over what they did.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from terracekv.tiers.body import Object
from terracekv.tiers.breaker import NotTried, State
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.caller import Caller
from terracekv.tiers.codec_id import Codec, inner, is_sealed
from terracekv.tiers.coder import Coder
from terracekv.tiers.epochs import Epochs
from terracekv.tiers.errors import ConfigError, Damaged, TerraceError, TierDown
from terracekv.tiers.journal import INTERNAL, Journal
from terracekv.tiers.ledger import Ledger
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.presence import PresenceCache
from terracekv.tiers.s3_errors import Forbidden, Full, NoBucket, Refused
from terracekv.tiers.s3_record import header, key_of, opened, pack, payload, place_of
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.scout import Scout
from terracekv.tiers.segment import Record
from terracekv.tiers.steady import Steady
from terracekv.tiers.tier import Outcome, TierStatus
from terracekv.tiers.vault import Sealed, Vault

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

MARKER = b"TerraceKV keeps blocks of KV cache here. This object is written and read back at every start.\n"
TRIAL_S = 3.0
RIGHTS_S = 30.0
"""While the credentials may not write, it is tried again so often."""
PAGE_KEYS = 1000
"""Objects that a sweep lists at a time."""
_CLOSED = TierDown("the tier is closed")
QUARANTINE_S = 24 * 3600.0
"""A damaged object is taken as absent for so long in this process, unless a put replaces it before."""

journal = Journal(__name__)


class S3Tier:
    """Keeps ``terracekv.tiers.tier.Tier``. ``leading`` goes by what is known; ``leading_remote`` finds out."""

    name = "s3"

    def __init__(
        self,
        settings: S3Settings,
        *,
        namespaces: Namespaces,
        presence: PresenceCache | None = None,
        keys: "Keys | None" = None,
    ) -> None:
        """Connects to nobody, and is down until ``probe`` has; see ``Bucket`` for ConfigError. ``keys`` seal blocks."""
        self.settings = settings
        self._namespaces = namespaces
        self._bucket = Bucket(settings)
        self._caller = Caller(self._bucket)
        self.breaker = self._caller.breaker
        self._epochs = Epochs(self._caller, namespaces)
        self._scout = Scout(self._caller, presence, self._failed)
        self._coder = Coder(settings.codec, settings.codec_memory_bytes)
        self._vault = Vault(self._coder, keys)
        self.chooser = self._coder.chooser
        self._ledger = Ledger(self.name)
        self._probed = False
        self.read_only = False
        """The credentials may not write, as far as was tried: see ``RIGHTS_S``."""
        self._closing = threading.Event()
        self._recovery = Steady("s3-recovery", self._recover)
        self._recovery.start()

    def probe(self, timeout_s: float = 10.0) -> bool:
        """Write and read an object, once at start. False when the bucket cannot be reached: it is tried again by
        itself. ConfigError when it never can be used so: no such bucket, credentials refused, bodies come back changed.
        """
        error = self._caller.trial(lambda: self._examine(time.monotonic() + timeout_s))
        if isinstance(error, (ConfigError, Refused, NoBucket)):
            raise ConfigError(error.message, error.hint) from error
        if error is not None:
            self._ledger.failed(error)
        if self._closing.is_set():
            self.breaker.trip(_CLOSED)
        return error is None

    def leading(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.leading``: by what is remembered, without asking anybody; none while the bucket is down."""
        if self.breaker.state is not State.CLOSED:
            return 0
        return self._scout.presence.leading(namespace.stamp, ids)

    def knows(self, namespace: Namespace, id: bytes) -> bool | None:
        """Whether a block is here as far as is remembered; None: nobody has asked lately."""
        return self._scout.presence.get(namespace.stamp, id)

    def leading_remote(self, namespace: Namespace, ids: Sequence[bytes], deadline: float) -> int:
        """As ``leading``, asking the bucket for what is not known, until ``deadline`` (of ``time.monotonic``).

        At most 2 * log2 of the unknown blocks are asked about. What is learned is remembered, late answers too.
        """
        try:
            if not self._epochs.current(namespace, deadline):
                return 0
        except TierDown as error:
            self._failed(error)
            return self.leading(namespace, ids)
        return self._scout.find(namespace, ids, deadline)

    def put(self, namespace: Namespace, id: bytes, payload: memoryview, checksum: int) -> Outcome:
        """See ``Tier.put``. As long as the link takes, up to ``timeout_s``; FAILED at once while it is down."""
        deadline = time.monotonic() + self.settings.timeout_s
        try:
            if not self._namespaces.is_current(namespace) or not self._epochs.current(namespace, deadline):
                return Outcome.STALE
            with self._scout.writing(id) as stripe:
                present = self._scout.present(namespace, id, deadline)
                if not present:
                    about = Record(id, namespace.id, namespace.epoch, namespace.block_bytes, 0, checksum, 0, 0)
                    with (
                        self._coder.stored(namespace, payload, deadline) as coded,
                        self._vault.sealed(about, coded, payload, deadline) as sealed,
                    ):
                        stripe.sent += 1
                        self._send(namespace, id, sealed, deadline)
                if not self._namespaces.is_current(namespace):
                    return Outcome.STALE
                self._scout.presence.note(namespace.stamp, id, True, self.settings.present_ttl_s)
        except Full as full:
            self._ledger.noted(full)
            return Outcome.FULL
        except TierDown as error:
            self._failed(error)
            return Outcome.FAILED
        if present:
            return Outcome.PRESENT
        self._ledger.put(namespace.block_bytes)
        return Outcome.STORED

    def get(self, namespace: Namespace, id: bytes, into: memoryview) -> Outcome:
        """See ``Tier.get``: straight into ``into``, no byte of which after the payload is touched."""
        deadline = time.monotonic() + self.settings.timeout_s
        stripe = self._scout.stripe(id)
        writes, sent = stripe.writes, stripe.sent
        try:
            current = self._namespaces.is_current(namespace) and self._epochs.current(namespace, deadline)
            found = current and self._caller.call(lambda: self._fetch(namespace, id, into, deadline), deadline)
            outcome = Outcome.HIT if found else Outcome.MISS
        except Damaged as damage:
            self._ledger.damaged(damage.message)
            self._ledger.left("damaged", 1)
            outcome = Outcome.DAMAGED
        except TierDown as error:
            self._failed(error)
            outcome = Outcome.FAILED
        if outcome is Outcome.HIT:
            self._scout.learned(namespace, id, True, self.settings.present_ttl_s, writes)
        elif outcome is Outcome.MISS:
            self._scout.learned(namespace, id, False, self.settings.absent_ttl_s, writes)
        elif outcome is Outcome.DAMAGED:
            self._scout.damaged(namespace, id, QUARANTINE_S, sent)
        self._ledger.got(outcome, namespace.block_bytes)
        return outcome

    def delete(self, namespace: Namespace, ids: Sequence[bytes]) -> int:
        """See ``Tier.delete``. For every node of the bucket; those that know a block may list it for their TTL."""
        gone = 0
        deadline = time.monotonic() + self.settings.timeout_s
        try:
            for id in ids:
                with self._scout.writing(id):
                    # That it is absent may be old news; that it is present is the common case.
                    present = self._scout.presence.get(namespace.stamp, id)
                    if present or self._scout.head(namespace, id, deadline) is not None:
                        self._delete(self._key(namespace, id))
                        gone += 1
                    self._scout.presence.note(namespace.stamp, id, False, self.settings.absent_ttl_s)
        except TierDown as error:
            self._failed(error)
        self._ledger.left("delete", gone)
        return gone

    def flush(self, namespace: Namespace) -> None:
        """Make the flush of a namespace hold on all nodes; call after the local epoch was raised.

        TierDown when the bucket cannot be told now: it is told before the namespace is next used.
        """
        self._epochs.flush(namespace, time.monotonic() + self.settings.timeout_s)

    def reclaim(self, namespace: Namespace) -> int:
        """After a flush: delete the objects of older epochs; the number deleted. A listing: may take minutes."""
        return self.sweep(namespace)[0]

    def sweep(self, namespace: Namespace) -> tuple[int, TierDown | None]:
        """As ``reclaim``, with the error that ended it, if one did: what is left is gone for lookups all the same."""
        gone = 0
        ended: TierDown | None = None
        root = self.settings.root
        try:
            for found in self._listed(f"{root}{namespace.id.hex()}/"):
                place = place_of(root, found.key)
                if place is not None and place.epoch < namespace.epoch:
                    self._delete(found.key)
                    gone += 1
        except TierDown as error:
            self._failed(error)
            ended = error
        self._ledger.left("flush", gone)
        return gone, ended

    def redate(self, namespace: Namespace, chain: Sequence[bytes]) -> int:
        """A chain was read: begin the lifetime of those of its objects anew that are past half of it, head first, as
        without the head the rest is useless. How many were. Costs nothing for objects known to be young."""
        return self._scout.redate(namespace, chain)

    def status(self) -> TierStatus:
        """See ``Tier.status``. ``capacity_bytes`` and ``used_bytes`` are 0: the bucket is not ours alone, and only a
        listing of it would tell. ``blocks`` are those known to be present."""
        up = self.breaker.state is State.CLOSED
        return TierStatus(
            name=self.name,
            mode=("read-only" if self.read_only else "up") if up else "down",
            capacity_bytes=0,
            used_bytes=0,
            blocks=self._scout.presence.count(),
            counters=self._ledger.counters(),
            last_error=self.breaker.reason or self._ledger.last_error,
            last_error_at=self._ledger.last_error_at if up else None,
            last_event=self._ledger.last_event,
            advice=self._ledger.advice,
            details={
                "breaker": str(self.breaker.state),
                "breaker_opened": self.breaker.times_opened,
                "calls_at_once": self._caller.throttle.limit,
                "busy_answers": self._caller.busy_answers,
                "retries": self._caller.retries,
                "unheard_flushes": self._epochs.unheard,
                "refused_calls": self.breaker.refused,
                "heads": self._scout.heads,
                "redated": self._scout.redated,
                "aged_out": self._scout.aged_out,
                "rtt_s": self._scout.rtt_s,
                **self._coder.report(),
                "sealed_blocks": self._vault.sealed_blocks,
            },
        )

    def check(self) -> None:
        """See ``Tier.check``: when idle, nothing is under way and all lent memory is back. The bucket itself is
        checked by ``s3_audit.verify``."""
        assert self._caller.throttle.running == 0, f"{self._caller.throttle.running} calls are under way"
        self._coder.check()
        self._vault.check()
        self._scout.check()

    def close(self) -> None:
        """See ``Tier.close``. Calls under way are cut off at their next piece; an answer is waited for as usual."""
        self._closing.set()
        self._bucket.close()
        self.breaker.trip(_CLOSED)
        self.breaker.opened.set()
        self._scout.close()
        self._recovery.join()
        self.breaker.trip(_CLOSED)

    def _key(self, namespace: Namespace, id: bytes) -> str:
        return key_of(self.settings.root, namespace.id, namespace.epoch, id)

    def _send(self, namespace: Namespace, id: bytes, stored: Sealed, deadline: float) -> None:
        buffers = pack(namespace, id, stored.codec, stored.view[: stored.size], stored.checksum)

        def send() -> None:
            started = time.perf_counter()
            self._bucket.put(self._key(namespace, id), buffers, deadline)
            self.chooser.sent(stored.size, time.perf_counter() - started)

        self._caller.call(send, deadline)
        self.chooser.stored(Codec(inner(stored.codec)))
        self._scout.note_age(namespace, id, 0.0)

    def _fetch(self, namespace: Namespace, id: bytes, into: memoryview, deadline: float) -> bool:
        """Whether there is such an object; Damaged when it is not the block."""
        size = namespace.block_bytes
        started = time.perf_counter()
        with self._bucket.get(self._key(namespace, id), deadline) as body:
            if body is None:
                return False
            record = header(body)
            said = (record.id, record.namespace_id, record.epoch, record.payload_bytes)
            if said != (id, namespace.id, namespace.epoch, size):
                raise Damaged(f"{body.about.key} holds another block than its name says")
            if is_sealed(record.codec):
                decoding_s = opened(body, record, into[:size], self._vault, deadline)
            else:
                decoding_s = payload(body, record, into[:size])
            self.chooser.received(record.stored_bytes, time.perf_counter() - started - decoding_s)
            if inner(record.codec) != Codec.RAW:
                self.chooser.decoded(size, decoding_s)
            self._scout.note_age(namespace, id, body.about.age_s)
            return True

    def _listed(self, prefix: str) -> Iterator[Object]:
        """All objects whose keys begin so, page by page through the caller, as any other call. TierDown."""
        limit_s, page = self.settings.timeout_s, list[Object]()

        def next_page() -> list[Object]:
            rest = self._bucket.list(prefix, limit_s, after=page[-1].key if page else "")
            return list(islice(rest, PAGE_KEYS))

        while page := self._caller.call(next_page, time.monotonic() + limit_s):
            yield from page
            if len(page) < PAGE_KEYS:
                return

    def _delete(self, key: str) -> None:
        deadline = time.monotonic() + self.settings.timeout_s
        self._caller.call(lambda: self._bucket.delete(key, deadline), deadline)

    def _failed(self, error: TerraceError) -> None:
        """Count and log an error; what the open breaker refused it has counted itself, and once is enough to log."""
        if not isinstance(error, NotTried):
            self._ledger.failed(error)

    def _examine(self, deadline: float) -> None:
        """Is the bucket there, may we write, is what we read what we wrote? Once answered, only: does it answer?"""
        bucket = self._bucket
        key = f"{self.settings.root}terracekv.probe"
        if self._probed:
            found = bucket.read(key, len(MARKER), deadline)
            if found is not None and not found[0].startswith(MARKER[:9]):  # the rest is the writer's version's own
                raise self._changed()
            return
        if bucket.found(deadline) is False:
            if not self.settings.create_bucket:
                raise NoBucket(f"there is no bucket {self.settings.bucket}", "create it, or set s3.create_bucket")
            bucket.create(deadline)
        try:
            bucket.put(key, [MARKER], deadline)
        except Forbidden as error:
            self.read_only = True
            self._ledger.noted(error)
            bucket.warn_once(error.event, f"s3: nothing will be stored: {error}")
        except Full as error:
            self._ledger.failed(error)  # room may come; what is there can be read
        found = bucket.read(key, 2 * len(MARKER), deadline)
        if found is not None and found[0] != MARKER:
            raise self._changed()
        bucket.head(f"{self.settings.root}terracekv.absent", deadline)
        self._probed = True

    def _changed(self) -> ConfigError:
        return ConfigError(
            f"what was written to bucket {self.settings.bucket} comes back changed",
            "the service or a proxy in between alters bodies; nothing is stored there",
        )

    def _recover(self) -> None:
        """The recovery thread: while the breaker is open it alone calls the bucket."""
        while not self._closing.is_set():
            opened = self.breaker.opened.wait(RIGHTS_S)
            if opened and self._closing.wait(self.breaker.pause_s):
                return
            try:
                if opened:
                    self._caller.trial(lambda: self._examine(time.monotonic() + TRIAL_S))
                elif self.read_only:
                    self._try_to_write()
            except Exception as error:
                journal.failed(INTERNAL, "s3 tier: a trial failed in a way not foreseen", error, tier=self.name)
            else:
                if opened and self.breaker.state is State.CLOSED:
                    journal.info("TKV-S3-UP", f"s3 tier: bucket {self.settings.bucket} answers again", tier=self.name)

    def _try_to_write(self) -> None:
        """Whether the bucket's policy, or other credentials, let us write by now."""
        deadline = time.monotonic() + TRIAL_S
        key = f"{self.settings.root}terracekv.probe"
        try:
            self._caller.call(lambda: self._bucket.put(key, [MARKER], deadline), deadline)
        except Forbidden as error:
            self._ledger.noted(error)
        except TierDown as error:
            self._failed(error)
        else:
            self.read_only = False
            journal.info("TKV-S3-UP", f"s3 tier: bucket {self.settings.bucket} takes blocks again", tier=self.name)

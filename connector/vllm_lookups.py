"""What the daemon has of each prompt: asked, and brought up, off the scheduler's thread.

``Lookups`` owns the scheduler's session, its leases and one thread; an ``Answer`` is written by that thread and read by
the scheduler's. Called by the scheduler half, which never waits for it. Imports ``connector.leases``, ``vllm_chain``
and ``vllm_worth``.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from terracekv.connector.leases import Held, Leases
from terracekv.connector.vllm_chain import Adapters, Chain
from terracekv.connector.vllm_options import Options
from terracekv.connector.vllm_worth import Worth

log = logging.getLogger(__name__)

LISTEN_S = 0.002
"""How often blocks on their way up are looked for."""
UNREADABLE = "adapter_unreadable"
EXPIRE_S = 1.0
"""How often leases that nobody came for are looked for."""
FORGOTTEN_MAX = 4096
FORGOTTEN_S = 60.0
"""A block that could not be loaded is not offered again for so long, or until it is stored anew."""


@dataclass(slots=True, eq=False)
class Answer:
    """What is known about a prompt. ``blocks`` can be had, of which ``held.ready`` are in host now."""

    asked: float
    found: float | None = None
    """When the daemon had answered; None: not yet."""
    blocks: int = 0
    per_tier: Mapping[str, int] = field(default_factory=dict)
    why: str | None = None
    held: Held | None = None
    over: bool = False
    """The scheduler half has no more use for it."""
    counted: bool = False
    """Why no more was offered stands in the statistics."""

    @property
    def ready(self) -> int:
        """Leading blocks that can be loaded at once."""
        return min(self.blocks, self.held.ready) if self.held is not None else 0


class Lookups:
    """``session`` makes the session; tests give another."""

    def __init__(self, session: Callable[[], Leases], options: Options, worth: Worth) -> None:
        self._errors = 0
        self._options = options
        self._worth = worth
        self._session = session()
        self._adapters = Adapters()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rising: set[Answer] = set()
        self._holding: dict[Answer, None] = {}
        self._forgotten: OrderedDict[bytes, float] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="terracekv-lookups", daemon=True)
        self._thread.start()

    @property
    def namespace(self) -> bytes | None:
        """None as long as no daemon was ever joined."""
        return self._session.namespace_id

    @property
    def joined(self) -> bool:
        """Whether there is a session with a daemon now."""
        return self._session.joined

    def ask(self, chain: Chain, tokens: int) -> Answer:
        """Begin to find out what there is of the first ``tokens`` tokens of a request; of none only the keys are
        computed."""
        answer = Answer(time.monotonic())
        self._work.put(lambda: self._find(chain, answer, tokens))
        return answer

    def end(self, answer: Answer) -> None:
        """Give back what an answer holds. Idempotent."""
        if not answer.over:
            answer.over = True
            self._work.put(lambda: self._end(answer))

    def lasts(self, answer: Answer) -> bool:
        """Whether what an answer promises still holds."""
        if answer.found is not None and time.monotonic() - answer.found > self._options.lease_s:
            return False
        return answer.held is None or self._session.lasts(answer.held)

    def forget(self, keys: list[bytes]) -> None:
        """These could not be loaded: until they are stored anew, or for a minute, they are not offered."""
        self._work.put(lambda: self._forget(keys))

    def stored(self, keys: list[bytes], ttl_s: float = 0.0) -> None:
        """These were stored just now, and are to stay for ``ttl_s``."""
        if self._forgotten:
            self._work.put(lambda: self._recall(keys))
        if ttl_s:
            self._work.put(lambda: self._session.keep(keys, ttl_s))

    def take_errors(self) -> int:
        """Lookups that failed by our own fault, since the last call."""
        taken, self._errors = self._errors, 0
        return taken

    def close(self) -> None:
        """End the thread and the session. Idempotent."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()
        self._session.close()

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=LISTEN_S if self._rising else EXPIRE_S if self._holding else None)
            except queue.Empty:
                self._listen()
                self._expire()
                continue
            if work is None:
                return
            try:
                work()
            except Exception:
                log.exception("a lookup failed: the prompt is a miss")
                self._errors += 1

    def _listen(self) -> None:
        self._session.listen()
        self._rising = {answer for answer in self._rising if answer.held is not None and answer.held.pending}

    def _find(self, chain: Chain, answer: Answer, tokens: int) -> None:
        try:
            namespace = self._session.namespace_id
            if namespace is None:
                self._session.lookup([])  # notices a daemon that has come
                answer.why = "no_daemon"
                return
            if chain.namespace != namespace:
                chain.begin(namespace, self._adapters)
            if tokens and not answer.over:
                self._look(chain, answer, tokens)
        except (OSError, ValueError) as error:
            log.warning("requests of an adapter are not cached: %s", error)
            answer.why = UNREADABLE
        finally:
            answer.found = time.monotonic()

    def _look(self, chain: Chain, answer: Answer, tokens: int) -> None:
        size = chain.block_tokens
        keys = chain.keys[: -(-tokens // size)]
        if not keys:
            answer.why = "shorter_than_block"
            return
        found = self._session.lookup(keys)
        answer.why, answer.per_tier = found.reason, found.per_tier
        blocks = self._not_forgotten(keys, found.blocks, answer)
        while blocks and not self._worth.load(blocks * size, found.load_ms):
            answer.why = "too_slow"
            above = max((reach for reach in found.per_tier.values() if reach < blocks), default=0)
            if above:
                found = self._session.lookup(keys[:above])
            blocks = min(above, found.blocks)
        host = found.per_tier.get("host", 0)
        if self._options.wait_tokens_max and blocks - host > (most := self._options.wait_tokens_max // size):
            answer.why = "too_long"
            blocks = max(host, 0) + most
        if blocks:
            answer.held = self._session.hold(keys[:blocks])
            answer.blocks = min(blocks, answer.held.blocks) if answer.held is not None else 0
            if answer.held is None:
                answer.why = "no_daemon"
            elif answer.held.pending:
                self._rising.add(answer)
            if answer.held is not None:
                self._holding[answer] = None

    def _not_forgotten(self, keys: list[bytes], blocks: int, answer: Answer) -> int:
        now = time.monotonic()
        while self._forgotten and next(iter(self._forgotten.values())) < now - FORGOTTEN_S:
            self._forgotten.popitem(last=False)
        for index, key in enumerate(keys[:blocks]) if self._forgotten else ():
            if key in self._forgotten:
                answer.why = "failed_before"
                return index
        return blocks

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            self._forgotten[key] = time.monotonic()
            self._forgotten.move_to_end(key)
        while len(self._forgotten) > FORGOTTEN_MAX:
            self._forgotten.popitem(last=False)

    def _recall(self, keys: list[bytes]) -> None:
        for key in keys:
            self._forgotten.pop(key, None)

    def _expire(self) -> None:
        """Leases of requests that waited too long to be scheduled; they are asked for anew then."""
        oldest = time.monotonic() - self._options.lease_s - self._options.load_deadline_ms / 1e3
        for answer in list(self._holding):
            if answer.found is None or answer.found > oldest:
                return
            self._end(answer)

    def _end(self, answer: Answer) -> None:
        self._holding.pop(answer, None)
        if answer.held is not None:
            self._session.release(answer.held)
            answer.held = None

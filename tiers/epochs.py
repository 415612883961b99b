"""The epoch of a namespace as all nodes of a bucket see it: one small object beside the namespace's blocks.

Owns when each namespace was last compared; ``namespaces`` keeps which flushes the bucket has not heard of. Called by
the s3 tier from worker threads. Imports ``caller``, ``errors``, ``namespace``, ``s3_errors`` and ``s3_record``.

Epochs only grow, here and in the bucket, and whoever sees a higher one takes it over. So nodes agree without talking,
a node that was away learns of a flush before it reads or writes, and a flush that the bucket misses is made up for.
"""

import threading
import time
from collections.abc import Callable

from terracekv.tiers.caller import Caller
from terracekv.tiers.errors import TierDown
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.s3_errors import NotOffered, Raced
from terracekv.tiers.s3_record import EPOCH_BELIEVED_MAX, epoch_key, epoch_of

_RACES_MAX = 8
_SIZE_MAX = 32
_MEND = "write the namespace's epoch there, or remove it and flush"


class Epochs:
    """Thread-safe. Methods raise TierDown when the bucket cannot be asked."""

    def __init__(self, caller: Caller, namespaces: Namespaces) -> None:
        self._caller = caller
        self._namespaces = namespaces
        self._fresh_s = caller.bucket.settings.epoch_ttl_s
        self._ttl_s = caller.bucket.settings.ttl_s
        self._lock = threading.Lock()
        self._asking: dict[bytes, threading.Lock] = {}
        self._compared: dict[bytes, float] = {}

    @property
    def unheard(self) -> int:
        """Flushes that the bucket has not heard of."""
        return len(self._namespaces.unheard)

    def key(self, id: bytes) -> str:
        """Where a namespace's epoch is kept."""
        return epoch_key(self._caller.bucket.settings.root, id)

    def current(self, namespace: Namespace, deadline: float) -> bool:
        """Whether a snapshot is still that of now, as the bucket has it: asked for when last asked ``epoch_ttl_s`` ago.

        Before the first answer all callers wait for it; later on one asks and the others go by what is known.
        """
        compared = self._compared.get(namespace.id)
        if compared is None or time.monotonic() - compared > self._fresh_s:
            with self._lock:
                asking = self._asking.setdefault(namespace.id, threading.Lock())
            if asking.acquire(blocking=compared is None, timeout=-1):
                try:
                    if self._compared.get(namespace.id) == compared:
                        self._compare(namespace.id, deadline)
                finally:
                    asking.release()
        return self._namespaces.is_current(namespace)

    def flush(self, namespace: Namespace, deadline: float) -> None:
        """Tell the bucket of a flush, after the local epoch was raised. TierDown: it is told at the next chance."""
        with self._lock:
            self._compared.pop(namespace.id, None)
        _kept(lambda: self._namespaces.note_unheard(namespace.id, True))
        self._raise(namespace.id, deadline)

    def _compare(self, id: bytes, deadline: float) -> None:
        if id in self._namespaces.unheard:
            self._raise(id, deadline)
            return
        for _ in range(_RACES_MAX):
            there, etag, old = self._read(id, deadline)
            here = self._epoch(id)
            # Were it to age out before the blocks that it makes invisible, they would come back.
            if (there >= here and not old) or self._write(id, max(here, there), etag, deadline):
                self._took(id, there)
                return
        raise TierDown(f"{self.key(id)} changes all the time", "is another program writing to the bucket?")

    def _raise(self, id: bytes, deadline: float) -> None:
        for _ in range(_RACES_MAX):
            there, etag, _ = self._read(id, deadline)
            # Another node that flushed at the same time may have stored blocks under its new epoch already.
            wanted = max(self._epoch(id), there + 1)
            if wanted > EPOCH_BELIEVED_MAX:
                raise TierDown(f"{self.key(id)} stands at {there}, the last that there is", _MEND)
            if self._write(id, wanted, etag, deadline):
                self._took(id, wanted)
                _kept(lambda: self._namespaces.note_unheard(id, False))
                return
        raise TierDown(f"{self.key(id)} changes all the time", "is another program writing to the bucket?")

    def _took(self, id: bytes, epoch: int) -> None:
        if epoch > self._epoch(id):
            _kept(lambda: self._namespaces.adopt(id, epoch))
        self._compared[id] = time.monotonic()

    def _epoch(self, id: bytes) -> int:
        known = self._namespaces.get(id)
        return known.epoch if known else 0

    def _read(self, id: bytes, deadline: float) -> tuple[int, str, bool]:
        """The bucket's epoch (0 when there is none), the etag of its object, and whether half its life is over."""
        found = self._caller.call(lambda: self._caller.bucket.read(self.key(id), _SIZE_MAX, deadline), deadline)
        if found is None:
            return 0, "", False
        content, about = found
        if (epoch := epoch_of(content)) is None:
            # Not to be guessed at: a lower one would bring back what was flushed.
            raise TierDown(f"{self.key(id)} is damaged", _MEND)
        return epoch, about.etag, 0 < self._ttl_s < 2 * about.age_s

    def _write(self, id: bytes, epoch: int, etag: str, deadline: float) -> bool:
        """Replace exactly what was read; False when somebody was quicker."""
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        try:
            self._put(id, epoch, condition, deadline)
        except Raced:
            return False
        except NotOffered:
            self._caller.bucket.warn_once(
                "TKV-S3-NOT-OFFERED", "s3: no conditional writes here; flushes at the same moment may count as one"
            )
            self._put(id, epoch, {}, deadline)
        return True

    def _put(self, id: bytes, epoch: int, condition: dict[str, str], deadline: float) -> None:
        content = b"%d" % epoch
        self._caller.call(lambda: self._caller.bucket.put(self.key(id), [content], deadline, **condition), deadline)


def _kept(note: Callable[[], object]) -> None:
    """Note something in the state folder. TierDown when that cannot be."""
    try:
        note()
    except OSError as error:
        raise TierDown(f"the epoch of the bucket cannot be kept here: {error}", "free the state folder") from error

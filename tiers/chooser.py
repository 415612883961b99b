"""Whether to compress: decided for each namespace by measurement, and reported.

Owns the measured rates and the state of each namespace, under one lock; no I/O. Called by the tiers that code their
blocks, from any worker thread. Imports ``codec_id`` and ``namespace``.

A block that is coded costs processor time once on its way down and once on its way up, and saves link time on both:

    raw    1/up + 1/down                                 seconds per payload byte
    coded  1/encode + 1/decode + (1/up + 1/down)/ratio

All rates are those that one transfer sees while others run beside it, so a crowded link or processor counts as such.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from terracekv.tiers.codec_id import Codec, codec_for
from terracekv.tiers.namespace import Namespace

TRIES = 4
"""First blocks of a namespace that are coded to learn what coding brings."""
AGAIN_EVERY = 256
"""One block in so many is coded although it does not pay, to notice when that changes."""
MARGIN = 1.05
"""What is done now is changed only for a gain of 5 %."""
DECODE_ASSUMED = 2.0
"""Decoding runs at so many times the rate of encoding, until it is measured."""
_NAMESPACES_MAX = 256
_WEIGHT_BYTES = 256 << 20
"""Of a rate, what was measured so many bytes ago weighs half or less."""


class Rate:
    """Bytes per second, newer measurements weighing more. Its owner's lock guards it."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.seconds = 0.0

    def add(self, moved_bytes: int, seconds: float) -> None:
        keep = _WEIGHT_BYTES / (_WEIGHT_BYTES + moved_bytes)
        self.bytes = self.bytes * keep + moved_bytes
        self.seconds = self.seconds * keep + max(seconds, 1e-9)

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first measurement."""
        return self.bytes / self.seconds if self.bytes else None


@dataclass(slots=True)
class _State:
    codec: Codec
    tried: int = 0
    skipped: int = 0
    chosen: bool = False
    payload: Rate = field(default_factory=Rate)
    """Payload bytes over stored bytes, as a rate: both fade alike."""

    @property
    def ratio(self) -> float:
        return self.payload.bytes_per_s or 1.0


class Chooser:
    """``mode``: ``auto`` decides by measurement, ``on`` codes what gets smaller, ``off`` nothing."""

    def __init__(self, mode: str = "auto") -> None:
        assert mode in ("auto", "on", "off")
        self.mode = mode
        self._lock = threading.Lock()
        self._states: OrderedDict[bytes, _State] = OrderedDict()
        self._up, self._down = Rate(), Rate()
        self._encode, self._decode = Rate(), Rate()
        self.coded_blocks = 0
        self.raw_blocks = 0

    def codec(self, namespace: Namespace) -> Codec:
        """What the next block of a namespace is to be coded with; say afterwards with ``coded`` what came of it."""
        with self._lock:
            state = self._state(namespace)
            if self.mode == "off" or state.codec is Codec.RAW:
                return Codec.RAW
            if self.mode == "on" or state.tried < TRIES or state.chosen:
                return state.codec
            state.skipped += 1
            return state.codec if state.skipped % AGAIN_EVERY == 0 else Codec.RAW

    def coded(self, namespace: Namespace, payload_bytes: int, stored_bytes: int | None, seconds: float) -> None:
        """A block was coded; None: it did not get smaller."""
        with self._lock:
            state = self._state(namespace)
            state.tried += 1
            state.payload.add(payload_bytes, stored_bytes or payload_bytes)
            self._encode.add(payload_bytes, seconds)
            state.chosen = self._pays(state)

    def decoded(self, payload_bytes: int, seconds: float) -> None:
        """A block was decoded; ``seconds`` without the time it waited for the link."""
        with self._lock:
            self._decode.add(payload_bytes, seconds)

    def sent(self, stored_bytes: int, seconds: float) -> None:
        """One block went up the link."""
        with self._lock:
            self._up.add(stored_bytes, seconds)

    def received(self, stored_bytes: int, seconds: float) -> None:
        """One block came down the link; ``seconds`` without the time of decoding."""
        with self._lock:
            self._down.add(stored_bytes, seconds)

    def stored(self, codec: Codec) -> None:
        """A block was stored so."""
        with self._lock:
            if codec is Codec.RAW:
                self.raw_blocks += 1
            else:
                self.coded_blocks += 1

    def down_bytes_per_s(self) -> float | None:
        """What one transfer gets from the link, or None before the first one."""
        with self._lock:
            return self._down.bytes_per_s

    def up_bytes_per_s(self) -> float | None:
        """What the link takes from one transfer, or None before the first one."""
        with self._lock:
            return self._up.bytes_per_s

    def report(self) -> dict[str, int | float | str | None]:
        """For the status. Speeds are payload bytes per second in one thread; ``codec_ratio`` is over all namespaces."""
        with self._lock:
            states = [state for state in self._states.values() if state.tried]
            payload = sum(state.payload.bytes for state in states)
            stored = sum(state.payload.seconds for state in states)
            return {
                "codec": self.mode,
                "codec_ratio": round(payload / stored, 3) if stored else None,
                "codec_encode_bytes_per_s": self._encode.bytes_per_s,
                "codec_decode_bytes_per_s": self._decode.bytes_per_s,
                "codec_chosen_namespaces": sum(map(self._uses, states)),
                "codec_tried_namespaces": len(states),
                "coded_blocks": self.coded_blocks,
                "raw_blocks": self.raw_blocks,
                "link_up_bytes_per_s": self._up.bytes_per_s,
                "link_down_bytes_per_s": self._down.bytes_per_s,
            }

    def chosen(self, namespace: Namespace) -> bool:
        """Whether blocks of a namespace are coded now, trials aside."""
        with self._lock:
            return self._uses(self._state(namespace))

    def _uses(self, state: _State) -> bool:
        return self.mode == "on" or (self.mode == "auto" and state.chosen)

    def _state(self, namespace: Namespace) -> _State:
        state = self._states.get(namespace.id)
        if state is None:
            state = self._states[namespace.id] = _State(codec_for(namespace.dtype))
            if len(self._states) > _NAMESPACES_MAX:
                self._states.popitem(last=False)
        return state

    def _pays(self, state: _State) -> bool:
        up = self._up.bytes_per_s or self._down.bytes_per_s
        down = self._down.bytes_per_s or up
        encode = self._encode.bytes_per_s
        if up is None or down is None or encode is None:
            return state.chosen
        decode = self._decode.bytes_per_s or DECODE_ASSUMED * encode
        raw = 1 / up + 1 / down
        coded = 1 / encode + 1 / decode + raw / state.ratio
        return coded * MARGIN < raw if not state.chosen else coded < raw * MARGIN

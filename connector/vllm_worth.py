"""Load or recompute: how fast this engine computes a prompt, and whether loading beats that.

``Prefill`` and ``Worth`` own a few numbers each, under no lock: a race costs one answer near the border. Written by the
scheduler's thread, read by the lookup thread. Standard library only.
"""

TOKENS_MIN = 64
"""A step of fewer prompt tokens says nothing: its time is that of a step, not of its tokens."""
KEEP = 0.8
"""Weight of what was measured before, at each step."""
MARGIN = 1.25
"""Between 1/MARGIN and MARGIN times as fast as computing, what was answered last is answered again."""


class Prefill:
    """Tokens per second of prefill, as declared or as measured over the steps that mostly were one."""

    def __init__(self, declared: float = 0.0) -> None:
        self._declared = declared
        self._tokens = 0.0
        self._seconds = 0.0
        self._step: tuple[float, int] | None = None
        self._ended = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None as long as nothing was measured."""
        return self._declared or (self._tokens / self._seconds if self._seconds else None)

    def begin(self, scheduled: dict[str, int], now: float) -> None:
        """A step is scheduled: tokens by request."""
        prompt = sum(tokens for tokens in scheduled.values() if tokens > 1)
        decoding = sum(1 for tokens in scheduled.values() if tokens == 1)
        self._step = (now, prompt) if prompt >= TOKENS_MIN and prompt > 8 * decoding else None

    def end(self, now: float) -> None:
        """A step's result is there. Where steps overlap, the time since the one before counts."""
        if self._step is not None:
            began, tokens = self._step
            seconds = now - max(began, self._ended)
            if seconds > 0:
                self._tokens = self._tokens * KEEP + tokens
                self._seconds = self._seconds * KEEP + seconds
            self._step = None
        self._ended = now


class Worth:
    """Whether a prefix should be loaded that takes ``load_ms``."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill
        self.offering = True

    def load(self, tokens: int, load_ms: float) -> bool:
        """Until prefill was measured everything is worth it."""
        rate = self._prefill.tokens_per_s
        if not rate or not tokens:
            return True
        border = MARGIN if self.offering else 1 / MARGIN
        self.offering = load_ms < tokens / rate * 1e3 * border
        return self.offering

"""Whether loading a prefix from a slow tier beats computing it anew.

``Worth`` owns one bit, under no lock: a race costs one answer near the border. Called by whoever answers lookups, from
one thread or the event loop. Standard library only.
"""

MARGIN = 1.25
"""Between 1/MARGIN and MARGIN times as fast as computing, what was answered last is answered again: a rate that
trembles around the border does not make answers tremble."""


class Worth:
    """For one tier and one engine, whose ``prefill_tokens_per_s`` it has declared; None: everything is worth it."""

    def __init__(self, prefill_tokens_per_s: float | None) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.offering = True

    def load(self, tokens: int, size_bytes: int, bytes_per_s: float | None, rtt_s: float | None) -> bool:
        """Whether ``tokens`` tokens that are ``size_bytes`` on the tier should be offered. ``bytes_per_s`` and
        ``rtt_s`` are as measured, None while they are not: the first load is what measures them."""
        if not self.prefill_tokens_per_s or not bytes_per_s or not tokens:
            return True
        load_s = (rtt_s or 0.0) + size_bytes / bytes_per_s
        compute_s = tokens / self.prefill_tokens_per_s
        border = MARGIN if self.offering else 1 / MARGIN
        self.offering = load_s < compute_s * border
        return self.offering

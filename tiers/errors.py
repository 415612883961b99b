"""What can go wrong, grouped by when it occurs. Imports the standard library only.

An expected outcome is a value of an enum, not an exception (``tiers/tier.py``). A bug is an assert.
Every error says what is wrong (``message``) and what to do about it (``hint``); ``kind`` is stable, for machines.
"""


class TerraceError(Exception):
    """Root of the tree."""

    kind = "error"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


# When the daemon starts.


class ConfigError(TerraceError):
    """A setting is unknown, malformed or contradicts another."""

    kind = "config"


class NoRoom(TerraceError):
    """The machine cannot give what the configuration asks for; the message has the numbers."""

    kind = "no_room"


class InUse(TerraceError):
    """Another live daemon owns the directory, arena or socket."""

    kind = "in_use"


# When a request is answered.


class BadRequest(TerraceError):
    """The caller sent what cannot be meant; nothing was changed."""

    kind = "bad_request"


class NotFound(TerraceError):
    """No such namespace, block, lease or reservation."""

    kind = "not_found"


class TierFull(TerraceError):
    """Nothing more can be evicted for this request."""

    kind = "tier_full"

    def __init__(self, tier: str, needed_bytes: int, free_bytes: int, hint: str) -> None:
        super().__init__(
            f"the {tier} tier has no room: {needed_bytes} bytes needed, {free_bytes} bytes free or evictable", hint
        )
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


# When a tier does its I/O.


class TierDown(TerraceError):
    """A tier cannot do its work now; blocks that only it holds are misses until it can."""

    kind = "tier_down"


class Damaged(TerraceError):
    """Stored structures contradict themselves; what they described is dropped, never served."""

    kind = "damaged"


# When handles outlive their owner.


class Fenced(TerraceError):
    """A lease, reservation, slot or environment is no longer the caller's: its generation has passed."""

    kind = "fenced"

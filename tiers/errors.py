"""What can go wrong, grouped by when it occurs. Imports the standard library only.

An expected outcome is a value of an enum, not an exception (``tiers/tier.py``). A bug is an assert.
Every error says what is wrong (``message``) and what to do about it (``hint``); ``kind`` is stable, for machines, and
so is ``event``, under which the log, the status and ``docs/errors.md`` speak of it.
"""

import errno


class TerraceError(Exception):
    """Root of the tree."""

    kind = "error"
    own_event = ""
    """The event of an error that shares its kind with others."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint

    @property
    def event(self) -> str:
        """Its id in the log."""
        return self.own_event or event_of_kind(self.kind)


def event_of_kind(kind: str) -> str:
    """The event of an error that has its kind for itself: ``tier_full`` is TKV-TIER-FULL."""
    return f"TKV-{kind.upper().replace('_', '-')}"


# When the daemon starts.


class ConfigError(TerraceError):
    """A setting is unknown, malformed or contradicts another."""

    kind = "config"


class NoRoom(TerraceError):
    """The machine cannot give what the configuration asks for; the message has the numbers."""

    kind = "no_room"


class NoGpu(TerraceError):
    """The gpu tier cannot be opened in this process, or not so that engines can share it; the message says why."""

    kind = "no_gpu"


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
    own_event = "TKV-TIER-FULL"

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


class TierStuck(TierDown):
    """A call of the tier does not come back: until it does, nobody waits for the tier."""

    own_event = "TKV-TIER-STUCK"


class Damaged(TerraceError):
    """Stored structures contradict themselves; what they described is dropped, never served."""

    kind = "damaged"


# When handles outlive their owner.


class Fenced(TerraceError):
    """A lease, reservation, slot or environment is no longer the caller's: its generation has passed."""

    kind = "fenced"


# What the machine says when a tier does its I/O.

_FULL = ("TKV-DISK-FULL", "free space there; blocks that are used again are written once there is room")
_READ_ONLY = ("TKV-DISK-READ-ONLY", "see the kernel's log for why (dmesg), repair and remount it writable")
_DENIED = ("TKV-DISK-DENIED", "let the daemon's user read and write there: chown, chmod, the container's user")
_GONE = ("TKV-DISK-GONE", "who removes files of disk.path? what they held is forgotten; nothing need be done")
_IO = ("TKV-DISK-IO", "see the kernel's log (dmesg, smartctl): if it goes on, replace the disk or move disk.path")
_OF_MEDIUM = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
}


def event_and_advice(error: Exception) -> tuple[str, str]:
    """Under which id an error of a tier is spoken of, and what to do about it."""
    if isinstance(error, TerraceError):
        return error.event, error.hint or f"see {error.event} in docs/errors.md"
    return _OF_MEDIUM.get(error.errno or 0, _IO) if isinstance(error, OSError) else _IO

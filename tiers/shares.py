"""Shares: how many bytes of a tier each tenant's blocks take, and how many they may.

Owns the counts of one tier; its owner's lock guards them. Called by the tiers whose blocks lie in slots, on the event
loop and in workers, and by the daemon to set limits. Imports ``namespace``.

Bytes are counted by namespace, since that is what a stored block names; whose a namespace is, the daemon's table of
namespaces says, also when it learns it late. A limit is a ceiling and no promise: it bounds what a tenant holds and
reserves nothing for it.
"""

from collections import Counter
from collections.abc import Mapping

from terracekv.tiers.namespace import Namespaces


class Shares:
    """``limits[tenant]`` in bytes; a tenant that is not there has none, as have namespaces of no tenant."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self.limits: Mapping[str, int] = {}
        self.held: Counter[bytes] = Counter()
        """Bytes by namespace id."""

    def count(self, namespace_id: bytes, more_bytes: int) -> None:
        """A namespace's blocks take so much more, or less."""
        self.held[namespace_id] += more_bytes
        assert self.held[namespace_id] >= 0, "a namespace gives back more than it holds"
        if not self.held[namespace_id]:
            del self.held[namespace_id]

    def tenant(self, namespace_id: bytes) -> str:
        """Whose a namespace is."""
        known = self._namespaces.get(namespace_id)
        return known.tenant if known is not None else ""

    def limit(self, namespace_id: bytes) -> int | None:
        """How much the namespace's tenant may hold, None without a limit."""
        return self.limits.get(self.tenant(namespace_id)) if self.limits else None

    def of(self, tenant: str) -> int:
        """Bytes that a tenant's blocks take."""
        return sum(held for id, held in self.held.items() if self.tenant(id) == tenant)

    def by_namespace(self) -> dict[bytes, int]:
        """Bytes that each namespace's blocks take, by its id."""
        return dict(self.held)

    def by_tenant(self) -> dict[str, int]:
        """The same for all who hold any."""
        held: Counter[str] = Counter()
        for id, count in list(self.held.items()):
            held[self.tenant(id)] += count
        return dict(held)

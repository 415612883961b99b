"""The disk tier's shares: how much of it each tenant's blocks take, how much they may, and who of them goes first.

Owns the limits, what is on its way in, and how far each tenant's oldest blocks have been looked for. The bytes that
are there are the catalog's books. Called by the disk tier from worker threads, by the status on the event loop. Imports
``catalog``, ``entry``, ``errors``, ``ledger`` and ``namespace``.

A block that is evicted for its tenant's quota is not listed any more; its room in its segment comes back when the
segment is evicted, as that of any block that is gone. So a quota bounds what of a tenant can be found on disk.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from terracekv.tiers.catalog import Catalog
from terracekv.tiers.entry import Place
from terracekv.tiers.errors import TierDown
from terracekv.tiers.ledger import Ledger
from terracekv.tiers.namespace import Namespace, Namespaces

_START = (0, -1)


class DiskShares:
    """``limits[tenant]`` in bytes; a tenant that is not there has none, as have namespaces of no tenant."""

    def __init__(self, catalog: Catalog, namespaces: Namespaces, ledger: Ledger) -> None:
        self._catalog = catalog
        self._namespaces = namespaces
        self._ledger = ledger
        self._locks: dict[str, threading.Lock] = {}
        """By tenant: whoever looks for blocks of one, which may be far apart on the disk, holds up no other."""
        self._coming: Counter[str] = Counter()
        """Bytes of records that are being written."""
        self._looked: dict[str, tuple[int, int]] = {}
        """By tenant, the segment and page up to which nothing of it is left: older blocks of it are gone."""
        self.limits: Mapping[str, int] = {}

    def tenant(self, namespace_id: bytes) -> str:
        """Whose a namespace is."""
        known = self._namespaces.get(namespace_id)
        return known.tenant if known is not None else ""

    def limit(self, namespace_id: bytes) -> int | None:
        """How much the namespace's tenant may hold, None without a limit."""
        return self.limits.get(self.tenant(namespace_id)) if self.limits else None

    def by_tenant(self) -> dict[str, int]:
        """Bytes that tenants' records take; none of a catalog that fails."""
        try:
            return self._by_tenant()
        except TierDown:
            return {}

    def by_namespace(self) -> dict[bytes, int]:
        """Bytes that each namespace's records take, by its id; none of a catalog that fails."""
        try:
            held = self._catalog.bytes_by_namespace()
        except TierDown:
            return {}
        return {namespace.id: held.get(namespace.number, 0) for namespace in self._namespaces}

    def _by_tenant(self) -> dict[str, int]:
        tenants = {namespace.number: namespace.tenant for namespace in self._namespaces}
        held: Counter[str] = Counter()
        for number, count in self._catalog.bytes_by_namespace().items():
            held[tenants.get(number, "")] += count
        return dict(held)

    def of(self, tenant: str) -> int:
        """Bytes that a tenant's records take. TierDown when the catalog fails."""
        return self._by_tenant().get(tenant, 0)

    @contextmanager
    def admitted(self, namespace: Namespace, size: int) -> Iterator[bool]:
        """Whether a record of ``size`` bytes is within its tenant's quota, after evicting the tenant's oldest blocks if
        need be. It counts as there until the context ends, by when the catalog should have it."""
        limit = self.limit(namespace.id)
        if limit is None:
            yield True
            return
        tenant = self.tenant(namespace.id)
        lock = self._locks.setdefault(tenant, threading.Lock())
        with lock:
            fits = self._make_room(tenant, limit - size)
            self._coming[tenant] += size * fits
        if not fits:
            text = f"a block of {size} bytes is more than tenant {tenant} may hold of disk: {limit} bytes"
            self._ledger.full(text, "raise the tenant's quota")
        try:
            yield fits
        finally:
            with lock:
                self._coming[tenant] -= size * fits

    def _make_room(self, tenant: str, limit: int) -> bool:
        """Whether what the tenant holds, with what is coming, is within ``limit`` now. Where it cannot be, nothing is
        evicted."""
        from_start = False
        while (excess := self.of(tenant) + self._coming[tenant] - limit) > 0:
            if self._coming[tenant] > limit:
                return False
            if places := self._oldest(tenant, excess):
                self._ledger.left("quota", self._catalog.forget(places))
            elif from_start:
                return False
            else:
                self._looked.pop(tenant, None)
                from_start = True
        return True

    def _oldest(self, tenant: str, wanted_bytes: int) -> list[Place]:
        """The tenant's next blocks in the order of the disk that take ``wanted_bytes``, or as many as there are."""
        numbers = {namespace.number for namespace in self._namespaces if namespace.tenant == tenant}
        segment, page = self._looked.get(tenant, _START)
        found: list[Place] = []
        for number in sorted(each for each in self._catalog.segments() if each >= segment):
            after = page if number == segment else -1
            while rows := self._catalog.held(number, after):
                for id, entry in rows:
                    after = entry.page
                    if entry.stamp >> 32 in numbers:
                        found.append((id, entry.segment, entry.page))
                        wanted_bytes -= entry.record_bytes
                    self._looked[tenant] = (number, after)
                    if wanted_bytes <= 0:
                        return found
        return found

"""The status as it changes: one document about every second, the same for all who listen and may see the same.

Owns the documents of this second and the task that makes them, which runs only while somebody listens. Called by
``http_door`` on the event loop. Imports aiohttp, msgspec, ``http_gate``, ``http_listeners``, ``recent``, ``store`` and
``tasks``.

A stream begins with an event ``past`` (the last lookups, the last hour) and goes on with events ``now``, each of which
has what is new of both. Whoever reads too slowly to get every ``now`` gets the ``past`` again, so nothing is queued.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from terracekv.daemon import tasks
from terracekv.daemon.http_gate import tenant_of
from terracekv.daemon.http_listeners import Listener, Listeners, stream
from terracekv.daemon.recent import PERIOD_S, Use
from terracekv.daemon.store import Store

EVERY_S = 1.0
ROWS_MAX = 50
"""Sessions and namespaces in a document; ``totals`` says how many there are."""
LAST_PERIODS = 2
"""The one that goes on, and the one that may have ended since the last document."""


class Live:
    """``about(tenant)`` is the status document, or what of it that tenant may know."""

    def __init__(self, store: Store, about: Callable[[str], dict[str, Any]], listeners: Listeners) -> None:
        self._store = store
        self._about = about
        self._listeners = listeners
        self._listening: list[Listener] = []
        self._documents: dict[str, tuple[int, bytes]] = {}
        """By tenant: the number of its last document, and what is sent of it."""
        self._told: dict[str, int] = {}
        """By tenant: the number of the last lookup that a document told of."""
        self._number = 0
        self._ticker: asyncio.Task[None] | None = None

    async def stream(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Until the client, or the daemon, goes away."""
        with self._listeners.join(request) as listener:
            response = stream()
            self._begin(listener, tenant_of(request))
            try:
                await response.prepare(request)
                await self._feed(response, listener, tenant_of(request))
                await response.write_eof()
            finally:
                self._finish(listener)
        return response

    async def _feed(self, response: web.StreamResponse, listener: Listener, tenant: str) -> None:
        sent: int | None = None
        while not listener.ended:
            listener.news.clear()
            number, document = self._documents[tenant]
            if number != sent:
                if sent is None or number != sent + 1:
                    await listener.send(response, self._past(tenant))
                await listener.send(response, document)
                sent = number
            elif not listener.ended:
                await listener.news.wait()

    def _begin(self, listener: Listener, tenant: str) -> None:
        self._listening.append(listener)
        if tenant not in self._documents:
            self._make(tenant)
        if self._ticker is None:
            self._ticker = tasks.begin(tasks.keep(self._tick, "live", EVERY_S), "live")

    def _finish(self, listener: Listener) -> None:
        self._listening.remove(listener)
        if not self._listening and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self._documents.clear()
            self._told.clear()

    async def _tick(self) -> None:
        self._number += 1
        tenants = {listener.caller.tenant for listener in self._listening}
        for gone in self._documents.keys() - tenants:
            del self._documents[gone], self._told[gone]
        for tenant in tenants:
            self._make(tenant)
        for listener in self._listening:
            listener.news.set()

    def _make(self, tenant: str) -> None:
        recent, past = self._store.recent, self._store.recent.of(tenant)
        status = self._about(tenant)
        status.pop("config", None)  # it never changes, and is in the status
        totals = {rows: len(status[rows]) for rows in ("sessions", "namespaces")}
        uses = {row["namespace_id"]: recent.use(bytes.fromhex(row["namespace_id"])) for row in status["namespaces"]}
        together = dict[str | None, list[Use]]()
        for row in status["namespaces"]:
            together.setdefault(row["tenant"], []).append(uses[row["namespace_id"]])
        for row in status.get("tenants", ()):
            mine = together.get(row["tenant"], [])
            row |= {"namespaces": len(mine)} | asdict(sum(mine, start=Use()))
        status["sessions"] = status["sessions"][:ROWS_MAX]
        status["namespaces"].sort(key=lambda row: -uses[row["namespace_id"]].lookups)
        status["namespaces"] = status["namespaces"][:ROWS_MAX]
        held = {name: shares.by_namespace() for name, shares in self._store.shares.items()}
        for row in status["namespaces"]:
            id = bytes.fromhex(row["namespace_id"])
            row |= asdict(uses[row["namespace_id"]])
            row["used_bytes"] = {name: of_tier.get(id, 0) for name, of_tier in held.items()}
        document = {
            "number": self._number,
            "at": round(recent.now(), 3),
            "tenant": tenant or None,
            "totals": totals,
            "status": status,
            "lookups": past.since(self._told.get(tenant, past.number)),
            "history": past.history(LAST_PERIODS),
        }
        self._told[tenant] = past.number
        self._documents[tenant] = self._number, _event("now", document)

    def _past(self, tenant: str) -> bytes:
        past = self._store.recent.of(tenant)
        return _event("past", {"period_s": PERIOD_S, "lookups": past.since(0), "history": past.history()})


def _event(name: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))

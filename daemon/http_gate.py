"""The people's door's gate: who a request comes from, and whether its route is theirs to use.

Owns no state. Called by ``http_door`` on the event loop, before a route's handler. Imports aiohttp, ``access``,
``http_messages``, ``http_routes``, ``peers``, ``store`` and ``tiers``.

What a tenant may not see answers as what is not there: no route tells the two apart.
"""

import ipaddress

from aiohttp import web

from terracekv.daemon.access import Access, Denied
from terracekv.daemon.access_file import Caller
from terracekv.daemon.http_messages import Problem
from terracekv.daemon.http_routes import Route
from terracekv.daemon.peers import peer_of

CALLER = web.RequestKey("caller", Caller)


def admit(access: Access, request: web.BaseRequest, route: Route, *, tcp: bool) -> None:
    """Note who asks (see ``caller_of``). Problem 401 for nobody known, 403 for somebody who may not."""
    peer = peer_of(request.transport) if access.asks_peers and not tcp else None
    if not tcp and (refusal := access.admission.refusal(peer)) is not None:
        access.refused += 1
        raise Problem(403, "forbidden", refusal, "run as a user that access.uids or access.gids name")
    if route.right is None:
        return
    if tcp and not access.guarded and not _is_literal(request.host):
        # A web page can make a name of its own point at this machine; then its browser would let it read answers.
        raise Problem(
            403,
            "forbidden",
            f"without a token only localhost and IP addresses are answered for, not {request.host[:80]!r}",
            "set daemon.token_file, or use the address",
        )
    try:
        caller = access.at_http(_token(request), peer, tcp=tcp)
        access.require(caller, route.right)
    except Denied as denied:
        raise _problem(denied) from None
    request[CALLER] = caller


def caller_of(request: web.BaseRequest) -> Caller:
    """Who asks. Of a request that was not admitted yet there is nobody."""
    return request[CALLER]


def tenant_of(request: web.BaseRequest) -> str:
    """The tenant whose namespaces a request may name; "" for all."""
    return caller_of(request).tenant


def refuse_tenants(request: web.BaseRequest) -> None:
    """Problem 403 for a tenant: what is asked for concerns the blocks of all."""
    if tenant_of(request):
        raise Problem(403, "forbidden", "this is of all tenants' blocks", "use a token of no tenant that has the right")


def _problem(denied: Denied) -> Problem:
    if denied.known:
        return Problem(403, "forbidden", denied.message, denied.hint)
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem(401, "unauthorized", denied.message, denied.hint, headers=headers)


def _token(request: web.BaseRequest) -> bytes | None:
    """What the request presents, None for nothing. Another scheme is no token of ours."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if not scheme:
        return None
    return given.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def _is_literal(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

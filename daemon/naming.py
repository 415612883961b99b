"""Which namespace somebody means by a name.

Owns nothing. Called by the people's door on the event loop. Imports ``tiers``.
"""

from terracekv.tiers.errors import BadRequest, NotFound
from terracekv.tiers.namespace import Namespace, Namespaces


def find_namespace(namespaces: Namespaces, name: str, tenant: str = "") -> Namespace:
    """A namespace by its id in hex, a unique prefix of it (8 digits or more), or a model name only it bears.

    For a ``tenant`` there are none but its own: BadRequest and NotFound say nothing of others'."""
    if len(name) == 64 and (whole := _of_id(namespaces, name)) is not None and tenant in ("", whole.tenant):
        return whole
    there = [n for n in namespaces if tenant in ("", n.tenant)]
    matches = [n for n in there if n.model == name]
    if not matches and len(name) >= 8:
        matches = [n for n in there if n.id.hex().startswith(name.lower())]
    if len(matches) > 1:
        ids = ", ".join(n.id.hex()[:16] for n in matches)
        raise BadRequest(f"{len(matches)} namespaces are called {name!r}", f"name one by its id: {ids}")
    if not matches:
        raise NotFound(
            f"no namespace {name!r}",
            "GET /v1/namespaces lists those that engines have registered; a prefix of an id needs 8 digits",
        )
    return matches[0]


def _of_id(namespaces: Namespaces, digits: str) -> Namespace | None:
    try:
        return namespaces.get(bytes.fromhex(digits))
    except ValueError:
        return None

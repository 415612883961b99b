"""Which request goes to whom, and the OpenAPI document that says so to others.

Owns the table of routes. Called by ``http_door`` on the event loop. Imports aiohttp, msgspec, ``access_file`` and
``http_messages``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from terracekv.daemon.access_file import Right
from terracekv.daemon.http_messages import KEY_SCHEMA, ONE_OF_BOTH, Chain, Failure, Problem

Handler = Callable[[web.BaseRequest, Mapping[str, str]], Awaitable[web.StreamResponse]]

PARAMETERS = {
    "ns": "namespace id in hex, a unique prefix of it (8 digits or more), or a model name that is unique",
    "key": "the block's key, 64 hex digits",
    "shard": "the shard of the block; 0 where it is left out",
    "file": "the name of a file that the page loads",
    "durable": "1: answer once the block is in the lowest tier that is configured, too: disk, or s3 where there is one",
    "after": "only events with numbers above this one",
    "Range": "one range of bytes",
    "X-TerraceKV-Checksum": "xxh3-64:<16 hex digits> of the body, to be compared before the block is stored",
    "Last-Event-ID": "the same as after",
}

SCHEMAS = {
    "ns": {"type": "string", "minLength": 1},
    "key": KEY_SCHEMA,
    "shard": {"type": "integer", "minimum": 0, "maximum": 0xFFFF},
    "durable": {"type": "integer", "enum": [0, 1]},
    "after": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
}


@dataclass(frozen=True)
class Route:
    """``answers`` maps a status to the struct of its body, or to its media type. ``right`` is what a caller must have;
    None for the routes that ask for no token, as probes have none."""

    method: str
    path: str
    right: Right | None
    handler: Handler
    summary: str
    answers: Mapping[int, Any]
    request: Any = None
    query: Sequence[str] = ()
    headers: Sequence[str] = ()


class Routes:
    """All routes of the door."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.all = tuple(routes)
        self._fixed: dict[str, dict[str, Route]] = {}
        self._open: list[tuple[list[str], dict[str, Route]]] = []
        for path in dict.fromkeys(route.path for route in routes):
            methods = {route.method: route for route in routes if route.path == path}
            if "{" in path:
                self._open.append((path.split("/"), methods))
            else:
                self._fixed[path] = methods

    def match(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route for a path as it was sent (still quoted), and what its parameters are. Problem 404 or 405."""
        methods, names = self._fixed.get(path), dict[str, str]()
        if methods is None:
            parts = path.split("/")
            for template, each in self._open:
                if len(parts) == len(template) and all(
                    t == p or t[:1] == "{" for t, p in zip(template, parts, strict=True)
                ):
                    methods = each
                    names = {t[1:-1]: unquote(p) for t, p in zip(template, parts, strict=True) if t[:1] == "{"}
        if methods is None:
            raise Problem(404, "not_found", f"no such route: {path[:200]}", "GET /openapi.json lists all routes")
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise Problem(
                405,
                "method_not_allowed",
                f"{method[:20]} is nothing that {path[:200]} does",
                f"it does {allowed}",
                headers={"Allow": allowed},
            )
        return route, names


def openapi(routes: Routes, version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    structs: dict[type, None] = {Failure: None}
    for route in routes.all:
        for shape in (route.request, *route.answers.values()):
            if isinstance(shape, type) and shape is not dict:
                structs[shape] = None
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for shape in structs:
        if issubclass(shape, Chain):
            components[shape.__name__] |= ONE_OF_BOTH
    paths: dict[str, dict[str, Any]] = {}
    for route in routes.all:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "TerraceKV",
            "version": version,
            "description": "Bodies are JSON, or msgpack where Content-Type and Accept say application/msgpack.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> dict[str, Any]:
    parameters = [_parameter(part[1:-1], "path") for part in route.path.split("/") if part[:1] == "{"]
    parameters += [_parameter(name, "query") for name in route.query]
    parameters += [_parameter(name, "header") for name in route.headers]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {str(status): _content(shape, "as asked") for status, shape in route.answers.items()},
    }
    operation["responses"]["default"] = _content(Failure, "not done: what is wrong, and what to do about it")
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request, "")["content"]}
    if route.right is not None:
        operation["security"] = [{}, {"token": []}]
        operation["description"] = f"Needs the right {route.right}."
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    described = {"name": name, "in": place, "required": place == "path", "description": PARAMETERS[name]}
    return described | {"schema": SCHEMAS.get(name, {"type": "string"})}


def _content(shape: Any, description: str) -> dict[str, Any]:
    if shape is None:
        return {"description": description}
    if isinstance(shape, str):
        return {"description": description, "content": {shape: {}}}
    schema: dict[str, Any] = {"type": "object"}
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        schema = {"$ref": f"#/components/schemas/{shape.__name__}"}
    return {
        "description": description,
        "content": {kind: {"schema": schema} for kind in ("application/json", "application/msgpack")},
    }

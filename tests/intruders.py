"""Two tenants of one daemon for tests in which the one attacks the other: each with all the rights that a tenant can
have. Owns the access file and a way to ask over HTTP as any of them. Called by tests. Imports ``harness``.
"""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from terracekv.tests.harness import Blocks, Daemon

ATTACKER, VICTIM, OPERATOR = "attackers-secret-01", "victims-secret-0001", "operators-secret-01"
SECRETS = {"attacker": ATTACKER, "victim": VICTIM}
FILE = "".join(
    f"[[tokens]]\nname = '{name}s-token'\nsecret = '{secret}'\ntenant = '{name}'\nrights = ['read', 'write', 'admin']\n"
    for name, secret in SECRETS.items()
)
FILE += f"[[tokens]]\nname = 'operators-token'\nsecret = '{OPERATOR}'\nrights = ['read', 'write', 'admin', 'metrics']\n"
BIG = 256 << 10
"""Bytes of a block, of which host has room for 16."""
TENANTS = "[tenants.attacker]\n[tenants.victim]\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def two_tenants(shm_dir: Path, tmp_path: Path, tenants: str = TENANTS, **more: str) -> Iterator[Daemon]:
    """A daemon that knows both, and an operator."""
    access = tmp_path / "access.toml"
    access.write_text(FILE + tenants)
    settings = {"access__own_user": "false", "access__file": str(access)} | more
    with Daemon(shm_dir / "run", tmp_path / "d", **settings) as daemon:
        yield daemon


def door(daemon: Daemon) -> http.client.HTTPConnection:
    """A connection to the people's door."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(30.0)
    connection.sock.connect(str(daemon.runtime / "http.sock"))
    return connection


def ask(daemon: Daemon, secret: str, method: str, route: str, body: Any = None, **headers: str) -> Answer:
    """A request; ``body`` is bytes, or goes as JSON. ``headers`` with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()} | {"Authorization": f"Bearer {secret}"}
    if body is not None and not isinstance(body, bytes):
        body, named["Content-Type"] = json.dumps(body).encode(), "application/json"
    with contextlib.closing(door(daemon)) as connection:
        connection.request(method, route, body, named)
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


def done(daemon: Daemon, secret: str, method: str, route: str, body: Any = None) -> Any:
    """The answer to a request that must be done."""
    answer = ask(daemon, secret, method, route, body)
    assert answer.status in (200, 201), answer
    return answer.json


def engine(daemon: Daemon, tenant: str, block_bytes: int = 4096, **changes: Any) -> Blocks:
    """A tenant's engine."""
    return daemon.client(block_bytes, credential=SECRETS[tenant].encode(), **changes)


def block(namespace_id: bytes, key: bytes) -> str:
    """The route of a block."""
    return f"/v1/namespaces/{namespace_id.hex()}/blocks/{key.hex()}"


def chain(namespace_id: bytes, keys: list[bytes], **more: Any) -> dict[str, Any]:
    """The body of a question or an order about a chain."""
    return {"namespace": namespace_id.hex(), "keys": [key.hex() for key in keys], **more}


@contextlib.contextmanager
def both(daemon: Daemon, block_bytes: int = 4096) -> Iterator[tuple[Blocks, Blocks]]:
    """Engines of attacker and victim that serve the same model."""
    with engine(daemon, "attacker", block_bytes) as attacker, engine(daemon, "victim", block_bytes) as victim:
        yield attacker, victim


def from_disk(daemon: Daemon, secret: str, namespace_id: bytes, keys: list[bytes]) -> list[bytes | None]:
    """Blocks of a tenant as they come when host has none of them."""
    done(daemon, secret, "POST", "/v1/flush", {"namespace": namespace_id.hex(), "tier": "host"})
    answers = [ask(daemon, secret, "GET", block(namespace_id, key)) for key in keys]
    return [answer.body if answer.status == 200 else None for answer in answers]


@contextlib.contextmanager
def events(daemon: Daemon, secret: str, last: str | None = None) -> Iterator[Any]:
    """The event stream as a file, from its first event on."""
    headers = {"Authorization": f"Bearer {secret}"} | ({} if last is None else {"Last-Event-ID": last})
    with contextlib.closing(door(daemon)) as connection:
        connection.request("GET", "/v1/events", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline() == b": connected\n" and answer.readline() == b"\n"
        yield answer


def hear_of(events: Any, namespace_id: bytes) -> bytes:
    """Read until something of a namespace comes: all that was read."""
    heard = b""
    while namespace_id.hex().encode() not in heard:
        heard += (line := events.readline())
        assert line, "the stream has ended"
    return heard

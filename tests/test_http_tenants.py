"""The people's door for several tenants: what each may do, and that none learns of another."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from terracekv.daemon.access_file import Right
from terracekv.tests.people import BLOCK_BYTES, BLOCK_TOKENS, MODEL, People, keys_of, people, served, url, whole
from terracekv.tests.test_access import ADMIN, FILE
from terracekv.tiers.namespace import Namespace

RED = "red-secret-0000001"
BLUE = "blue-secret-000001"
TOKENS = FILE + "".join(
    f"[[tokens]]\nname='{name}'\nsecret='{secret}'\ntenant='{tenant}'\nrights={rights}\n"
    for name, secret, tenant, rights in (
        ("reds", RED, "red", ["read", "write", "admin"]),
        ("blues", BLUE, "blue", ["read", "write", "admin"]),
        ("only-read", "only-read-000000001", "red", ["read"]),
        ("only-write", "only-write-00000001", "red", ["write"]),
        ("only-admin", "only-admin-00000001", "red", ["admin"]),
        ("only-metrics", "only-metrics-000001", "", ["metrics"]),
    )
)
KEY, OTHER, ABSENT = keys_of(3)
WANTED = {
    ("POST", "/v1/lookup"): "read",
    ("POST", "/v1/explain"): "read",
    ("POST", "/v1/prefetch"): "read",
    ("POST", "/v1/pin"): "write",
    ("POST", "/v1/unpin"): "write",
    ("POST", "/v1/flush"): "admin",
    ("POST", "/v1/verify"): "admin",
    ("POST", "/v1/sync"): "admin",
    ("GET", "/v1/status"): "read",
    ("GET", "/v1/namespaces"): "read",
    ("GET", "/v1/events"): "read",
    ("GET", "/v1/live"): "read",
    ("GET", "/metrics"): "metrics",
    ("GET", "/v1/whatif"): "metrics",
    ("GET", "/openapi.json"): "read",
    ("GET", "/"): None,
    ("GET", "/page/{file}"): None,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
    ("GET", "/v1/namespaces/{ns}/blocks/{key}"): "read",
    ("HEAD", "/v1/namespaces/{ns}/blocks/{key}"): "read",
    ("PUT", "/v1/namespaces/{ns}/blocks/{key}"): "write",
    ("DELETE", "/v1/namespaces/{ns}/blocks/{key}"): "write",
    ("GET", "/v1/namespaces/{ns}/blocks/{key}/{shard}"): "read",
    ("HEAD", "/v1/namespaces/{ns}/blocks/{key}/{shard}"): "read",
    ("PUT", "/v1/namespaces/{ns}/blocks/{key}/{shard}"): "write",
    ("DELETE", "/v1/namespaces/{ns}/blocks/{key}/{shard}"): "write",
}
"""What each route asks for. A new route must be put here with a right, or say why it needs none."""
OF_ALL = {"/v1/verify", "/v1/sync"}
"""Routes about the blocks of all tenants, so of none."""


def guarded(scenario: Any, shm_dir: Path, **values: Any) -> None:
    """Run a scenario where tokens and tenants are configured."""
    (shm_dir / "access.toml").write_text(TOKENS)

    async def run() -> None:
        async with people(shm_dir, access_file=str(shm_dir / "access.toml"), **values) as opened:
            await scenario(opened)

    uvloop.run(run())


def of_tenant(p: People, seed: int, tenant: str, model: str = MODEL) -> Namespace:
    wanted = Namespace(
        bytes([seed]) * 32, 0, 0, model, "r1", "bf16", bytes(32), BLOCK_TOKENS, 1, BLOCK_BYTES, tenant=tenant
    )
    return p.store.namespaces.register(wanted)


async def ask(
    p: People, secret: str | None, method: str, route: str, body: Any = None, data: bytes | None = None
) -> tuple[int, Any]:
    """Status and body (decoded where it is JSON)."""
    headers = {"Authorization": f"Bearer {secret}"} if secret is not None else {}
    async with p.client.request(method, route, json=body, data=data, headers=headers) as answer:
        content = await answer.read()
        return answer.status, json.loads(content) if answer.content_type == "application/json" and content else content


@served()
async def test_every_route_asks_for_a_right_and_only_probes_for_none(people: People) -> None:
    table = {(route.method, route.path): route.right for route in people.door.routes.all}
    assert table == {key: None if right is None else Right(right) for key, right in WANTED.items()}


@pytest.mark.parametrize("right", ["read", "write", "admin", "metrics"])
def test_a_right_opens_its_routes_and_no_others(shm_dir: Path, right: str) -> None:
    async def scenario(p: People) -> None:
        secret = next(line for line in TOKENS.splitlines() if f"'only-{right}-" in line).partition("'")[2][:-1]
        for (method, path), needed in WANTED.items():
            if path in ("/v1/events", "/v1/live") and needed == right:
                continue  # they do not end
            route = path.replace("{ns}", "x" * 9).replace("{key}", KEY.hex()).replace("{shard}", "0")
            status, answer = await ask(p, secret, method, route, body={} if method == "POST" else None)
            if needed in (None, right) and path not in OF_ALL:
                assert status in (200, 400, 404), (method, path, answer)
            else:
                assert status == 403 and (method == "HEAD" or answer["error"]["kind"] == "forbidden"), (method, path)

    guarded(scenario, shm_dir)


@pytest.mark.fault(28)
def test_what_concerns_the_blocks_of_all_is_refused_to_a_tenant_and_done_for_the_operator(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        reds = of_tenant(p, 1, "red")
        assert (await ask(p, RED, "PUT", url(reds, KEY), data=whole(reds, KEY)))[0] == 201
        for path in OF_ALL:
            body = {"tier": "host"} if path == "/v1/verify" else {}
            for secret in (RED, BLUE):
                status, answer = await ask(p, secret, "POST", path, body=body)
                assert status == 403 and answer["error"]["kind"] == "forbidden", path
            status, answer = await ask(p, None, "POST", path, body=body)
            assert status == 200, answer
            assert path != "/v1/verify" or answer["checked"] == 1

    guarded(scenario, shm_dir)


def test_over_tcp_and_over_the_socket_a_token_is_asked_for_and_a_wrong_one_is_none(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        for secret in ("", "wrong-secret-000001", RED[:-1], RED + " x", "é"):
            status, answer = await ask(p, secret, "GET", "/v1/status")
            assert (status, answer["error"]["kind"]) == (401, "unauthorized"), secret
        assert (await ask(p, None, "GET", "/v1/status"))[0] == 401
        assert (await ask(p, None, "GET", "/healthz"))[0] == 200
        assert (await ask(p, RED, "GET", "/v1/status"))[0] == 200
        async with aiohttp.ClientSession(f"http://127.0.0.1:{p.door.port}") as client:
            for scheme, expected in ((f"Bearer {RED}", 200), (f"bearer {RED}", 200), (f"Basic {RED}", 401), (RED, 401)):
                async with client.get("/v1/status", headers={"Authorization": scheme}) as over_tcp:
                    assert over_tcp.status == expected, scheme
            async with client.get("/v1/status") as over_tcp:
                assert over_tcp.status == 401 and over_tcp.headers["WWW-Authenticate"] == "Bearer"

    guarded(scenario, shm_dir, access_own_user="false", daemon_http="127.0.0.1:0")


@pytest.mark.fault(28)
def test_a_tenant_finds_its_own_and_of_others_not_even_that_they_are_there(shm_dir: Path) -> None:
    """Each question is asked twice, of a namespace that another has and of one that nobody has: the answers are one."""

    async def scenario(p: People) -> None:
        reds, blues = of_tenant(p, 1, "red"), of_tenant(p, 2, "blue", "blue/model")
        nobodys = bytes([3]) * 32
        for namespace, secret in ((reds, RED), (blues, BLUE)):
            payload = whole(namespace, KEY)
            assert (await ask(p, secret, "PUT", url(namespace, KEY), data=payload))[0] == 201
        assert (await ask(p, RED, "GET", url(reds, KEY)))[1] == whole(reds, KEY)
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            body = whole(blues, KEY) if method == "PUT" else None
            theirs = await ask(p, RED, method, url(blues, KEY), data=body)
            none = await ask(p, RED, method, url(blues, KEY).replace(blues.id.hex(), nobodys.hex()), data=body)
            assert theirs[0] == none[0] == 404
            assert _without_names(theirs[1], blues.id) == _without_names(none[1], nobodys), method
        chain = {"keys": [KEY.hex()]}
        for route, more in (("lookup", chain), ("prefetch", chain), ("pin", chain), ("unpin", chain), ("flush", {})):
            for name in (blues.id.hex(), blues.id.hex()[:8], "blue/model"):
                theirs = await ask(p, RED, "POST", f"/v1/{route}", {"namespace": name, **more})
                none = await ask(p, RED, "POST", f"/v1/{route}", {"namespace": nobodys.hex(), **more})
                assert theirs[0] == none[0]
                text = json.dumps(theirs[1]).replace(name, "?")
                assert text == json.dumps(none[1]).replace(nobodys.hex(), "?"), route
        status, found = await ask(p, BLUE, "POST", "/v1/lookup", {"namespace": "blue/model", **chain})
        assert (status, found["matched_blocks"]) == (200, 1), "and nothing was done to it"

    guarded(scenario, shm_dir)


def _without_names(answer: Any, id: bytes) -> str:
    return (answer.decode() if isinstance(answer, bytes) else json.dumps(answer)).replace(id.hex(), "?")


def test_lists_and_the_status_have_a_tenants_own_and_the_operators_all(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        of_tenant(p, 1, "red")
        of_tenant(p, 2, "blue")
        of_tenant(p, 3, "")
        for secret, expected in ((RED, {"red"}), (BLUE, {"blue"}), (ADMIN, {"red", "blue", None})):
            for route in ("/v1/namespaces", "/v1/status"):
                status, answer = await ask(p, secret, "GET", route)
                assert status == 200 and {row["tenant"] for row in answer["namespaces"]} == expected, route
        _, red = await ask(p, RED, "GET", "/v1/status")
        text = json.dumps(red)
        assert red["tenant"] == "red" and "blue" not in text and "config" not in red and "access" not in red
        _, all_of_it = await ask(p, ADMIN, "GET", "/v1/status")
        assert all_of_it["access"]["tokens"][:3] == ["router", "worker", "admin"]
        assert not any(secret in json.dumps(all_of_it) for secret in (RED, BLUE, ADMIN))

    guarded(scenario, shm_dir)


def test_a_tenant_hears_of_its_own_blocks_only(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        reds, blues = of_tenant(p, 1, "red"), of_tenant(p, 2, "blue")
        headers = {"Authorization": f"Bearer {RED}"}
        async with p.client.get("/v1/events", headers=headers) as stream:
            await stream.content.readuntil(b": connected\n\n")
            await ask(p, BLUE, "PUT", url(blues, KEY), data=whole(blues, KEY))
            await ask(p, BLUE, "POST", "/v1/flush", {"namespace": blues.id.hex()})
            await ask(p, RED, "PUT", url(reds, OTHER), data=whole(reds, OTHER))
            event = await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 30)
            assert reds.id.hex().encode() in event and blues.id.hex().encode() not in event

    guarded(scenario, shm_dir)


def test_a_name_that_two_tenants_use_is_each_ones_own(shm_dir: Path) -> None:
    async def scenario(p: People) -> None:
        reds, blues = of_tenant(p, 1, "red"), of_tenant(p, 2, "blue")
        for secret, mine in ((RED, reds), (BLUE, blues)):
            _, found = await ask(p, secret, "POST", "/v1/lookup", {"namespace": MODEL, "keys": [ABSENT.hex()]})
            assert found["namespace_id"] == mine.id.hex()
        status, answer = await ask(p, ADMIN, "POST", "/v1/flush", {"namespace": MODEL})
        assert status == 400 and "2 namespaces" in answer["error"]["message"]

    guarded(scenario, shm_dir)


def test_a_namespaces_tenant_outlives_a_restart(shm_dir: Path) -> None:
    async def before(p: People) -> None:
        of_tenant(p, 1, "red")

    async def after(p: People) -> None:
        assert [n["tenant"] for n in (await ask(p, RED, "GET", "/v1/namespaces"))[1]["namespaces"]] == ["red"]
        assert (await ask(p, BLUE, "GET", "/v1/namespaces"))[1]["namespaces"] == []

    guarded(before, shm_dir)
    guarded(after, shm_dir)

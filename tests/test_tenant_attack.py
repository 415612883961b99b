"""A tenant attacks another with all the rights that a tenant can have: over HTTP, and as an engine.

Each attack must fail, and the same request must work for the tenant whose blocks they are: nothing here passes because
a request was wrong in itself.
"""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon import protocol
from terracekv.daemon.http_queries import LISTENERS_OF_TENANT_MAX
from terracekv.daemon.protocol import Acquire, Committed, Error, Found, Leased, Lookup, Refused, Reserve, Reserved
from terracekv.tests.harness import Daemon, hello, payload_of
from terracekv.tests.intruders import (
    ATTACKER,
    BIG,
    OPERATOR,
    VICTIM,
    Answer,
    ask,
    block,
    both,
    chain,
    done,
    door,
    engine,
    events,
    from_disk,
    hear_of,
    two_tenants,
)

NOWHERE = bytes([0xEE]) * 32


def same(answer: Answer, name: str) -> tuple[int, list[str], bytes]:
    """What an answer tells, but for the name that was asked for and the time."""
    return answer.status, sorted(answer.headers), answer.body.replace(name.encode(), b"?")


@pytest.mark.fault(28)
def test_over_no_route_does_a_namespace_of_anothers_differ_from_none(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, engine(daemon, "victim", model="victims/model") as victim:
        keys = victim.chain(1, 2)
        assert victim.put(keys, durable=True).durable
        theirs = victim.space.hex()
        names = (theirs, theirs.upper(), theirs[:8], theirs[:63], "victims%2Fmodel", "%00", "..", "*")
        body = payload_of(keys[0], 4096)
        for key in (keys[0], bytes(32)):
            for tail in ("", "/0", "/1", "/65535"):
                for method, sent in (("GET", None), ("HEAD", None), ("PUT", body), ("DELETE", None)):
                    for headers in ({}, {"Range": "bytes=0-9"}, {"If_None_Match": "*"}):
                        none = _on_block(daemon, method, NOWHERE.hex(), key, tail, sent, headers)
                        assert none[0] == 404
                        for name in (theirs, theirs[:8]) if headers else names:
                            told = _on_block(daemon, method, name, key, tail, sent, headers)
                            assert told == none, (method, name, tail)
        order = {"keys": [key.hex() for key in keys]}
        for route, more in _ORDERS(order):
            none = same(ask(daemon, ATTACKER, "POST", route, {"namespace": "nobodys", **more}), "nobodys")
            for name in (theirs, theirs[:8], theirs.upper(), "victims/model"):
                assert same(ask(daemon, ATTACKER, "POST", route, {"namespace": name, **more}), name) == none, route
        mine = ask(daemon, VICTIM, "GET", block(victim.space, keys[0]), Range="bytes=0-9")
        assert (mine.status, mine.body) == (206, body[:10]) and "etag" in mine.headers
        for route, more in _ORDERS(order):
            assert done(daemon, VICTIM, "POST", route, {"namespace": "victims/model", **more})["namespace_id"] == theirs


def _ORDERS(keys: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    tokens = {"tokens": list(range(8))}
    asked = [("/v1/lookup", keys), ("/v1/lookup", tokens), ("/v1/prefetch", keys), ("/v1/prefetch", tokens)]
    return [*asked, ("/v1/pin", keys), ("/v1/unpin", keys), ("/v1/flush", {}), ("/v1/flush", {"tier": "host"})]


def _on_block(
    daemon: Daemon, method: str, name: str, key: bytes, tail: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, list[str], bytes]:
    answer = ask(daemon, ATTACKER, method, f"/v1/namespaces/{name}/blocks/{key.hex()}{tail}", body, **headers)
    plain = name.replace("%2F", "/").replace("%00", "\0")
    return same(answer, json.dumps(plain)[1:-1] if plain.isprintable() else repr(plain)[1:-1].replace("\\", "\\\\"))


@pytest.mark.fault(28)
def test_no_list_no_figure_and_no_event_tells_of_others(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, engine(daemon, "victim", model="victims/model") as victim:
        keys = victim.chain(1, 3)
        with events(daemon, VICTIM) as heard:  # while somebody listens they are kept, for those who ask later
            assert victim.put(keys, durable=True) == Stored(stored=3, durable=3)
            hear_of(heard, victim.space)
        telling = (victim.space.hex(), "victims/model", "victims-token", '"victim"', *(k.hex() for k in keys))
        for route in ("/v1/status", "/v1/namespaces", "/openapi.json", "/readyz", "/healthz", "/"):
            seen = ask(daemon, ATTACKER, "GET", route)
            assert seen.status == 200 and not any(word in seen.body.decode() for word in telling), route
        for route in ("/v1/status", "/v1/namespaces"):
            assert "victims/model" in ask(daemon, VICTIM, "GET", route).body.decode()
        for method, route in (("GET", "/metrics"), ("POST", "/v1/verify"), ("POST", "/v1/sync")):
            body = {"tier": "disk"} if method == "POST" else None
            assert ask(daemon, ATTACKER, method, route, body).status == 403
            assert ask(daemon, OPERATOR, method, route, body).status == 200
        for last in ("0", "1"):
            with engine(daemon, "attacker") as attacker, events(daemon, ATTACKER, last) as heard:
                assert attacker.put(attacker.chain(1, 1)).stored == 1  # whatever comes first is of before
                before = hear_of(heard, attacker.space)
                assert not any(word.encode() in before for word in telling)
            with events(daemon, VICTIM, last) as again:
                hear_of(again, victim.space)
            done(daemon, ATTACKER, "POST", "/v1/flush", {"namespace": attacker.space.hex()})


@pytest.mark.fault(28)
def test_who_knows_anothers_keys_can_neither_replace_nor_delete_what_they_name(shm_dir: Path, tmp_path: Path) -> None:
    """Over HTTP whoever writes chooses keys: those of others too, in its own namespace."""
    with two_tenants(shm_dir, tmp_path) as daemon, both(daemon) as (attacker, victim):
        keys = victim.chain(1, 3)
        assert victim.put(keys, durable=True) == Stored(stored=3, durable=3)
        whole, forged = [payload_of(key, 4096) for key in keys], bytes(4096)
        for key in keys:  # of what it does not have itself
            done(daemon, ATTACKER, "DELETE", block(attacker.space, key))
        assert from_disk(daemon, VICTIM, victim.space, keys) == whole
        for key in keys:
            done(daemon, ATTACKER, "PUT", f"{block(attacker.space, key)}?durable=1", forged)
        assert from_disk(daemon, VICTIM, victim.space, keys) == whole
        assert from_disk(daemon, ATTACKER, attacker.space, keys) == [forged] * 3, "each has its own"
        for order in ("prefetch", "unpin"):
            done(daemon, ATTACKER, "POST", f"/v1/{order}", chain(attacker.space, keys))
        done(daemon, ATTACKER, "POST", "/v1/flush", {"namespace": attacker.space.hex()})
        assert from_disk(daemon, VICTIM, victim.space, keys) == whole
        assert from_disk(daemon, ATTACKER, attacker.space, keys) == [None] * 3
        assert done(daemon, OPERATOR, "POST", "/v1/verify", {"tier": "disk"})["wrong"] == {}
        for key in keys:
            assert done(daemon, VICTIM, "DELETE", block(victim.space, key))["done"]["disk"]["deleted"] == 1
        assert from_disk(daemon, VICTIM, victim.space, keys) == [None] * 3


def test_anothers_pins_are_neither_ended_nor_renewed_nor_told_of(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, both(daemon) as (attacker, victim):
        keys = victim.chain(1, 2)
        assert victim.put(keys) == Stored(stored=2)
        mine, theirs = chain(victim.space, keys), chain(attacker.space, keys)

        def pinned() -> int:
            return int(done(daemon, OPERATOR, "GET", "/v1/status")["pins"]["blocks"])

        assert done(daemon, VICTIM, "POST", "/v1/pin", mine)["done"]["host"]["pinned"] == 2
        told = done(daemon, ATTACKER, "POST", "/v1/pin", theirs | {"ttl_s": 0.001})
        assert told["done"]["host"] == {"pinned": 0, "renewed": 0} and told["skipped"]["miss"] == 2
        assert done(daemon, ATTACKER, "POST", "/v1/unpin", theirs)["done"]["host"]["unpinned"] == 0
        for key in keys:
            done(daemon, ATTACKER, "DELETE", block(attacker.space, key))
        done(daemon, ATTACKER, "POST", "/v1/flush", {"namespace": attacker.space.hex()})
        assert pinned() == 2
        assert done(daemon, VICTIM, "POST", "/v1/unpin", mine)["done"]["host"]["unpinned"] == 2
        assert pinned() == 0


def test_nothing_tells_that_another_once_had_a_block(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path, disk__enabled="false") as daemon, both(daemon, BIG) as (attacker, victim):
        keys = victim.chain(1, 1)
        assert victim.put(keys) == Stored(stored=1)
        for seed in range(2, 20):
            assert victim.put(victim.chain(seed, 1)).stored == 1
        assert victim.lookup(keys).reason == "evicted" and attacker.lookup(keys).reason == "absent"
        for secret, mine, reason in ((VICTIM, victim, "evicted"), (ATTACKER, attacker, "absent")):
            found = done(daemon, secret, "POST", "/v1/lookup", chain(mine.space, keys))
            assert found["first_miss"]["reason"] == reason


def test_no_count_tells_of_blocks_that_others_read(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, both(daemon) as (attacker, victim):
        assert attacker.put(attacker.chain(9, 1)) == Stored(stored=1)
        keys = victim.chain(1, 2)
        assert victim.put(keys) == Stored(stored=2)
        with daemon.wire(hello(credential=VICTIM.encode())) as reader:
            assert isinstance(reader.ask(Acquire(1, b"".join(keys), 1000)), Leased)
            for secret, mine, leased in ((VICTIM, victim, 2), (ATTACKER, attacker, 0), (VICTIM, victim, 2)):
                told = done(daemon, secret, "POST", "/v1/flush", {"namespace": mine.space.hex()})
                assert told["skipped"]["leased"] == leased


def test_no_error_quotes_what_a_tier_said_of_anothers_blocks(shm_dir: Path, tmp_path: Path) -> None:
    tenants = "[tenants.attacker]\n[tenants.victim]\ndisk = 0\n"
    more = {"daemon__queue": "64KiB"}
    with two_tenants(shm_dir, tmp_path, tenants, **more) as daemon, engine(daemon, "victim") as victim:
        key = victim.chain(1, 1)[0]
        kept = ask(daemon, VICTIM, "PUT", f"{block(victim.space, key)}?durable=1", bytes(4096))
        assert kept.status == 507 and "tenant victim" in kept.json["error"]["message"], "of one's own it tells"
        with engine(daemon, "attacker", BIG) as attacker:
            route = f"{block(attacker.space, key)}?durable=1"
            told = ask(daemon, ATTACKER, "PUT", route, bytes(BIG))
            assert (
                told.status == 503 and "victim" not in told.body.decode() and "did not reach disk" in told.body.decode()
            )
            assert "tenant victim" in ask(daemon, OPERATOR, "PUT", route, bytes(BIG)).body.decode()
            assert "victim" not in ask(daemon, ATTACKER, "GET", "/readyz").body.decode()


@pytest.mark.fault(28)
def test_an_engine_gets_nothing_under_anothers_keys_handles_and_numbers(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, both(daemon) as (_, victim):
        keys = victim.chain(1, 3)
        assert victim.put(keys, durable=True) == Stored(stored=3, durable=3)
        mine, theirs = hello(credential=VICTIM.encode()), hello(credential=ATTACKER.encode())
        with daemon.wire(mine) as owner, daemon.wire(theirs) as other, daemon.wire(theirs) as third:
            new = victim.chain(2, 2)
            leased, reserved = owner.ask(Acquire(1, b"".join(keys), 1000)), owner.ask(Reserve(2, b"".join(new)))
            assert isinstance(leased, Leased) and isinstance(reserved, Reserved)
            for handle in range(-1, 16):
                for wire in (other, third):
                    wire.tell(protocol.Release(handle))
                    wire.tell(protocol.Abort(handle))
                    refused = wire.ask(protocol.Commit(3, handle, [0]))
                    assert isinstance(refused, Error) and refused.kind == "not_found"
            wire.tell(protocol.Pin(b"".join(keys), 1))
            wire.tell(protocol.Prefetch(b"".join(keys)))
            found = other.ask(Lookup(4, b"".join(keys), 1000))
            assert isinstance(found, Found) and found.blocks == 0 and found.reason == "absent"
            nothing = other.ask(Acquire(5, b"".join(keys), 1000))
            assert isinstance(nothing, Leased) and nothing.slots == [None] * 3 and not nothing.pending
            sessions = done(daemon, VICTIM, "GET", "/v1/status")["sessions"]
            assert [(s["leased_blocks"], s["reserved_blocks"]) for s in sessions] == [(0, 0), (3, 2)]
            committed = owner.ask(protocol.Commit(6, reserved.reservation, [0, 1]))
            assert isinstance(committed, Committed) and committed.stored == [0, 1]
        assert victim.lookup(new).blocks == 2 and from_disk(daemon, VICTIM, victim.space, keys[:1]) != [None]


def test_no_hello_names_anothers_namespace(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, engine(daemon, "victim") as victim:
        theirs = victim.space
        secret = (tmp_path / "d" / "state" / "secret").read_bytes()
        for guess in (b"", b"victim", b"victims-token", theirs, theirs.hex().encode(), bytes(32), secret, b"operator"):
            with daemon.wire() as wire:
                refused = wire.ask(hello(credential=guess))
                assert isinstance(refused, Refused) and refused.field == "credential"
        with daemon.wire() as wire:
            refused = wire.ask(hello(model="m\0victim", credential=ATTACKER.encode()))
            assert isinstance(refused, Refused) and refused.field == "model"
        for model in ("m", "mvictim", theirs.hex(), "victim/m"):
            for access in ("read", "write"):
                with daemon.wire(hello(model=model, credential=ATTACKER.encode(), access=access)) as wire:
                    assert wire.welcome is not None and wire.welcome.namespace_id != theirs
                    assert isinstance(wire.ask(hello(credential=VICTIM.encode())), Error), "once is once"
        with daemon.wire(hello(credential=VICTIM.encode(), access="read")) as wire:
            assert wire.welcome is not None and wire.welcome.namespace_id == theirs


@pytest.mark.fault(28)
def test_no_way_around_a_quota_takes_anothers_room(shm_dir: Path, tmp_path: Path) -> None:
    """By many namespaces, reservations never committed, leases, pins, uploads that do not end and sessions that do."""
    tenants = f"[tenants.attacker]\nhost = {4 * BIG}\n[tenants.victim]\n"
    with two_tenants(shm_dir, tmp_path, tenants, disk__enabled="false") as daemon:
        with engine(daemon, "victim", BIG) as victim, contextlib.ExitStack() as held:
            keys = victim.chain(1, 12)
            assert victim.put(keys) == Stored(stored=12)

            def used(secret: str) -> int:
                return int(done(daemon, secret, "GET", "/v1/status")["tiers"]["host"]["used_bytes"])

            for n in range(6):
                mine = held.enter_context(engine(daemon, "attacker", BIG, model=f"m{n}"))
                one = mine.chain(n, 1)
                if not n:
                    assert mine.put(one) == Stored(stored=1)
                    done(daemon, ATTACKER, "POST", "/v1/pin", chain(mine.space, one))
                said = hello(BIG, model=f"m{n}", credential=ATTACKER.encode())
                wire = held.enter_context(daemon.wire(said))
                wire.ask(Acquire(1, one[0], 1000))
                wire.ask(Reserve(2, b"".join(mine.chain(100 + n, 2))))
                upload = held.enter_context(contextlib.closing(door(daemon)))
                upload.putrequest("PUT", block(mine.space, one[0]))
                upload.putheader("Authorization", f"Bearer {ATTACKER}")
                upload.putheader("Content-Length", str(BIG))
                upload.endheaders(b"x")
                assert used(ATTACKER) <= 4 * BIG
            assert used(ATTACKER) == 4 * BIG, "it has all that it may have"
            full = ask(daemon, ATTACKER, "PUT", block(mine.space, one[0]), bytes(BIG))
            assert (full.status, full.json["error"]["kind"]) == (507, "quota")
            assert victim.get(keys) == Loaded(12, None) and used(VICTIM) == 12 * BIG


def test_a_tenant_listens_to_events_so_often_and_others_still_can(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, contextlib.ExitStack() as held:
        for _ in range(LISTENERS_OF_TENANT_MAX):
            held.enter_context(events(daemon, ATTACKER))
        assert ask(daemon, ATTACKER, "GET", "/v1/events").status == 503
        for secret in (VICTIM, OPERATOR):
            held.enter_context(events(daemon, secret))


def test_no_door_answers_before_it_is_told_who_asks(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon, engine(daemon, "victim") as victim:
        for message in (Lookup(1, bytes(32), 0), Acquire(1, bytes(32), 0), Reserve(1, bytes(32)), protocol.Release(1)):
            with daemon.wire() as wire:
                answer = wire.ask(message)
                assert isinstance(answer, Error) and "before Hello" in answer.message
        with socket.socket(socket.AF_UNIX) as bare:
            bare.settimeout(30.0)
            bare.connect(str(daemon.runtime / "http.sock"))
            bare.sendall(f"GET {block(victim.space, bytes(32))} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert bare.recv(4096).startswith(b"HTTP/1.1 401 ")
        assert victim.lookup(victim.chain(1, 1)).blocks == 0

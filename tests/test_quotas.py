"""Quotas: a tenant's own blocks go first, then it is refused with numbers; what others have is not touched."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.tests.blocks import BLOCK_BYTES, in_threads, name, payload_of, put
from terracekv.tests.disks import CAP, SEGMENT, Disks, crash
from terracekv.tests.harness import Daemon, until
from terracekv.tests.hosts import BLOCK, Host, host_in
from terracekv.tests.people import People, keys_of, served, url, whole
from terracekv.tests.people import until as in_time
from terracekv.tiers.catalog import DATA, Catalog
from terracekv.tiers.checksum import checksum
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.folder import seal_of
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import PAGE, Outcome

CHAIN = [name(index) for index in range(20)]
STORED, PRESENT, QUOTA = Outcome.STORED, Outcome.PRESENT, Outcome.QUOTA
RECORD = 6 * PAGE
"""Bytes of a record of BLOCK_BYTES on disk: a page of header, five of payload."""


def owned(namespaces: Namespaces, seed: int, tenant: str, block_bytes: int = BLOCK) -> Namespace:
    wanted = Namespace(bytes([seed]) * 32, 0, 0, f"m{seed}", "r", "u8", bytes(32), 4, 1, block_bytes, tenant=tenant)
    return namespaces.register(wanted)


def listed(host: Host | DiskTier, namespace: Namespace, ids: list[bytes] = CHAIN) -> list[int]:
    return [index for index, id in enumerate(ids) if host.leading(namespace, [id])]


@pytest.mark.fault(45)
def test_host_evicts_a_tenants_own_oldest_blocks_for_its_new_ones(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        red, blue = owned(host.namespaces, 11, "red"), owned(host.namespaces, 12, "blue")
        also_red = owned(host.namespaces, 13, "red")
        host.shares.limits = {"red": 4 * PAGE}
        assert host.put_chain(blue, CHAIN[:6]) == [STORED] * 6  # the oldest of all
        assert host.put_chain(also_red, CHAIN[10:12]) == [STORED] * 2
        assert host.put_chain(red, CHAIN[:3]) == [STORED] * 3
        assert host.shares.by_tenant() == {"red": 4 * PAGE, "blue": 6 * PAGE}
        assert listed(host, also_red) == [10], "the tail of what was least recently used, whatever its namespace"
        assert listed(host, red) == [0, 1, 2] and listed(host, blue) == list(range(6))
        assert host.counters.evictions == {"quota": 1}
        host.check()


def test_what_is_left_of_a_chain_is_refused_and_what_is_leased_stays(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        red = owned(host.namespaces, 11, "red")
        host.shares.limits = {"red": 3 * PAGE}
        assert host.put_chain(red, CHAIN[:5]) == [STORED] * 3 + [QUOTA] * 2
        leases = host.held(red, CHAIN[:3])
        assert host.put_chain(red, CHAIN[10:12]) == [QUOTA] * 2
        assert listed(host, red) == [0, 1, 2]
        host.release(leases)
        assert host.put_chain(red, CHAIN[:4]) == [PRESENT] * 3 + [QUOTA], "a chain does not evict its own head"
        assert host.put_chain(red, CHAIN[10:12]) == [STORED] * 2
        assert listed(host, red) == [0, 10, 11]
        host.check()


def test_the_same_keys_in_another_namespace_of_the_tenant_make_room_as_any_others(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        red, also_red = owned(host.namespaces, 11, "red"), owned(host.namespaces, 13, "red")
        host.shares.limits = {"red": 3 * PAGE}
        assert host.put_chain(also_red, CHAIN[:3]) == host.put_chain(red, CHAIN[:3]) == [STORED] * 3
        assert listed(host, red) == [0, 1, 2] and listed(host, also_red) == []


@pytest.mark.parametrize("limit", [0, PAGE - 1])
def test_a_tenant_without_room_for_one_block_stores_nothing_and_loses_nothing(shm_dir: Path, limit: int) -> None:
    with host_in(shm_dir) as host:
        red = owned(host.namespaces, 11, "red")
        host.shares.limits = {"red": limit}
        assert host.put_chain(red, CHAIN[:2]) == [QUOTA] * 2
        assert host.put_chain(owned(host.namespaces, 12, "blue"), CHAIN[:2]) == [STORED] * 2
        assert host.put_chain(host.namespace, CHAIN[:2]) == [STORED] * 2, "who is nobody's has no quota"
        host.check()


def test_a_lower_quota_takes_hold_with_the_next_block(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        red = owned(host.namespaces, 11, "red")
        assert host.put_chain(red, CHAIN[:8]) == [STORED] * 8
        host.shares.limits = {"red": 2 * PAGE}
        assert listed(host, red) == list(range(8))
        assert host.put_chain(red, CHAIN[10:11]) == [STORED]
        assert host.shares.of("red") == 2 * PAGE and listed(host, red) == [0, 10]
        host.check()


def test_slots_that_are_being_written_and_doomed_ones_count(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        red = owned(host.namespaces, 11, "red")
        host.shares.limits = {"red": 3 * PAGE}
        writing = [slot for slot in host.reserve(red, CHAIN[:2], 1) if isinstance(slot, Slot)]
        assert len(writing) == 2 and host.reserve(red, CHAIN[5:7], 2)[1] is QUOTA
        host.abort(writing)
        assert host.shares.of("red") == PAGE
        host.check()
        assert host.put_chain(red, CHAIN[:2]) == [STORED] * 2
        leases = host.held(red, CHAIN[:2])
        assert host.delete(red, CHAIN[:2]) == 2 and host.shares.of("red") == 3 * PAGE
        assert host.reserve(red, CHAIN[9:10], 1) == [QUOTA], "their readers still hold them"
        host.release(leases)
        assert host.shares.of("red") == PAGE
        host.check()


def test_the_books_of_host_survive_a_restart_and_learn_late_whose_a_namespace_is(shm_dir: Path) -> None:
    with host_in(shm_dir, 4) as host:
        assert host.put_chain(owned(host.namespaces, 11, "red"), CHAIN[:5]) == [STORED] * 5
    with host_in(shm_dir, 4) as host:
        assert host.shares.by_tenant() == {"red": 5 * PAGE}
        host.check()
    (shm_dir / "namespaces.json").unlink()
    with host_in(shm_dir, 4) as host:
        assert host.shares.by_tenant() == {"": 5 * PAGE}, "known from its records only"
        red = owned(host.namespaces, 11, "red")
        assert host.shares.by_tenant() == {"red": 5 * PAGE}
        host.shares.limits = {"red": 5 * PAGE}
        assert host.put_chain(red, CHAIN[7:8]) == [STORED] and host.shares.of("red") == 5 * PAGE
        host.check()


def test_no_order_of_things_brings_a_tenant_over_its_quota_or_the_books_out_of_balance(shm_dir: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with host_in(shm_dir, 4) as host:
        spaces = [owned(host.namespaces, 20 + n, ("red", "red", "blue", "")[n]) for n in range(4)]
        limits = {"red": 5 * PAGE, "blue": 3 * PAGE}
        host.shares.limits = limits
        held: list[Slot] = []
        for _ in range(600):
            namespace, start = dice.choice(spaces), dice.randrange(12)
            ids = CHAIN[start : start + dice.randrange(1, 5)]
            match dice.randrange(6):
                case 0 | 1 | 2:
                    host.put_chain(namespace, ids)
                case 3 if len(held) < 6:
                    held += [slot for slot in host.acquire(namespace, ids) if slot is not None]
                case 4:
                    host.delete(namespace, ids)
                case _:
                    host.release(held)
                    held = []
            for tenant, limit in limits.items():
                assert host.shares.of(tenant) <= limit
            host.check()
        host.release(held)


def fill(tier: DiskTier, namespace: Namespace, first: int, last: int) -> list[Outcome]:
    return [put(tier, namespace, name(index)) for index in range(first, last)]


@pytest.fixture
def disk(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


@pytest.mark.fault(45)
def test_disk_evicts_a_tenants_own_oldest_blocks_for_its_new_ones(disk: Disks) -> None:
    red, blue = (owned(disk.namespaces, n, tenant, BLOCK_BYTES) for n, tenant in ((11, "red"), (12, "blue")))
    ids = [name(index) for index in range(30)]
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": 5 * RECORD}
        assert fill(tier, blue, 0, 9) == [STORED] * 9
        assert fill(tier, red, 10, 15) == [STORED] * 5
        assert fill(tier, blue, 15, 20) == [STORED] * 5
        assert fill(tier, red, 20, 23) == [STORED] * 3
        assert listed(tier, red, ids) == [13, 14, 20, 21, 22]
        assert listed(tier, blue, ids) == [*range(9), *range(15, 20)]
        assert tier.shares.by_tenant() == {"red": 5 * RECORD, "blue": 14 * RECORD}
        assert tier.status().counters.evictions == {"quota": 3}
        tier.check()


def test_a_block_larger_than_the_tenants_share_of_disk_is_refused_with_the_numbers(disk: Disks) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        assert fill(tier, red, 0, 2) == [STORED] * 2
        tier.shares.limits = {"red": RECORD - 1}
        assert fill(tier, red, 5, 6) == [QUOTA]
        assert listed(tier, red, [name(index) for index in range(6)]) == [0, 1], "nothing was evicted in vain"
        assert str(RECORD - 1) in str(tier.status().last_error) and "red" in str(tier.status().last_error)
        tier.check()


def test_the_books_of_disk_follow_every_way_in_which_a_block_comes_and_goes(disk: Disks) -> None:
    """Eviction with segments, saving what was hit, deleting, flushing, damage, a rebuild, another start."""
    red, blue = (owned(disk.namespaces, n, tenant, BLOCK_BYTES) for n, tenant in ((11, "red"), (12, "blue")))
    with closing(disk.open()) as tier:
        for index in range(700):
            put(tier, (red, blue)[index % 3 == 0], name(index))
            if index % 7 == 0:
                tier.get(red, name(index - index % 3 + 1), memoryview(bytearray(BLOCK_BYTES)))
        assert tier.status().counters.evictions["capacity"] > 0
        tier.check()
        assert tier.delete(red, [name(index) for index in range(690, 700)]) > 0
        tier.check()
        assert tier.reclaim(disk.namespaces.raise_epoch(blue.id)) > 0
        tier.check()
        assert tier.shares.by_tenant().keys() == {"red"}
        before = tier.shares.by_tenant()
    with closing(disk.open()) as tier:
        assert tier.shares.by_tenant() == before
        tier.check()
    Catalog.discard(disk.path / "catalog")
    with closing(disk.open()) as tier:
        assert tier.rebuild() > 0
        tier.check()
        assert tier.shares.by_tenant()["red"] >= before["red"], "deleted blocks may be listed again"


def test_a_quota_binds_after_a_restart_too(disk: Disks) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": 5 * RECORD}
        fill(tier, red, 0, 5)
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": 5 * RECORD}
        assert fill(tier, red, 5, 7) == [STORED] * 2
        assert listed(tier, red, [name(index) for index in range(7)]) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("line", ["catalog.commit*9", "disk.publish*9", "disk.published*9"])
def test_killed_between_a_block_and_its_books_neither_is_there_without_the_other(disk: Disks, line: str) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)

    def work() -> None:
        tier = disk.open()
        tier.shares.limits = {"red": 4 * RECORD}
        fill(tier, red, 0, 40)

    crash(work, f"{line}=kill")
    with closing(disk.open()) as tier:
        count = len(listed(tier, red, [name(index) for index in range(40)]))
        assert count and tier.shares.of("red") == count * RECORD
        tier.check()


def test_a_catalog_of_before_there_were_books_is_counted_when_it_is_opened(disk: Disks) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        fill(tier, red, 0, 5)
    environment = lmdb.open(str(disk.path / "catalog"), max_dbs=4)
    with environment.begin(write=True) as transaction:
        transaction.drop(environment.open_db(b"held", transaction), delete=True)
    environment.close()
    state = json.loads((disk.path / "state.json").read_text())
    state["seal"] = seal_of(disk.path / "catalog" / DATA)
    (disk.path / "state.json").write_text(json.dumps(state))
    with closing(disk.open()) as tier:
        assert not tier.rebuilding and tier.shares.of("red") == 5 * RECORD
        tier.check()


def test_threads_that_store_at_once_stay_within_the_quota_together(disk: Disks) -> None:
    red = owned(disk.namespaces, 11, "red", BLOCK_BYTES)
    with closing(disk.open()) as tier:
        tier.shares.limits = {"red": 6 * RECORD}

        def store(thread: int) -> None:
            for index in range(12):
                assert put(tier, red, name(100 * thread + index)) is STORED
                assert tier.shares.of("red") <= 6 * RECORD

        in_threads(*(lambda n=n: store(n) for n in range(4)))
        tier.check()
        assert 0 < tier.shares.of("red") <= 6 * RECORD


@pytest.mark.fault(45)
@served()
async def test_a_block_that_disk_may_not_have_is_507_where_it_should_be_durable(people: People) -> None:
    namespace = owned(people.store.namespaces, 1, "red", 20_000)
    (key,) = keys_of(1)
    assert people.store.disk is not None
    people.store.disk.shares.limits = {"red": RECORD - 1}
    body = whole(namespace, key)
    async with people.client.put(url(namespace, key), data=body, params={"durable": "1"}) as full:
        error = (await full.json())["error"]
        assert (full.status, error["kind"], error["tier"]) == (507, "quota", "disk")
        assert (error["needed_bytes"], error["used_bytes"], error["limit_bytes"]) == (RECORD, 0, RECORD - 1)
    people.store.disk.shares.limits = {"red": RECORD}
    async with people.client.put(url(namespace, key), data=body, params={"durable": "1"}) as answer:
        assert answer.status == 200, "exactly its quota is not too much"


@pytest.mark.fault(45)
@served()
async def test_over_http_a_full_quota_is_507_with_the_numbers(people: People) -> None:
    namespace = owned(people.store.namespaces, 1, "red", 20_000)
    slot = 5 * PAGE
    people.store.host.shares.limits = {"red": 2 * slot}
    keys = keys_of(3)
    await people.put(namespace, *keys[:2])
    status, answer = await people.ask("POST", "/v1/pin", {"namespace": "m1", "keys": [key.hex() for key in keys[:2]]})
    assert status == 200 and answer["done"]["host"]["pinned"] == 2
    async with people.client.put(url(namespace, keys[2]), data=whole(namespace, keys[2])) as full:
        error = (await full.json())["error"]
        assert (full.status, error["kind"]) == (507, "quota")
        figures = {name: error[name] for name in ("tier", "needed_bytes", "used_bytes", "limit_bytes")}
        assert figures == {"tier": "host", "needed_bytes": slot, "used_bytes": 2 * slot, "limit_bytes": 2 * slot}
        assert "red" in error["message"] and error["hint"]
    await people.ask("POST", "/v1/unpin", {"namespace": "m1", "keys": [key.hex() for key in keys[:2]]})
    await in_time(lambda: not people.store.host.leases())  # a write to disk holds one too
    await people.put(namespace, keys[2])
    assert await people.lookup(namespace, keys[2:]) == 1


@pytest.mark.fault(45)
def test_an_engine_is_refused_with_the_reason_and_the_status_has_the_books(shm_dir: Path, tmp_path: Path) -> None:
    text = """
[[tokens]]
name = "reds"
secret = "red-secret-0000001"
tenant = "red"
rights = ["read", "write"]
[tenants.red]
host = "16KiB"
disk = "40KiB"
[tenants.blue]
"""
    path = tmp_path / "access.toml"
    path.write_text(text)
    with Daemon(shm_dir / "run", tmp_path / "d", access__file=str(path)) as daemon:
        with daemon.client(credential=b"red-secret-0000001") as red:
            keys = red.chain(1, 6)
            assert red.put(keys) == Stored(stored=4, refused=2, why="quota")
            assert red.get(keys) == Loaded(4, "absent")

            def books() -> Any:
                return {row["tenant"]: row["tiers"] for row in daemon.http("/v1/status")[1]["tenants"]}

            until(lambda: books()["red"]["disk"]["used_bytes"] == 4 * 2 * PAGE, "what was stored is on disk")
            until(
                lambda: red.put(red.chain(2, 3), durable=True).durable == 3, "no block is on its way to disk any more"
            )
            # Records written at one moment are counted twice for the blink in which they are listed.
            assert 3 * 2 * PAGE <= books()["red"]["disk"]["used_bytes"] <= 5 * 2 * PAGE
            assert books()["red"]["host"] == {"used_bytes": 4 * PAGE, "limit_bytes": 4 * PAGE}
            assert books()["red"]["disk"]["limit_bytes"] == 40 << 10
            assert books()["blue"] == {tier: {"used_bytes": 0, "limit_bytes": None} for tier in ("host", "disk")}
            path.write_text(text.replace("16KiB", "64KiB"))
            until(lambda: books()["red"]["host"]["limit_bytes"] == 64 << 10, "the new quota is in force")
            assert red.put(red.chain(3, 8)) == Stored(stored=8)
        daemon.restart()
        rows = daemon.http("/v1/status")[1]["tenants"]
        red_host = next(row for row in rows if row["tenant"] == "red")["tiers"]["host"]
        assert 0 < red_host["used_bytes"] <= red_host["limit_bytes"] == 64 << 10
        assert daemon.errors() == []


def test_a_block_that_comes_up_from_disk_is_within_the_quota(shm_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(
        "[[tokens]]\nname='reds'\nsecret='red-secret-0000001'\ntenant='red'\nrights=['read','write']\n"
        "[tenants.red]\nhost='16KiB'\n"
    )
    with Daemon(shm_dir / "run", tmp_path / "d", access__file=str(path)) as daemon:
        with daemon.client(credential=b"red-secret-0000001") as red:
            first, second = red.chain(1, 4), red.chain(2, 4)
            assert red.put(first, durable=True).durable == 4 and red.put(second, durable=True).durable == 4
            assert red.lookup(first).per_tier == {"host": 0, "disk": 4}
            assert red.get(first) == Loaded(4, None), "its own others made room"
            rows = daemon.http("/v1/status")[1]["tenants"]
            assert [row["tiers"]["host"]["used_bytes"] for row in rows] == [16 << 10]


def test_the_number_of_bytes_a_record_takes_is_what_the_books_say(disk: Disks) -> None:
    red = replace(owned(disk.namespaces, 11, "red", BLOCK_BYTES))
    with closing(disk.open(CAP, segment_bytes=SEGMENT)) as tier:
        payload = payload_of(name(1), red.id, BLOCK_BYTES)
        assert tier.put(red, name(1), memoryview(payload), checksum(payload)) is STORED
        assert tier.shares.of("red") == RECORD == int(tier.status().details["record_bytes"] or 0)

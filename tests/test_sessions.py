"""Sessions: what they lease and reserve ends with them, at the latest, and nothing of it twice."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from terracekv.daemon.sessions import read_secret, tenant_salt
from terracekv.tests.hosts import SLOTS, lock_byte
from terracekv.tests.stores import World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers.block import block_id
from terracekv.tiers.errors import Damaged, NotFound
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Outcome

worlds = pytest.fixture(opened_worlds)


class Told:
    """What a session was told of its pending blocks: (lease, index, result)."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, Slot | Outcome]] = []

    def __call__(self, handle: int, index: int, result: Slot | Outcome) -> None:
        self.all.append((handle, index, result))


@pytest.mark.fault(42)
def test_a_lease_ends_once_however_often_it_is_released(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        await w.idle()
        session, other = w.session(), w.session()
        handle, _ = w.sessions.acquire(session, [key(1)], Told())
        again, _ = w.sessions.acquire(other, [key(1)], Told())
        assert w.sessions.release(session, handle)
        assert not w.sessions.release(session, handle) and not w.sessions.release(session, 99)
        assert list(w.host.leases().values()) == [1], "the other session's lease is its own"
        assert w.sessions.release(other, again) and w.host.leases() == {}
        w.sessions.close(session)
        w.sessions.close(session)
        w.sessions.close(other)

    worlds.run(story)


@pytest.mark.fault(41)
def test_what_a_session_holds_ends_with_it(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(2, 3)
        await w.put(1)
        session, told = w.session(), Told()
        _, lease = w.sessions.acquire(session, [key(1), key(2), key(3)], told)
        assert sorted(lease.pending) == [1, 2] and 0 in lease.slots
        w.sessions.reserve(session, [key(10), key(11)])
        w.sessions.close(session)
        await w.idle()
        assert told.all == [], "told of a lease that is over"
        assert w.host.leases() == {} and w.host.detail("reserved_blocks") == 0
        assert w.store.lookup(w.namespace, [key(1), key(2), key(3)]).per_tier["host"] == 3

    worlds.run(story)


@pytest.mark.fault(125)
def test_what_comes_after_the_deadline_comes_under_no_lease(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.only_on_disk(1, 2)
        assert w.disk
        w.disk.reading.clear()
        session, told = w.session(), Told()
        handle, lease = w.sessions.acquire(session, [key(1), key(2)], told)
        assert w.sessions.give_up(lease) == [0, 1] and w.sessions.give_up(lease) == []
        w.disk.reading.set()
        await w.idle()
        assert told.all == [] and lease.slots == {} and w.host.leases() == {}
        assert w.sessions.release(session, handle)
        w.sessions.close(session)

    worlds.run(story)


@pytest.mark.fault(17)
def test_ten_thousand_aborted_loads_and_stores_leave_nothing_held(worlds: Worlds) -> None:
    seed = int.from_bytes(os.urandom(4))

    async def story(w: World) -> None:
        dice = random.Random(seed)
        await w.only_on_disk(1, 2)
        await w.put(3)
        session = w.session()
        for step in range(10_000):
            match dice.randrange(3):
                case 0:
                    handle, lease = w.sessions.acquire(session, [key(3), key(1), key(2)], Told())
                    if dice.random() < 0.3:
                        w.sessions.give_up(lease)
                    w.sessions.release(session, handle)
                case 1:
                    handle, _ = w.sessions.reserve(session, [key(10), key(11)])
                    w.sessions.abort(session, handle)
                    assert not w.sessions.abort(session, handle)
                case _:
                    w.sessions.close(session)
                    session = w.session()
            if step % 500 == 0:
                await asyncio.sleep(0.001)
        w.sessions.close(session)
        await w.idle()
        assert w.host.leases() == {} and w.host.detail("reserved_blocks") == 0, f"seed {seed}"
        assert w.sessions.open == {} and w.store.promoter.coming == 0

    worlds.run(story)


def test_only_the_open_slots_of_a_reservation_can_be_committed_and_once(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        session, other = w.session(), w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2), key(3)])
        assert slots[0] is Outcome.PRESENT
        w.fill(slots, ids_of(1, 2, 3))
        for who, which, indices in (
            (session, handle, [0]),
            (session, handle, [3]),
            (session, handle, [-1]),
            (session, handle, [1, 1]),
            (session, handle + 1, [1]),
            (other, handle, [1]),
        ):
            with pytest.raises(NotFound, match="no open slots"):
                await w.sessions.commit(who, which, indices, False)
        assert w.store.lookup(w.namespace, [key(1), key(2)]).blocks == 1, "a refused commit does nothing"
        assert await w.sessions.commit(session, handle, [1], False) == ([1], [])
        with pytest.raises(NotFound):
            await w.sessions.commit(session, handle, [1], False)
        assert w.sessions.abort(session, handle)
        with pytest.raises(NotFound):
            await w.sessions.commit(session, handle, [2], False)
        assert w.store.lookup(w.namespace, [key(1), key(2), key(3)]).blocks == 2
        w.sessions.close(session)
        w.sessions.close(other)

    worlds.run(story)


@pytest.mark.fault(30)
def test_two_sessions_may_commit_the_same_block_at_once(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        sessions = [w.session() for _ in range(3)]
        commits = []
        for session in sessions:
            handle, slots = w.sessions.reserve(session, [key(1)])
            w.fill(slots, ids_of(1))
            commits.append(w.sessions.commit(session, handle, [0], False))
        assert await asyncio.gather(*commits) == [([0], [])] * 3
        await w.idle()
        assert w.host.status().blocks == 1 and w.host.detail("reserved_blocks") == 0
        (slot,) = w.host.held(w.namespace, ids_of(1))
        assert w.right(slot, ids_of(1)[0])
        w.host.release([slot])
        for session in sessions:
            w.sessions.close(session)

    worlds.run(story)


def test_a_commit_goes_on_when_its_session_ends_meanwhile(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2)])
        w.fill(slots, ids_of(1, 2))
        commit = asyncio.create_task(w.sessions.commit(session, handle, [0], False))
        await asyncio.sleep(0)
        w.sessions.close(session)
        assert await commit == ([0], [])
        await w.idle()
        assert w.store.lookup(w.namespace, [key(1), key(2)]).blocks == 1
        assert w.host.detail("reserved_blocks") == 0

    worlds.run(story)


@pytest.mark.fault(17)
def test_slots_of_a_session_that_ended_are_kept_while_its_process_may_write(worlds: Worlds, shm_dir: Path) -> None:
    async def story(w: World) -> None:
        session = w.session()
        held = lock_byte(shm_dir / "slots", session.number)
        _, slots = w.sessions.reserve(session, [key(1), key(2)])
        w.sessions.close(session)
        assert w.host.detail("orphaned_blocks") == 2
        assert len(await w.put(*range(10, 10 + SLOTS))) == SLOTS - 2
        os.close(held)
        assert w.host.reap() == 0
        await w.idle()
        assert len(await w.put(*range(20, 20 + SLOTS))) == SLOTS
        assert not any(w.host.table.current(slot) for slot in slots if isinstance(slot, Slot))

    worlds.run(story, slabs=1)


def test_a_chain_stored_bit_by_bit_is_evicted_tail_first(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2), key(3)])
        w.fill(slots, ids_of(1, 2, 3))
        for index in (0, 1, 2):
            await w.sessions.commit(session, handle, [index], False)
        await w.idle()
        await w.put(10, 11)
        assert w.store.lookup(w.namespace, [key(1), key(2), key(3)]).per_tier["host"] == 2
        w.sessions.close(session)

    worlds.run(story, slabs=1)


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_chain_stored_in_part_is_evicted_tail_first_too(worlds: Worlds, end: str) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, slots = w.sessions.reserve(session, [key(1), key(2), key(3), key(4)])
        w.fill(slots, ids_of(1, 2, 3, 4))
        for index in (0, 1, 2):
            await w.sessions.commit(session, handle, [index], False)
        await w.idle()
        if end == "abort":
            w.sessions.abort(session, handle)
        w.sessions.close(session)
        await w.put(10, 11)
        assert w.store.lookup(w.namespace, [key(1), key(2), key(3)]).per_tier["host"] == 2

    worlds.run(story, slabs=1)


@pytest.mark.fault(94)
def test_a_scheduler_leases_all_shards_of_whole_blocks_and_of_no_others(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        workers = [w.session(shard) for shard in (0, 1)]
        scheduler = w.session(None)
        await w.put(1, 2, session=workers[0])
        await w.put(1, session=workers[1])
        await w.idle()
        handle, lease = w.sessions.acquire(scheduler, [key(1), key(2)], Told())
        assert {lease.ids[index] for index in lease.slots} == {block_id(key(1), 0), block_id(key(1), 1)}
        assert not lease.pending and len(w.host.leases()) == 2
        mine, _ = w.sessions.acquire(workers[0], [key(1)], Told())
        w.sessions.release(workers[0], mine)
        assert len(w.host.leases()) == 2, "a worker's release does not end the scheduler's lease"
        assert w.sessions.release(scheduler, handle) and w.host.leases() == {}
        for session in (*workers, scheduler):
            w.sessions.close(session)

    worlds.run(story, shards=2)


@pytest.mark.fault(15)
def test_a_session_goes_on_in_the_epoch_that_a_flush_began(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        assert await w.put(1, session=session) == [1]
        await w.idle()
        handle, lease = w.sessions.acquire(session, [key(1)], Told())
        await w.store.flush(w.namespace)
        assert w.host.detail("doomed_blocks") == 1
        assert w.right(lease.slots[0], ids_of(1)[0]), "what was leased before may be read to its end"
        late, after = w.sessions.acquire(session, [key(1)], Told())
        assert after.slots == {} and not after.pending
        assert w.sessions.release(session, handle) and w.sessions.release(session, late)
        assert await w.put(1, session=session) == [1]
        w.sessions.close(session)

    worlds.run(story)


def test_check_finds_a_lease_that_no_session_has(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        await w.put(1)
        await w.idle()
        slots = w.host.held(w.namespace, ids_of(1))
        with pytest.raises(AssertionError, match="leases of the sessions"):
            w.sessions.check()
        w.host.release(slots)

    worlds.run(story)


@pytest.mark.fault(28)
def test_a_tenants_salt_depends_on_the_secret_and_the_credential() -> None:
    salts = {tenant_salt(secret, credential) for secret in (b"a" * 32, b"b" * 32) for credential in (b"x", b"y")}
    assert len(salts) == 4 and all(len(salt) == 32 for salt in salts)
    assert tenant_salt(b"a" * 32, b"x") == tenant_salt(b"a" * 32, b"x")
    assert tenant_salt(b"a" * 32, b"") == b""


@pytest.mark.fault(28)
def test_the_secret_is_made_once_and_only_ours_to_read(tmp_path: Path) -> None:
    secret = read_secret(tmp_path / "secret")
    assert len(secret) == 32 and read_secret(tmp_path / "secret") == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "another") != secret
    assert sorted(os.listdir(tmp_path)) == ["another", "secret"]


@pytest.mark.fault(28)
@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_secret_that_anybody_could_guess_is_refused(tmp_path: Path, content: bytes) -> None:
    """As a crash between creating and writing the file would leave it."""
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(Damaged, match="secret"):
        read_secret(tmp_path / "secret")

"""The gpu tier as part of the store: looked up above host, leased by those who have it open, forgotten like all."""

import asyncio
import threading

import pytest

from terracekv.daemon.sessions import Session
from terracekv.tests.blocks import payload_of
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.gpus import bytes_at
from terracekv.tests.stores import World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot
from terracekv.tiers.tier import Outcome

worlds = pytest.fixture(opened_worlds)


def ignored(handle: int, index: int, result: Slot | Outcome) -> None:
    """Nobody waits."""


async def use(w: World, session: Session, *indices: int) -> tuple[set[int], set[int]]:
    """Lease a chain and let go of it: which indices lay on the GPU, and which in host."""
    handle, lease = w.sessions.acquire(session, [key(index) for index in indices], ignored, near=True)
    await w.idle()
    near, host = set(lease.near), set(lease.slots)
    w.sessions.release(session, handle)
    return near, host


async def heat(w: World, session: Session, *indices: int) -> None:
    """Use blocks until they are on the GPU."""
    await use(w, session, *indices)
    await use(w, session, *indices)
    await w.idle()


def on_gpu(w: World, *indices: int) -> list[bool]:
    assert w.near is not None
    return [w.near.gpu.has(w.namespace, id) for id in ids_of(*indices)]


def right(w: World, slot: Slot, index: int) -> bool:
    """Whether a slot of the GPU holds the bytes of a block, as an engine would find them."""
    assert w.near is not None
    size = w.namespace.block_bytes
    found = bytes(bytes_at(w.near.gpu._base + slot.offset, size))
    return found == payload_of(ids_of(index)[0], w.namespace.id, size)


def test_a_lookup_counts_the_gpu_above_host_and_says_which_tier_serves(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session_on_gpu()
        await w.only_on_disk(3)
        await w.put(1, 2)
        await heat(w, session, 1)
        found = w.store.lookup(w.namespace, [key(index) for index in (1, 2, 3, 4)])
        assert found.per_tier == {"gpu": 1, "host": 2, "disk": 3}
        assert found.split == {"gpu": 1, "host": 1, "disk": 1}
        assert w.store.stats.matched == {"gpu": 1, "host": 1, "disk": 1}
        assert list(w.store.tiers) == ["gpu", "host", "disk"] and w.store.holder(w.namespace, ids_of(1)[0]) == "gpu"
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy())


@pytest.mark.fault(94)
def test_many_readers_share_one_copy_on_the_gpu(worlds: Worlds) -> None:
    """What all ranks hold alike (MLA) is one shard, stored once."""

    async def story(w: World) -> None:
        assert w.near is not None
        ranks = [w.session_on_gpu() for _ in range(4)]
        await w.put(1, 2)
        await heat(w, ranks[0], 1, 2)
        leases = [w.sessions.acquire(rank, [key(1), key(2)], ignored, near=True)[1] for rank in ranks]
        assert len({(lease.near[0].offset, lease.near[1].offset) for lease in leases}) == 1
        assert w.near.gpu.status().blocks == 2 and set(w.near.gpu.leases().values()) == {4}
        assert all(right(w, lease.near[1], 2) and not lease.slots for lease in leases)
        w.sessions.check()
        for rank in ranks:
            w.sessions.close(rank)
        assert w.near.gpu.leases() == {} == w.host.leases()

    worlds.run(story, gpu=FakeCupy())


def test_a_chain_may_lie_in_all_tiers_and_ends_at_its_first_hole(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.near is not None
        session = w.session_on_gpu()
        await w.only_on_disk(3)
        await w.put(1, 2, 5)
        await heat(w, session, 1)
        await heat(w, session, 5)
        keys = [key(index) for index in (1, 2, 3, 4, 5)]
        handle, lease = w.sessions.acquire(session, keys, ignored, near=True)
        assert (set(lease.near), set(lease.slots), lease.pending) == ({0}, {1}, {2}), "5 stands behind a hole"
        await w.idle()
        assert set(lease.slots) == {1, 2} and not lease.pending
        assert right(w, lease.near[0], 1) and w.right(lease.slots[2], ids_of(3)[0])
        assert set(w.near.gpu.leases().values()) == {1}
        w.sessions.check()
        w.sessions.release(session, handle)
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy())


def test_only_what_engines_of_the_gpu_use_goes_up_and_only_they_are_given_its_slots(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        plain, scheduler, engine = w.session(), w.session_on_gpu(None), w.session_on_gpu()
        await w.put(1)
        for _ in range(4):
            assert await use(w, plain, 1) == (set(), {0})
            assert await use(w, scheduler, 1) == (set(), {0})
        assert on_gpu(w, 1) == [False]
        await heat(w, engine, 1)
        assert on_gpu(w, 1) == [True]
        assert await use(w, engine, 1) == ({0}, set())
        assert await use(w, plain, 1) == await use(w, scheduler, 1) == (set(), {0})
        handle, lease = w.sessions.acquire(engine, [key(1)], ignored)
        assert not lease.near, "a call that cannot read a GPU does not ask for it"
        for session in (plain, scheduler, engine):
            w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy())


def test_what_only_the_gpu_has_comes_back_to_host_for_others(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        engine, plain = w.session_on_gpu(), w.session()
        await w.put(1)
        await heat(w, engine, 1)
        w.host.delete(w.namespace, ids_of(1))
        assert w.store.lookup(w.namespace, [key(1)]).per_tier == {"gpu": 1, "host": 1}
        handle, lease = w.sessions.acquire(plain, [key(1)], ignored)
        assert lease.pending == {0}
        await w.idle()
        assert w.right(lease.slots[0], ids_of(1)[0]) and w.store.stats.loaded["gpu"] == 1
        w.sessions.close(plain)
        w.sessions.close(engine)

    worlds.run(story, gpu=FakeCupy(), disk=False)


@pytest.mark.fault(15)
@pytest.mark.parametrize("tier", [None, "gpu"])
def test_a_flush_empties_the_gpu_and_a_lease_may_be_read_to_its_end(worlds: Worlds, tier: str | None) -> None:
    async def story(w: World) -> None:
        assert w.near is not None
        session = w.session_on_gpu()
        await w.put(1, 2)
        await heat(w, session, 1, 2)
        handle, lease = w.sessions.acquire(session, [key(1), key(2)], ignored, near=True)
        flushed = await w.store.flush(w.namespace, tier)
        assert flushed.dropped["gpu"] == 2 and on_gpu(w, 1, 2) == [False, False]
        assert right(w, lease.near[0], 1) and w.near.gpu.status().details["doomed_blocks"] == 2
        assert w.store.lookup(w.namespace, [key(1)]).per_tier["host"] == (0 if tier is None else 1)
        w.sessions.release(session, handle)
        assert w.near.gpu.status().used_bytes == 0
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy())


@pytest.mark.fault(15)
@pytest.mark.parametrize("order", ["delete", "flush"])
def test_a_block_on_its_way_up_is_forgotten_too(worlds: Worlds, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(w: World) -> None:
        assert w.near is not None
        gpu, session = w.near.gpu, w.session_on_gpu()
        await w.put(1)
        began, go_on, write = threading.Event(), threading.Event(), gpu._shuttle.write

        def held(address: int, payload: memoryview) -> None:
            began.set()
            assert go_on.wait(30)
            write(address, payload)

        monkeypatch.setattr(gpu._shuttle, "write", held)
        for _ in range(2):
            handle, _ = w.sessions.acquire(session, [key(1)], ignored, near=True)
            w.sessions.release(session, handle)
        assert await w.mover.load(lambda: began.wait(30))
        threading.Timer(0.1, go_on.set).start()
        namespace = w.namespace
        if order == "delete":
            await w.store.delete(namespace, ids_of(1))
        else:
            await w.store.flush(namespace)
        await w.idle()
        assert on_gpu(w, 1) == [False] and gpu.status().blocks == 0
        assert w.store.lookup(w.namespace, [key(1)]).blocks == 0
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy())


def test_the_only_copy_of_a_block_comes_down_before_its_place_is_taken(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session_on_gpu()
        await w.put(1, 2, 3)
        await heat(w, session, 1, 2)
        w.host.delete(w.namespace, ids_of(1, 2))
        await heat(w, session, 3)
        assert on_gpu(w, 3) == [True] and sum(on_gpu(w, 1, 2)) == 1
        assert w.store.lookup(w.namespace, [key(index) for index in (1, 2, 3)]).blocks == 3
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy(), disk=False, gpu_slots=2)


def test_a_block_that_the_disk_has_too_leaves_the_gpu_without_taking_room_in_host(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        assert w.near is not None
        session = w.session_on_gpu()
        await w.put(1, 2, 3)
        await w.idle()
        await heat(w, session, 1, 2)
        w.host.delete(w.namespace, ids_of(1, 2))
        await heat(w, session, 3)
        assert on_gpu(w, 3) == [True] and sum(on_gpu(w, 1, 2)) == 1
        assert w.near.gpu.demoted == 0 and w.host.leading(w.namespace, ids_of(3)) == w.host.status().blocks == 1
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy(), gpu_slots=2)


def test_a_head_that_is_read_on_the_gpu_does_not_leave_host_before_its_tail(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session_on_gpu()
        await w.put(1, 2, 3)
        await heat(w, session, 1)
        await w.put(4)
        assert await use(w, session, 1, 2, 3) == ({0}, {1, 2})
        assert [id for _, id in w.host.next_out(4)] == ids_of(4, 3, 2, 1)
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy(), disk=False)


def test_loads_go_before_what_goes_up(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(w: World) -> None:
        assert w.near is not None
        session = w.session_on_gpu()
        await w.put(1)
        await use(w, session, 1)
        held, order, put = threading.Event(), list[str](), w.near.gpu.put

        def noted(namespace: Namespace, id: bytes, payload: memoryview, digest: int) -> Outcome:
            order.append("up")
            return put(namespace, id, payload, digest)

        monkeypatch.setattr(w.near.gpu, "put", noted)
        waiting = [w.mover.load(lambda: held.wait(30)) for _ in range(3)]  # every worker is taken
        handle, _ = w.sessions.acquire(session, [key(1)], ignored, near=True)
        loads = [w.mover.load(lambda: order.append("load")) for _ in range(5)]
        held.set()
        await asyncio.gather(*waiting, *loads)
        await w.idle()
        assert order.count("up") == 1 and order.index("up") >= 3, "asked for first, begun when no load waits"
        w.sessions.release(session, handle)
        w.sessions.close(session)

    worlds.run(story, gpu=FakeCupy(), threads=3)

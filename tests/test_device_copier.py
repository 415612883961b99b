"""A prompt's blocks between a (fake) GPU's pages and a real daemon's arena, through an ordinary client.

The fake GPU is as late as CUDA allows: a slot that is committed, believed or given back too early shows as wrong bytes.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from terracekv.connector.client import Client, Loaded, Stored
from terracekv.connector.connection import Trouble
from terracekv.connector.device import DeviceBlocks, DeviceCopier
from terracekv.kernels import pinned
from terracekv.kernels.shared import Shared
from terracekv.kernels.transfer import STAGED, Strategy
from terracekv.tests.blocks import name, payload_of, put, registered
from terracekv.tests.gpu_tiers import SLAB_BYTES, gpu_tier
from terracekv.tests.harness import TOKENS, Daemon, layout_of, until
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import World
from terracekv.tests.kernels.gpus import PAGES, PAGES_PER_BLOCK, Engine, bytes_at, engine_on, slots_for
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.tier import Outcome

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

COUNT = PAGES // PAGES_PER_BLOCK
SEEDS = range(4)


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_refused", None)


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as started:
        yield started


def gpu(seed: int) -> FakeCupy:
    return FakeCupy(seed=seed, eager=seed % 2 == 1)


@contextmanager
def copier_of(engine: Engine) -> Iterator[DeviceCopier]:
    made = DeviceCopier(
        engine.pieces, PAGES_PER_BLOCK, device=engine.device, try_out=False, part_bytes=2 * engine.block_bytes
    )
    with closing(made) as copier:
        yield copier


def client_of(daemon: Daemon, copier: DeviceCopier, access: str = "write") -> Client:
    return Client(
        daemon.socket,
        model="m",
        revision="r",
        dtype="bf16",
        block_tokens=TOKENS,
        layout=layout_of(copier.block_bytes),
        strict=True,
        attach=copier.attach,
        access=access,
    )


@contextmanager
def joined(
    daemon: Daemon, fake: FakeCupy, layouts: Sequence[str] = ("NHD",), seed: int = 0
) -> Iterator[tuple[Engine, DeviceCopier, Client, list[bytes]]]:
    """An engine on a GPU that has computed its pages and joined a daemon, with the keys of a prompt of ``COUNT``
    blocks."""
    with engine_on(fake, layouts, seed) as engine, copier_of(engine) as copier:
        with closing(client_of(daemon, copier)) as client:
            engine.compute()
            yield engine, copier, client, client.keys(list(range(COUNT * TOKENS)))


def blocks_of(engine: Engine) -> list[list[int]]:
    order = engine.dice.sample(range(PAGES), PAGES)
    return [order[at : at + PAGES_PER_BLOCK] for at in range(0, PAGES, PAGES_PER_BLOCK)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_one_prompt_stored_another_loads_into_other_pages(daemon: Daemon, seed: int) -> None:
    layouts = [("NHD",), ("HND",), ("MLA",), ("fused", "NHD")][seed % 4]
    with joined(daemon, gpu(seed), layouts, seed) as (engine, copier, client, keys):
        pages = blocks_of(engine)
        expected: list[bytes] = []
        for of_block in pages:
            engine.read(of_block, expected)
        blocks = copier.blocks(pages, engine.stream.ptr)
        assert client.store(keys, blocks.gather, settle=blocks.settle) == Stored(stored=COUNT)
        engine.compute()  # the pages are another's
        other = blocks_of(engine)
        loading = copier.blocks(other, engine.stream.ptr)
        assert client.load(keys, loading.scatter, loading.settle) == Loaded(COUNT, None)
        assert [engine.payload(of_block) for of_block in other] == expected


@pytest.mark.fault(2)
@pytest.mark.fault(16)
@pytest.mark.parametrize("way", ["store", "load"])
def test_a_copy_that_fails_stores_and_loads_nothing_and_the_next_call_works(daemon: Daemon, way: str) -> None:
    fake = FakeCupy()
    with joined(daemon, fake) as (engine, copier, client, keys):
        client.strict = False
        blocks = copier.blocks(blocks_of(engine), engine.stream.ptr)
        if way == "load":
            assert client.store(keys, blocks.gather, settle=blocks.settle).stored == COUNT
        fake.fail_calls["memcpyAsync"] = 0
        if way == "store":
            assert client.store(keys, blocks.gather, settle=blocks.settle) == Stored(why="copy_failed")
        else:
            loading = copier.blocks(blocks_of(engine), engine.stream.ptr)
            assert client.load(keys, loading.scatter, loading.settle) == Loaded(0, "copy_failed")
        assert "told to fail" in str(client.last_trouble)
        until(lambda: client.joined, "the client joins again")
        again = copier.blocks(blocks_of(engine), engine.stream.ptr)
        outcome = client.store(keys, again.gather, settle=again.settle)
        assert (outcome.stored, outcome.present) == ((COUNT, 0) if way == "store" else (0, COUNT))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_is_not_given_back_while_a_copy_from_it_is_under_way(daemon: Daemon, seed: int) -> None:
    """The load ends early because the chain does: what was begun is over, and counts."""
    with joined(daemon, gpu(seed), seed=seed) as (engine, copier, client, keys):
        pages = blocks_of(engine)
        blocks = copier.blocks(pages, engine.stream.ptr)
        assert client.store(keys[:3], blocks.gather, settle=blocks.settle).stored == 3
        expected = [engine.payload(of_block) for of_block in pages[:3]]
        engine.compute()
        loading = copier.blocks(pages, engine.stream.ptr)
        assert client.load(keys, loading.scatter, loading.settle) == Loaded(3, "absent")
        assert [engine.payload(of_block) for of_block in pages[:3]] == expected


@pytest.mark.fault(16)
@pytest.mark.parametrize("way", ["store", "load"])
def test_a_call_that_fails_in_the_middle_leaves_nothing_under_way(daemon: Daemon, way: str) -> None:
    """Its slots are another's as soon as it returns, and its pages are computed into."""
    fake = FakeCupy()
    with joined(daemon, fake) as (engine, copier, client, keys):
        client.strict = False
        blocks = copier.blocks(blocks_of(engine), engine.stream.ptr)
        if way == "load":
            assert client.store(keys, blocks.gather, settle=blocks.settle).stored == COUNT
        copy = blocks.gather if way == "store" else blocks.scatter

        def breaks(index: int, payload: memoryview) -> None:
            if index == 4:
                raise Trouble("deadline")
            copy(index, payload)

        if way == "store":
            assert client.store(keys, breaks, settle=blocks.settle) == Stored(why="deadline")
        else:
            assert client.load(keys, breaks, blocks.settle) == Loaded(0, "deadline")
        assert not fake.busy


@pytest.mark.fault(80)
def test_the_arena_is_pinned_while_it_is_mapped_and_what_is_not_is_reported(daemon: Daemon) -> None:
    fake = FakeCupy(pin_limit=4096)
    with engine_on(fake) as engine, copier_of(engine) as copier:
        client = client_of(daemon, copier)
        until(lambda: copier.report()["pageable_reason"], "pinning is over")
        report = copier.report()
        assert report["pinned_bytes"] == 0 and report["pageable_bytes"] > 4096
        assert "ulimit -l" in report["pageable_reason"]
        assert (report["device"], report["gather"], report["not_measured"]) == (
            engine.device.uuid,
            "staged",
            "not asked to",
        )
        client.close()
        assert copier.report()["pageable_bytes"] == 0


def test_a_client_that_may_only_read_loads_into_the_pages_of_a_gpu(daemon: Daemon) -> None:
    """Its mapping cannot be written, so it is copied from as pageable memory, and that is told."""
    with joined(daemon, FakeCupy()) as (engine, copier, client, keys), copier_of(engine) as other:
        blocks = copier.blocks(blocks_of(engine), engine.stream.ptr)
        assert client.store(keys, blocks.gather, settle=blocks.settle) == Stored(stored=COUNT)
        expected = [engine.payload(pages) for pages in blocks._pages]
        with closing(client_of(daemon, other, access="read")) as reader:
            assert reader.joined and "access=read" in other.report()["pageable_reason"]
            engine.compute()
            loading = other.blocks(blocks_of(engine), engine.stream.ptr)
            assert reader.load(keys, loading.scatter, loading.settle) == Loaded(COUNT, None)
            assert [engine.payload(pages) for pages in loading._pages] == expected
        assert pinned._refused is None


@pytest.mark.fault(80)
def test_clients_of_one_process_share_one_mapping_of_the_arena_which_is_pinned_once(daemon: Daemon) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(daemon.runtime / "arena"))

    with joined(daemon, FakeCupy()) as (engine, copier, first, keys), copier_of(engine) as other:
        clients = [client_of(daemon, copier), first, client_of(daemon, other)]
        size = (daemon.runtime / "arena").stat().st_size
        until(lambda: copier.report()["pinned_bytes"] == size, "the arena is pinned")
        assert mapped() == 1
        assert copier.report()["pinned_bytes"] == other.report()["pinned_bytes"] == size
        clients.pop(0).close()
        assert mapped() == 1 and copier.report()["pinned_bytes"] == size
        blocks = copier.blocks(blocks_of(engine), engine.stream.ptr)
        assert first.store(keys, blocks.gather, settle=blocks.settle) == Stored(stored=COUNT)
        for client in clients:
            client.close()
        assert mapped() == 0 == copier.report()["pinned_bytes"] == other.report()["pinned_bytes"]


@pytest.mark.fault(60)
def test_a_daemon_with_a_new_arena_is_pinned_anew_and_the_old_arena_let_go(daemon: Daemon) -> None:
    fake = FakeCupy()
    with joined(daemon, fake) as (_, copier, client, _):
        client.strict = False
        assert client.joined
        until(lambda: copier.report()["pinned_bytes"], "the arena is pinned")
        before = copier.report()["pinned_bytes"]
        daemon.restart(host__size="32MiB")
        until(lambda: client.lookup([]).reason != "no_daemon", "the client joins again")
        until(lambda: copier.report()["pinned_bytes"] == 32 << 20 != before, "the new arena is pinned")
        assert sum(fake.world.pinned.values()) == 32 << 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prompt_in_the_gpu_tier_is_loaded_by_another_process_past_the_bus(tmp_path: Path, seed: int) -> None:
    world = World()
    daemons, engines = FakeCupy(world, seed=seed), FakeCupy(world, seed=seed, eager=seed % 2 == 1)
    namespaces = Namespaces(tmp_path / "namespaces.json")
    with gpu_tier(tmp_path, daemons, namespaces, SLAB_BYTES) as tier, closing(Engine(engines, ("HND",))) as engine:
        namespace = registered(namespaces, 1, engine.block_bytes)
        ids = [name(number) for number in range(COUNT)]
        for id in ids:
            assert put(tier, namespace, id) is Outcome.STORED
        assert tier.exported is not None
        with copier_of(engine) as copier, closing(Shared(engine.device, tier.exported)) as shared:
            engine.compute()
            pages = blocks_of(engine)
            blocks = copier.blocks(pages, engine.stream.ptr)
            slots = tier.acquire(namespace, ids)
            engines.calls.clear()
            for index, slot in enumerate(slots):
                assert slot is not None
                blocks.fetch(index, shared, slot.offset)
            blocks.settle(COUNT - 1)
            tier.release([slot for slot in slots if slot is not None])
            found = [engine.payload(of_block) for of_block in pages]
            assert found == [payload_of(id, namespace.id, engine.block_bytes) for id in ids]
            sizes = [call[3] for call in engines.calls if call[0] == "memcpyAsync"]
            assert max(sizes) < engine.block_bytes, "only lists of pages cross the bus"
            with pytest.raises(ValueError, match="not inside"):
                blocks.fetch(0, shared, SLAB_BYTES - 8)


def test_a_copier_measures_which_way_is_faster_unless_told_not_to() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine:
        made = DeviceCopier(
            engine.pieces, PAGES_PER_BLOCK, device=engine.device, part_bytes=4096, scratch_bytes=1 << 15
        )
        with closing(made) as copier:
            assert set(copier.measured.rates["gather"]) == {Strategy.STAGED, Strategy.MAPPED}
            assert copier.report()["not_measured"] is None
        with copier_of(engine) as copier:
            assert copier.measured.choice == STAGED


@pytest.mark.fault(2)
@pytest.mark.fault(16)
def test_a_wait_that_fails_leaves_nothing_under_way_and_keeps_nothing() -> None:
    """What was begun after the block that is waited for included: its slots are another's in a moment."""
    fake = FakeCupy()
    with engine_on(fake) as engine, copier_of(engine) as copier, slots_for(engine, COUNT) as slots:
        detach = copier.attach(slots.view)
        until(lambda: copier.report()["pageable_reason"] or copier.report()["pinned_bytes"], "pinning is over")
        made: list[int] = []
        for _ in range(3):
            engine.compute()
            blocks = copier.blocks(blocks_of(engine), engine.stream.ptr)
            for index, address in enumerate(slots.addresses):
                blocks.gather(index, bytes_at(address, engine.block_bytes))
            assert fake.busy
            fake.fail_calls["eventSynchronize"] = 0
            with pytest.raises(Trouble, match="told to fail"):
                blocks.settle(0)
            assert not fake.busy
            made.append(len(fake._events))
        assert len(set(made)) == 1, "events are used again"
        detach()


@pytest.mark.fault(16)
@pytest.mark.parametrize("pages", [[0, 1, PAGES], [0, 1]])
def test_a_block_in_pages_that_are_not_there_leaves_nothing_under_way(daemon: Daemon, pages: list[int]) -> None:
    """A mistake of the engine's, which is told; the blocks before it were begun."""
    fake = FakeCupy()
    with joined(daemon, fake) as (engine, copier, client, keys):
        until(lambda: copier.report()["pinned_bytes"], "the arena is pinned: else copies wait")
        blocks = copier.blocks([*blocks_of(engine)[: COUNT - 1], pages], engine.stream.ptr)
        with pytest.raises((ValueError, AssertionError)):
            client.store(keys, blocks.gather, settle=blocks.settle)
        assert not fake.busy


def test_settling_is_in_order_and_again_is_nothing() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine, copier_of(engine) as copier:
        room = mmap.mmap(-1, COUNT * 4096)
        view = memoryview(room)
        detach = copier.attach(view)
        until(lambda: copier.report()["pinned_bytes"], "the room is pinned: else copies wait")
        payloads = [view[at : at + engine.block_bytes] for at in range(0, len(view), 4096)]
        engine.compute()
        pages = blocks_of(engine)
        blocks: DeviceBlocks = copier.blocks(pages, engine.stream.ptr)
        for index, payload in enumerate(payloads[:5]):
            blocks.gather(index, payload)
        blocks.settle(0)
        assert bytes(payloads[0]) == engine.payload(pages[0])
        blocks.settle(1)
        blocks.settle(0)
        assert [bytes(payloads[n]) for n in (0, 1)] == [engine.payload(pages[n]) for n in (0, 1)]
        blocks.settle(4)
        assert [bytes(payload) for payload in payloads[:5]] == [engine.payload(of) for of in pages[:5]]
        fake.fail_calls["memcpyAsync"] = 0
        with pytest.raises(Trouble, match="copy_failed"):
            blocks.gather(5, payloads[5])
            blocks.settle(5)
        detach()
        for payload in payloads:
            payload.release()
        view.release()
        room.close()

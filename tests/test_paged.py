"""Pages in groups on a (fake) GPU that is as late as CUDA allows: the same payloads as page by page on the CPU."""

import mmap
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest

from terracekv.connector.connection import Trouble
from terracekv.connector.paged import Paged, PagedCopier
from terracekv.kernels import host
from terracekv.kernels.runs import Runs
from terracekv.kernels.shared import Shared, export
from terracekv.kernels.transfer import Event
from terracekv.tests.harness import until
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import World
from terracekv.tests.kernels.gpus import PAGES, bytes_at, device_on

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

BLOCK_TOKENS = 24
NULL = 0
SEEDS = range(6)


@dataclass
class Group:
    page_tokens: int
    pieces: tuple[Runs, ...]
    page_bytes: int
    offset: int


class Engine:
    """Two groups of layers, with pages of 4 and of 8 tokens; the second has two pieces."""

    def __init__(self, fake: FakeCupy, seed: int) -> None:
        self.fake, self.device, self.dice = fake, device_on(fake), random.Random(seed)
        self.stream = self.device.stream()
        self.memory: list[tuple[int, int]] = []
        first = (self._piece(3, 48),)
        second = (self._piece(2, 80), self._piece(1, 36))
        small, large = 3 * 48, 2 * 80 + 36
        self.groups = [Group(4, first, small, 0), Group(8, second, large, BLOCK_TOKENS // 4 * small)]
        self.block_bytes = BLOCK_TOKENS // 4 * small + BLOCK_TOKENS // 8 * large

    def _piece(self, bases: int, run: int) -> Runs:
        size = bases * PAGES * run
        address = self.device.allocate(size)
        self.memory.append((address, size))
        return Runs(tuple(address + base * PAGES * run for base in range(bases)), run, PAGES, run)

    def compute(self) -> None:
        contents = [self.dice.randbytes(size) for _, size in self.memory]

        def work() -> None:
            for (address, size), content in zip(self.memory, contents, strict=True):
                bytes_at(address, size)[:] = content

        self.fake.give(self.stream.ptr, work)

    def tables(self) -> list[list[int]]:
        return [self.dice.sample(range(1, PAGES), BLOCK_TOKENS // group.page_tokens) for group in self.groups]

    def page(self, group: Group, page: int) -> bytes:
        parts = []
        for piece in group.pieces:
            plan = piece.at(page)
            part = bytearray(plan.payload_bytes)
            host.gather_runs(plan, memoryview(part))
            parts.append(bytes(part))
        return b"".join(parts)

    def payload(self, tables: Sequence[Sequence[int]]) -> bytes:
        """As a copy of page by page makes it."""
        return b"".join(
            self.page(group, page) for group, table in zip(self.groups, tables, strict=True) for page in table
        )

    def close(self) -> None:
        if not self.fake.broken:
            for address, _ in self.memory:
                self.device.free(address)


@contextmanager
def engine_and_copier(seed: int, world: World | None = None) -> Iterator[tuple[Engine, PagedCopier, list[memoryview]]]:
    fake = FakeCupy(world, seed=seed, eager=seed % 2 == 1)
    with closing(Engine(fake, seed)) as engine:
        made = PagedCopier(engine.groups, BLOCK_TOKENS, null_page=NULL, device=engine.device, part_bytes=400)
        with closing(made) as copier, mmap.mmap(-1, 4 * mmap.PAGESIZE) as room:
            assert copier.block_bytes == engine.block_bytes
            view = memoryview(room)
            detach = copier.attach(view)
            until(lambda: copier.report()["pinned_bytes"], "the room is pinned: else copies wait")
            slots = [view[at : at + mmap.PAGESIZE] for at in range(0, len(view), mmap.PAGESIZE)]
            yield engine, copier, slots
            detach()
            for each in (*slots, view):
                each.release()


def recorded(engine: Engine) -> Event:
    event = engine.device.event()
    engine.device.record(event, engine.stream.ptr)
    return Event(event)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_another_thread_begins_takes_what_was_computed_before_its_event(seed: int) -> None:
    """And not what the stream was given since: that is another request's, in other pages, and is not waited for."""
    with engine_and_copier(seed) as (engine, copier, slots):
        tables = [engine.tables() for _ in range(3)]
        engine.compute()
        event = recorded(engine)
        expected: list[bytes] = []
        engine.fake.give(engine.stream.ptr, lambda: expected.extend(engine.payload(each) for each in tables))
        later: list[str] = []
        engine.fake.give(engine.stream.ptr, lambda: later.append("another request's step"))
        copies = copier.begin(event)
        for index, (each, slot) in enumerate(zip(tables, slots, strict=False)):
            copies.gather(index, each, slot)
        copies.settle(2)
        if seed % 2 == 0:
            assert later == [], "a lazy GPU does only what must be waited for"
        found = [bytes(slot[: engine.block_bytes]) for slot in slots[:3]]
        engine.device.synchronize(engine.stream.ptr)
        assert found == expected
        engine.device.destroy_event(event.handle)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_comes_after_the_last_use_of_its_pages_and_leaves_all_others_alone(seed: int) -> None:
    """The second half of a block, into all of its pages but the one that stands for none."""
    with engine_and_copier(seed) as (engine, copier, slots):
        content = engine.dice.randbytes(engine.block_bytes)
        slots[0][: engine.block_bytes] = content
        first = 8
        tables = [table[first // g.page_tokens :] for table, g in zip(engine.tables(), engine.groups, strict=True)]
        tables[1][0] = NULL
        engine.compute()
        before: list[list[bytes]] = []
        engine.fake.give(
            engine.stream.ptr,
            lambda: before.extend([engine.page(g, page) for page in range(PAGES)] for g in engine.groups),
        )
        event = recorded(engine)
        copies = copier.begin(event)
        copies.scatter(0, tables, first, slots[0])
        copies.settle(0)
        for group, table, old in zip(engine.groups, tables, before, strict=True):
            for number, page in enumerate(table, first // group.page_tokens):
                at = group.offset + number * group.page_bytes
                old[page] = old[page] if page == NULL else content[at : at + group.page_bytes]
            assert [engine.page(group, page) for page in range(PAGES)] == old
        engine.device.destroy_event(event.handle)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_of_the_gpu_tier_is_loaded_past_the_bus(seed: int) -> None:
    world = World()
    daemon = device_on(FakeCupy(world))
    size = 8192
    exported = export(daemon, daemon.allocate(size), size)
    with engine_and_copier(seed, world) as (engine, copier, _):
        content = engine.dice.randbytes(size)
        bytes_at(world.handles[exported.handle], size)[:] = content
        with closing(Shared(engine.device, exported)) as shared:
            tables = engine.tables()
            engine.compute()
            copies = copier.begin(engine.stream.ptr)
            copies.fetch(0, tables, 0, shared, 512)
            copies.settle(0)
            assert engine.payload(tables) == content[512 : 512 + engine.block_bytes]
            with pytest.raises(ValueError, match="not inside"):
                copies.fetch(1, tables, 0, shared, size - 8)


@pytest.mark.fault(2)
@pytest.mark.fault(16)
def test_a_copy_that_fails_is_trouble_for_this_and_later_blocks_and_nothing_is_under_way() -> None:
    with engine_and_copier(0) as (engine, copier, slots):
        engine.compute()
        copies: Paged = copier.begin(engine.stream.ptr)
        copies.gather(0, engine.tables(), slots[0])
        engine.fake.fail_calls["memcpyAsync"] = 0
        with pytest.raises(Trouble, match="copy_failed"):
            copies.gather(1, engine.tables(), slots[1])
        assert not engine.fake.busy
        for index in (0, 1):
            with pytest.raises(Trouble, match="told to fail"):
                copies.settle(index)
        copies = copier.begin(engine.stream.ptr)
        with pytest.raises(ValueError, match="pages"):
            copies.gather(0, [engine.tables()[0], [PAGES]], slots[0])
        assert not engine.fake.busy, "not even of the groups that came before the page that is not there"


@pytest.mark.fault(2)
@pytest.mark.fault(16)
def test_a_wait_that_fails_for_one_group_leaves_no_copies_of_the_others_under_way() -> None:
    with engine_and_copier(0) as (engine, copier, slots):
        engine.compute()
        copies: Paged = copier.begin(engine.stream.ptr)
        copies.gather(0, engine.tables(), slots[0])
        engine.fake.fail_calls["eventSynchronize"] = 0
        with pytest.raises(Trouble, match="told to fail"):
            copies.settle(0)
        assert not engine.fake.busy

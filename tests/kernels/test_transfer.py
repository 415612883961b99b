"""Transfers on a GPU that is as late and as disorderly as CUDA allows: what is not ordered shows as wrong bytes."""

from contextlib import closing

import pytest

from terracekv.kernels.transfer import Strategy, Transfer
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import FRESH
from terracekv.tests.kernels.gpus import PAGES, PAGES_PER_BLOCK, Engine, Slots, bytes_at, engine_on, slots_for

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

SEEDS = range(12)
COUNT = PAGES // PAGES_PER_BLOCK
LAYOUTS = [("NHD",), ("HND",), ("MLA",), ("fused", "NHD")]


def gpu(seed: int) -> FakeCupy:
    """Half of them lazy, half of them eager."""
    return FakeCupy(seed=seed, eager=seed % 2 == 1)


def transfer_of(engine: Engine, slots: Slots, part_bytes: int = 0, depth: int = 2) -> Transfer:
    """With parts of two blocks, or of a fraction of one."""
    part_bytes = part_bytes or 2 * engine.block_bytes
    return Transfer(engine.device, engine.pieces, PAGES_PER_BLOCK, slots.pinned, part_bytes=part_bytes, depth=depth)


def blocks_of(engine: Engine) -> list[list[int]]:
    order = engine.dice.sample(range(PAGES), PAGES)
    return [order[at : at + PAGES_PER_BLOCK] for at in range(0, PAGES, PAGES_PER_BLOCK)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", Strategy)
def test_a_gather_takes_what_the_engine_wrote_before_and_nothing_it_writes_after(seed: int, strategy: Strategy) -> None:
    with engine_on(gpu(seed), LAYOUTS[seed % 4], seed) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots, 700 * (seed % 3))) as transfer:
            blocks = blocks_of(engine)
            for _ in range(2):  # staging and events are used again
                engine.compute()
                expected: list[bytes] = []
                for pages in blocks:
                    engine.read(pages, expected)
                batch = transfer.gather(blocks, slots.addresses, engine.stream.ptr, strategy)
                batch.hold(engine.stream.ptr)
                engine.compute()  # the pages are the next prompt's
                for block in range(COUNT):
                    batch.wait(block)
                    assert batch.done(block)
                    assert slots.payload(block) == expected[block]
                batch.finish()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", Strategy)
def test_a_scatter_comes_after_the_last_use_of_the_pages_and_before_the_next(seed: int, strategy: Strategy) -> None:
    with engine_on(gpu(seed), LAYOUTS[seed % 4], seed) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots, 700 * (seed % 3))) as transfer:
            blocks = blocks_of(engine)
            for _ in range(2):
                slots.fill(engine.dice)
                expected = [slots.payload(block) for block in range(COUNT)]
                engine.compute()
                batch = transfer.scatter(blocks, slots.addresses, engine.stream.ptr, strategy)
                batch.hold(engine.stream.ptr)
                found: list[bytes] = []
                for pages in blocks:
                    engine.read(pages, found)
                batch.finish()
                slots.fill(engine.dice)  # the slots are another's
                engine.device.synchronize(engine.stream.ptr)
                assert found == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_become_whole_one_by_one(seed: int) -> None:
    """On a lazy GPU only what must happen for a block has happened when it is waited for: loads pipeline."""
    with engine_on(FakeCupy(seed=seed), ("NHD",), seed) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots, engine.block_bytes)) as transfer:
            engine.compute()
            batch = transfer.gather(blocks_of(engine), slots.addresses, engine.stream.ptr)
            batch.wait(2)
            assert [batch.done(block) for block in range(COUNT)] == [True] * 3 + [False] * (COUNT - 3)
            batch.finish()
            assert all(batch.done(block) for block in range(COUNT))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_batches_may_be_under_way(seed: int) -> None:
    with engine_on(gpu(seed), LAYOUTS[seed % 4], seed) as engine, slots_for(engine, 2 * COUNT) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            slots.fill(engine.dice)
            stored, loaded = slots.addresses[:COUNT], slots.addresses[COUNT:]
            fresh = [slots.payload(COUNT + block) for block in range(COUNT)]
            blocks = blocks_of(engine)
            engine.compute()
            old: list[bytes] = []
            for pages in blocks:
                engine.read(pages, old)
            out = transfer.gather(blocks, stored, engine.stream.ptr)
            out.hold(engine.stream.ptr)
            back = transfer.scatter(blocks, loaded, engine.stream.ptr)
            back.finish()
            out.finish()
            assert [slots.payload(block) for block in range(COUNT)] == old
            assert [engine.payload(pages) for pages in blocks] == fresh


def test_payloads_in_the_memory_of_the_gpu_do_not_touch_the_bus() -> None:
    fake = FakeCupy()
    with engine_on(fake, ("fused", "NHD")) as engine, slots_for(engine, 1) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            arena = engine.device.allocate(COUNT * engine.block_bytes)
            content = engine.dice.randbytes(COUNT * engine.block_bytes)
            bytes_at(arena, len(content))[:] = content
            blocks = blocks_of(engine)
            fake.calls.clear()
            sources = [arena + block * engine.block_bytes for block in range(COUNT)]
            transfer.scatter_from_device(blocks, sources, engine.stream.ptr).finish()
            assert b"".join(engine.payload(pages) for pages in blocks) == content
            assert [call[0] for call in fake.calls].count("memcpyAsync") == 1  # the list of pages
            engine.device.free(arena)


@pytest.mark.fault(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_that_goes_wrong_is_raised_and_its_blocks_are_never_done(seed: int) -> None:
    fake = gpu(seed)
    with engine_on(fake, ("NHD",), seed) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            engine.compute()
            fake.fail_copies = 3  # the parameters and two blocks get through
            with pytest.raises(RuntimeError, match="IllegalAddress"):
                batch = transfer.gather(blocks_of(engine), slots.addresses, engine.stream.ptr, Strategy.STAGED)
                with pytest.raises(RuntimeError, match="IllegalAddress"):
                    batch.wait(COUNT - 1)
                batch.done(COUNT - 1)


@pytest.mark.fault(16)
@pytest.mark.parametrize("call", ["memcpyAsync", "eventRecord", "streamWaitEvent"])
def test_a_call_that_is_refused_raises_only_when_nothing_is_under_way_any_more(call: str) -> None:
    """The caller gives its slots back then: a copy still to come would write into another's."""
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            engine.compute()
            fake.fail_calls[call] = 7
            with pytest.raises(RuntimeError, match="told to fail"):
                transfer.gather(blocks_of(engine), slots.addresses, engine.stream.ptr)
            slots.view[:] = bytes([FRESH]) * len(slots.view)
            fake.run_all()
            assert set(slots.view) == {FRESH}
            engine.compute()
            blocks = blocks_of(engine)
            transfer.gather(blocks, slots.addresses, engine.stream.ptr).finish()
            assert [slots.payload(block) for block in range(COUNT)] == [engine.payload(pages) for pages in blocks]


@pytest.mark.fault(77)
def test_a_block_is_one_launch_and_one_copy_however_many_runs_it_has() -> None:
    fake = FakeCupy()
    with engine_on(fake, ("HND",)) as engine, slots_for(engine, COUNT) as slots:
        with closing(transfer_of(engine, slots, 4 * engine.block_bytes)) as transfer:
            engine.compute()
            fake.calls.clear()
            transfer.gather(blocks_of(engine), slots.addresses, engine.stream.ptr, Strategy.STAGED).finish()
            names = [call[0] for call in fake.calls]
            assert names.count("gather_runs") == COUNT // 4
            assert names.count("memcpyAsync") == COUNT + 1


def test_no_page_that_is_not_there_is_ever_given_to_the_gpu() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, 1) as slots, closing(transfer_of(engine, slots)) as transfer:
        fake.calls.clear()
        with pytest.raises(ValueError, match="pages"):
            transfer.scatter([[0, 1, PAGES]], slots.addresses, engine.stream.ptr)
        assert not fake.calls


def test_slots_that_are_not_pinned_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is written by a kernel, which could not reach it."""
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, COUNT, pin=False) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            engine.compute()
            blocks = blocks_of(engine)
            transfer.gather(blocks, slots.addresses, engine.stream.ptr, Strategy.MAPPED).finish()
            assert [slots.payload(block) for block in range(COUNT)] == [engine.payload(pages) for pages in blocks]
            assert not any(call[0] == "pointerGetAttributes" for call in fake.calls)


def test_memory_that_is_not_pinned_is_in_no_batch() -> None:
    """Whether the driver keeps to the stream there, and returns at once, nobody says."""
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, COUNT, pin=False) as slots:
        with closing(transfer_of(engine, slots)) as transfer:
            engine.compute()
            blocks = blocks_of(engine)
            transfer.gather(blocks, slots.addresses, engine.stream.ptr, Strategy.BATCHED).finish()
            assert [slots.payload(block) for block in range(COUNT)] == [engine.payload(pages) for pages in blocks]
            assert not any(call[0] == "batch" for call in fake.calls)


@pytest.mark.fault(2)
def test_a_batch_that_failed_is_never_called_whole() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, 2) as slots, closing(transfer_of(engine, slots)) as transfer:
        batch = transfer.gather(blocks_of(engine)[:2], slots.addresses, engine.stream.ptr)
        fake.fail_calls["eventSynchronize"] = 0
        with pytest.raises(RuntimeError, match="told to fail"):
            batch.finish()
        assert not fake.busy, "what failed is over"
        for ask in (batch.wait, batch.done):
            with pytest.raises(RuntimeError, match="told to fail"):
                ask(0)
        batch.finish()


def test_a_stream_that_cannot_be_marked_costs_no_event() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, 1) as slots, closing(transfer_of(engine, slots)) as transfer:
        made: list[int] = []
        for call in ("eventRecord", "streamWaitEvent") * 3:
            fake.fail_calls[call] = 0
            with pytest.raises(RuntimeError, match="told to fail"):
                transfer.gather(blocks_of(engine)[:1], slots.addresses, engine.stream.ptr)
            made.append(len(fake._events))
        assert len(set(made)) == 1


def test_no_copy_reaches_over_the_end_of_one_registration() -> None:
    """The fake refuses such a copy, as CUDA does."""
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, COUNT, chunk_bytes=4096) as slots:
        moved = [address + 4096 - engine.block_bytes // 2 for address in slots.addresses[:-1:2]]
        with closing(transfer_of(engine, slots)) as transfer:
            blocks = blocks_of(engine)[: len(moved)]
            for strategy in Strategy:
                slots.view[:] = bytes(len(slots.view))
                engine.compute()
                transfer.gather(blocks, moved, engine.stream.ptr, strategy).finish()
                found = [bytes(bytes_at(address, engine.block_bytes)) for address in moved]
                assert found == [engine.payload(pages) for pages in blocks]


def test_a_gpu_without_room_for_staging_is_an_error_and_nothing_is_kept() -> None:
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, 1) as slots:
        fake.room_bytes = sum(fake.world.device.values()) + engine.block_bytes
        with pytest.raises(RuntimeError, match="out of memory"):
            transfer_of(engine, slots, engine.block_bytes)


def test_no_page_is_written_twice_by_one_scatter() -> None:
    """Two warps would write it at once, and a bit of both would be in it."""
    fake = FakeCupy()
    with engine_on(fake) as engine, slots_for(engine, 2) as slots, closing(transfer_of(engine, slots)) as transfer:
        fake.calls.clear()
        with pytest.raises(ValueError, match="page 3 is written twice"):
            transfer.scatter([[0, 1, 3], [3, 4, 5]], slots.addresses, engine.stream.ptr)
        assert not fake.calls
        engine.compute()
        transfer.gather([[0, 1, 3], [3, 4, 5]], slots.addresses, engine.stream.ptr).finish()  # who reads may
        assert [slots.payload(n) for n in (0, 1)] == [engine.payload(pages) for pages in ([0, 1, 3], [3, 4, 5])]

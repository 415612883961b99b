"""The mover: loads before stores, stores bounded in bytes, one worker left to loads, nothing lost without a word."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from terracekv.daemon.mover import Meter, Mover
from terracekv.tiers.errors import TierDown, TierStuck


@contextmanager
def mover_of(threads: int, queue_bytes: int = 100) -> Iterator[Mover]:
    mover = Mover(threads=threads, queue_bytes=queue_bytes)
    try:
        yield mover
    finally:
        mover.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(limited())


class Gate:
    """Work that does not end until the gate is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> str:
        self.entered.release()
        assert self._open.wait(30)
        return "through"

    def open(self) -> None:
        self._open.set()

    async def busy(self, workers: int) -> None:
        for _ in range(workers):
            assert await asyncio.to_thread(self.entered.acquire, timeout=30)


@pytest.mark.fault(123)
def test_loads_go_before_stores_that_came_earlier() -> None:
    async def test() -> None:
        with mover_of(threads=1) as mover:
            order = list[str]()
            gate = Gate()
            first = mover.load(gate)
            await gate.busy(1)
            stores = [mover.store(1, lambda n=n: order.append(f"store {n}")) for n in range(2)]  # type: ignore[misc]
            loads = [mover.load(lambda n=n: order.append(f"load {n}")) for n in range(2)]  # type: ignore[misc]
            gate.open()
            await asyncio.gather(first, *loads, *(store for store in stores if store))
            assert order == ["load 0", "load 1", "store 0", "store 1"]

    run(test)


@pytest.mark.fault(123)
def test_stores_over_the_bound_are_refused_until_earlier_ones_are_done() -> None:
    async def test() -> None:
        with mover_of(threads=2, queue_bytes=100) as mover:
            gate = Gate()
            running, waiting = mover.store(60, gate), mover.store(40, gate)
            assert running is not None and waiting is not None and mover.queue_bytes == 100
            assert mover.store(1, gate) is None and mover.queue_bytes == 100
            gate.open()
            assert [await running, await waiting] == ["through"] * 2
            assert mover.queue_bytes == 0
            assert mover.store(101, gate) is None
            exact = mover.store(100, gate)
            assert exact is not None and await exact == "through"

    run(test)


@pytest.mark.parametrize("threads", [2, 4])
def test_one_worker_is_always_left_to_loads(threads: int) -> None:
    async def test() -> None:
        with mover_of(threads) as mover:
            gate = Gate()
            stores = [mover.store(1, gate) for _ in range(2 * threads)]
            await gate.busy(threads - 1)
            for answer in range(5):
                assert await mover.load(lambda answer=answer: answer) == answer  # type: ignore[misc]
            assert not gate.entered.acquire(blocking=False), "a store took the last worker"
            gate.open()
            await asyncio.gather(*(store for store in stores if store))
            assert mover.queue_bytes == 0

    run(test)


def test_what_a_job_raises_is_counted_and_reaches_who_asked() -> None:
    async def test() -> None:
        def fail() -> None:
            raise OSError("broken medium")

        with mover_of(threads=1) as mover:
            with pytest.raises(OSError, match="broken medium"):
                await mover.load(fail)
            store = mover.store(10, fail)
            assert store is not None
            with pytest.raises(OSError, match="broken medium"):
                await store
            assert mover.failures == 2 and mover.queue_bytes == 0
            assert await mover.load(lambda: "still at work") == "still at work"

    run(test)


def test_more_loads_than_may_wait_are_refused_and_those_before_them_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr("terracekv.daemon.mover.LOADS_MAX", 2)
        with mover_of(threads=1) as mover:
            gate = Gate()
            running = mover.load(gate)
            await gate.busy(1)
            waiting = [mover.load(gate), mover.load(gate)]
            refused = mover.load(gate)
            gate.open()
            with pytest.raises(TierDown, match="2 jobs wait already"):
                await refused
            assert await asyncio.gather(running, *waiting) == ["through"] * 3
            assert await mover.load(lambda: "again") == "again"

    run(test)


def test_a_job_that_would_end_its_thread_ends_neither_worker_nor_loop() -> None:
    async def test() -> None:
        def leave() -> None:
            raise SystemExit(3)

        with mover_of(threads=1) as mover:
            with pytest.raises(RuntimeError, match="SystemExit"):
                await mover.load(leave)
            assert await mover.load(lambda: "still at work") == "still at work"

    run(test)


def test_only_a_job_past_its_limit_is_stuck_and_only_what_may_be_let_go_is() -> None:
    async def test() -> None:
        with mover_of(threads=2) as mover:
            gate = Gate()
            patient = mover.load(gate, limit_s=1000.0)
            await gate.busy(1)
            assert mover.stalled_s == 0.0
            stuck = mover.load(gate, limit_s=0.0)
            await gate.busy(1)
            assert mover.stalled_s > 0.0
            kept, gone, store = mover.load(gate), mover.load(gate, shed=True), mover.store(10, gate)
            assert store is not None and mover.shed(TierStuck("it hangs", "wait")) == 2 and mover.queue_bytes == 0
            for future in (gone, store):
                with pytest.raises(TierStuck, match="it hangs"):
                    await future
            gate.open()
            assert [*await asyncio.gather(patient, stuck, kept)] == ["through"] * 3

    run(test)


def test_who_stopped_waiting_stops_neither_the_work_nor_the_worker() -> None:
    async def test() -> None:
        with mover_of(threads=1) as mover:
            gate = Gate()
            load, store = mover.load(gate), mover.store(10, gate)
            assert store is not None
            await gate.busy(1)
            load.cancel()
            store.cancel()
            gate.open()
            await mover.drain()
            assert mover.queue_bytes == 0 and await mover.load(lambda: 1) == 1

    run(test)


def test_drain_waits_for_stores_that_wait_and_for_those_that_run() -> None:
    async def test() -> None:
        with mover_of(threads=2) as mover:
            gate = Gate()
            stores = [mover.store(10, gate) for _ in range(3)]
            drain = asyncio.create_task(mover.drain())
            await gate.busy(1)
            assert not drain.done()
            gate.open()
            await drain
            assert all(store is not None and store.done() for store in stores)

    run(test)


def test_close_ends_what_runs_and_cancels_what_waits() -> None:
    async def test() -> None:
        mover = Mover(threads=2, queue_bytes=100)
        gate = Gate()
        running = [mover.load(gate), mover.load(gate)]
        await gate.busy(2)
        queued = [mover.load(gate), mover.store(10, gate)]
        asyncio.get_running_loop().call_later(0.05, gate.open)
        threading.Timer(0.05, gate.open).start()
        mover.close()
        assert mover.store(1, gate) is None
        assert [await load for load in running] == ["through"] * 2
        for future in queued:
            assert future is not None
            with pytest.raises(asyncio.CancelledError):
                await future
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("mover-")]

    run(test)


def test_a_worker_whose_loop_is_gone_ends_quietly() -> None:
    gate = Gate()
    movers = list[Mover]()

    async def start() -> None:
        movers.append(Mover(threads=1, queue_bytes=100))
        movers[0].load(gate)
        await gate.busy(1)

    asyncio.run(start())
    gate.open()
    movers[0]._threads[0].join(30)
    assert not movers[0]._threads[0].is_alive()


def test_a_first_tiny_transfer_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("terracekv.daemon.mover.time.monotonic", lambda: now[0])
    meter = Meter(1e9)
    assert meter.bytes_per_s == pytest.approx(1e9) and not meter.measured
    with meter:
        now[0] += 0.001
        meter.moved(4096)
    assert 0.9e9 < meter.bytes_per_s < 1e9 and meter.measured


def test_the_meter_counts_time_that_several_threads_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("terracekv.daemon.mover.time.monotonic", lambda: now[0])
    meter = Meter(1000)
    with meter:
        now[0] += 0.25
        with meter:
            now[0] += 0.5
            meter.moved(600)
        now[0] += 0.25
        meter.moved(400)
    now[0] += 50  # idle
    assert meter.bytes_per_s == pytest.approx(1000)


def test_the_meter_forgets_how_fast_it_once_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("terracekv.daemon.mover.time.monotonic", lambda: now[0])
    meter = Meter(1e9)
    for rate, seconds in ((1000, 4), (10, 20)):
        for _ in range(seconds):
            with meter:
                now[0] += 1
                meter.moved(rate)
    assert 10 <= meter.bytes_per_s < 20

"""The whole store against a dumb model: anything may happen between any two steps, and the promises hold after each.

The store is the real one, in one process: host and disk tier, promotions, write-through, pins, sessions. Blocks are few
and space is scarce, so evictions, promotions and writes meet all the time. Jobs of the mover run one by one in an order
that the test draws, so every interleaving of the event loop with its workers can come up, and comes up again.

TERRACEKV_TEST_MODEL_RUNS makes more runs of it. A failure prints the steps and a line that repeats them.
"""

import logging
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from terracekv.tests.model.books import MODELS, Model, Seen, look, lying, read
from terracekv.tests.model.engine_rules import EngineRules
from terracekv.tests.model.machine import any_of, chain_of, length_of, model_of, mortal
from terracekv.tests.model.world import MEDIA
from terracekv.tiers import failpoint
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.tier import PAGE

RUNS = int(os.environ.get("TERRACEKV_TEST_MODEL_RUNS", "120"))
STEPS = 60
LINES = (
    "catalog.commit",
    "disk.evicted",
    "disk.publish",
    "disk.published",
    "namespaces.replace",
    "namespaces.replaced",
    "segment.create",
    "segment.reuse",
    "segment.write",
    "segment.written",
    "slots.assign",
    "slots.free",
    "slots.freed",
    "slots.seal",
    "slots.sealed",
    "slots.taken",
    "store.committed",
    "store.durable",
    "store.promoted",
)
"""Lines at which the daemon may be killed."""
GROWTH = {
    "no room": "segment.create=errno:ENOSPC",
    "no file": "segment.create=errno:EIO",
    "room again": "",
}
AGE_MIN = 6
"""Steps that a life lasts before it may be ended on purpose."""
GAPS = ("segment.written", "disk.publish", "disk.published")
"""Lines at which a write to disk holds no lock."""

mostly = st.sampled_from([True, True, True, False])


class StoreMachine(EngineRules):
    """All that engines, operators, disks and power cuts do."""

    # Operators.

    @rule(
        what=st.sampled_from(["host", "host", "host", "delete", "delete", "delete", "disk", "gpu", "all"]),
        model=model_of,
        chain=chain_of,
        start=st.integers(0, 5),
        length=st.integers(1, 3),
    )
    @mortal
    def somebody_deletes_or_flushes(self, what: str, model: Model, chain: int, start: int, length: int) -> None:
        if what == "delete":
            self.delete(model, chain, start, length)
        elif what != "gpu" or self.world.gpu is not None:
            self.flush(model, None if what == "all" else what)

    def flush(self, model: Model, tier: str | None) -> None:
        namespace, _ = self.target(model, 0, 1)
        self.flushes.append((self.world.task(self.world.store.flush(namespace, tier)), namespace, tier))

    def delete(self, model: Model, chain: int, start: int, length: int) -> None:
        namespace, ids = self.target(model, chain, length, start)
        under_way = {id for each in self.commits for id in each.ids.values()}
        task = self.world.task(self.world.store.delete(namespace, ids))
        self.deletions.append((task, set(ids), under_way))

    @rule(
        what=st.sampled_from(
            [
                "pin",
                "pin",
                "pin briefly",
                "unpin",
                "prefetch",
                "gather",
                "gather and hang up",
                "hang up",
                "a second passes",
            ]
        ),
        model=model_of,
        chain=chain_of,
        start=st.sampled_from([0, 0, 1, 2]),
        length=length_of,
    )
    @mortal
    def somebody_asks(self, what: str, model: Model, chain: int, start: int, length: int) -> None:
        world, store = self.world, self.world.store
        namespace, ids = self.target(model, chain, length, start)
        if what.startswith("pin"):
            ttl_s = -1 if what == "pin briefly" else 1_000
            self.errands.append((world.task(store.pins.pin(namespace, ids, ttl_s)), None, ids))
        elif what == "unpin":
            world.on_loop(lambda: store.pins.unpin(namespace, ids))
        elif what == "prefetch":
            world.on_loop(lambda: store.promoter.prefetch(namespace, ids))
        elif what == "gather and hang up":
            self.gather_and_hang_up(namespace, ids)
        elif what == "gather":
            self.errands.append((world.task(store.promoter.gather(namespace, ids)), namespace, ids))
        elif what == "hang up":
            for task, _, _ in self.errands:
                task.cancel()
            world.turn()
        else:
            world.on_loop(store.pins.expire)
            world.on_loop(store.host.reap)

    def gather_and_hang_up(self, namespace: Namespace, ids: list[bytes]) -> None:
        """Somebody waits until the first of several blocks has come, and no longer."""
        task = self.world.task(self.world.store.promoter.gather(namespace, ids))
        self.do_last_job()
        task.cancel()
        self.errands.append((task, namespace, ids))
        self.world.turn()

    # The mover.

    @precondition(lambda self: self.world.mover.jobs)
    @rule(n=any_of)
    @mortal
    def a_job_is_done(self, n: int) -> None:
        self.do_job(n)

    @precondition(lambda self: self.world.mover.jobs)
    @rule(oldest_first=st.booleans())
    @mortal
    def all_jobs_are_done(self, oldest_first: bool) -> None:
        """Newest first, a flush that came later overtakes commits and promotions."""
        self.do_all_jobs(0 if oldest_first else -1)

    @precondition(lambda self: self.world.mover.jobs)
    @rule(
        n=any_of,
        line=st.sampled_from(GAPS),
        model=model_of,
        what=st.sampled_from(["flush", "flush and store", "delete", "other jobs"]),
    )
    @mortal
    def a_job_is_done_while_something_happens(self, n: int, line: str, model: Model, what: str) -> None:
        def meanwhile() -> None:
            self.world.meanwhile = lambda: None
            if self.world.disk.roller._rolling.locked():
                return
            before = len(self.world.mover.jobs)
            if what.startswith("flush"):
                self.flush(model, None)
            elif what == "delete":
                self.delete(model, n % 2, n % 4, 2)
            else:
                before = 0
            while len(self.world.mover.jobs) > before:
                self.do_job(before)
            if what == "flush and store":
                for engine in self.engines:
                    if engine.model is model:
                        self.store(engine, n % 2, 6, durable=True)
                while len(self.world.mover.jobs) > before:
                    self.do_job(before)

        self.world.meanwhile = meanwhile
        failpoint.arm(f"{line}=sleep:1")
        try:
            self.do_job(n)
        finally:
            failpoint.disarm(line)
            self.world.meanwhile = lambda: None

    @precondition(lambda self: self.world.disk.rebuilding)
    @rule()
    @mortal
    def the_catalog_is_rebuilt(self) -> None:
        self.world.calm()
        self.books.may_tear = True
        self.world.disk.rebuild()
        assert not self.world.disk.rebuilding

    @rule(what=st.sampled_from(["all leave", "flush", "delete"]), model=model_of)
    @mortal
    def all_is_quiet(self, what: str, model: Model) -> None:
        """All leave, and nothing is held; or an operator flushes tier after tier, or deletes all that there is of a
        namespace, and nothing is listed."""
        self.do_all_jobs()
        if what == "all leave":
            self.all_leave()
        elif self.world.disk.rebuilding:
            return
        elif what == "delete":
            for chain in (0, 1):
                self.delete(model, chain, 0, 6)
                self.do_all_jobs()
            seen = look(self.world)
            assert not set(model.ids) & (seen.gpu.keys() | seen.host.keys() | seen.disk.keys())
        else:
            for tier in self.world.store.tiers:
                self.flush(model, tier)
                self.do_all_jobs()
                assert not getattr(look(self.world), tier).keys() & set(model.ids)

    def all_leave(self) -> None:
        roles = [(engine.model, engine.session.shard) for engine in self.engines]
        while self.engines:
            self.leave(self.engines[0], True)
        self.do_all_jobs()
        for model in MODELS:
            self.world.on_loop(lambda model=model: self.world.store.pins.unpin(model.wanted, model.ids))  # type: ignore[misc]
        host = self.world.tiers.host
        assert self.idle and not host.leases() and not host._doomed
        gpu = self.world.gpu
        assert gpu is None or not (gpu.leases() or gpu._doomed)
        for model, shard in roles:
            self.join(model, shard)

    # What goes wrong.

    @rule(
        what=st.sampled_from([*MEDIA, *GROWTH, *LINES, *["rot"] * 3, *["a GPU's copy"] * 2]),
        n=any_of,
        offset=st.integers(-140, 4_999),
    )
    def something_goes_wrong(self, what: str, n: int, offset: int) -> None:
        """The next time the disk or the GPU is asked, when a line is reached, or in what lies on the disk already."""
        if what in MEDIA:
            self.world.go_wrong(what)
        elif what in LINES:
            failpoint.disarm(what)
            failpoint.arm(f"{what}*{1 + n % 3}=kill")
        elif what in GROWTH:
            failpoint.disarm("segment.create")
            failpoint.arm(GROWTH[what])
        elif what == "a GPU's copy":
            self.world.fake.fail_calls["memcpyAsync"] = 0
        else:
            self.rot(n, offset)

    def rot(self, n: int, offset: int) -> None:
        """A bit flips in a record's header, where the offset is negative, or in its payload."""
        places = [(id, place) for id, place in look(self.world).disk.items() if place not in self.books.headless]
        if not places:
            return
        id, (segment, page) = places[n % len(places)]
        self.books.spoiled.add(id)
        if offset < 0:
            self.world.flip_on_disk(segment, page * PAGE - offset - 1)
            self.books.headless.add((segment, page))
        else:
            _, stored = lying(self.world, (segment, page), size_of(id))
            self.world.flip_on_disk(segment, (page + 1) * PAGE + offset % len(stored))
            self.books.rotten.add(read(self.world, (segment, page), size_of(id))[1])

    @precondition(lambda self: self.age >= AGE_MIN)
    @rule(
        how=st.sampled_from(["killed", "killed", "stopped", "stopped in the middle"]),
        rot=st.none() | any_of,
        catalog=mostly,
        host=mostly,
        codec=st.sampled_from(["off", "on"]),
        hurried=st.none() | model_of,
    )
    @mortal
    def the_daemon_is_started_again(
        self, how: str, rot: int | None, catalog: bool, host: bool, codec: str, hurried: Model | None
    ) -> None:
        """``rot`` spoils a bit of the arena, ``catalog`` and ``host`` say what the next life finds, ``codec`` how it
        writes to disk."""
        if how == "stopped":
            self.do_all_jobs()
        if how != "killed":
            self.settle()
            while self.engines:
                self.leave(self.engines[0], False)
            self.settle()
        before = look(self.world)
        self.world.set_codec(codec)
        end = self.world.crash if how == "killed" else self.world.close
        self.die(end, lambda: self.between_lives(before, rot, catalog, host))
        self.live()
        if host:
            assert look(self.world).host.keys() == before.host.keys(), "host does not hold what it held"
        if hurried is not None:
            self.gather_and_hang_up(*self.target(hurried, 0, 6))

    def between_lives(self, before: Seen, rot: int | None, catalog: bool, host: bool) -> None:
        if not catalog:
            self.world.lose_catalog()
            self.books.forgotten.clear()
        if not host:
            self.world.lose_host()
            while self.ghosts:
                self.ghosts.pop().end()
            self.past.clear()
            self.books.in_host.clear()
        elif rot is not None and before.host:
            id, slot = list(before.host.items())[rot % len(before.host)]
            self.books.rotten.add(self.world.flip_in_arena(slot.offset, rot * 400, size_of(id)))
            self.past = [held for held in self.past if held[0].record != slot.record]


def size_of(id: bytes) -> int:
    return next(model.wanted.block_bytes for model in MODELS if id in model.ids)


@pytest.mark.timeout(600)
@pytest.mark.breaks("bytes rot and media fail to the end; the machine itself checks what is promised")
@pytest.mark.fault(1)
@pytest.mark.fault(11)
@pytest.mark.fault(42)
def test_the_store_keeps_its_promises_whatever_happens(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("terracekv", "asyncio"):  # a record keeps its error, and that the life it happened in
        caplog.set_level(logging.CRITICAL, name)
    StoreMachine.steps_done = 0
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    with capsys.disabled():
        print(f"\nmodel: {StoreMachine.steps_done} steps")
    assert StoreMachine.steps_done >= RUNS * STEPS // 2, "the runs were cut short"

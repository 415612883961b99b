"""What holds after every step of the model test, and how a life of the store ends.

Owns the world, the books and the engines of one run. The rules that change things are in ``test_store.py``. Imports
the other modules of this folder.
"""

import asyncio
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from terracekv.daemon.forgetting import Flushed
from terracekv.tests.model.books import MODELS, Books, Model, Seen, check_bytes, check_lookups, look, present
from terracekv.tests.model.engines import Commit, Engine, Writer, commit, join
from terracekv.tests.model.world import Killed, World
from terracekv.tiers import failpoint
from terracekv.tiers.gpu import GpuTier
from terracekv.tiers.namespace import Namespace
from terracekv.tiers.slots import Slot, slot_bytes_for

PAST_MAX = 16
SHM = Path("/dev/shm")

any_of = st.integers(0, 11)
model_of = st.sampled_from(MODELS)
chain_of = st.integers(0, 1)
length_of = st.sampled_from([6, 4, 3, 2, 1])


def mortal(rule: Callable[..., None]) -> Callable[..., None]:
    """A rule in which the daemon may die at a line that was armed; then it is started again."""

    @functools.wraps(rule)
    def run(self: "Machine", *args: Any, **kwargs: Any) -> None:
        try:
            rule(self, *args, **kwargs)
        except Killed:
            self.killed = True
            self.killed_freeing = not failpoint._armed.keys().isdisjoint({"slots.free", "slots.freed"})
            self.die()
            self.live()

    return run


class Machine(RuleBasedStateMachine):
    """State and invariants."""

    folder: Path
    world: World
    steps_done = 0
    """Of all runs."""

    @initialize(
        segments=st.sampled_from([2, 3, 16]),
        admission=st.sampled_from(["all", "second_touch"]),
        queue_blocks=st.sampled_from([3, 1000]),
        codec=st.sampled_from(["off", "on"]),
        gpu_slabs=st.sampled_from([0, 1, 3]),
    )
    def begin(self, segments: int, admission: str, queue_blocks: int, codec: str, gpu_slabs: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="terracekv-model-", dir=SHM))
        self.books = Books()
        self.engines: list[Engine] = []
        self.ghosts: list[Writer] = []
        self.past: list[tuple[Slot, bytes]] = []
        self.commits: list[Commit] = []
        self.flushes: list[tuple[asyncio.Task[Flushed], Namespace, str | None]] = []
        self.deletions: list[tuple[asyncio.Task[dict[str, int]], set[bytes], set[bytes]]] = []
        """With the blocks, and those that were being stored at the time: they may come after it."""
        self.errands: list[tuple[asyncio.Task[Any], Namespace | None, list[bytes]]] = []
        self.age = 0
        self.doomed: set[int] = set()
        """Slots that outlive their blocks because somebody reads them."""
        self.new_step()
        self.world = World(
            self.folder,
            segments=segments,
            admission=admission,
            queue_blocks=queue_blocks,
            codec=codec,
            gpu_slabs=gpu_slabs,
        )
        self.live()

    def new_step(self) -> None:
        self.evicted: set[bytes] = set()
        """Blocks of which the host tier said, in this step, that they left."""
        self.left_gpu: set[bytes] = set()
        """Likewise the gpu tier."""
        self.excused: set[bytes] = set()
        """Blocks that may leave the disk in this step."""
        self.killed = self.killed_freeing = False
        self.age += 1

    def live(self) -> None:
        """After each start: evictions are heard of, engines join again."""
        self.age = 0
        world = self.world
        for each in MODELS:
            world.tiers.namespaces.register(each.wanted)
        heard = world.tiers.host.on_evict

        def hear(namespace: Namespace, ids: list[bytes], reason: str) -> None:
            current = world.tiers.namespaces.is_current(namespace)
            if current:
                self.evicted.update(ids)
            if reason == "capacity":
                assert world.tiers.host._doomed <= self.doomed, "evicted under a lease"
            self.doomed = set(world.tiers.host._doomed)
            heard(namespace, ids, reason)

        world.tiers.host.on_evict = hear
        if world.gpu is not None:
            self.hear_gpu(world.gpu)
        for each in MODELS:
            for shard in range(each.wanted.shards):
                self.join(each, shard)

    def hear_gpu(self, gpu: GpuTier) -> None:
        heard = gpu.on_evict

        def hear(namespace: Namespace, ids: list[bytes], reason: str) -> None:
            self.left_gpu.update(ids)
            heard(namespace, ids, reason)

        gpu.on_evict = hear

    def join(self, model: Model, shard: int | None) -> None:
        self.engines.append(join(self.world, model, shard))

    def leave(self, engine: Engine, ends_too: bool) -> None:
        """Its connection closes with all it holds; its process may go on writing."""
        self.engines.remove(engine)
        ghost = Writer(engine.lock, engine.reserved)
        self.past += [held for by in engine.seen.values() for held in by.values()]
        if ends_too:
            ghost.end()
        else:
            self.ghosts.append(ghost)
        self.world.on_loop(lambda: self.world.sessions.close(engine.session))

    def commit(
        self, engine: Engine, handle: int, durable: bool, choose: Callable[[int], bool] = lambda n: True
    ) -> None:
        """Write what ``choose`` takes of a reservation's slots, and ask to make it findable."""
        asked = commit(self.world, self.books, engine, handle, choose, durable)
        self.commits.append(asked)
        for _, _, stored_beside in self.deletions:
            stored_beside.update(asked.ids.values())

    def die(self, end: Callable[[], None] | None = None, between: Callable[[], None] = lambda: None) -> None:
        """A life ends, by default by a kill. Engines are told nothing; slots that they hold they may go on using."""
        held = [(engine.lock, engine.reserved) for engine in self.engines]
        self.past += [held for engine in self.engines for by in engine.seen.values() for held in by.values()]
        (end or self.world.crash)()
        self.ghosts += [Writer(lock, slots) for lock, slots in held]
        for left in (self.engines, self.commits, self.flushes, self.deletions, self.errands):
            left.clear()
        self.books.on_gpu.clear()
        between()
        self.world.open()

    def settle(self) -> None:
        """Take the answers that have come."""
        seen = look(self.world)
        for asked in [asked for asked in self.commits if asked.task.done()]:
            self.commits.remove(asked)
            stored, durable = asked.task.result()
            if not self.world.tiers.namespaces.is_current(asked.namespace):
                continue
            for index in stored:
                id = asked.ids[index]
                there = id in seen.host or id in seen.disk or id in self.evicted
                assert there or asked.durable or id in self.books.forgotten, "answered as stored, and is not there"
            for index in durable:
                id = asked.ids[index]
                there = id in seen.disk or id in self.may_have_left_the_disk() or self.a_segment_was_evicted()
                assert there, "answered as durable, and is not"
        for flush in [flush for flush in self.flushes if flush[0].done()]:
            self.flushes.remove(flush)
            task, before, tier = flush
            task.result()
            if tier == "disk":
                self.excused |= {id for m in MODELS if m.id == before.id for id in m.ids}
            now = self.world.tiers.namespaces.get(before.id)
            assert now is not None and (tier is not None or now.epoch > before.epoch)
        for deletion in [deletion for deletion in self.deletions if deletion[0].done()]:
            self.deletions.remove(deletion)
            deleting, ids, stored_beside = deletion
            deleting.result()
            self.excused |= ids
            if not self.world.disk.rebuilding:
                self.books.forgotten |= ids - stored_beside
        for errand in [errand for errand in self.errands if errand[0].done()]:
            self.errands.remove(errand)
            self.end_errand(*errand)

    def end_errand(self, task: "asyncio.Task[Any]", namespace: Namespace | None, ids: list[bytes]) -> None:
        """A pin, or a gather whose leases are ours to end."""
        if task.cancelled():
            return
        results = task.result()
        if namespace is None:
            return
        for id, slot in zip(ids, results, strict=True):
            if isinstance(slot, Slot):
                found = bytes(self.world.tiers.host.payload(slot, namespace.block_bytes))
                assert self.books.is_right(id, namespace.epoch, found), "gathered wrong bytes"
                self.world.tiers.host.release([slot])

    @property
    def idle(self) -> bool:
        return not (self.world.mover.jobs or self.commits or self.flushes or self.errands or self.deletions)

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "world"):
            return
        type(self).steps_done += 1
        assert not self.world.surprises, self.world.surprises
        self.settle()
        self.world.media.asleep = True
        world, books = self.world, self.books
        seen = look(world)
        books.may_tear |= "os.preadv flip" in world.media.fired
        check_bytes(world, books, seen)
        check_lookups(world, seen)
        self.check_nothing_left_unsaid(seen)
        self.check_leases()
        self.check_writers(seen)
        self.check_sums(seen)
        self.world.media.asleep = books.may_tear = False
        self.new_step()

    def check_nothing_left_unsaid(self, seen: Seen) -> None:
        """What was listed is listed, unless something that happened in this step explains it."""
        world, books = self.world, self.books
        epochs = {each.id: namespace.epoch for each, namespace in present(world)}
        current = {id for each in MODELS if epochs[each.id] == books.epochs.get(each.id) for id in each.ids}
        assert all(epochs[id] >= epoch for id, epoch in books.epochs.items()), "an epoch went back"
        books.epochs = epochs
        gone = (books.in_host & current) - seen.host.keys() - self.evicted
        assert not gone or self.killed_freeing, f"{len(gone)} blocks left host and nobody said so"
        books.in_host = set(seen.host)
        assert not (books.on_gpu & current) - seen.gpu.keys() - self.left_gpu, "blocks left the GPU unsaid"
        books.on_gpu = set(seen.gpu)
        there = [segment.number for segment in world.disk._shelf.segments()]
        leaving = {*books.segments[:1], *there[:1]} if self.killed else set[int]()
        excused = self.may_have_left_the_disk()
        gone = {
            id
            for id, segment in books.on_disk.items()
            if id in current and id not in seen.disk and id not in excused and segment in set(there) - leaving
        }
        if any(call.startswith("os.preadv") for call in world.media.fired):
            gone.clear()  # what cannot be read is not listed any more
        kept = dict[bytes, int]()
        if world.disk.rebuilding:
            kept = {id: books.on_disk[id] for id in gone}
        else:
            assert not gone, f"{len(gone)} blocks left the disk without cause"
        books.on_disk = kept | {id: segment for id, (segment, _) in seen.disk.items()}
        books.segments = there
        world.media.fired.clear()

    def may_have_left_the_disk(self) -> set[bytes]:
        """Blocks that are being deleted or flushed, or that the test spoiled."""
        leaving: list[Iterable[bytes]] = [ids for _, ids, _ in self.deletions]
        for _, namespace, tier in self.flushes:
            if tier == "disk":
                leaving += [each.ids for each in MODELS if each.id == namespace.id]
        return self.excused.union(self.books.forgotten, self.books.spoiled, *leaving)

    def a_segment_was_evicted(self) -> bool:
        """In this step."""
        return any(not self.world.disk._shelf.has(number) for number in self.books.segments)

    def check_leases(self) -> None:
        """Bytes under a lease stay, and whoever reads on after it is over can tell."""
        world = self.world
        table, host = world.tiers.table, world.tiers.host
        for engine in self.engines:
            for handle in set(engine.seen) - set(engine.session.leases):
                self.past += engine.seen.pop(handle).values()
            for held in engine.seen.values():
                for slot, found in held.values():
                    assert table.current(slot), "a leased slot was taken away"
                    assert bytes(host.payload(slot, len(found))) == found, "leased bytes changed"
            for handle in set(engine.seen_on_gpu) - set(engine.session.leases):
                del engine.seen_on_gpu[handle]
            for held in engine.seen_on_gpu.values():
                for slot, found in held.values():
                    assert world.on_gpu(slot, len(found)) == found, "leased bytes changed, on the GPU"
        self.past = [(slot, found) for slot, found in self.past[-PAST_MAX:] if table.current(slot)]
        for slot, found in self.past:
            assert bytes(host.payload(slot, len(found))) == found, "bytes changed and the generation did not"

    def check_writers(self, seen: Seen) -> None:
        """A slot that somebody may write is nobody else's."""
        taken = [slot.record for slot in seen.host.values()]
        for engine in self.engines:
            taken += [slot.record for slot in engine.reserved]
        for ghost in self.ghosts:
            taken += [slot.record for slot in ghost.slots]
        assert len(taken) == len(set(taken)), "a slot has two writers, or is listed while it can be written"

    def check_sums(self, seen: Seen) -> None:
        """Promises 2 and 3: books balance, bytes stay below their caps."""
        world, host = self.world, self.world.tiers.host
        host.check()
        # Entries of a flushed epoch, too, until they are reclaimed.
        listed = {(entry.segment, entry.page) for _, entry in world.disk._catalog.entries() if entry is not None}
        broken = self.books.headless & listed
        if not broken:
            world.disk.check()
        status = host.status()
        assert status.used_bytes == sum(map(world.tiers.table.slot_bytes, world.tiers.table.occupied()))
        assert status.used_bytes <= status.capacity_bytes
        assert world.disk_bytes() <= world.disk.capacity_bytes, "the disk tier's folder is larger than its cap"
        if world.gpu is not None:
            world.gpu.check()
            near = world.gpu.status()
            assert near.used_bytes <= near.capacity_bytes == world.config.gpu.size
            assert not self.idle or near.blocks == len(seen.gpu), "the GPU keeps blocks of an older epoch"
        assert world.mover.queue_bytes <= world.mover.queue_bytes_max
        pins = world.store.pins
        assert pins.bytes == sum(slot_bytes_for(held[0].block_bytes) for held in pins._held.values()) <= pins.bytes_max
        if self.idle:
            world.sessions.check()
            assert world.store.promoter.coming == world.mover.queue_bytes == 0
            reserved = {slot.record for engine in self.engines for slot in engine.reserved}
            orphans = {record for records in host._orphans.values() for record in records}
            assert status.blocks == len(seen.host), "host keeps blocks of an older epoch"
            assert host._writing.keys() == reserved | orphans, "slots are reserved that no session has"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.crash()
        for engine in self.engines:
            os.close(engine.lock)
        for ghost in self.ghosts:
            ghost.end()
        self.world.end()
        shutil.rmtree(self.folder)

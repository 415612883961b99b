"""What engines do in the model test: store, load, come, go, write half, write on when nobody thinks they do.

Owns nothing: rules on the state of ``machine.py``. Imports the other modules of this folder.
"""

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from terracekv.tests.model.books import Model
from terracekv.tests.model.engines import Engine, acquire
from terracekv.tests.model.machine import Machine, any_of, chain_of, length_of, mortal
from terracekv.tiers.errors import NotFound
from terracekv.tiers.namespace import Namespace


class EngineRules(Machine):
    """Rules for engines, and how jobs of the mover are done."""

    def writing(self) -> list[tuple[Engine, int]]:
        return [(engine, handle) for engine in self.engines for handle in engine.session.reservations]

    def reading(self) -> list[tuple[Engine, int]]:
        return [(engine, handle) for engine in self.engines for handle in engine.session.leases]

    def target(self, model: Model, chain: int, length: int, start: int = 0) -> tuple[Namespace, list[bytes]]:
        """The present namespace, and the ids of a part of a chain."""
        namespace = self.world.tiers.namespaces.get(model.id)
        assert namespace is not None
        return namespace, model.ids_of(model.chains[chain][start : start + length])

    @rule(n=any_of, shard=st.sampled_from([None, 0, 1]), ends_too=st.booleans())
    @mortal
    def an_engine_leaves_and_another_joins(self, n: int, shard: int | None, ends_too: bool) -> None:
        engine = self.engines[n % len(self.engines)]
        self.leave(engine, ends_too)
        self.join(engine.model, shard if shard is None else shard % engine.model.wanted.shards)

    @precondition(lambda self: self.ghosts)
    @rule(n=any_of, ends=st.booleans())
    @mortal
    def a_process_without_a_session_writes_on_or_ends(self, n: int, ends: bool) -> None:
        ghost = self.ghosts[n % len(self.ghosts)]
        for slot in ghost.slots:
            self.world.tiers.host.payload(slot, 5_000)[:] = os.urandom(8) * 625
        if ends:
            self.ghosts.remove(ghost)
            ghost.end()

    @rule(n=any_of, chain=chain_of, length=length_of)
    @mortal
    def an_engine_reserves(self, n: int, chain: int, length: int) -> None:
        self.reserve(self.engines[n % len(self.engines)], chain, length)

    def reserve(self, engine: Engine, chain: int, length: int) -> int:
        keys = engine.model.chains[chain][:length]
        if engine.session.shard is None:
            return 0
        return self.world.on_loop(lambda: self.world.sessions.reserve(engine.session, keys))[0]

    @precondition(lambda self: self.writing())
    @rule(n=any_of, mask=st.integers(0, 63), durable=st.booleans())
    @mortal
    def an_engine_commits(self, n: int, mask: int, durable: bool) -> None:
        engine, handle = self.writing()[n % len(self.writing())]
        self.commit(engine, handle, durable, lambda n: not mask >> n & 1)

    @rule(n=any_of, chain=chain_of, length=length_of, durable=st.booleans(), jobs=st.integers(0, 3))
    @mortal
    def an_engine_stores(self, n: int, chain: int, length: int, durable: bool, jobs: int) -> None:
        engine = self.engines[n % len(self.engines)]
        self.store(engine, chain, length, durable)
        for _ in range(jobs):
            self.do_last_job()

    def store(self, engine: Engine, chain: int, length: int, durable: bool) -> None:
        """Reserve, write, and ask to make it findable."""
        handle = self.reserve(engine, chain, length)
        if handle in engine.session.reservations:
            self.commit(engine, handle, durable)

    @rule(n=any_of, chain=chain_of, durable=st.booleans())
    @mortal
    def an_engine_works_a_prompt_through(self, n: int, chain: int, durable: bool) -> None:
        """Load what is there, store the whole, wait for both."""
        engine = self.engines[n % len(self.engines)]
        for _ in range(2):
            handle = acquire(self.world, self.books, engine, engine.model.chains[chain])
            self.do_all_jobs()
            self.world.on_loop(lambda: self.world.sessions.release(engine.session, handle))  # noqa: B023
            self.store(engine, chain, 6, durable)
            if not durable:
                return
            self.do_all_jobs()

    @rule(n=any_of, chain=chain_of, length=length_of)
    @mortal
    def an_engine_loads_a_prompt(self, n: int, chain: int, length: int) -> None:
        engine = self.engines[n % len(self.engines)]
        handle = acquire(self.world, self.books, engine, engine.model.chains[chain][:length])
        self.do_all_jobs()
        self.world.on_loop(lambda: self.world.sessions.release(engine.session, handle))

    @precondition(lambda self: self.writing())
    @rule(n=any_of, aborts=st.booleans())
    @mortal
    def an_engine_writes_half_and_may_abort_once_and_again(self, n: int, aborts: bool) -> None:
        engine, handle = self.writing()[n % len(self.writing())]
        for slot in engine.reserved[: 1 + n // 2]:
            self.world.tiers.host.payload(slot, 3_000)[:] = os.urandom(8) * 375
        if aborts:
            sessions = self.world.sessions
            assert self.world.on_loop(lambda: sessions.abort(engine.session, handle))
            assert not self.world.on_loop(lambda: sessions.abort(engine.session, handle))
            late = self.world.task(sessions.commit(engine.session, handle, [0], False))
            with pytest.raises(NotFound):
                late.result()

    @rule(n=any_of, chain=chain_of, length=length_of, jobs=st.integers(0, 3))
    @mortal
    def an_engine_acquires(self, n: int, chain: int, length: int, jobs: int) -> None:
        engine = self.engines[n % len(self.engines)]
        acquire(self.world, self.books, engine, engine.model.chains[chain][:length])
        for _ in range(jobs):
            self.do_last_job()

    @precondition(lambda self: self.reading())
    @rule(n=any_of, deadline=st.booleans())
    @mortal
    def an_engine_is_out_of_time_or_releases_once_and_again(self, n: int, deadline: bool) -> None:
        engine, handle = self.reading()[n % len(self.reading())]
        sessions = self.world.sessions
        if deadline:
            sessions.give_up(engine.session.leases[handle])
        else:
            assert self.world.on_loop(lambda: sessions.release(engine.session, handle))
            assert not self.world.on_loop(lambda: sessions.release(engine.session, handle))

    def do_job(self, n: int) -> None:
        self.world.mover.run(n % len(self.world.mover.jobs))
        self.world.turn()

    def do_last_job(self) -> None:
        if self.world.mover.jobs:
            self.do_job(-1)

    def do_all_jobs(self, n: int = 0) -> None:
        while self.world.mover.jobs:
            self.do_job(n)
            self.settle()

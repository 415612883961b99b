"""A stage on which a client lies at the engine door: an honest client, a neighbour of its that holds a lease and a
reservation, and the liar.

Owns the connections of the two that are honest: ``close`` ends them. Called by tests. Imports the connector,
``daemon.protocol`` and the harness.
"""

from typing import Any

import msgspec

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon.protocol import (
    Abort,
    Acquire,
    Commit,
    Committed,
    Found,
    Leased,
    Lookup,
    Opened,
    Pin,
    Prefetch,
    Release,
    Reserve,
    Reserved,
)
from terracekv.tests.harness import Daemon, Wire, hello, until

KEPT, HELD = 4, 2
PING = 1 << 40


class Stage:
    """A daemon, and beside the liar two who are honest: a client that stores and loads, and a neighbour of its that
    holds a lease and a reservation all the while. ``model`` is the liar's: theirs, or another."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self.daemon, self.model = daemon, model
        # What is not answered in this time is a miss: so a daemon that is kept busy is seen.
        self.honest = daemon.client(lookup_budget_ms=5_000, load_deadline_ms=10_000)
        self.kept = self.honest.chain(1, KEPT)
        assert self.honest.put(self.kept, durable=True).durable == KEPT
        self.held = self.honest.chain(2, HELD)
        self.neighbour = daemon.wire(hello())
        for id in range(1, 9):  # so that its handles are not the liar's
            lease = self.neighbour.ask(Acquire(id, b"".join(self.kept), 1000))
            assert isinstance(lease, Leased) and lease.blocks == KEPT
            self.lease = lease
        reserved = self.neighbour.ask(Reserve(9, b"".join(self.held)))
        assert isinstance(reserved, Reserved) and None not in reserved.slots
        self.reserved = reserved
        self._seed = 100
        self.known = self.of_neighbour()

    def of_neighbour(self) -> list[int]:
        assert self.neighbour.welcome is not None
        names = ("leases", "leased_blocks", "reservations", "reserved_blocks")
        return [self.session(self.neighbour)[name] for name in names]

    def session(self, wire: Wire) -> Any:
        """What the status says of a session."""
        assert wire.welcome is not None
        sessions = self.status()["sessions"]
        return next(each for each in sessions if each["session"] == wire.welcome.session)

    def status(self) -> Any:
        return self.daemon.http("/v1/status")[1]

    def chain(self, blocks: int) -> list[bytes]:
        """Keys that nobody has used."""
        self._seed += 1
        return self.honest.chain(self._seed, blocks)

    def nobody_is_harmed(self) -> None:
        """The honest client loads what it stored and stores anew, what was durable is on disk, and the neighbour has
        what it had. Wrong bytes are an AssertionError of ``get``."""
        assert self.honest.get(self.kept) == Loaded(KEPT, None)
        assert self.honest.lookup(self.kept).per_tier["disk"] == KEPT, "a durable block is not there any more"
        fresh = self.chain(2)
        assert self.honest.put(fresh, durable=True).durable == 2 and self.honest.get(fresh) == Loaded(2, None)
        assert self.of_neighbour() == self.known

    def nobody_can_store(self) -> None:
        """All of host is reserved: what is there is loaded, and a store is refused with the reason."""
        assert self.honest.get(self.kept) == Loaded(KEPT, None)
        assert self.honest.put(self.chain(2)) == Stored(refused=2, why="full")
        assert self.of_neighbour() == self.known

    def close(self) -> None:
        """The neighbour gets to the end of what it began, and the books are those of a daemon with nobody in it."""
        indices = list(range(HELD))
        done = self.neighbour.ask(Commit(1, self.reserved.reservation, indices))
        assert isinstance(done, Committed) and done.stored == indices
        self.neighbour.socket.close()
        self.honest.close()

        def idle() -> bool:
            told = self.status()
            host, pinned = told["tiers"]["host"], told["pins"]["blocks"]
            held = host["reserved_blocks"], host["details"]["orphaned_blocks"], host["details"]["doomed_blocks"]
            return not told["sessions"] and host["leased_blocks"] == pinned and not any(held)

        until(idle, "nothing is leased or reserved when all have left")
        assert self.daemon.errors() == []


class Liar:
    """A session in which one lie is told: it has a lease, and a reservation of which slot 0 is committed."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.wire = stage.daemon.wire(hello(model=stage.model))
        self.fresh, self.more = stage.chain(4), stage.chain(3)
        reserved = self.wire.ask(Reserve(1, b"".join(self.fresh)))
        assert isinstance(reserved, Reserved)
        self.reservation = reserved.reservation
        done = self.wire.ask(Commit(2, self.reservation, [0]))
        assert isinstance(done, Committed) and done.stored == [0]
        leased = self.wire.ask(Acquire(3, self.fresh[0], 1000))
        assert isinstance(leased, Leased) and leased.blocks == 1
        self.lease = leased.lease

    def truth(self, kind: type[msgspec.Struct]) -> Any:
        """A message that nobody would mind."""
        fresh = b"".join(self.fresh)
        made: dict[type[msgspec.Struct], Any] = {
            Lookup: Lookup(7, fresh, 1000),
            Acquire: Acquire(7, fresh, 1000),
            Release: Release(self.lease),
            Reserve: Reserve(7, b"".join(self.more)),
            Commit: Commit(7, self.reservation, [1]),
            Abort: Abort(self.reservation),
            Prefetch: Prefetch(fresh),
            Pin: Pin(self.fresh[0], 1000),
            Opened: Opened("no such device"),
        }
        return made[kind]

    def answers(self, message: Any) -> list[Any]:
        """All that comes until a lookup that is sent behind it is answered, and the answer to what was asked."""
        self.wire.tell(message)
        self.wire.tell(Lookup(PING, b"", 1000))
        came: list[Any] = []
        pinged, asked = False, isinstance(message, Lookup | Acquire | Reserve | Commit)
        while not pinged or (asked and not came):
            answer = self.wire.read()
            pinged |= (ping := isinstance(answer, Found) and answer.id == PING)
            came += [] if ping else [answer]
        return came

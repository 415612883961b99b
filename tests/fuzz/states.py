"""Fuzzing what a restarted daemon finds: the arena and its slot table, namespaces, the secret, the catalog's own file,
and the small files that say how they were left.

Owns the folders that it is given. Called by the test and by ``make fuzz``. Imports ``daemon.recovery``, ``tiers`` and
``mutants``.

A start with wrong bytes in any of them is a start that rebuilds or forgets, or one that is refused with an error that
names the file and says what to do. What is listed after it is right.
"""

import os
import shutil
import time
from collections import Counter
from pathlib import Path

from terracekv.daemon.config import load_config, resolve, survey
from terracekv.daemon.recovery import Tiers, open_tiers
from terracekv.tests.blocks import get, name, put, registered, verified
from terracekv.tests.fuzz.mutants import Mutants
from terracekv.tiers.errors import Damaged
from terracekv.tiers.tier import Outcome

BLOCKS = 12
BLOCK_BYTES = 3000
WINDOW = 128
"""Bytes of an entry of the slot table; some damage is kept within such a part."""
GOOD = (Outcome.STORED, Outcome.PRESENT)
SETTINGS = {
    "daemon.http": "",
    "host.size": "256KiB",
    "host.slab": "64KiB",
    "disk.size": "12MiB",
    "disk.segment": "256KiB",
    "disk.free_floor": "0",
}
FILES = {
    "run/arena": 1,
    "run/slots": 6,
    "run/owner.lock": 1,
    "state/namespaces.json": 5,
    "state/secret": 1,
    "state/disk/state.json": 2,
    "state/disk/owner.lock": 1,
    "state/disk/catalog/data.mdb": 5,
    "state/disk/catalog/lock.mdb": 2,
}
"""Files by how often they are mutated."""


class StateFuzz:
    """Two folders as a daemon leaves them, and copies of them that are damaged and opened."""

    def __init__(self, shm: Path, folder: Path, mutants: Mutants) -> None:
        self.mutants = mutants
        self.left = {"run": shm / "left", "state": folder / "left"}
        self.now = {"run": shm / "now", "state": folder / "now"}
        folders = {"daemon.runtime_dir": str(self.now["run"]), "daemon.state_dir": str(self.now["state"])}
        config = load_config(None, SETTINGS | folders, {})
        self.config = resolve(config, survey(config))
        self.ids = [name(index) for index in range(BLOCKS)]
        self.outcomes: Counter[str] = Counter()
        self._leave()

    def one(self) -> None:
        """Damage a file or two of a copy, and start on it."""
        self._copy(self.left, self.now)
        damaged = [self._damage() for _ in range(self.mutants.random.choice((1, 1, 2)))]
        try:
            tiers = open_tiers(self.config)
        except Damaged as error:
            assert any(path.name in error.message for path in damaged), f"{error} names none of {damaged}"
            assert error.hint and "\n" not in error.message and len(error.message) < 1000, error
            self.outcomes["refused"] += 1
            return
        except BaseException as error:
            error.add_note(f"damaged: {damaged}")
            raise
        try:
            self._serves(tiers)
        except BaseException as error:
            error.add_note(f"damaged: {damaged}")
            raise
        finally:
            tiers.close()

    def _leave(self) -> None:
        """A daemon that has stored blocks in host and on disk, some of them damaged by nobody."""
        tiers = open_tiers(self.config)
        tiers.arena.prepare()
        namespace = registered(tiers.namespaces, 1, BLOCK_BYTES)
        registered(tiers.namespaces, 2, 2 * BLOCK_BYTES)
        assert tiers.disk is not None
        for id in self.ids:
            assert put(tiers.host, namespace, id) is Outcome.STORED
            assert put(tiers.disk, namespace, id) is Outcome.STORED
        tiers.host.reserve(namespace, [name(99)], session=tiers.table.next_session())
        tiers.close()
        self._copy(self.now, self.left)

    def _copy(self, source: dict[str, Path], target: dict[str, Path]) -> None:
        for part, folder in target.items():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source[part], folder)
            os.chmod(folder, 0o700)

    def _damage(self) -> Path:
        chosen = self.mutants.random.choices([*FILES], [*FILES.values()])[0]
        part, _, rest = chosen.partition("/")
        path = self.now[part] / rest
        data = path.read_bytes() if path.exists() else b""
        used = data.rstrip(b"\0")
        if self.mutants.one_in(2):
            start = self.mutants.random.randrange(len(used) + 1) // WINDOW * WINDOW
            end = start + self.mutants.random.choice((8, 64, WINDOW))
        else:
            start, end = 0, self.mutants.random.choice((len(data), len(used), len(used), 4096, 64))
        path.write_bytes(data[:start] + self.mutants.mutated(data[start:end], (data,)) + data[end:])
        if self.mutants.one_in(20):
            os.truncate(path, self.mutants.random.randrange(len(data) + 1))
        return path

    def _serves(self, tiers: Tiers) -> None:
        """All that is listed is right, all can be put again, and the books balance."""
        assert tiers.disk is not None
        tiers.arena.prepare()
        tiers.disk.rebuild()
        namespace = registered(tiers.namespaces, 1, BLOCK_BYTES)
        other = registered(tiers.namespaces, 2, 2 * BLOCK_BYTES)
        assert namespace.stamp >> 32 != other.stamp >> 32, "two namespaces of one number"
        tiers.host.reap()
        for tier in (tiers.host, tiers.disk):
            tier.leading(namespace, self.ids)
            for id in self.ids:
                outcome, _ = get(tier, namespace, id)
                assert outcome in (Outcome.HIT, Outcome.MISS, Outcome.DAMAGED), outcome
                self.outcomes[f"{tier.name} {outcome}"] += 1
            verified(tier, namespace, self.ids)
            assert all(put(tier, namespace, id) in GOOD for id in self.ids)
            assert put(tier, other, name(50)) in GOOD
            assert verified(tier, namespace, self.ids) == BLOCKS
        tiers.table.next_session()
        tiers.host.check()
        tiers.disk.check()


def fuzz_states(shm: Path, folder: Path, *, count: int, seed: int) -> dict[str, object]:
    """``count`` starts on damaged folders."""
    begun = time.monotonic()
    fuzz = StateFuzz(shm, folder, Mutants(seed))
    for number in range(count):
        try:
            fuzz.one()
        except BaseException as error:
            error.add_note(f"seed {seed}, start {number}")
            raise
    return {"starts": count, "outcomes": dict(fuzz.outcomes), "s": round(time.monotonic() - begun, 1)}

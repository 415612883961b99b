"""Fuzzing what lies on disk: records in segments, entries of the catalog, and the files around them.

Owns the folders that it is given. Called by the test and by ``make fuzz``. Imports ``tiers`` and ``mutants``.

Whatever the bytes are, a block is a hit with its own bytes, or a miss that the next put heals; the books balance.
"""

import os
import time
from collections import Counter
from pathlib import Path

from terracekv.tests.blocks import get, name, payload_of, put, registered, verified
from terracekv.tests.fuzz.mutants import Mutants
from terracekv.tiers import entry as entries
from terracekv.tiers import segment as segments
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.entry import Entry, name_of
from terracekv.tiers.namespace import Namespaces
from terracekv.tiers.segment import HEADER_BYTES, Record
from terracekv.tiers.tier import PAGE, Outcome

BLOCKS = 40
SIZES = {"off": 3000, "on": 20_000}
"""Bytes of a block, by whether they are coded."""
FINE = (Outcome.HIT, Outcome.MISS, Outcome.DAMAGED)


class DiskFuzz:
    """One folder, opened again and again."""

    def __init__(self, folder: Path, mutants: Mutants, codec: str) -> None:
        self.mutants = mutants
        self.random = mutants.random
        self.codec = codec
        self.path = folder / "disk"
        folder.mkdir(exist_ok=True)
        self.namespaces = Namespaces(folder / "namespaces.json")
        self.namespace = registered(self.namespaces, 1, SIZES[codec], dtype="bfloat16")
        self.ids = [name(index) for index in range(BLOCKS)]
        self.outcomes: Counter[str] = Counter()
        self.tier = self.open()

    def open(self) -> DiskTier:
        self.tier = DiskTier(
            self.path,
            capacity_bytes=12 << 20,
            segment_bytes=1 << 20,
            codec=self.codec,
            namespaces=self.namespaces,
            free_floor_bytes=0,
        )
        self.tier.rebuild()
        return self.tier

    def one_record(self) -> None:
        """Wrong bytes in a record that is listed: read, healed, read again."""
        id = self.random.choice(self.ids)
        if not self._damage(id):
            assert put(self.tier, self.namespace, id) is Outcome.STORED
            return
        outcome, found = get(self.tier, self.namespace, id)
        assert outcome in FINE, outcome
        assert outcome is not Outcome.HIT or found == payload_of(id, self.namespace.id, len(found)), "other bytes"
        self.outcomes[outcome] += 1
        if outcome is not Outcome.HIT:
            assert not self.tier.leading(self.namespace, [id]), "listed, and not readable"
            assert put(self.tier, self.namespace, id) is Outcome.STORED

    def one_entry(self) -> None:
        """Wrong bytes in an entry of the catalog."""
        id = self.random.choice(self.ids)
        catalog, name = self.tier._catalog, name_of(self.namespace.stamp, id)
        with catalog._environment.begin(write=True, db=catalog._tables.blocks) as transaction:
            value = transaction.get(name)
            if value is not None:
                transaction.put(name, self.mutants.mutated(value) or b"\0")
        self.tier.leading(self.namespace, self.ids)
        outcome, found = get(self.tier, self.namespace, id)
        assert outcome in FINE, outcome
        assert outcome is not Outcome.HIT or found == payload_of(id, self.namespace.id, len(found)), "other bytes"
        self.outcomes[outcome] += 1
        assert put(self.tier, self.namespace, id) in (Outcome.STORED, Outcome.PRESENT)
        assert get(self.tier, self.namespace, id)[0] is Outcome.HIT

    def reopened(self, lost: str) -> int:
        """Many records damaged while nobody looked; ``lost`` is what of the catalog is gone as well. The number of
        records that were damaged."""
        damaged = sum(self._damage(id) for id in self.random.sample(self.ids, BLOCKS // 2))
        if lost == "killed":
            self.tier._owned.distrust()
        self.tier.close()
        if lost == "catalog":
            (self.path / "catalog" / "data.mdb").unlink()
        self.open()
        self.healed()
        return damaged

    def healed(self) -> None:
        """What is listed is right once it was read; all can be put again; the books balance."""
        for id in self.ids:
            outcome, _ = get(self.tier, self.namespace, id)
            assert outcome in FINE, outcome
            self.outcomes[outcome] += 1
        verified(self.tier, self.namespace, self.ids)
        for id in self.ids:
            assert put(self.tier, self.namespace, id) in (Outcome.STORED, Outcome.PRESENT)
        assert verified(self.tier, self.namespace, self.ids) == BLOCKS
        self.tier.check()

    def _damage(self, id: bytes) -> bool:
        """Mutate the stored bytes of a block; False when it is not there."""
        entry = self.tier._catalog.get(name_of(self.namespace.stamp, id))
        if entry is None:
            return False
        size = PAGE + entry.stored_bytes
        file = os.open(self.tier._files.path(entry.segment), os.O_RDWR)
        try:
            data = os.pread(file, size, entry.page * PAGE)
            end = self.random.choice((HEADER_BYTES, HEADER_BYTES, PAGE, size))
            wrong = (self.mutants.mutated(data[:end], (data,)) + data[end:])[:size]
            os.pwrite(file, wrong, entry.page * PAGE)
        finally:
            os.close(file)
        return True


def fuzz_formats(count: int, mutants: Mutants) -> int:
    """The bytes of headers and entries alone: what is read is what was written, or nothing."""
    random = mutants.random
    record = Record(name(1), bytes(32), 3, 4096, 4096, 2**63, 7, 1, 0)
    entry = Entry(1 << 32, 7, 9, 4096, 4096, 2**63)
    header, value = record.encode().ljust(PAGE, b"\0"), entries.pack(name(1), entry)
    for _ in range(count // 2):
        wrong = mutants.mutated(header[: random.choice((HEADER_BYTES, PAGE))], (header,))
        assert segments.decode(wrong) in (None, record), wrong.hex()
        wrong = mutants.mutated(value, (value, header))
        assert entries.unpack(name(1), wrong) in (None, entry), wrong.hex()
    return count


def fuzz_records(folder: Path, *, count: int, seed: int) -> dict[str, object]:
    """``count`` damaged records and entries, on disk and in bytes alone."""
    begun, mutants = time.monotonic(), Mutants(seed)
    fuzzed: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for codec in ("off", "on"):
        disk = DiskFuzz(folder / codec, mutants, codec)
        try:
            disk.healed()
            while fuzzed[codec] < count // 4:
                for _ in range(min(count, 400)):
                    disk.one_record()
                    disk.one_entry()
                fuzzed[codec] += 2 * min(count, 400)
                for lost in ("nothing", "catalog", "killed"):
                    fuzzed["reopened"] += disk.reopened(lost)
            outcomes += disk.outcomes
        except BaseException as error:
            error.add_note(f"seed {seed}, codec {codec}, after {dict(fuzzed)}")
            raise
        finally:
            disk.tier.close()
    fuzzed["formats"] = fuzz_formats(count // 2, mutants)
    figures = {"records": fuzzed.total(), "by": dict(fuzzed), "outcomes": dict(outcomes)}
    return figures | {"s": round(time.monotonic() - begun, 1)}

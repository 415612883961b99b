"""A loss of power, simulated: what is on the medium when a recorded run is cut off at some call, and what comes back.

Owns the library that records (``recorder.c``, compiled here) and the model of a medium. A run of ``power_work`` is
recorded whole, segments and LMDB's own writes alike; then, for each cut, a folder is made of what a medium may hold
there: all that was synced, and of what was not any part, file by file, page by page; of names in a folder that was not
synced any number of the first changes. Used by ``test_power.py``. Imports ``tests`` and ``tiers``.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terracekv.tests.blocks import get, name, payload_of
from terracekv.tests.disks import Disks
from terracekv.tiers import folder as folders
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.tier import Outcome

COMPILER = shutil.which("gcc") or shutil.which("cc")
SECTOR = 4096
"""What a medium writes whole or not at all."""
CAPACITY_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 10
MARKS = "marks"
"""The file in which the recorded run says what it was promised: see ``power_work``."""


def recorded(root: Path, log: Path, library: Path, *arguments: str) -> list["Op"]:
    """Run ``power_work`` on a folder, with all its calls written down."""
    source = Path(__file__).with_name("recorder.c")
    assert COMPILER is not None
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    root.mkdir()
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "RECORDER_FOLDER": str(root),
        "RECORDER_LOG": str(log),
    }
    subprocess.run(
        [sys.executable, "-m", "terracekv.tests.crash.power_work", str(root), *arguments], env=environment, check=True
    )
    return list(parsed(log.read_bytes(), root))


@dataclass(frozen=True)
class Op:
    """One call. ``kind``: C and M make a file or a folder, W writes, T truncates, A allocates, S syncs, R renames,
    U removes. Paths are relative to the folder."""

    kind: str
    inode: int = 0
    path: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = b""


def parsed(log: bytes, root: Path) -> Iterator[Op]:
    """The calls of a log."""
    at = 0
    while at < len(log):
        end = log.index(b"\n", at)
        kind, _, rest = log[at:end].decode().partition(" ")
        at = end + 1
        if kind == "W":
            inode, offset, size = map(int, rest.split())
            yield Op("W", inode, offset=offset, data=log[at : at + size])
            at += size
        elif kind in "TA":
            inode, size = map(int, rest.split())
            yield Op(kind, inode, offset=size)
        elif kind == "S":
            yield Op("S", int(rest))
        elif kind in "CM":
            number, _, path = rest.partition(" ")
            yield Op(kind, int(number), os.path.relpath(path, root))
        else:
            path, _, other = rest.partition("\t")
            yield Op(kind, path=os.path.relpath(path, root), other=os.path.relpath(other, root) if other else "")


Keeps = Callable[[], bool]
"""Whether something that was not synced made it to the medium."""


class Bytes:
    """A file's content: what is on the medium, and what may be."""

    def __init__(self) -> None:
        self.sure = bytearray()
        self.pending: list[Op] = []

    def synced(self) -> None:
        for op in self.pending:
            _apply(self.sure, op)
        self.pending.clear()

    def after_power_loss(self, keeps: Keeps) -> bytes:
        """Each sector of a write, and each change of the size, is there or not."""
        content = bytearray(self.sure)
        for op in self.pending:
            if op.kind != "W":
                if keeps():
                    _apply(content, op)
                continue
            for start in range(0, len(op.data), SECTOR):
                if keeps():
                    _apply(content, Op("W", offset=op.offset + start, data=op.data[start : start + SECTOR]))
        return bytes(content)


def _apply(content: bytearray, op: Op) -> None:
    if op.kind == "T":
        del content[op.offset :]
    end = op.offset + len(op.data)
    content.extend(bytes(max(0, end - len(content))))
    if op.kind == "W":
        content[op.offset : end] = op.data


@dataclass
class Names:
    """A folder's names: those on the medium, and changes that may be."""

    sure: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, str, int]] = field(default_factory=list)
    """(name that goes, name that comes, its number)"""

    def now(self, count: int | None = None) -> dict[str, int]:
        """With the first ``count`` changes, all by default."""
        names = dict(self.sure)
        for old, new, number in self.pending[:count]:
            moved = names.pop(old, number) if old else number
            if new:
                names[new] = moved
        return names


class Medium:
    """A folder on a medium, call by call. Each file and folder has a number of its own, as an inode is used again."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.files: dict[int, Bytes] = {}
        self.folders: dict[str, Names] = {".": Names()}
        self.folder_numbers: dict[int, str] = {}
        self.marks: list[dict[str, Any]] = []

    def do(self, op: Op) -> None:
        """One more call was made."""
        number = self._numbers.get(op.inode, 0)
        if op.kind in "CM":
            number = self._numbers[op.inode] = len(self.files) + len(self.folders)
            self._change(op.path, "", os.path.basename(op.path), number)
            if op.kind == "M":
                self.folders[op.path] = Names()
                self.folder_numbers[number] = op.path
            else:
                self.files[number] = Bytes()
        elif op.kind == "U":
            self._change(op.path, os.path.basename(op.path), "", 0)
        elif op.kind == "R":
            assert os.path.dirname(op.path) == os.path.dirname(op.other)
            self._change(op.path, os.path.basename(op.path), os.path.basename(op.other), 0)
        elif op.kind == "S":
            self._sync(number)
        elif number in self.files:
            self.files[number].pending.append(op)
            if op.kind == "W" and self.folders["."].now().get(MARKS) == number:
                self.marks.append(json.loads(op.data))

    def _change(self, path: str, old: str, new: str, number: int) -> None:
        self.folders[os.path.dirname(path) or "."].pending.append((old, new, number))

    def _sync(self, number: int) -> None:
        if number in self.files:
            self.files[number].synced()
            return
        # The folder in which the run began was there before it, so whatever else is synced is that one.
        names = self.folders[self.folder_numbers.get(number, ".")]
        names.sure, names.pending = names.now(), []

    def after_power_loss(self, target: Path, dice: random.Random, kept: float) -> None:
        """Make a folder of what may be left; each thing that was not synced is there with probability ``kept``."""
        self._make(".", target, dice, lambda: dice.random() < kept)

    def _make(self, path: str, target: Path, dice: random.Random, keeps: Keeps) -> None:
        target.mkdir()
        names = self.folders[path]
        count = 0
        while count < len(names.pending) and keeps():
            count += 1
        for each, number in names.now(count).items():
            inner = os.path.normpath(os.path.join(path, each))
            if number in self.files:
                (target / each).write_bytes(self.files[number].after_power_loss(keeps))
            else:
                self._make(inner, target / each, dice, keeps)


@dataclass
class Found:
    """What came back, over all cuts."""

    images: int = 0
    listed: int = 0
    required: int = 0


def required(medium: Medium, after: Sequence[dict[str, Any]]) -> set[int]:
    """Blocks that must be there: on the disk when it was last synced, and never said to be gone since then."""
    last = max((n for n, mark in enumerate(medium.marks) if mark["synced"]), default=None)
    if last is None:
        return set()
    wanted = set(medium.marks[last]["listed"])
    for mark in [*medium.marks[last:], *after[:1]]:
        wanted &= set(mark["listed"])
    return wanted


@contextmanager
def opened(image: Path, boot: str) -> Iterator[tuple[Disks, DiskTier]]:
    """A tier on a folder, in a start of the machine that has this name."""
    folders.boot_id = lambda: boot
    disk = Disks(image)
    with closing(disk.open(CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, direct="off")) as tier:
        tier.rebuild()
        tier.check()
        yield disk, tier


def read(disk: Disks, tier: DiskTier, blocks: int) -> set[int]:
    """The blocks that are listed, each of which is right."""
    came_back = set()
    for index in range(blocks):
        listed = tier.leading(disk.namespace, [name(index)]) == 1
        outcome, came = get(tier, disk.namespace, name(index))
        assert listed == (outcome is Outcome.HIT), f"block {index} is listed {listed}, and is {outcome}"
        assert not listed or came == payload_of(name(index), disk.namespace.id), f"block {index} is wrong"
        if listed:
            came_back.add(index)
    return came_back


def examine(image: Path, wanted: set[int], blocks: int, found: Found) -> None:
    """Open what is left as the next daemon would, after the machine has been started again; sync, and once more."""
    before, again = folders.boot_id, image.with_name("again")
    try:
        with opened(image, "another") as (disk, tier):
            came_back = read(disk, tier, blocks)
            tier.sync()
            shutil.copytree(image, again)
        assert wanted <= came_back, f"blocks {sorted(wanted - came_back)} were synced and are lost"
        with opened(again, "yet another") as (disk, tier):
            lost = came_back - read(disk, tier, blocks)  # blocks of a spare segment may come back
        assert not lost, f"blocks {sorted(lost)} were synced, and another loss of power took them"
    finally:
        folders.boot_id = before
        shutil.rmtree(again, ignore_errors=True)
    found.listed += len(came_back)
    found.images += 1
    found.required += len(wanted)


def lose_power(ops: Sequence[Op], cuts: set[int], folder: Path, seed: int, blocks: int) -> Found:
    """Cut the run off at each of ``cuts``, several times over; AssertionError names the first promise broken."""
    every = Medium()
    for op in ops:
        every.do(op)
    medium, found, dice = Medium(), Found(), random.Random(seed)
    for at, op in enumerate(ops):
        medium.do(op)
        if at not in cuts:
            continue
        wanted = required(medium, every.marks[len(medium.marks) :])
        for kept in (0.0, 1.0, 0.5, 0.9):
            image = folder / f"{at}-{kept}"
            medium.after_power_loss(image, dice, kept)
            try:
                examine(image, wanted, blocks, found)
            except BaseException as error:
                error.add_note(
                    f"seed {seed}: cut after call {at} of {len(ops)} ({op.kind} {op.path}), {kept} kept: {image}"
                )
                raise
            shutil.rmtree(image)
    return found

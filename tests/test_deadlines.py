"""Deadlines everywhere: whatever state a tier is in, every message of an engine and every route gets its answer.

Every operation is tried with each tier up, slow, down, full, read-only and stuck; with a stuck one both before that is
seen and after. What an answer says is tested where the operation is: here it has to come. The bucket's states are in
``s3/test_deadlines_s3.py``.
"""

import contextlib
from pathlib import Path

import pytest

from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.places import STUCK_S, Trouble, armed, held, held_disk, hurry, opened, tried
from terracekv.tests.stores import World, Worlds, opened_worlds

worlds = pytest.fixture(opened_worlds)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


DISK: dict[str, Trouble] = {
    "up": lambda w: contextlib.nullcontext(),
    "slow": lambda w: armed("segment.read=sleep:0.05,segment.write=sleep:0.05"),
    "down": lambda w: armed("segment.read=errno:EIO,segment.write=errno:EIO"),
    "full": lambda w: armed("segment.write=errno:ENOSPC"),
    "read-only": lambda w: armed("segment.write=errno:EROFS"),
    "stuck": held_disk,
}
GPU: dict[str, Trouble] = {
    "up": lambda w: contextlib.nullcontext(),
    "stuck": lambda w: held(w.near and w.near.gpu, "put", "get"),
}


@pytest.mark.fault(7)
@pytest.mark.parametrize("state", DISK)
def test_every_operation_is_answered_whatever_the_disk_does(worlds: Worlds, tmp_path: Path, state: str) -> None:
    async def story(w: World) -> None:
        async with opened(w, tmp_path) as p:
            await tried(p, "disk", DISK[state](w), state == "stuck")

    worlds.run(story, slabs=16, stuck_s=STUCK_S)


@pytest.mark.parametrize("state", GPU)
def test_every_operation_is_answered_whatever_the_gpu_does(worlds: Worlds, tmp_path: Path, state: str) -> None:
    async def story(w: World) -> None:
        async with opened(w, tmp_path) as p:
            await tried(p, "gpu", GPU[state](w), state == "stuck")

    worlds.run(story, slabs=16, stuck_s=STUCK_S, gpu=FakeCupy(), gpu_slots=16, disk=False)

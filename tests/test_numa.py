"""The arena's memory is taken from where the GPUs are, and from anywhere when that cannot be."""

import ctypes
import mmap
import platform
from pathlib import Path

import pytest

from terracekv.kernels.pages import address_of
from terracekv.tiers import numa
from terracekv.tiers.arena import Arena

_libc = ctypes.CDLL(None, use_errno=True)
GET_MEMPOLICY = 239
BY_ADDRESS = 2


def device(sysfs: Path, slot: str, vendor: str = "0x10de", kind: str = "0x030200", node: str = "0") -> None:
    folder = sysfs / slot
    folder.mkdir(parents=True)
    for file, content in (("vendor", vendor), ("class", kind), ("numa_node", node)):
        (folder / file).write_text(content + "\n")


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for number in (0, 1):
        (tmp_path / "nodes" / f"node{number}").mkdir(parents=True)
    return tmp_path / "nodes"


@pytest.mark.fault(92)
def test_the_node_is_that_of_the_gpus_whatever_else_is_plugged_in(tmp_path: Path, nodes: Path) -> None:
    sysfs = tmp_path / "pci"
    device(sysfs, "0000:01:00.0", vendor="0x8086", kind="0x020000", node="0")
    device(sysfs, "0000:3b:00.0", node="1")
    device(sysfs, "0000:3c:00.0", kind="0x030000", node="1")
    device(sysfs, "0000:3b:00.1", kind="0x040300", node="0")
    assert numa.choose("auto", sysfs, nodes) == (1, "that of the GPUs")


@pytest.mark.fault(92)
def test_no_node_is_chosen_when_gpus_are_near_several_or_near_none_that_is_known(tmp_path: Path, nodes: Path) -> None:
    sysfs = tmp_path / "pci"
    assert numa.choose("auto", sysfs, nodes) == (None, "no GPU whose node is known")
    device(sysfs, "0000:3b:00.0", node="-1")
    assert numa.choose("auto", sysfs, nodes) == (None, "no GPU whose node is known")
    device(sysfs, "0000:3c:00.0", node="1")
    device(sysfs, "0000:3d:00.0", node="0")
    assert numa.choose("auto", sysfs, nodes) == (None, "GPUs are near nodes 0, 1")


def test_a_node_that_is_asked_for_must_be_there(tmp_path: Path, nodes: Path) -> None:
    assert numa.choose("1", tmp_path, nodes) == (1, "asked for")
    assert numa.choose("7", tmp_path, nodes) == (None, "there is no node 7")
    assert numa.choose("off", tmp_path, nodes) == (None, "off")


def test_the_policy_of_a_mapping_is_what_was_asked_for() -> None:
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as mapped, memoryview(mapped) as view:
        why = numa.prefer(address_of(view), len(view), 0)
        if why is not None:
            pytest.skip(why)
        mode = ctypes.c_int(-1)
        ask = (
            ctypes.byref(mode),
            None,
            ctypes.c_ulong(0),
            ctypes.c_ulong(address_of(view)),
            ctypes.c_ulong(BY_ADDRESS),
        )
        if platform.machine() != "x86_64" or _libc.syscall(GET_MEMPOLICY, *ask) != 0:
            pytest.skip("the policy cannot be asked for here")
        assert mode.value == numa._PREFERRED


@pytest.mark.fault(92)
def test_an_arena_whose_place_is_refused_goes_on_and_says_so(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.tiers.arena.prefer", lambda address, size, node: "mbind: Operation not permitted")
    arena = Arena(shm_dir, size_bytes=1 << 20, slab_bytes=1 << 20, numa_node=1)
    assert arena.placement == "anywhere: mbind: Operation not permitted" and arena.slabs_ready == 1
    arena.close()
    monkeypatch.undo()
    arena = Arena(shm_dir, size_bytes=1 << 20, slab_bytes=1 << 20)
    assert arena.placement == "anywhere"
    arena.close()

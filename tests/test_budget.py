"""How much may be taken: fake cgroup trees, fake file systems, and refusals that carry the numbers."""

import os
from pathlib import Path

import pytest

from terracekv.tiers import budget
from terracekv.tiers.budget import GIB, KIB, MIB, memory, parse_size, require, show, space
from terracekv.tiers.errors import NoRoom


class Machine:
    """A root folder with the files that the kernel would show."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def available(self, size: int) -> None:
        self.write("proc/meminfo", f"MemTotal: {256 * GIB // KIB} kB\nMemAvailable: {size // KIB} kB")

    def v2(self, path: str, limit: int | str, used: int, **stat: int) -> None:
        self.write(f"sys/fs/cgroup{path}/memory.max", limit)
        self.write(f"sys/fs/cgroup{path}/memory.current", used)
        self.write(f"sys/fs/cgroup{path}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def v1(self, path: str, limit: int, used: int, **stat: int) -> None:
        self.write(f"sys/fs/cgroup/memory{path}/memory.limit_in_bytes", limit)
        self.write(f"sys/fs/cgroup/memory{path}/memory.usage_in_bytes", used)
        self.write(f"sys/fs/cgroup/memory{path}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.available(200 * GIB)
    return made


@pytest.mark.fault(78)
def test_without_a_cgroup_the_kernels_estimate_counts(machine: Machine) -> None:
    found = memory(machine.root)
    assert (found.available_bytes, found.limited_by) == (200 * GIB, "MemAvailable")


@pytest.mark.fault(78)
def test_the_tightest_of_all_groups_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kubepods/pod1/engine")
    machine.v2("/kubepods", 100 * GIB, 60 * GIB)
    machine.v2("/kubepods/pod1", 32 * GIB, 20 * GIB)
    machine.v2("/kubepods/pod1/engine", "max", 10 * GIB)
    found = memory(machine.root)
    assert (found.available_bytes, found.limited_by) == (12 * GIB, "cgroup /kubepods/pod1")
    assert found.readings == {
        "MemAvailable": 200 * GIB,
        "cgroup /kubepods": 40 * GIB,
        "cgroup /kubepods/pod1": 12 * GIB,
    }


@pytest.mark.fault(78)
def test_page_cache_is_not_use_and_shared_memory_is(machine: Machine) -> None:
    """``file`` counts shared memory too; the lists of active and inactive file pages do not."""
    machine.write("proc/self/cgroup", "0::/pod")
    stat = {"file": 12 * GIB, "shmem": 4 * GIB, "active_file": 3 * GIB, "inactive_file": 5 * GIB}
    machine.v2("/pod", 16 * GIB, 15 * GIB, **stat)
    assert memory(machine.root).available_bytes == 9 * GIB


@pytest.mark.fault(78)
def test_version_1_is_read_alike_and_its_no_limit_is_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/docker/abc\n0::/")
    machine.v1("", 9223372036854771712, 90 * GIB)
    machine.v1("/docker/abc", 8 * GIB, 7 * GIB, total_active_file=1 * GIB, total_inactive_file=2 * GIB)
    found = memory(machine.root)
    assert (found.available_bytes, found.limited_by) == (4 * GIB, "cgroup /docker/abc")
    assert "cgroup /" not in found.readings


@pytest.mark.fault(78)
@pytest.mark.parametrize("path", ["/docker/abc", "/../../other", "/"])
def test_in_a_container_the_top_of_the_mount_is_the_group(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"0::{path}")
    machine.v2("", 4 * GIB, 1 * GIB)
    assert memory(machine.root).available_bytes == 3 * GIB


@pytest.mark.fault(78)
def test_a_group_over_its_limit_leaves_nothing_and_not_less(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod")
    machine.v2("/pod", 1 * GIB, 2 * GIB)
    assert memory(machine.root).available_bytes == 0


def test_when_nothing_can_be_read_the_error_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="host.size"):
        memory(tmp_path)


def test_this_machine_can_be_read() -> None:
    found = memory()
    assert 0 < found.available_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_room_is_that_of_the_nearest_parent_that_exists(tmp_path: Path) -> None:
    here, below = space(tmp_path), space(tmp_path / "not" / "yet")
    assert below.path == tmp_path and below.device == here.device == tmp_path.stat().st_dev
    assert 0 <= here.free_bytes <= here.total_bytes


def test_the_file_system_is_that_of_the_deepest_mount_and_of_the_last_on_one_point(tmp_path: Path) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nnone {spaced} xfs rw 0 0\nnone {spaced} tmpfs rw 0 0\nbroken\n")
    assert budget.filesystem_type(tmp_path / "a b" / "c", mounts) == "tmpfs"
    assert budget.filesystem_type(tmp_path, mounts) == "ext4"
    assert budget.filesystem_type(tmp_path, tmp_path / "none") == "unknown"


def test_what_an_earlier_life_left_counts_as_ours(tmp_path: Path) -> None:
    arena, disk = tmp_path / "run" / "arena", tmp_path / "disk"
    empty = budget.survey(arena, disk)
    assert (empty.arena_size, empty.arena_bytes, empty.disk_bytes) == (0, 0, 0)
    arena.parent.mkdir()
    (disk / "segments").mkdir(parents=True)
    arena.write_bytes(bytes(1 * MIB))
    os.truncate(arena, 8 * MIB)
    (disk / "segments" / "1").write_bytes(bytes(2 * MIB))
    found = budget.survey(arena, disk)
    assert found.arena_size == 8 * MIB
    assert 1 * MIB <= found.arena_bytes < 2 * MIB
    assert 2 * MIB <= found.disk_bytes < 3 * MIB


@pytest.mark.fault(34)
@pytest.mark.fault(79)
def test_all_that_is_asked_is_summed_and_the_largest_that_fits_is_named() -> None:
    asked = {"host.size": 12 * GIB, "disk.size": 3 * GIB, "the daemon itself": 1 * GIB}
    require("memory", 16 * GIB, asked, "host.size")
    with pytest.raises(NoRoom) as caught:
        require("memory", 16 * GIB - 1, asked, "host.size")
    text = str(caught.value)
    for part in ("memory has 15.9GiB left", "16GiB is asked", "host.size 12GiB", "disk.size 3GiB"):
        assert part in text
    assert "largest host.size that fits is 11.9GiB" in text


@pytest.mark.fault(79)
def test_the_value_that_is_named_does_fit() -> None:
    available = 10 * GIB + 12345
    with pytest.raises(NoRoom) as caught:
        require("memory", available, {"host.size": 11 * GIB, "rest": 3 * MIB}, "host.size")
    named = parse_size(caught.value.hint.rpartition(" ")[2])
    require("memory", available, {"host.size": named, "rest": 3 * MIB}, "host.size")
    assert named > 9 * GIB


def test_when_the_rest_alone_is_too_much_nothing_fits() -> None:
    with pytest.raises(NoRoom, match="largest a that fits is 0B"):
        require("memory", 5, {"a": 1, "b": 9}, "a")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("8GiB", 8 * GIB), ("8 gib", 8 * GIB), ("1.5GiB", 3 * GIB // 2), ("2GB", 2 * 10**9),
     ("10k", 10_000), ("64MiB", 64 * MIB), ("0.1GiB", GIB // 10), ("3TiB", 3072 * GIB)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8GoB", "-1GiB", "1e9", "8GiB per rank", "0x10", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, KIB, 1536 * KIB, GIB - 1, GIB, 3 * GIB // 2, 5951717376, 1 << 40])
def test_a_size_is_shown_rounded_down_and_can_be_read_again(size: int) -> None:
    again = parse_size(show(size))
    assert again <= size and size - again <= size // 10


@pytest.mark.parametrize("size", [0, 1, 1023, KIB, 1536 * KIB, GIB - 1, GIB, GIB + 1, 539246592, 5951717376, 1 << 40])
def test_a_size_that_is_the_least_is_shown_rounded_up(size: int) -> None:
    again = parse_size(budget.show_up(size)) + 1  # reading rounds a fraction of a byte down
    assert again > size and again - size <= size // 10 + 2

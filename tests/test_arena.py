"""The arena: adopted or replaced but never cut under a reader, owned by one daemon, and a shortage is an error with
numbers instead of a SIGBUS."""

import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from terracekv.tiers.arena import Arena
from terracekv.tiers.errors import InUse, NoRoom

SLAB = 1 << 16
SIZE = 4 * SLAB


@contextmanager
def arena_in(folder: Path, size: int = SIZE, *, adopt: bool = True, prefault: bool = True) -> Iterator[Arena]:
    arena = Arena(folder, size_bytes=size, slab_bytes=SLAB, adopt=adopt, prefault=prefault)
    try:
        yield arena
    finally:
        arena.close()


def in_small_tmpfs(code: str, size: str = "1m") -> str:
    """Run ``code`` with ``folder`` on a real tmpfs of that size; skips where nobody may mount one."""
    command = f"import sys\nfrom pathlib import Path\nfolder = Path('/mnt')\n{textwrap.dedent(code)}"
    mount = f'mount -t tmpfs -o size={size} none /mnt && exec "$@"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs in a user namespace")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", command], capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return done.stdout


def test_bytes_outlive_the_daemon_that_wrote_them(shm_dir: Path) -> None:
    with arena_in(shm_dir) as arena:
        assert not arena.adopted and arena.slabs_ready == 1
        arena.view[10:15] = b"bytes"
    with arena_in(shm_dir) as arena:
        assert arena.adopted and bytes(arena.view[10:15]) == b"bytes"
    assert (shm_dir / "arena").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("prefault", [True, False])
def test_all_of_it_is_allocated_before_anybody_may_write(shm_dir: Path, prefault: bool) -> None:
    with arena_in(shm_dir, prefault=prefault) as arena:
        arena.prepare(slabs=3)
        assert arena.slabs_ready == 3
        assert 3 * SLAB <= arena.path.stat().st_blocks * 512 < SIZE
        arena.prepare()
        assert arena.slabs_ready == arena.slabs == 4 and arena.path.stat().st_blocks * 512 >= SIZE
        assert arena.last_error is None


def test_preparing_ends_when_it_is_told_to(shm_dir: Path) -> None:
    with arena_in(shm_dir) as arena:
        arena.stop()
        arena.prepare()
        assert arena.slabs_ready == 1


@pytest.mark.parametrize("other", [2 * SIZE, SIZE // 2])
def test_an_arena_of_another_size_is_replaced_and_who_maps_the_old_one_reads_on(shm_dir: Path, other: int) -> None:
    """Cut short, it would kill an engine that copies out of it: a SIGBUS, not an error."""
    with arena_in(shm_dir) as arena:
        arena.prepare()
        arena.view[SIZE - 5 :] = b"bytes"
        with open(arena.path, "r+b") as file:
            engine = mmap.mmap(file.fileno(), SIZE)
    with arena_in(shm_dir, other) as arena:
        assert not arena.adopted
        arena.prepare()
        arena.view[:] = b"\xff" * other
    assert engine[SIZE - 5 :] == b"bytes" and engine[:5] == bytes(5)
    engine.close()


def test_an_arena_that_may_not_be_adopted_is_replaced_too(shm_dir: Path) -> None:
    """When what described its bytes is lost, an engine may still be writing to it unknown to the new daemon."""
    with arena_in(shm_dir) as arena:
        with open(arena.path, "r+b") as file:
            engine = mmap.mmap(file.fileno(), SIZE)
    with arena_in(shm_dir, adopt=False) as arena:
        assert not arena.adopted
        engine[:5] = b"late!"
        assert arena.view[:5] == bytes(5)
    engine.close()


@pytest.mark.fault(63)
def test_one_folder_has_one_daemon(shm_dir: Path) -> None:
    with arena_in(shm_dir):
        with pytest.raises(InUse, match=rf"running \(process {os.getpid()}\)"):
            Arena(shm_dir, size_bytes=2 * SIZE, slab_bytes=SLAB)
        assert (shm_dir / "arena").stat().st_size == SIZE
    with arena_in(shm_dir) as arena:
        assert arena.adopted


@pytest.mark.fault(54)
def test_a_killed_owner_leaves_the_folder_free_and_nothing_more_in_it(shm_dir: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from terracekv.tiers.arena import Arena
arena = Arena(Path(sys.argv[1]), size_bytes={SIZE}, slab_bytes={SLAB})
arena.view[:4] = b"left"
os.kill(os.getpid(), signal.SIGKILL)
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code, str(shm_dir)]).returncode == -9
    with arena_in(shm_dir) as arena:
        assert arena.adopted and bytes(arena.view[:4]) == b"left"
    assert sorted(os.listdir(shm_dir)) == ["arena", "owner.lock"]


@pytest.mark.fault(83)
def test_too_little_room_is_refused_with_the_numbers_and_what_would_fit(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(shm_dir)
    free_pages = (3 * SLAB + 4096) // 4096
    room = os.statvfs_result((4096, 4096, 1000, free_pages, free_pages, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    with pytest.raises(NoRoom) as caught:
        Arena(shm_dir, size_bytes=SIZE, slab_bytes=SLAB)
    assert (
        f"asks for {SIZE} bytes" in caught.value.message and f"has {3 * SLAB + 4096} bytes free" in caught.value.message
    )
    assert f"at most {3 * SLAB}," in caught.value.hint and "--shm-size" in caught.value.hint
    with arena_in(shm_dir, 3 * SLAB):
        pass


@pytest.mark.fault(83)
def test_what_is_allocated_already_counts_as_room(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with arena_in(shm_dir) as arena:
        arena.prepare()
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, *os.statvfs(shm_dir)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with arena_in(shm_dir) as arena:
        assert arena.adopted


@pytest.mark.fault(83)
def test_a_tmpfs_of_one_megabyte_refuses_two() -> None:
    out = in_small_tmpfs("""
        from terracekv.tiers.arena import Arena
        from terracekv.tiers.errors import NoRoom
        try:
            Arena(folder, size_bytes=2 << 20, slab_bytes=1 << 16)
        except NoRoom as error:
            print(error)
        Arena(folder, size_bytes=1 << 19, slab_bytes=1 << 16).close()
    """)
    assert "asks for 2097152 bytes" in out and "at most 1048576" in out


@pytest.mark.fault(83)
def test_room_that_others_take_after_the_start_is_a_shortage_and_not_a_sigbus() -> None:
    out = in_small_tmpfs("""
        from terracekv.tiers.arena import Arena
        arena = Arena(folder, size_bytes=1 << 19, slab_bytes=1 << 16)
        with open(folder / "others", "wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 14))
                    file.flush()
            except OSError:
                pass
        arena.prepare()
        arena.view[: arena.slabs_ready << 16] = b"x" * (arena.slabs_ready << 16)
        print(arena.slabs_ready, arena.last_error)
        (folder / "others").unlink()
        arena.prepare()
        print(arena.slabs_ready, arena.last_error)
        arena.close()
    """)
    short, whole = out.splitlines()
    assert 1 <= int(short.split()[0]) < 8 and "slabs could be allocated" in short and "No space left" in short
    assert whole.startswith("8 ")


def test_a_view_that_somebody_kept_outlives_the_close(shm_dir: Path) -> None:
    arena = Arena(shm_dir, size_bytes=SIZE, slab_bytes=SLAB)
    kept = arena.view[:4]
    kept[:] = b"kept"
    arena.close()
    arena.close()
    assert bytes(kept) == b"kept"
    kept.release()


@pytest.mark.parametrize("name", ["arena", "owner.lock"])
def test_a_link_in_the_place_of_a_file_of_ours_leads_nowhere(tmp_path: Path, name: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "runtime"
    victim.write_text("as it was")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), arena_in(folder):
        pass
    assert victim.read_text() == "as it was"

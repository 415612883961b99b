"""The engine door and its sockets for strangers: other users, wrong tokens, sessions that may only read."""

import contextlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon import protocol
from terracekv.daemon.protocol import Error, Pin, Refused, Reserve, Welcome
from terracekv.tests.conftest import PREFIX
from terracekv.tests.harness import Daemon, hello, until
from terracekv.tests.test_http_tenants import BLUE, RED, TOKENS

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@contextlib.contextmanager
def guarded(shm_dir: Path, tmp_path: Path, text: str = TOKENS, **more: str) -> Iterator[Daemon]:
    """A daemon with tokens and tenants."""
    (tmp_path / "access.toml").write_text(text)
    with Daemon(shm_dir / "run", tmp_path / "d", access__file=str(tmp_path / "access.toml"), **more) as running:
        yield running


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder in shared memory that other users may pass through."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def refused(daemon: Daemon, **changes: Any) -> Refused:
    with daemon.wire() as wire:
        answer = wire.ask(hello(**changes))
        assert isinstance(answer, Refused), answer
        assert wire.closed()
        return answer


@pytest.mark.fault(28)
def test_a_session_is_its_tokens_tenants_and_finds_no_others(shm_dir: Path, tmp_path: Path) -> None:
    with guarded(shm_dir, tmp_path) as daemon:
        with daemon.client(credential=RED.encode()) as red, daemon.client(credential=BLUE.encode()) as blue:
            keys = red.chain(1, 3)
            assert red.put(keys) == Stored(stored=3) and red.get(keys) == Loaded(3, None)
            assert blue.namespace_id != red.namespace_id
            for theirs in (keys, blue.chain(1, 3)):  # by the very keys, and by the same tokens
                assert blue.lookup(theirs).blocks == 0 and blue.get(theirs).blocks == 0
            sessions = daemon.http("/v1/status")[1]["sessions"]
        assert [(s["tenant"], s["caller"], s["access"]) for s in sessions] == [
            ("red", "reds", "write"),
            ("blue", "blues", "write"),
        ]
        assert all(s["peer"] == {"pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid()} for s in sessions)
        assert daemon.errors() == []


def test_who_is_not_known_is_refused_by_the_name_of_what_is_wrong(shm_dir: Path, tmp_path: Path) -> None:
    with guarded(shm_dir, tmp_path, access__own_user="false") as daemon:
        assert refused(daemon).field == "credential" and "no credential" in refused(daemon).reason
        for wrong in (b"wrong", RED.encode()[:-1], b"red", b"x" * 4096):
            assert refused(daemon, credential=wrong).field == "credential"
        assert refused(daemon, credential=b"only-read-000000001").field == "access"
        assert refused(daemon, credential=b"only-metrics-000001", access="read").field == "access"
        assert refused(daemon, credential=RED.encode(), access="execute").field == "access"
        with daemon.wire(hello(credential=b"only-read-000000001", access="read")) as wire:
            assert wire.welcome is not None
        assert "only-read-000000001" not in daemon.tail(1000) and RED not in daemon.tail(1000), "secrets are not logged"


def test_a_revoked_token_ends_its_sessions_and_a_broken_file_ends_none(shm_dir: Path, tmp_path: Path) -> None:
    with guarded(shm_dir, tmp_path) as daemon:
        path = tmp_path / "access.toml"
        with daemon.wire(hello(credential=RED.encode())) as red, daemon.wire(hello(credential=BLUE.encode())) as blue:
            path.write_text("[[tokens]")
            daemon.signal(signal.SIGHUP)
            until(lambda: daemon.http("/v1/status")[1]["access"]["last_error"], "the broken file is noticed")
            assert isinstance(red.ask(protocol.Lookup(1, b"", 1000)), protocol.Found)
            path.write_text(TOKENS.replace(RED, "another-secret-0001").replace("name='reds'", "name='red-two'"))
            assert red.closed(), "without a signal, too"
            assert isinstance(blue.ask(protocol.Lookup(1, b"", 1000)), protocol.Found)
        assert refused(daemon, credential=RED.encode()).field == "credential"
        with daemon.wire(hello(credential=b"another-secret-0001")) as again:
            assert again.welcome is not None and red.welcome is not None
            assert again.welcome.namespace_id == red.welcome.namespace_id, "the tenant's blocks are still its own"


def test_a_session_that_reads_loads_what_others_store_and_stores_nothing(shm_dir: Path, tmp_path: Path) -> None:
    with guarded(shm_dir, tmp_path) as daemon:
        reader = daemon.client(credential=b"only-read-000000001", access="read")
        with daemon.client(credential=RED.encode()) as writer, reader:
            keys = writer.chain(1, 5)
            assert writer.put(keys) == Stored(stored=5)
            assert reader.namespace_id == writer.namespace_id
            assert reader.get(keys) == Loaded(5, None)
            assert reader.put(reader.chain(2, 1)) == Stored(why="read_only")
            assert reader._arena is not None and reader._arena.view.readonly
        with daemon.wire(hello(credential=RED.encode(), access="read")) as wire:
            answer = wire.ask(Reserve(1, keys[0]))
            assert isinstance(answer, Error) and answer.id == 1 and "reads" in answer.message
            wire.tell(Pin(keys[0], 1000))
            assert isinstance(wire.read(), Error)
        assert daemon.http("/v1/status")[1]["pins"]["blocks"] == 0


def handed(daemon: Daemon, **changes: Any) -> tuple[socket.socket, list[int], Welcome]:
    """The descriptors that come with Welcome."""
    door = socket.socket(socket.AF_UNIX)
    door.settimeout(30.0)
    door.connect(str(daemon.socket))
    door.sendall(protocol.frame(hello(**changes)))
    data, files, _, _ = socket.recv_fds(door, 1 << 16, 8)
    welcome = protocol.answer_decoder.decode(data[protocol.LENGTH.size :])
    assert isinstance(welcome, Welcome)
    return door, files, welcome


@pytest.mark.parametrize("access", ["read", "write"])
def test_the_arena_is_handed_over_for_what_the_session_may_do(shm_dir: Path, tmp_path: Path, access: str) -> None:
    with Daemon(shm_dir / "run", tmp_path / "d") as daemon:
        door, (arena, slots), welcome = handed(daemon, access=access)
        with door:
            assert os.path.samestat(os.fstat(arena), os.stat(welcome.arena))
            assert os.path.samestat(os.fstat(slots), os.stat(welcome.slots))
            mmap.mmap(arena, welcome.arena_bytes, prot=mmap.PROT_READ).close()
            for file, writable in ((arena, access == "write"), (slots, False)):
                refuse = contextlib.nullcontext() if writable else pytest.raises(PermissionError)
                with refuse:
                    mmap.mmap(file, mmap.PAGESIZE).close()
                with contextlib.nullcontext() if writable else pytest.raises(OSError):
                    os.pwrite(file, b"", 0)
            os.close(arena)
            os.close(slots)


DROP = """
import os
os.setgroups({groups})
os.setgid({gid})
os.setuid({uid})
"""
STRANGER = """
import ctypes, mmap
client = Blocks({socket!r}, model="m", revision="r", dtype="u8", block_tokens=TOKENS, layout=layout_of(4096),
                access={access!r}, lookup_budget_ms=10000, load_deadline_ms=30000)
print("joined" if client.joined else client.last_trouble, flush=True)
if not client.joined:
    os._exit(0)
print(client.get(client.chain(1, 2)).blocks, flush=True)
for path in (client._welcome.arena, f"/proc/self/fd/{{client._arena._mapping.fd}}"):
    try:
        os.close(os.open(path, os.O_RDWR))
        print("opened", path, flush=True)
    except PermissionError:
        print("denied", flush=True)
if client._arena.view.readonly:
    libc, size = ctypes.CDLL(None), ctypes.c_size_t(4096)
    libc.mmap.restype = ctypes.c_void_p
    shared = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, client._arena._mapping.fd, ctypes.c_long(0))
    both = mmap.PROT_READ | mmap.PROT_WRITE
    print("mprotect", libc.mprotect(ctypes.c_void_p(shared), size, both), flush=True)
    ctypes.memset(ctypes.c_void_p(shared), 255, 1)
print("written", flush=True)
client.close()
"""


def as_stranger(code: str, gid: int = NOBODY, groups: list[int] | None = None) -> tuple[int, list[str]]:
    """Run code as another user: its exit status, and the lines it wrote. What it needs is loaded before it is one."""
    loaded = "import http.client, json, socket\nfrom terracekv.tests.harness import TOKENS, Blocks, layout_of\n"
    program = loaded + DROP.format(groups=groups or [], gid=gid, uid=NOBODY) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def stranger(daemon: Daemon, access: str, *, gid: int = NOBODY, groups: list[int] | None = None) -> Any:
    """What another user's engine comes to."""
    return as_stranger(STRANGER.format(socket=str(daemon.socket), access=access), gid, groups)


@as_root
def test_another_user_reads_what_it_may_and_its_write_faults(public: Path, tmp_path: Path) -> None:
    more = {"access__socket_mode": "0666", "access__uids": str(NOBODY)}
    with Daemon(public / "run", tmp_path / "d", **more) as daemon:
        with daemon.client() as writer:
            assert writer.put(writer.chain(1, 2)) == Stored(stored=2)
        status, lines = stranger(daemon, "read")
        assert lines == ["joined", "2", "denied", "denied", "mprotect -1"], "it never gets to a write"
        assert status == -signal.SIGSEGV
        with daemon.client() as reader:
            assert reader.get(reader.chain(1, 2)) == Loaded(2, None), "and the blocks are what they were"


@as_root
def test_another_user_that_may_write_needs_no_way_to_the_files(public: Path, tmp_path: Path) -> None:
    more = {"access__socket_mode": "0660", "access__socket_group": str(NOBODY), "access__gids": str(NOBODY)}
    with Daemon(public / "run", tmp_path / "d", **more) as daemon:
        assert (daemon.runtime / "arena").stat().st_mode & 0o777 == 0o600
        assert daemon.runtime.stat().st_mode & 0o777 == 0o710
        assert daemon.socket.stat().st_gid == (daemon.runtime / "http.sock").stat().st_gid == NOBODY
        for gid, groups in ((NOBODY, []), (12345, [NOBODY])):
            status, lines = stranger(daemon, "write", gid=gid, groups=groups)
            assert (status, lines[0], lines[-1]) == (0, "joined", "written")
            assert lines[2] == "denied", "by its name the arena is not theirs"


@as_root
@pytest.mark.fault(108)
def test_a_user_who_is_not_named_is_refused_at_both_doors(public: Path, tmp_path: Path) -> None:
    more = {"access__socket_mode": "0666", "access__uids": "12345"}
    with Daemon(public / "run", tmp_path / "d", **more) as daemon:
        status, (said, *rest) = stranger(daemon, "read")
        assert (status, rest) == (0, []) and "refused: peer: uid 65534" in said and "access.uids" in said
        ask = f"""
            door = http.client.HTTPConnection("localhost")
            door.sock = socket.socket(socket.AF_UNIX)
            door.sock.connect({str(daemon.runtime / "http.sock")!r})
            door.request("GET", "/v1/status")
            answer = door.getresponse()
            print(answer.status, json.loads(answer.read())["error"]["kind"])
        """
        assert as_stranger(ask) == (0, ["403 forbidden"])
        with daemon.client() as mine:
            assert mine.joined, "the daemon's own user is always let in"


@as_root
def test_a_uid_is_a_tenant_where_the_file_says_so(public: Path, tmp_path: Path) -> None:
    text = TOKENS + f"[tenants.green]\nuids = [{NOBODY}]\nrights = ['read']\n"
    with guarded(public, tmp_path, text, access__socket_mode="0666") as daemon:
        status, lines = stranger(daemon, "write")
        assert "refused: access: uid 65534 has not the right write" in lines[0]
        status, lines = stranger(daemon, "read")
        assert lines[:2] == ["joined", "0"]
        assert {"green"} == {n["tenant"] for n in daemon.http("/v1/namespaces")[1]["namespaces"]}


def test_a_client_of_an_older_daemon_opens_the_files_by_their_names(shm_dir: Path, tmp_path: Path) -> None:
    """One that sends no descriptors; the same as where they cannot go."""
    from terracekv.connector.arena import Arena

    with Daemon(shm_dir / "run", tmp_path / "d") as daemon, daemon.wire(hello()) as wire:
        assert wire.welcome is not None
        for write in (True, False):
            arena = Arena(wire.welcome, write=write)
            assert arena.view.readonly != write and arena.serves(wire.welcome)
            arena.close()

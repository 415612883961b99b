"""A tenant attacks another from the machine that both are on: by secrets that it had, by files, as another user, by the
log. As in ``test_tenant_attack``, each attack must fail, and what its victim does must work.
"""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector.client import Loaded, Stored
from terracekv.daemon import protocol
from terracekv.daemon.protocol import Found, Lookup, Refused
from terracekv.tests.harness import hello, until
from terracekv.tests.intruders import ATTACKER, FILE, TENANTS, VICTIM, both, engine, events, hear_of, two_tenants
from terracekv.tests.test_strangers import NOBODY, as_root, as_stranger, public  # noqa: F401


def test_a_secret_that_is_replaced_ends_all_that_came_in_by_it(shm_dir: Path, tmp_path: Path) -> None:
    """Under the same name too: it may have been replaced because somebody else had it."""
    with two_tenants(shm_dir, tmp_path) as daemon:
        own = hello(credential=VICTIM.encode())
        with daemon.wire(hello(credential=ATTACKER.encode())) as stolen, daemon.wire(own) as mine:
            with events(daemon, ATTACKER) as heard, events(daemon, VICTIM) as still:
                (tmp_path / "access.toml").write_text(FILE.replace(ATTACKER, "another-secret-0001") + TENANTS)
                assert stolen.closed()
                assert heard.read() == b"", "its events end"
                assert isinstance(mine.ask(Lookup(1, b"", 1000)), Found)
                with engine(daemon, "victim") as victim:
                    assert victim.put(victim.chain(1, 1)).stored == 1
                hear_of(still, victim.space)


def test_a_secret_that_is_replaced_while_its_engine_says_hello_opens_no_session(shm_dir: Path, tmp_path: Path) -> None:
    with two_tenants(shm_dir, tmp_path) as daemon:
        daemon.restart(failpoints="namespaces.replace*2=sleep:3")
        for secret, welcome in ((VICTIM, True), (ATTACKER, False)):
            with daemon.wire() as late:
                late.tell(hello(credential=secret.encode()))
                if not welcome:
                    until((tmp_path / "d" / "state" / "namespaces.new").exists, "its namespace is being noted")
                    (tmp_path / "access.toml").write_text(FILE.replace(ATTACKER, "another-secret-0001") + TENANTS)
                answer = late.read()
                assert isinstance(answer, protocol.Welcome) if welcome else isinstance(answer, Refused), answer


def test_no_file_is_open_to_other_users(shm_dir: Path, tmp_path: Path) -> None:
    """Whatever the modes of the folders are that the daemon was given."""
    for folder in (tmp_path / "d", tmp_path / "d" / "state", tmp_path / "disk"):
        folder.mkdir(mode=0o755)
    with two_tenants(shm_dir, tmp_path, disk__path=str(tmp_path / "disk")) as daemon, both(daemon) as (_, victim):
        assert victim.put(victim.chain(1, 3), durable=True) == Stored(stored=3, durable=3)
        told = [tmp_path / "d" / "state", tmp_path / "disk", daemon.runtime]
        files = [path for folder in told for path in folder.rglob("*") if not path.is_dir()]
        assert {"secret", "namespaces.json", "data.mdb", "arena", "http.sock"} <= {path.name for path in files}
        assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_no_name_that_an_engine_gives_looks_like_an_event_in_the_log(shm_dir: Path, tmp_path: Path) -> None:
    forged = "2026-01-01T00:00:00.000Z ERROR TKV-DAMAGED everything is lost"
    with two_tenants(shm_dir, tmp_path) as daemon:
        for name in ("model", "revision", "dtype"):
            lie: dict[str, Any] = {name: f"before\n{forged}\x1b[2J\r\nafter"}
            with daemon.wire() as attacker:
                answer = attacker.ask(hello(credential=ATTACKER.encode(), **lie))
                assert isinstance(answer, Refused) and answer.field == name
        with engine(daemon, "victim") as victim:
            assert victim.put(victim.chain(1, 1)).stored == 1
        lines = daemon.tail(1000).split("\n")
        assert sum("TKV-REFUSED" in line for line in lines) == 3
        assert not any("everything is lost" in line for line in lines) and all(line.isprintable() for line in lines)


@as_root
@pytest.mark.fault(108)
def test_an_engine_of_another_user_has_its_session_and_no_other_way_in(public: Path, tmp_path: Path) -> None:  # noqa: F811
    """Not over the files, not over the daemon's descriptors, not as whom it says that it is."""
    tenants = f"[tenants.attacker]\nuids = [{NOBODY}]\nrights = ['read']\n[tenants.victim]\n"
    with two_tenants(public, tmp_path, tenants, access__socket_mode="0666") as daemon, both(daemon) as (_, victim):
        keys = victim.chain(1, 2)
        assert victim.put(keys, durable=True) == Stored(stored=2, durable=2)
        wanted = {
            "model": "m", "revision": "r", "dtype": "u8", "block_tokens": 4, "lookup_budget_ms": 10_000,
            "access": "read",
        }  # fmt: skip
        files = [path for folder in (tmp_path / "d", daemon.runtime) for path in folder.rglob("*") if path.is_file()]
        files += [Path(f"/proc/{daemon.pid}/{name}") for name in ("mem", "environ", "fd/0", "maps")]
        lines = as_stranger(
            f"""
            import os
            client = Blocks({str(daemon.socket)!r}, layout=layout_of(4096), **{wanted!r})
            keys = [bytes.fromhex(key) for key in {[key.hex() for key in keys]!r}]
            print(client.joined, client.namespace_id.hex(), client.lookup(keys).blocks, client.get(keys).blocks)
            client.close()
            for path in {[str(path) for path in files]!r}:
                try:
                    os.close(os.open(path, os.O_RDONLY))
                    print("opened", path)
                except PermissionError:
                    pass
            """
        )
        first, *opened = lines[1]
        joined, namespace_id, *found = first.split()
        assert (joined, found) == ("True", ["0", "0"]) and namespace_id != victim.space.hex()
        assert [line for line in opened if "daemon.log" not in line] == []
        assert files and all(os.access(path, os.R_OK) for path in files), "as root they open"
        assert victim.get(keys) == Loaded(2, None)

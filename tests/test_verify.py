"""``terracekv verify``: bytes that were changed behind the daemon's back are found, named, forgotten, stored anew."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.http_client import Answered, Door
from terracekv.daemon.verify import _asked
from terracekv.tests.harness import Blocks, Daemon, payload_of
from terracekv.tests.people import People, keys_of, served
from terracekv.tests.s3_stub import BUCKET, s3_stub
from terracekv.tests.test_stuck import flush_host
from terracekv.tiers.block import block_id

MAIN = "from terracekv.daemon.cli import main; main()"


def verify(daemon: Daemon, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the report of each tier."""
    flags = [part for key, value in daemon.settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-c", MAIN, "verify", "--json", *flags, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    return done.returncode, {report["tier"]: report for report in json.loads(done.stdout)}


def spoil(files: Iterable[Path], payload: bytes) -> None:
    """Change one byte of a payload, wherever it lies."""
    for path in files:
        at = path.read_bytes().find(payload)
        if at >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 7)
                file.write(bytes([payload[7] ^ 1]))
                file.flush()
                os.fsync(file.fileno())
            return
    raise AssertionError("the block is in no file")


def segments(daemon: Daemon) -> list[Path]:
    return sorted((daemon.state / "state" / "disk" / "segments").glob("*.segment"))


def damaged_twice(daemon: Daemon, client: Blocks, keys: list[bytes]) -> None:
    """One block in memory, another on disk."""
    spoil([daemon.runtime / "arena"], payload_of(keys[1], client.block_bytes))
    spoil(segments(daemon), payload_of(keys[2], client.block_bytes))


class Earlier(Door):
    """A daemon of an earlier version: it counts no blocks whose key is not at hand."""

    def ask(self, method: str, route: str, body: object = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        return {"tier": "host", "checked": 3, "passed_over": 1, "wrong": {}, "next": None}


def test_a_daemon_of_an_earlier_version_is_asked_too(tmp_path: Path) -> None:
    """It runs until somebody restarts it, with the new command beside it."""
    report = _asked(Earlier(tmp_path), "host")
    assert (report.checked, report.passed_over, report.locked, report.trouble) == (3, 1, 0, None)


@pytest.mark.long
@pytest.mark.fault(11)
def test_what_is_damaged_is_found_through_the_daemon_forgotten_and_stored_anew(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as client:
        keys = client.chain(1, 8)
        assert client.put(keys, durable=True).durable == 8
        status, reports = verify(daemon)
        assert status == 0 and {name: report["checked"] for name, report in reports.items()} == {"host": 8, "disk": 8}
        damaged_twice(daemon, client, keys)
        status, reports = verify(daemon)
        assert status == 1
        assert [*reports["host"]["wrong"]] == [block_id(keys[1], 0).hex()]
        ((id, why),) = reports["disk"]["wrong"].items()
        assert id == block_id(keys[2], 0).hex() and "is damaged" in why and "segment" in why
        assert "stored anew" in reports["disk"]["done"]
        status, reports = verify(daemon)
        assert status == 0 and (reports["host"]["checked"], reports["disk"]["checked"]) == (7, 7)
        flush_host(daemon)
        assert client.lookup(keys).blocks == 2, "what was wrong is a miss, never wrong bytes"
        assert client.put(keys, durable=True).durable == 8, "healed by the next store"
        assert client.get(keys).blocks == 8
        status, reports = verify(daemon, "--tier", "disk")
        assert status == 0 and [*reports] == ["disk"] and reports["disk"]["checked"] == 8
        _, document = daemon.http("/v1/status")
        assert document["tiers"]["disk"]["counters"]["checksum_failures"] == 1
        assert document["tiers"]["disk"]["last_event"] == "TKV-DAMAGED"


@pytest.mark.long
@pytest.mark.fault(11)
def test_without_a_daemon_the_folders_are_looked_at_and_the_books_too(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as client:
        keys = client.chain(1, 8)
        assert client.put(keys, durable=True).durable == 8
        daemon.kill()
        status, reports = verify(daemon)
        assert status == 0 and (reports["host"]["checked"], reports["disk"]["checked"]) == (8, 8)
        assert {report["through"] for report in reports.values()} == {"no daemon runs"}
        damaged_twice(daemon, client, keys)
        status, reports = verify(daemon)
        assert status == 1 and len(reports["host"]["wrong"]) == len(reports["disk"]["wrong"]) == 1
        assert verify(daemon)[0] == 0
        daemon.start()
        client.rejoin()
        assert client.lookup(keys).per_tier["host"] == 1, "the daemon adopts what was not damaged"
        assert client.put(keys).stored == 1 and client.get(keys).blocks == 8


@contextmanager
def sealed_blocks(shm_dir: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Callable[[], None]]]:
    """A daemon that has stopped, of whose eight sealed blocks the second says that they come back from disk."""
    pytest.importorskip("cryptography")
    (tmp_path / "keys").write_text("ab" * 32)
    with Daemon(shm_dir, tmp_path, encryption__key_file=str(tmp_path / "keys")) as daemon:
        with daemon.client() as client:
            keys = client.chain(1, 8)
            assert client.put(keys, durable=True).durable == 8
        assert daemon.term() == 0

        def still_there() -> None:
            (daemon.runtime / "arena").unlink()
            daemon.start()
            with daemon.client() as client:
                assert client.get(keys).blocks == 8

        yield daemon, still_there


def test_without_a_daemon_sealed_blocks_are_opened_with_the_keys_of_the_settings_and_stay(
    shm_dir: Path, tmp_path: Path
) -> None:
    with sealed_blocks(shm_dir, tmp_path) as (daemon, still_there):
        code, reports = verify(daemon)
        assert code == 0 and reports["disk"]["checked"] == 8, reports
        still_there()


@pytest.mark.parametrize("at_hand", ["", "cd" * 32], ids=["no key", "another key"])
def test_a_sealed_block_whose_key_is_not_at_hand_is_counted_and_stays(
    shm_dir: Path, tmp_path: Path, at_hand: str
) -> None:
    with sealed_blocks(shm_dir, tmp_path) as (daemon, still_there):
        (tmp_path / "keys").write_text(at_hand)
        flags = () if at_hand else ("--set", "encryption.key_file=")
        code, reports = verify(daemon, *flags)
        assert code == 0 and (reports["disk"]["checked"], reports["disk"]["locked"]) == (8, 8), reports
        (tmp_path / "keys").write_text("ab" * 32)
        still_there()


def test_sealed_blocks_of_the_bucket_whose_key_is_not_at_hand_are_counted(shm_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    with s3_stub(tmp_path) as stub:
        bucket = {"bucket": BUCKET, "endpoint": stub.endpoint, "credentials_file": str(stub.credentials)}
        settings = {f"s3__{name}": value for name, value in ({"enabled": "true"} | bucket).items()}
        with Daemon(shm_dir, tmp_path, encryption__key_file=str(keys), **settings) as daemon, daemon.client() as client:
            assert client.put(client.chain(1, 8), durable=True).durable == 8
            for at_hand, locked in (("ab" * 32, 0), ("cd" * 32, 8), ("cd" * 32 + "\n" + "ab" * 32, 0)):
                keys.write_text(at_hand)
                code, reports = verify(daemon, "--tier", "s3")
                assert code == 0 and (reports["s3"]["checked"], reports["s3"]["locked"]) == (8, locked), reports


def test_where_no_daemon_ever_ran_there_is_nothing_to_look_at_and_nothing_is_made(
    shm_dir: Path, tmp_path: Path
) -> None:
    status, reports = verify(Daemon(shm_dir, tmp_path))
    assert status == 0 and "no daemon ever ran" in reports["disk"]["skipped"]
    assert not [*shm_dir.iterdir()] and not [*tmp_path.iterdir()]


def test_a_tier_that_is_named_and_not_there_is_said_not_to_have_been_looked_at(shm_dir: Path, tmp_path: Path) -> None:
    named = ("--tier", "s3", "--tier", "host", "--tier", "gpu", "--tier", "disk")
    with Daemon(shm_dir, tmp_path, disk__enabled="false") as daemon:
        status, reports = verify(daemon, *named)
        assert status == 0 and [*reports] == ["host", "s3", "gpu", "disk"]
        assert "s3.enabled is false" in reports["s3"]["skipped"] and "no gpu tier" in reports["gpu"]["skipped"]
        assert "no disk tier" in reports["disk"]["skipped"] and reports["host"]["skipped"] is None
        assert [*verify(daemon)[1]] == ["host"]
        assert daemon.term() == 0
        status, reports = verify(daemon, *named)
        assert status == 0 and {*reports} == {"host", "s3", "gpu", "disk"}


@served(disk_bytes=0)
async def test_a_tier_that_is_not_there_is_no_tier_to_check(people: People) -> None:
    status, answer = await people.ask("POST", "/v1/verify", {"tier": "disk"})
    assert status == 404 and "host" in answer["error"]["hint"]
    status, _ = await people.ask("POST", "/v1/verify", {"tier": "host", "after": "../../etc"})
    assert status == 400


@served(host_bytes=4 << 20, slab_bytes=1 << 20)
async def test_blocks_are_checked_a_piece_at_a_time_each_once(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.tiers.upkeep.AUDIT_BLOCKS", 7)
    namespace, keys = people.register(), keys_of(100)
    await people.put(namespace, *keys)
    await people.store.mover.drain()
    before = people.store.host.status().counters.hits, people.store.disk.status().counters.hits  # type: ignore[union-attr]
    for tier, least in (("host", 4), ("disk", 15)):
        checked, steps, after = 0, 0, None
        while steps == 0 or after is not None:
            status, answer = await people.ask("POST", "/v1/verify", {"tier": tier, "after": after})
            assert status == 200 and answer["wrong"] == {}
            checked, steps, after = checked + answer["checked"], steps + 1, answer["next"]
        assert checked == 100 and steps >= least
    assert before == (people.store.host.status().counters.hits, people.store.disk.status().counters.hits)  # type: ignore[union-attr]


@served()
async def test_blocks_of_a_flushed_namespace_are_passed_over(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys, durable="1")
    people.store.namespaces.raise_epoch(namespace.id)
    _, answer = await people.ask("POST", "/v1/verify", {"tier": "disk"})
    assert (answer["checked"], answer["passed_over"], answer["wrong"]) == (0, 3, {})


def test_a_daemon_that_does_not_answer_is_not_taken_for_none(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        with pytest.raises(Answered):
            Door(daemon.runtime).ask("POST", "/v1/verify", {"tier": "gpu"})

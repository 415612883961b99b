"""A scheduler's session: what it holds stays, comes up when it is below host, and ends with the session."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from terracekv.connector.connection import Connection
from terracekv.connector.leases import Leases
from terracekv.tests.harness import TOKENS, Daemon, layout_of, until


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path, disk__admission="all") as daemon:
        yield daemon


def leases(daemon: Daemon) -> Leases:
    return Leases(
        daemon.socket, model="m", revision="r", dtype="u8", block_tokens=TOKENS, layout=layout_of(4096),
        lookup_budget_ms=10_000, load_deadline_ms=10_000,
    )  # fmt: skip


def held_blocks(daemon: Daemon) -> int:
    return int(daemon.http("/v1/status")[1]["tiers"]["host"]["leased_blocks"])


def test_what_is_held_is_leased_until_it_is_released(daemon: Daemon) -> None:
    with daemon.client() as client, closing(leases(daemon)) as scheduler:
        keys = client.chain(1, 5)
        client.put(keys[:3])
        held = scheduler.hold(keys)
        assert held is not None and (held.blocks, held.ready) == (3, 3) and scheduler.lasts(held)
        assert held_blocks(daemon) == 3
        scheduler.release(held)
        scheduler.release(held)
        until(lambda: held_blocks(daemon) == 0, "it is released")
        assert not scheduler.lasts(held)


def test_blocks_below_host_come_up_and_are_told_of(daemon: Daemon) -> None:
    with daemon.client() as client:
        keys = client.chain(1, 20)
        assert client.put(keys, durable=True).durable == 20
    daemon.kill()
    for path in daemon.runtime.iterdir():
        path.unlink()
    daemon.start()
    with closing(leases(daemon)) as scheduler:
        held = scheduler.hold(keys)
        assert held is not None and held.blocks == 20
        until(lambda: scheduler.listen() and held.ready == 20, "all of it is up")
        assert not held.failed and scheduler.lookup(keys).per_tier["host"] == 20
        assert scheduler.lasts(held)


def test_leases_end_with_the_daemon_and_new_ones_can_be_had_from_the_next(daemon: Daemon) -> None:
    with daemon.client() as client, closing(leases(daemon)) as scheduler:
        keys = client.chain(1, 3)
        client.put(keys)
        held = scheduler.hold(keys)
        assert held is not None
        daemon.kill()
        until(lambda: not scheduler.listen() and not scheduler.lasts(held), "the end of the session is seen")
        scheduler.release(held)
        assert scheduler.hold(keys) is None
        daemon.start()
        until(lambda: scheduler.hold(keys) is not None, "the next daemon leases")


def test_a_released_lease_does_not_end_another(daemon: Daemon) -> None:
    with daemon.client() as client, closing(leases(daemon)) as scheduler:
        keys = client.chain(1, 3)
        client.put(keys)
        first, second = scheduler.hold(keys), scheduler.hold(keys[:2])
        assert first is not None and second is not None
        scheduler.release(first)
        assert scheduler.lasts(second)
        until(lambda: held_blocks(daemon) == 2, "the other goes on")


@pytest.mark.parametrize("error", [TimeoutError, BrokenPipeError])
def test_a_release_that_does_not_get_through_ends_the_session_and_with_it_the_lease(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def broken(self: Connection, message: object, deadline: float) -> None:
        raise error("the daemon does not read")

    with daemon.client() as client, closing(leases(daemon)) as scheduler:
        keys = client.chain(1, 3)
        client.put(keys)
        held = scheduler.hold(keys)
        assert held is not None and held_blocks(daemon) == 3
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "tell", broken)
            scheduler.release(held)
        assert not scheduler.lasts(held)
        until(lambda: held_blocks(daemon) == 0, "its leases ended with the session")

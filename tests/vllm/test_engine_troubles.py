"""What goes wrong between engine and daemon costs a computation and nothing else: the answer stays what it would be."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from terracekv.connector import vllm_start
from terracekv.connector.ahead import Settle
from terracekv.connector.client import Client, Copy, Loaded, Stored
from terracekv.connector.near import Fetch
from terracekv.connector.vllm_options import Wish
from terracekv.daemon.http_client import Door
from terracekv.tests.harness import Daemon, until
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, PAGE, Request, prompt

Make = Callable[..., Engine]


class Faulty(Client):
    """A client that fails as it is told to."""

    fail_at: ClassVar[int | None] = None
    """The block of a load that does not come; its bytes are copied, and wrong."""
    gate: ClassVar[threading.Event | None] = None
    """Loads wait for it."""
    raises: ClassVar[bool] = False
    full: ClassVar[bool] = False

    def load(
        self, keys: Sequence[bytes], scatter: Copy, settle: Settle | None = None, fetch: Fetch | None = None
    ) -> Loaded:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.raises:
            raise RuntimeError("a bug")
        if self.fail_at is None or self.fail_at >= len(keys):
            return super().load(keys, scatter, settle, fetch)
        good = super().load(keys[: self.fail_at], scatter).blocks
        scatter(self.fail_at, memoryview(bytes([0x7F]) * self.block_bytes))
        return Loaded(good, "damaged")

    def store(
        self,
        keys: Sequence[bytes],
        gather: Copy,
        durable: bool = False,
        settle: Settle | None = None,
        *,
        first: int = 0,
    ) -> Stored:
        if self.raises:
            raise RuntimeError("a bug")
        if self.full:
            return Stored(refused=len(keys), why="full")
        return super().store(keys, gather, durable, settle, first=first)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[Faulty]:
    monkeypatch.setattr(vllm_start, "Client", Faulty)
    for name, value in {"fail_at": None, "gate": None, "raises": False, "full": False}.items():
        monkeypatch.setattr(Faulty, name, value)
    return Faulty


@pytest.mark.fault(2)
@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.parametrize("settings", [{}, {"ranks": 2}, {"windows": (None, 24)}], ids=["one", "two ranks", "hybrid"])
@pytest.mark.parametrize("fail_at", [0, 1, 4, 9])
def test_a_block_that_does_not_come_is_computed(
    engine: Make, faulty: type[Faulty], settings: dict[str, Any], fail_at: int
) -> None:
    with engine(**settings) as first:
        first.ask(prompt("a", 10 * BLOCK + 2))
    faulty.fail_at = fail_at
    with engine(**settings) as second:
        asked = prompt("b", 10 * BLOCK + 2)
        assert second.ask(asked) == [truth(asked, **settings)]
        assert second.half is not None
        stats = second.half.take_stats()
        assert stats["failed/damaged"] == 1
        assert sum(stats[name] for name in stats if name.startswith("hit_tokens/")) == asked.loaded_tokens
        assert second.ranks[0].half.take_stats()["load_tokens"] == fail_at * BLOCK
        if "windows" not in settings:
            assert asked.loaded_tokens == fail_at * BLOCK
            assert asked.computed_tokens == 2 * BLOCK + 3 + (8 - fail_at) * BLOCK
        assert len([found for found in second.asked if found]) == 1, "it was offered again after it failed"


@pytest.mark.fault(2)
def test_what_failed_is_forgotten_and_the_next_request_succeeds_even_where_a_failure_is_an_error(
    engine: Make, faulty: type[Faulty]
) -> None:
    with engine() as first:
        first.ask(prompt("a", 10 * BLOCK))
    faulty.fail_at = 3
    with engine(policy="fail") as second:
        failed = second.add(prompt("b", 10 * BLOCK))
        second.run()
        assert second.errors == [failed] and failed.answer == []
        again = prompt("c", 10 * BLOCK)
        assert second.ask(again) == [truth(again)]
        assert again.loaded_tokens == 3 * BLOCK and not second.errors[1:]


@pytest.mark.fault(2)
def test_a_bug_in_a_copy_is_a_failed_load_and_a_store_that_was_not_made(engine: Make, faulty: type[Faulty]) -> None:
    with engine() as first:
        first.ask(prompt("a", 50))
    faulty.raises = True
    with engine() as second:
        asked, other = prompt("b", 50), prompt("c", 50, seed=1)
        assert second.ask(asked, other) == [truth(asked), truth(other)]
        second.idle()
        assert second.half is not None
        stats = second.half.take_stats()
        assert stats["failed/error"] == 1 and stats["skipped/store_error"] >= 2


@pytest.mark.fault(59)
@pytest.mark.parametrize("settings", [{}, {"ranks": 2}, {"windows": (None, 24)}], ids=["one", "two ranks", "hybrid"])
def test_a_load_that_was_promised_and_cannot_be_planned_is_reported_as_failed(
    engine: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    with engine(**settings) as first:
        first.ask(prompt("a", 50))
    with engine(**settings) as second:
        half = second.half
        assert half is not None

        def allocated(request: Request, blocks: Any, external: int) -> None:
            if external:  # as the connector does when planning raises
                groups = [[SimpleNamespace(block_id=page, block_hash=None, is_null=not page) for page in table]
                          for table in request.tables]  # fmt: skip
                half.give_up(request, SimpleNamespace(blocks=groups))

        monkeypatch.setattr(half, "allocated", allocated)
        asked = prompt("b", 50, kv_transfer_params={"terracekv": {"write": False}})
        second.add(asked)
        until(lambda: second.step() is not None and second.reported, "every rank says so")
        second.run()
        assert asked.answer == truth(asked, **settings)


@pytest.mark.fault(17)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_a_request_that_is_aborted_while_it_loads_keeps_its_pages_until_the_load_is_over(
    engine: Make, faulty: type[Faulty], ranks: int, steps: int
) -> None:
    with engine(ranks=ranks) as first:
        first.ask(prompt("a", 100))
    faulty.gate = threading.Event()
    with engine(ranks=ranks, pages=80) as second:
        gone = second.add(prompt("gone", 100))
        for _ in range(steps):
            second.step()
        loading = gone in second.loading
        held = [page for table in gone.tables for page in table]
        second.abort(gone)
        other = prompt("other", 100, seed=1)
        if loading:
            second.add(other)
            until(lambda: second.step() is not None and other.status == "finished", "another is answered meanwhile")
            assert all(second.pool.blocks[page].ref_cnt == 1 for page in held), "reused under a copy"
        faulty.gate.set()
        second.run()
        second.ask(again := prompt("again", 100))
        assert again.answer == truth(again, ranks=ranks)
        assert second.reported.count("gone") == (ranks if loading else 0), "reported once by each rank"


@pytest.mark.fault(17)
def test_a_thousand_aborts_leave_nothing_held(engine: Make) -> None:
    with engine() as first:
        first.ask(*(prompt(f"{n}", 40, seed=n) for n in range(20)))
    with engine() as second:
        for n in range(1000):
            request = second.add(prompt(f"{n}", 40, seed=n % 20))
            for _ in range(n % 4):
                second.step()
            if request.status != "finished":
                second.abort(request)
        second.idle()
        assert second.half is not None and not second.half._requests and not second.half._leaving


@pytest.mark.fault(18)
def test_a_store_that_is_refused_stops_nothing(engine: Make, faulty: type[Faulty]) -> None:
    faulty.full = True
    with engine() as first:
        asked = [prompt(f"{n}", 60, seed=n) for n in range(3)]
        assert first.ask(*asked) == [truth(request) for request in asked]
        first.idle()
        assert first.half is not None and first.half.take_stats()["skipped/store_full"] >= 3


@pytest.mark.fault(7)
def test_a_daemon_that_is_killed_in_the_middle_of_a_load_costs_what_was_not_loaded(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        with Engine(daemon.socket) as first:
            first.ask(prompt("a", 100))

        class Killing(Client):
            def load(
                self, keys: Sequence[bytes], scatter: Copy, settle: Settle | None = None, fetch: Fetch | None = None
            ) -> Loaded:
                def kill(index: int, payload: memoryview) -> None:
                    scatter(index, payload)
                    if index == 2 and daemon.alive:
                        daemon.kill()

                return super().load(keys, kill, settle, fetch)

        monkeypatch.setattr(vllm_start, "Client", Killing)
        with Engine(daemon.socket) as second:
            asked = prompt("b", 100)
            assert second.ask(asked) == [truth(asked)]
            again = prompt("c", 100)
            assert second.ask(again) == [truth(again)] and again.loaded_tokens == 0
            daemon.start()
            until(lambda: second.ranks[0].half._loader._client.joined, "the worker joins by itself")
            assert second.half is not None
            until(lambda: second.half is not None and second.half._lookups.joined, "the scheduler joins by itself")
            until(lambda: _loads(second), "a later request loads again")


def test_a_daemon_that_stands_still_costs_the_budget_of_one_lookup(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        with Engine(daemon.socket) as first:
            first.ask(prompt("a", 60))
        with Engine(daemon.socket, lookup_budget_ms=20, store_deadline_ms=100) as second:
            daemon.stop()
            asked = [prompt(f"{n}", 60, seed=n) for n in range(4)]
            assert second.ask(*asked) == [truth(request) for request in asked]
            assert second.half is not None
            stats = second.half.take_stats()
            assert stats["skipped/deadline"] + stats["skipped/no_daemon"] >= 1
            second.idle()
            daemon.cont()


@pytest.mark.parametrize(
    "ttl_s", [366 * 86_400, 1e12, 1e300, float("inf"), float("nan"), 10**400],
    ids=["a year", "longer", "1e300", "inf", "nan", "10**400"],
)  # fmt: skip
@pytest.mark.parametrize("checked", [True, False], ids=["as it comes", "past the check of what a request asks for"])
def test_no_request_can_end_the_schedulers_session_by_what_it_asks_for(
    daemon: Daemon, engine: Make, monkeypatch: pytest.MonkeyPatch, checked: bool, ttl_s: float
) -> None:
    if not checked:
        monkeypatch.setattr(Wish, "read_from", lambda params: Wish(ttl_s=ttl_s if params else 0))
    with engine() as first:
        assert first.half is not None
        lookups = first.half._lookups
        session = lookups._session._session
        asked = prompt("a", 60, kv_transfer_params={"terracekv": {"ttl_s": ttl_s}})
        assert first.ask(asked) == [truth(asked)]
        first.idle()
        until(lambda: lookups._work.empty(), "the wish was read")
        other = prompt("b", 60, seed=1)
        assert first.ask(other) == [truth(other)]
        assert session is not None and lookups._session._session is session, "the same session"


@pytest.mark.fault(119)
def test_an_engine_without_its_daemon_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tmp_path / "nobody") as alone:
        asked = prompt("a", 60)
        assert alone.ask(asked) == [truth(asked)]
        assert alone.half is not None
        stats = alone.half.take_stats()
        assert stats["joined"] == 0 and "joined" in stats and stats["skipped/no_daemon"] == 1
        assert "joined" not in alone.half.take_stats(), "said once"
    assert "everything is a miss until it is joined" in caplog.text


@pytest.fixture
def vllm_log() -> Iterator[list[str]]:
    """What vLLM's own handler is given, at the level that vLLM has."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_every_part_of_the_connector_speaks_through_vllms_own_log(engine: Make, vllm_log: list[str]) -> None:
    with engine():
        for module in (Path(vllm_start.__file__).parent).glob("*.py"):
            if (name := f"terracekv.connector.{module.stem}") in sys.modules:
                said = getattr(sys.modules[name], "log", None)
                if said is not None:
                    said.info("from %s", module.stem)
                    assert f"INFO from {module.stem}" in vllm_log


def test_the_log_says_what_has_become_of_the_session_and_when_it_is_back(
    shm_dir: Path, tmp_path: Path, vllm_log: list[str]
) -> None:
    def said(text: str) -> bool:
        return any(text in line for line in vllm_log)

    with Daemon(shm_dir, tmp_path) as daemon:
        with Engine(daemon.socket, lookup_budget_ms=20, store_deadline_ms=100) as engine:
            assert said(f"INFO joined the daemon at {daemon.socket}")
            assert engine.half is not None
            daemon.stop()
            engine.add(prompt("a", 60))
            until(lambda: said(f"WARNING the daemon at {daemon.socket} did not answer within 20 ms"), "it is late")
            assert not said("no daemon"), "it is there, and late"
            vllm_log.clear()
            daemon.cont()
            until(lambda: said(f"INFO joined the daemon at {daemon.socket}"), "it is back")
            engine.idle()
            daemon.kill()
            until(
                lambda: engine.ask(prompt(f"{len(engine.finished)}", 60)) and said("WARNING no daemon at"), "it is gone"
            )


@pytest.mark.fault(62)
def test_an_empty_daemon_that_comes_late_gets_no_more_pages_at_a_time_than_stores_may_hold(
    shm_dir: Path, tmp_path: Path
) -> None:
    daemon = Daemon(shm_dir, tmp_path)
    with Engine(daemon.socket, pages=200, pages_held=0.2) as engine:
        asked = [engine.add(prompt(f"{n}", 80, seed=n, answer_tokens=30)) for n in range(6)]
        for _ in range(5):
            engine.step()
        with daemon:
            assert engine.half is not None
            until(lambda: engine.half is not None and engine.half._lookups.joined, "it joins")
            most = 0
            while engine.waiting or engine.running or engine.loading:
                engine.step()
                most = max(most, engine.half.stores._held)
            engine.idle()
        assert 0 < most <= 0.2 * 200
        assert [request.answer for request in asked] == [truth(request) for request in asked]


def test_stores_that_lost_their_head_begin_anew(daemon: Daemon, engine: Make) -> None:
    asked = prompt("a", 6 * BLOCK + PAGE, answer_tokens=3 * BLOCK)
    with engine(chunk=3 * BLOCK) as first:
        first.add(asked)
        first.step()
        assert first.half is not None
        until(lambda: first.half is not None and not first.half.stores.under_way or first.step() is None, "stored")
        namespace = first.half._lookups.namespace
        assert namespace is not None
        Door(daemon.runtime).ask("POST", "/v1/flush", {"namespace": namespace.hex()})
        first.idle()
    with engine() as second:
        again = prompt("b", 6 * BLOCK + PAGE)
        second.ask(again)
        assert again.loaded_tokens == 6 * BLOCK and again.answer == truth(again) == asked.answer[:2]


def _loads(engine: Engine) -> bool:
    asked = prompt(f"{len(engine.finished)}", 100)
    assert engine.ask(asked) == [truth(asked)]
    return asked.loaded_tokens > 0

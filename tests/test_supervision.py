"""Threads and tasks are owned: each is named in the design, and none dies without a line in the log and a new life."""

import ast
import asyncio
import logging
import re
import threading
from pathlib import Path

import pytest

from terracekv.daemon import tasks
from terracekv.daemon.mover import Mover
from terracekv.tests.harness import until
from terracekv.tests.test_floor_plan import nodes
from terracekv.tiers import steady
from terracekv.tiers.errors import TierDown, TierStuck
from terracekv.tiers.steady import Steady

ROOT = Path(__file__).parent.parent
DAEMONS = sorted(path for room in ("daemon", "tiers") for path in (ROOT / room).glob("*.py"))
STARTS = {
    "Thread": {"tiers/steady.py"},
    "Timer": set[str](),
    "ThreadPoolExecutor": {"tiers/scout.py"},
    "create_task": {"daemon/tasks.py"},
    "ensure_future": set[str](),
    "to_thread": set[str](),
    "run_in_executor": set[str](),
    "TaskGroup": set[str](),
}
"""What starts a thread or a task, and the modules that may."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def starts(path: Path) -> list[str]:
    """Names of calls, and of base classes, by which a thread or task begins."""
    found = []
    for node in nodes(path):
        called = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        found += [ast.unparse(each).rpartition(".")[2] for each in called]
    return [each for each in found if each in STARTS]


@pytest.mark.parametrize("path", DAEMONS, ids=name)
def test_threads_and_tasks_begin_in_one_place(path: Path) -> None:
    assert [each for each in starts(path) if name(path) not in STARTS[each]] == []


def names_given() -> dict[str, str]:
    """The name of every thread, mover, lane and task that the daemon starts, and where."""
    found = {}
    for path in DAEMONS:
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            callee = ast.unparse(node.func).rpartition(".")[2]
            given = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            if callee == "Steady":
                given = node.args[:1]
            elif callee == "ThreadPoolExecutor":
                given = [keyword.value for keyword in node.keywords if keyword.arg == "thread_name_prefix"]
            elif callee == "Lane" or ast.unparse(node.func) == "tasks.begin":
                given = node.args[1:2]
            elif callee != "Mover":
                continue
            for each in given:
                text = ast.unparse(each)
                if isinstance(each, ast.Constant):
                    found[str(each.value)] = name(path)
                elif isinstance(each, ast.JoinedStr) and isinstance(each.values[0], ast.Constant):
                    found[str(each.values[0].value).rstrip("-")] = name(path)
                else:  # a mover's and a lane's workers bear the name that their maker gave
                    assert path.name in ("mover.py", "lane.py"), (
                        f"{name(path)}: {text} is no name that can be looked up"
                    )
            assert given, f"{name(path)}: {ast.unparse(node)[:60]} has no name"
    return found


def test_the_design_says_whose_each_thread_and_task_is_and_what_becomes_of_it() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("| thread or task |")[2].partition("\n\n")[0]
    listed = {word for row in table.splitlines()[2:] for word in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])}
    given = names_given()
    assert given.keys() - {"mover"} <= listed, f"not in the table: {given.keys() - listed}"
    assert listed <= {*given, "MainThread"}, f"nothing has that name: {listed - given.keys()}"


def test_a_thread_whose_work_dies_is_started_again_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "PAUSE_S", 0.0)
    lives = 0

    def work() -> None:
        nonlocal lives
        lives += 1
        if lives < 3:
            raise SystemExit("not an Exception")

    thread = Steady("frail", work)
    thread.start()
    thread.join(30)
    assert lives == 3 and thread.deaths == 2 and steady.deaths()["frail"] == 2
    said = [record for record in caplog.records if getattr(record, "event", "") == "TKV-THREAD-DIED"]
    assert len(said) == 2 and "frail" in said[0].getMessage() and said[0].exc_info


def test_a_worker_that_is_left_by_anything_at_all_goes_on_and_its_job_is_answered() -> None:
    async def story() -> None:
        mover = Mover(threads=1, queue_bytes=10)

        def leave() -> None:
            raise SystemExit(1)

        with pytest.raises(RuntimeError, match="SystemExit"):
            await mover.load(leave)
        stored = mover.store(10, leave)
        assert stored is not None
        with pytest.raises(RuntimeError, match="SystemExit"):
            await stored
        assert mover.queue_bytes == 0 and await mover.load(lambda: "at work") == "at work"
        assert mover.close(30.0)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_task_that_nobody_awaits_does_not_die_unseen(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async def work() -> None:
            raise ValueError("unforeseen")

        task = tasks.begin(work(), "lonely")
        while not task.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    before = tasks.failures["lonely"]
    asyncio.run(asyncio.wait_for(story(), 30))
    assert tasks.failures["lonely"] == before + 1
    (said,) = [record for record in caplog.records if getattr(record, "event", "") == "TKV-TASK-DIED"]
    assert "lonely" in said.getMessage() and said.exc_info


def test_a_step_that_fails_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        steps = 0
        third = asyncio.Event()

        async def step() -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                third.set()
            raise OSError("each time")

        task = tasks.begin(tasks.keep(step, "stubborn", 0.001), "stubborn")
        await third.wait()
        task.cancel()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert tasks.failures["stubborn"] >= 2


def test_an_error_of_a_timer_is_an_event_too(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        tasks.hear(loop)
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 30))
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1 and getattr(said[0], "event", "") == "TKV-INTERNAL" and said[0].exc_info


def test_a_job_that_runs_too_long_is_seen_and_what_waits_behind_it_is_let_go() -> None:
    async def story() -> None:
        gate, entered = threading.Event(), threading.Event()

        def held() -> str:
            entered.set()
            assert gate.wait(30)
            return "came back"

        mover = Mover(threads=1, queue_bytes=10, stuck_s=0.02)
        running = mover.load(held, shed=True)
        patient = mover.load(lambda: "must be done")
        read = mover.load(lambda: "can be done without", shed=True)
        write = mover.store(10, lambda: "too")
        assert write is not None and await asyncio.to_thread(entered.wait, 30)
        await asyncio.to_thread(until, lambda: mover.stalled_s > 0, "the job counts as stuck")
        assert mover.shed(TierStuck("it does not move", "wait")) == 2
        for let_go in (read, write):
            with pytest.raises(TierStuck):
                await let_go
        assert mover.queue_bytes == 0 and not running.done() and not patient.done()
        with pytest.raises(TierStuck, match="the medium did not answer"):
            await mover.ask(lambda: None, 0.01, "the medium")
        gate.set()
        assert await running == "came back" and await patient == "must be done"
        await mover.load(lambda: None)
        assert mover.stalled_s == 0
        assert mover.close(30.0)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_job_may_be_allowed_to_take_its_time() -> None:
    async def story() -> None:
        gate, entered = threading.Event(), threading.Event()

        def long() -> None:
            entered.set()
            assert gate.wait(30)

        mover = Mover(threads=1, queue_bytes=10, stuck_s=0.0)
        sweep = mover.load(long, limit_s=3600.0)
        assert await asyncio.to_thread(entered.wait, 30)
        assert mover.stalled_s == 0
        gate.set()
        await sweep
        mover.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_loads_that_nothing_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.daemon.mover.LOADS_MAX", 3)

    async def story() -> None:
        gate, entered = threading.Event(), threading.Event()

        def held() -> None:
            entered.set()
            assert gate.wait(30)

        mover = Mover(threads=1, queue_bytes=10)
        mover.load(held)
        assert await asyncio.to_thread(entered.wait, 30)
        waiting = [mover.load(lambda: None) for _ in range(3)]
        with pytest.raises(TierDown, match="3 jobs wait"):
            await mover.load(lambda: None)
        gate.set()
        await asyncio.gather(*waiting)
        mover.close()

    asyncio.run(asyncio.wait_for(story(), 60))

"""Events: every id is explained, every explanation is of an id, and a log has them as lines of text or of JSON."""

import ast
import importlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.daemon.logs import LINES_MAX, WINDOW_S, Lines, Sparing, Standard
from terracekv.tests.harness import Daemon
from terracekv.tests.test_floor_plan import nodes
from terracekv.tiers.errors import TerraceError, TierDown, TierFull, event_and_advice, event_of_kind
from terracekv.tiers.journal import Journal
from terracekv.tiers.ledger import Ledger

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for room in ("daemon", "tiers") for path in (ROOT / room).glob("*.py"))
PAGE = ROOT / "docs" / "errors.md"
SAYS = {"info", "warning", "error", "failed"}


def errors_below(kind: type[TerraceError]) -> Iterator[type[TerraceError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from errors_below(each)


def ids_of_errors() -> set[str]:
    for path in MODULES:
        importlib.import_module(f"terracekv.{path.parent.name}.{path.stem}")
    ours = [error for error in errors_below(TerraceError) if error.__module__.startswith("terracekv.")]
    return {error.own_event or event_of_kind(error.kind) for error in ours if "tests" not in error.__module__}


def ids_of_answers() -> set[str]:
    """Of kinds that only the people's door has."""
    calls = [node for path in MODULES for node in nodes(path) if isinstance(node, ast.Call)]
    kinds = [call.args[1] for call in calls if ast.unparse(call.func) == "Problem" and len(call.args) > 1]
    return {event_of_kind(str(kind.value)) for kind in kinds if isinstance(kind, ast.Constant)}


def ids_in_code() -> set[str]:
    return {id for path in MODULES for id in re.findall(r"\bTKV-[A-Z0-9]+(?:-[A-Z0-9]+)*", path.read_text())}


def test_every_event_is_explained_and_every_explanation_is_of_an_event() -> None:
    explained = re.findall(r"^### (\S+)$", PAGE.read_text(), re.MULTILINE)
    assert len(explained) == len(set(explained))
    used = ids_of_errors() | ids_of_answers() | ids_in_code()
    assert set(explained) == used, f"no section: {used - set(explained)}; no event: {set(explained) - used}"


def test_ids_that_are_mentioned_are_there() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    sections = set(re.findall(r"^### (\S+)$", PAGE.read_text(), re.MULTILINE))
    assert set(re.findall(r"\bTKV-[A-Z0-9-]*[A-Z0-9]", text)) <= sections


def test_nothing_is_said_without_an_id() -> None:
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAYS:
                told_by = ast.unparse(node.func.value)
                assert told_by != "log" and not told_by.startswith("logging"), f"{path.name}: {ast.unparse(node)}"
                if told_by == "journal":
                    first = ast.unparse(node.args[0])
                    assert re.search(r"TKV-|event|INTERNAL", first), f"{path.name}: {first} is no event"


def test_whatever_the_doctor_finds_wrong_it_says_what_to_do() -> None:
    findings = [
        node
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"
    ]
    wrong = [call for call in findings if not (isinstance(call.args[1], ast.Constant) and call.args[1].value == "ok")]
    assert len(wrong) > 20
    assert [ast.unparse(call) for call in wrong if len(call.args) < 4] == []


@pytest.mark.fault(118)
def test_an_error_of_the_machine_has_an_id_and_says_what_to_do() -> None:
    import errno

    for code, id in {
        errno.ENOSPC: "TKV-DISK-FULL",
        errno.EDQUOT: "TKV-DISK-FULL",
        errno.EROFS: "TKV-DISK-READ-ONLY",
        errno.EIO: "TKV-DISK-IO",
        errno.EACCES: "TKV-DISK-DENIED",
        errno.ENOENT: "TKV-DISK-GONE",
        errno.EBADF: "TKV-DISK-IO",
    }.items():
        event, advice = event_and_advice(OSError(code, "as the machine says"))
        assert event == id and len(advice) > 20
    assert event_and_advice(TierDown("down"))[1] == "see TKV-TIER-DOWN in docs/errors.md"
    assert event_and_advice(TierFull("host", 1, 0, "unpin")) == ("TKV-TIER-FULL", "unpin")


def test_a_tier_s_last_error_is_kept_with_its_id_and_advice(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("disk")
    ledger.failed(OSError(28, "No space left on device"))
    assert ledger.last_event == "TKV-DISK-FULL" and ledger.advice and "free space" in ledger.advice
    assert getattr(caplog.records[-1], "event", None) == "TKV-DISK-FULL"
    ledger.damaged("block 1 is damaged")
    assert ledger.last_event == "TKV-DAMAGED" and ledger.last_error == "block 1 is damaged"
    assert ledger.counters().checksum_failures == ledger.counters().io_errors == 1


@pytest.fixture
def said() -> Iterator[tuple[Journal, list[logging.LogRecord]]]:
    """A journal, and what of it got past the limit."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    handler.addFilter(Sparing())
    logger = logging.getLogger("terracekv.test_events")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield Journal(logger.name), records
    logger.removeHandler(handler)


def test_one_event_is_one_line(said: tuple[Journal, list[logging.LogRecord]]) -> None:
    journal, records = said
    journal.warning("TKV-DISK-FULL", "disk tier: no space", tier="disk", bytes=7)
    line = Lines(as_json=False).format(records[0])
    assert re.fullmatch(r"\S+T\S+Z WARNING TKV-DISK-FULL disk tier: no space tier=disk bytes=7", line)
    shown = json.loads(Lines(as_json=True).format(records[0]))
    assert shown.pop("time").endswith("Z")
    told = {"level": "warning", "event": "TKV-DISK-FULL", "message": "disk tier: no space", "tier": "disk", "bytes": 7}
    assert shown == told | {"from": "terracekv.test_events"}


def test_what_follows_a_line_is_indented_and_what_cannot_be_shown_is_escaped(
    said: tuple[Journal, list[logging.LogRecord]],
) -> None:
    journal, records = said
    forged = "2026-01-01T00:00:00.000Z ERROR TKV-DAMAGED everything is lost"
    journal.warning("TKV-PIN", f"before\n{forged}\x1b[2J\r\nafter")
    _, second, third = Lines(as_json=False).format(records[0]).split("\n")
    assert (second, third) == (f"  {forged}\\x1b[2J\\r", "  after")


def test_a_traceback_is_a_field_of_its_line_in_json(said: tuple[Journal, list[logging.LogRecord]]) -> None:
    journal, records = said
    try:
        raise ValueError("of a\nlong story")
    except ValueError as error:
        journal.failed("TKV-INTERNAL", "it failed", error)
    line = Lines(as_json=True).format(records[0])
    assert "\n" not in line and "ValueError: of a\nlong story" in json.loads(line)["traceback"]
    assert Lines(as_json=False).format(records[0]).splitlines()[1].startswith("Traceback")


def test_an_event_that_comes_all_the_time_does_not_fill_the_log(
    said: tuple[Journal, list[logging.LogRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, records = said
    now = [100.0]
    monkeypatch.setattr("terracekv.daemon.logs.time.monotonic", lambda: now[0])
    for _ in range(10 * LINES_MAX):
        journal.warning("TKV-REFUSED", "refused an engine")
    journal.warning("TKV-PIN", "another event has lines of its own")
    assert [getattr(record, "event", "") for record in records] == ["TKV-REFUSED"] * LINES_MAX + ["TKV-PIN"]
    now[0] += WINDOW_S
    journal.warning("TKV-REFUSED", "refused an engine")
    assert Lines(as_json=False).format(records[-1]).endswith(f"left_out={9 * LINES_MAX}")
    journal.warning("TKV-REFUSED", "refused an engine")
    assert "left_out" not in Lines(as_json=False).format(records[-1])


def test_a_daemon_writes_json_when_it_is_told_to(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path, daemon__log_format="json") as daemon:
        with daemon.client() as client:
            assert client.put(client.chain(1, 1)).stored == 1
        assert daemon.term() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events[0] == "TKV-START" and events[-2:] == ["TKV-STOPPING", "TKV-STOPPED"] and "TKV-READY" in events
    assert all(line["time"] and line["level"] == "info" and line["message"] for line in lines)


def test_a_log_that_nobody_reads_stops_nobody_and_what_is_lost_is_counted() -> None:
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as reader, open(theirs, "w") as stream:
        handler = Standard(stream)
        record = logging.LogRecord("n", logging.INFO, "", 0, "x" * 10_000, (), None)
        for _ in range(20):  # a pipe holds 65,536 bytes
            handler.handle(record)
        assert 0 < handler.lost < 20
        os.set_blocking(ours, False)
        while reader.read(1 << 16):
            pass
        lost = handler.lost
        handler.handle(logging.LogRecord("n", logging.INFO, "", 0, "here again", (), None))
        assert reader.read(1 << 16) == f"{lost} lines were lost: nobody read the log\nhere again\n".encode()
        assert handler.lost == 0

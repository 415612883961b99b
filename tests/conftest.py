"""What every test is held to: what it made keeps its promises to the end, and it leaves no thread, descriptor, child
process or shared-memory file behind."""

import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terracekv.tests import promises

SHM = Path("/dev/shm")
GRACE_S = 30.0
"""Time in which a thread or child that was told to end may still do so."""
LIBRARIES_OWN = {"tqdm_monitor"}
"""Threads that a library keeps for the life of the process."""
PREFIX = f"terracekv-test-{os.getpid()}-"
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for all that a shell starts in the background: processes started here would have it ignored, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _threads() -> set[str]:
    return {f"thread {t.name} ({t.ident})" for t in threading.enumerate() if t.name not in LIBRARIES_OWN}


def _descriptors() -> set[str]:
    found = set[str]()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


def _children() -> set[str]:
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {f"child {pid}" for pid in pids if "resource_tracker" not in _command(pid)}
    return found


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:80] or "that has ended unwaited for"
    except (FileNotFoundError, ProcessLookupError):
        return "that is gone"


def _shared_memory() -> set[str]:
    """On a machine of our own every new file is ours; beside other people only those that bear our mark are."""
    alone = os.environ.get("CI") == "true" and "PYTEST_XDIST_WORKER" not in os.environ
    return {f"shared memory {p}" for p in SHM.glob("terracekv*") if alone or p.name.startswith(PREFIX)}


def _held() -> set[str]:
    return _threads() | _descriptors() | _children() | _shared_memory()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _held()
    yield
    until = time.monotonic() + GRACE_S
    while (left := _held() - before) and time.monotonic() < until:
        gc.collect()  # what only a cycle of garbage still holds
        time.sleep(0.02)
    told = [f"{name} {_command(name[6:])}" if name.startswith("child ") else name for name in sorted(left)]
    assert not left, "left behind: " + "; ".join(told)


@pytest.fixture(autouse=True)
def promises_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of every tier and daemon that was closed during the test, or while it was taken down: see ``promises``."""
    promises.taken()
    yield
    found = promises.taken()
    assert not found or request.node.get_closest_marker("breaks"), "a promise is broken: " + "; ".join(found[:3])


promises.watch()


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty folder in shared memory, short enough for a Unix socket's path; gone after the test."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    yield folder
    shutil.rmtree(folder)

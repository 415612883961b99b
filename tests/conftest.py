"""What every test is held to: it leaves no thread, descriptor, child process or shared-memory file behind."""

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")
GRACE_S = 5.0
"""Time in which a thread or child that was told to end may still do so."""
LIBRARIES_OWN = {"TMonitor"}
"""Threads that a library keeps for the life of the process."""
PREFIX = f"terracekv-test-{os.getpid()}-"


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
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and "resource_tracker" not in command:
            found.add(f"child {folder.name} ({fields[0]}) {command[:80]}")
    return found


def _shared_memory() -> set[str]:
    """On a machine of our own every new file is ours; beside other people only those that bear our mark are."""
    alone = os.environ.get("CI") == "true"
    return {f"shared memory {p}" for p in SHM.glob("*") if alone or p.name.startswith(PREFIX)}


def _held() -> set[str]:
    return _threads() | _descriptors() | _children() | _shared_memory()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _held()
    yield
    until = time.monotonic() + GRACE_S
    gc.collect()
    while (left := _held() - before) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left, "left behind: " + "; ".join(sorted(left))


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty folder in shared memory, short enough for a Unix socket's path; gone after the test."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    yield folder
    shutil.rmtree(folder)

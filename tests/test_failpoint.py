"""Failpoints: silent unless armed, and then exactly at the hit that was named."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from terracekv.tiers.failpoint import arm, disarm, failpoint


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    disarm()
    yield
    disarm()


def test_a_line_that_nobody_armed_does_nothing() -> None:
    failpoint("disk.write")
    arm("disk.read=errno:EIO")
    failpoint("disk.write")


def test_an_armed_line_raises_the_error_that_was_named() -> None:
    arm("disk.write=errno:ENOSPC,disk.read=errno:EIO")
    for name, code in (("disk.write", errno.ENOSPC), ("disk.read", errno.EIO)):
        with pytest.raises(OSError) as caught:
            failpoint(name)
        assert caught.value.errno == code
        assert name in str(caught.value)


def test_the_nth_hit_acts_and_none_before() -> None:
    arm("disk.write*3=errno:EIO")
    failpoint("disk.write")
    failpoint("disk.write")
    for _ in range(2):
        with pytest.raises(OSError):
            failpoint("disk.write")


def test_hits_of_a_range_act_and_none_after_it() -> None:
    arm("disk.write*2-3=errno:EIO")
    failed = []
    for hit in range(1, 6):
        try:
            failpoint("disk.write")
        except OSError:
            failed.append(hit)
    assert failed == [2, 3]


def test_a_share_of_the_hits_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter((0.3, 0.1, 0.25))
    monkeypatch.setattr("random.random", lambda: next(draws))
    arm("disk.write%0.25=short")
    assert [failpoint("disk.write") for _ in range(3)] == ["", "short", ""]


@pytest.mark.parametrize("verb", ["short", "flip"])
def test_who_moves_bytes_is_told_what_to_do_to_them(verb: str) -> None:
    assert failpoint("disk.write") == ""
    arm(f"disk.write={verb}")
    assert failpoint("disk.write") == verb


def test_one_line_is_disarmed_and_the_others_stay() -> None:
    arm("disk.write=errno:EIO,disk.read=errno:EIO")
    disarm("disk.write")
    failpoint("disk.write")
    with pytest.raises(OSError):
        failpoint("disk.read")


def test_disarmed_lines_are_silent_and_count_afresh() -> None:
    arm("disk.write*2=errno:EIO")
    failpoint("disk.write")
    disarm()
    failpoint("disk.write")
    arm("disk.write*2=errno:EIO")
    failpoint("disk.write")
    with pytest.raises(OSError):
        failpoint("disk.write")


def test_a_sleep_waits_that_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    arm("disk.write=sleep:0.25")
    failpoint("disk.write")
    assert slept == [0.25]


def test_kill_ends_the_process_at_that_line_and_nothing_after_it_runs() -> None:
    code = (
        "from terracekv.tiers.failpoint import arm, failpoint\n"
        "arm('here*2=kill')\nfailpoint('here')\nprint('once', flush=True)\n"
        "failpoint('here')\nprint('twice', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "once\n")


@pytest.mark.parametrize(
    "text",
    [
        "disk.write",
        "disk.write=",
        "=kill",
        "disk.write=panic",
        "disk.write=errno:ENONSENSE",
        "disk.write=sleep",
        "a*x=kill",
        "a%=kill",
        "%0.5=kill",
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        arm(text)

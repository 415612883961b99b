"""The gate of the catalog's transactions: many at once, or one alone."""

import threading
from collections.abc import Callable

import pytest

from terracekv.tiers.gate import Gate


class Told(threading.Condition):
    """A condition that says when somebody waits for it."""

    def __init__(self, waits: threading.Event) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        self._waits.set()
        return super().wait(timeout)


def be_alone(gate: Gate, then: Callable[[], None]) -> None:
    with gate.alone():
        then()


def be_among(gate: Gate, then: Callable[[], None]) -> None:
    gate.enter()
    then()
    gate.leave()


@pytest.mark.parametrize("comes", [be_alone, be_among])
def test_who_comes_while_one_is_alone_waits_until_it_has_left(
    comes: Callable[[Gate, Callable[[], None]], None],
) -> None:
    gate, settled, inside = Gate(), threading.Event(), threading.Event()
    gate._changed = Told(settled)

    def got_in() -> None:
        inside.set()
        settled.set()

    thread = threading.Thread(target=comes, args=(gate, got_in), daemon=True)
    with gate.alone():
        thread.start()
        assert settled.wait(30), "it neither waits nor got in"
        assert not inside.is_set()
    assert inside.wait(30), "and then it gets in"
    thread.join(30)
    with gate.alone():
        assert not gate._inside

"""When a connection of the engine door is read, and when it waits in the line."""

import asyncio
from typing import Any, cast

from terracekv.daemon.inbox import WAITING_BYTES_MAX, Inbox
from terracekv.daemon.line import Line
from terracekv.daemon.protocol import LENGTH
from terracekv.daemon.unfinished import SMALL_BYTES, Unfinished

FRAME = LENGTH.pack(SMALL_BYTES) + bytes(SMALL_BYTES)


class Wire:
    """What an inbox uses of its transport, and an inbox that keeps what it serves."""

    def __init__(self) -> None:
        self.read = True
        self.served: list[int] = []
        self.line = Line()
        self.inbox = Inbox(
            cast(Any, self), self.line, Unfinished(), lambda body: self.served.append(len(body)), self.break_off
        )

    def pause_reading(self) -> None:
        self.read = False

    def resume_reading(self) -> None:
        self.read = True

    def is_closing(self) -> bool:
        return False

    def break_off(self, why: str, hint: str) -> None:
        raise AssertionError(why)

    def answers_pile_up_and_leave(self) -> None:
        self.inbox.full(True)
        assert not self.read
        self.inbox.full(False)


def test_who_waits_with_much_is_not_read_though_its_answers_have_left() -> None:
    wire = Wire()
    wire.answers_pile_up_and_leave()
    assert wire.read
    let_go = wire.inbox.hold(WAITING_BYTES_MAX)
    wire.answers_pile_up_and_leave()
    assert not wire.read
    wire.inbox.full(True)
    let_go(None)
    assert not wire.read, "nor while it does not read its answers"
    wire.inbox.full(False)
    assert wire.read


def test_who_waits_in_the_line_is_not_read_and_waits_there_once() -> None:
    async def story() -> None:
        wire = Wire()
        wire.inbox.take(FRAME * 4)
        assert not wire.read
        wire.answers_pile_up_and_leave()
        assert not wire.read
        wire.inbox.hold(WAITING_BYTES_MAX)(None)
        assert not wire.read and list(wire.line._waiting) == [wire.inbox]
        while wire.line:
            await asyncio.sleep(0)
        assert wire.read and wire.served == [SMALL_BYTES] * 4

    asyncio.run(asyncio.wait_for(story(), 30))

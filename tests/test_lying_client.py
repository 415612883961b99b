"""A client that lies in every field of every message, and by what it does with the memory it was given.

The daemon says what is wrong, or the liar has the harm; who is honest beside it has its bytes, its durable blocks, and
an answer in time.

The lies are in ``lies``: a field that has none yet fails the first test here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from terracekv.daemon.protocol import Hello, LayerGroup, Layout, Request
from terracekv.tests.harness import Daemon, hello, layout_of, until
from terracekv.tests.liars import Liar, Stage
from terracekv.tests.lies import BLOCK, HELLO_LIES, LIES, fields

MESSAGES = sorted({kind for kind, _ in LIES}, key=lambda kind: kind.__name__)


@pytest.fixture
def daemon(shm_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(shm_dir, tmp_path) as running:
        yield running
        assert running.errors() == [] and running.term() == 0


def test_there_is_a_lie_for_every_field_of_every_message() -> None:
    told = [*HELLO_LIES, *LIES]
    assert set(told) == set(fields()), "give a new field a lie, and take out what is no field any more"
    assert all((HELLO_LIES | LIES)[field] for field in told)


def introduction(kind: type[msgspec.Struct], name: str, value: Any) -> Hello:
    """A Hello in which one field is not the truth."""
    if kind is Hello:
        return hello(**{name: value})
    layout = layout_of(BLOCK)
    if kind is LayerGroup:
        name, value = "groups", (msgspec.structs.replace(layout.groups[0], **{name: value}),)
    else:
        assert kind is Layout
    return hello(layout=msgspec.structs.replace(layout, **{name: value}))


def test_who_introduces_itself_as_what_it_is_not_is_refused_by_name_or_apart(daemon: Daemon) -> None:
    stage = Stage(daemon, "m")
    for (kind, name), lies in HELLO_LIES.items():
        for lie in lies:
            with daemon.wire() as wire:
                answer = wire.ask(introduction(kind, name, lie.value))
                assert lie.meets(stage, wire, answer), f"{kind.__name__}.{name} = {str(lie.value)[:80]}: {answer}"
        stage.nobody_is_harmed()
    stage.close()
    assert max(map(len, daemon.log.read_text().splitlines())) < 2000, "no lie fills the log"


@pytest.mark.parametrize("model", ["m", "another"])
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_who_lies_in_a_field_gets_an_error_or_has_the_harm(daemon: Daemon, kind: type[Request], model: str) -> None:
    stage = Stage(daemon, model)
    for (of, name), lies in LIES.items():
        for number, lie in enumerate(lies if of is kind else []):
            liar = Liar(stage)
            with liar.wire:
                message = msgspec.structs.replace(liar.truth(kind), **{name: lie.value(liar)})
                came = liar.answers(message)
                assert lie.meets(liar, came), f"{kind.__name__}.{name}, lie {number}: {str(came)[:500]}"
                (stage.nobody_can_store if lie.fills else stage.nobody_is_harmed)()
                again = liar.answers(message)  # a lie that is told twice
                assert len(again) == len(came), str(again)[:500]
            until(lambda: len(stage.status()["sessions"]) == 2, "the liar is gone")
            stage.nobody_is_harmed()
    stage.close()

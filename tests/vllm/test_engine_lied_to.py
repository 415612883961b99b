"""vLLM's engine beside a daemon that lies: it computes what it would have without us, and our halves count no error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from terracekv.daemon.protocol import Committed, Found, Leased, Reserved, Slot
from terracekv.tests.daemon_lies import LIES, PROTOCOL
from terracekv.tests.lying_daemon import LyingDaemon
from terracekv.tests.mock_engine import Engine, truth
from terracekv.tests.mock_pages import BLOCK, prompt


@pytest.fixture
def liar(shm_dir: Path) -> Iterator[LyingDaemon]:
    with LyingDaemon(shm_dir) as running:
        yield running


def absent(answer: Any) -> Any:
    """Nothing is found, so all is stored."""
    return msgspec.structs.replace(answer, blocks=0, per_tier={}) if isinstance(answer, Found) else answer


@pytest.mark.fault(59)
@pytest.mark.parametrize("kind", [Found, Leased, Reserved, Committed, Slot], ids=lambda kind: kind.__name__)
def test_an_engine_computes_what_its_daemon_lies_about(liar: LyingDaemon, kind: type[msgspec.Struct]) -> None:
    told = 0
    for (of, name), lies in LIES.items():
        for lie in lies if of is kind else []:
            if lie.why != PROTOCOL:
                continue

            def tell(answer: Any, name: str = name, value: Any = lie.value) -> Any:
                if kind is Slot and isinstance(answer, Reserved):
                    slots = [
                        None if slot is None else msgspec.structs.replace(slot, **{name: value(getattr(slot, name))})
                        for slot in answer.slots
                    ]
                    return msgspec.structs.replace(answer, slots=slots)
                if isinstance(answer, kind):
                    return msgspec.structs.replace(answer, **{name: value(getattr(answer, name))})
                return answer if kind in (Found, Leased) else absent(answer)

            liar.lie = tell
            asked = prompt("a", 6 * BLOCK + 1, seed=told, answer_tokens=3)
            with Engine(liar.path, lookup_budget_ms=500, wait_ms=500) as engine:
                assert engine.ask(asked) == [truth(asked)] and not engine.errors
                assert engine.half is not None
                engine.idle()
                stats = engine.half.take_stats()
            assert not [each for each in stats if each.startswith(("errors", "hit_tokens"))], f"{name}: {stats}"
            told += 1
    assert told and liar.told >= told

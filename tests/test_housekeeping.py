"""What must happen every second or so happens, whatever a folder or a tier does meanwhile."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terracekv.daemon import __main__ as life
from terracekv.daemon.lookup_log import LookupLog
from terracekv.tests.stores import World, Worlds, ids_of, key, opened_worlds
from terracekv.tiers.namespace import Namespace

worlds = pytest.fixture(opened_worlds)


class HeldLog(LookupLog):
    """Its folder does not answer until it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, b"secret")
        self.answers = threading.Event()
        self.writes = 0

    def write(self, lines: list[str]) -> None:
        self.writes += 1
        assert self.answers.wait(30)
        super().write(lines)


def test_a_lookup_log_whose_folder_hangs_keeps_nothing_else_waiting(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[None]()
    monkeypatch.setattr(life, "_reread", lambda *_: read.append(None))

    async def story(w: World) -> None:
        log = w.sessions.demand.log = HeldLog(tmp_path / "lookups.jsonl")
        log.add(w.namespace, key(1))
        await w.put(1)
        await w.store.pins.pin(w.namespace, ids_of(1), 0)
        door: Any = SimpleNamespace(sessions=w.sessions, missing=lambda: ["arena"], path=tmp_path / "engine.sock")
        http: Any = SimpleNamespace(not_ready={})
        nobody: Any = None
        for _ in range(3):
            await asyncio.wait_for(life._keep_house(w.store, door, http, nobody), 5)
            log.add(w.namespace, key(2))
            while not log.writes:
                await asyncio.sleep(0.001)
        assert len(read) == 3, "tokens that were taken back are, in time"
        assert not len(w.store.pins) and "engine door" in http.not_ready and log.writes == 1
        log.answers.set()
        await w.idle()
        log.add(w.namespace, key(3))
        await life._keep_house(w.store, door, http, nobody)
        await w.idle()
        assert log.writes == 2 and len(log.path.read_text().splitlines()) == 5

    worlds.run(story, stuck_s=30.0)


def test_tokens_are_read_again_although_a_tier_keeps_the_housekeeper_waiting(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[None]()
    monkeypatch.setattr(life, "_reread", lambda *_: read.append(None))

    async def story(w: World) -> None:
        async def waits() -> None:
            await asyncio.sleep(30)

        monkeypatch.setattr(w.store, "keep_house", waits)
        door: Any = SimpleNamespace(sessions=w.sessions, missing=lambda: ["arena"], path=tmp_path / "engine.sock")
        http: Any = SimpleNamespace(not_ready={})
        nobody: Any = None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(life._keep_house(w.store, door, http, nobody), 0.05)
        assert read and "engine door" in http.not_ready

    worlds.run(story)


def test_flushes_by_other_nodes_keep_nothing_else_waiting_for_a_slow_disk(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(w: World) -> None:
        assert w.disk is not None
        answers, reclaim = threading.Event(), w.disk.reclaim

        def slow(namespace: Namespace) -> int:
            assert answers.wait(30)
            return reclaim(namespace)

        monkeypatch.setattr(w.disk, "reclaim", slow)
        monkeypatch.setattr(w.store, "far", SimpleNamespace(watch=lambda namespaces: None))
        swept = list[None]()
        monkeypatch.setattr(w.store.through[0], "sweep", lambda: swept.append(None))
        await w.put(1, durable=True)
        w.host.namespaces.adopt(w.namespace.id, 1)
        await asyncio.wait_for(w.store.keep_house(), 10)
        await w.put(2)
        await w.store.pins.pin(w.namespace, ids_of(2), 0)
        await asyncio.wait_for(w.store.keep_house(), 10)
        assert not len(w.store.pins) and len(swept) == 2
        answers.set()
        while w.disk.status().blocks != 1 or w.host.status().blocks != 1:
            await asyncio.sleep(0.001)
        monkeypatch.undo()

    worlds.run(story, stuck_s=30.0)

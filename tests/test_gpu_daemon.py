"""A daemon with a gpu tier, as a process on a fake GPU, and engines of that GPU, of another and of none.

The GPU's memory lies in files that both processes map, so what an engine reads there is what the daemon wrote.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from terracekv.connector.client import Client, Loaded, Stored
from terracekv.connector.device import DeviceCopier
from terracekv.kernels import pinned
from terracekv.tests.fake_nvml import UUID
from terracekv.tests.gpu_daemon import GPU, gpu_daemon
from terracekv.tests.harness import TOKENS, Daemon, layout_of, until
from terracekv.tests.kernels.emulated import COMPILER, WITHOUT
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import FREED, SharedWorld, World
from terracekv.tests.kernels.gpus import PAGES, PAGES_PER_BLOCK, Engine, device_on

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT)

COUNT = PAGES // PAGES_PER_BLOCK


@pytest.fixture
def world(tmp_path: Path) -> Path:
    folder = tmp_path / "gpu"
    folder.mkdir()
    return folder


@pytest.fixture
def gpu(world: Path) -> Iterator[Callable[..., FakeCupy]]:
    """Makes what an engine's process sees of the GPU; unmapped in the end."""
    worlds: list[SharedWorld] = []

    def made(**options: Any) -> FakeCupy:
        worlds.append(SharedWorld(world))
        return FakeCupy(worlds[-1], **options)

    yield made
    for each in worlds:
        each.buffers.clear()


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_refused", None)


class OnGpu:
    """An engine on a fake GPU with a client of the daemon; ``load`` says what came and how many blocks by IPC."""

    def __init__(self, daemon: Daemon, fake: FakeCupy, ordinal: int = 0, **options: Any) -> None:
        self.fake, self.engine = fake, Engine(fake, ("HND",))
        device = device_on(fake, ordinal)
        self.copier = DeviceCopier(self.engine.pieces, PAGES_PER_BLOCK, device=device, try_out=False, part_bytes=8192)
        self.client = Client(
            daemon.socket,
            model="m",
            revision="r",
            dtype="bf16",
            block_tokens=TOKENS,
            layout=layout_of(self.engine.block_bytes),
            attach=self.copier.attach,
            device=device,
            load_deadline_ms=30_000,
            store_deadline_ms=30_000,
            **options,
        )
        self.keys = self.client.keys(list(range(COUNT * TOKENS)))
        order = self.engine.dice.sample(range(PAGES), PAGES)
        self.pages = [order[at : at + PAGES_PER_BLOCK] for at in range(0, PAGES, PAGES_PER_BLOCK)]

    def store(self) -> list[bytes]:
        self.engine.compute()
        blocks = self.copier.blocks(self.pages, self.engine.stream.ptr)
        stored = self.client.store(self.keys, blocks.gather, settle=blocks.settle)
        assert stored == Stored(stored=COUNT), (stored, self.client.last_trouble)
        return [self.engine.payload(pages) for pages in self.pages]

    def load(self, expected: list[bytes]) -> tuple[Loaded, int]:
        self.engine.compute()  # the pages are another's
        blocks = self.copier.blocks(self.pages, self.engine.stream.ptr)
        fetched: list[int] = []

        def fetch(index: int, *where: Any) -> None:
            fetched.append(index)
            blocks.fetch(index, *where)

        loaded = self.client.load(self.keys, blocks.scatter, blocks.settle, fetch)
        found = [self.engine.payload(pages) for pages in self.pages]
        assert found[: loaded.blocks] == expected[: loaded.blocks], "wrong bytes"
        return loaded, len(fetched)

    def close(self) -> None:
        self.client.close()
        self.copier.close()
        self.engine.close()


@contextmanager
def on_gpu(daemon: Daemon, fake: FakeCupy, ordinal: int = 0, **options: Any) -> Iterator[OnGpu]:
    with closing(OnGpu(daemon, fake, ordinal, **options)) as engine:
        yield engine


def status(daemon: Daemon) -> Any:
    code, document = daemon.http("/v1/status")
    assert code == 200
    return document


def hot(daemon: Daemon, engine: OnGpu, expected: list[bytes]) -> None:
    """Load until all blocks are in the gpu tier."""
    until(lambda: engine.load(expected) == (Loaded(COUNT, None), COUNT), "all blocks go up")


def test_a_prompt_that_is_loaded_often_goes_up_and_is_read_there_by_the_engine(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    with gpu_daemon(shm_dir, tmp_path, world) as daemon, on_gpu(daemon, gpu()) as engine:
        assert engine.client.near.why is None
        expected = engine.store()
        assert engine.load(expected) == (Loaded(COUNT, None), 0)
        hot(daemon, engine, expected)
        found = engine.client.lookup(engine.keys)
        assert found.per_tier["gpu"] == found.per_tier["host"] == COUNT
        told = status(daemon)
        assert told["tiers"]["gpu"]["blocks"] == COUNT and told["tiers"]["gpu"]["leased_blocks"] == 0
        assert list(told["tiers"])[:2] == ["gpu", "host"]
        assert (told["gpu_tier"], told["sessions"][0]["transport"]) == ({"state": "ipc", "reason": None}, "ipc")
        assert told["tiers"]["gpu"]["details"]["device"] == told["sessions"][0]["gpu"] == GPU
        assert daemon.errors() == []
        assert daemon.term() == 0
        assert engine.load(expected)[0].blocks == 0


def test_an_engine_without_a_gpu_gets_host_slots_also_of_what_only_the_gpu_has(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    small = {"host__size": "64KiB", "host__slab": "64KiB", "gpu__size": "64KiB", "disk__enabled": "false"}
    with gpu_daemon(shm_dir, tmp_path, world, settings=small) as daemon:
        with on_gpu(daemon, gpu()) as engine:
            expected = engine.store()
            hot(daemon, engine, expected)
            with daemon.client(engine.engine.block_bytes, dtype="bf16") as plain:
                other = plain.chain(9, 16)
                assert plain.put(other).stored == 16  # as many as host has slots: nothing else is left in host
                assert plain.lookup(engine.keys).per_tier == {"gpu": COUNT, "host": COUNT}
                into: list[bytes] = []
                assert plain.load(engine.keys, lambda _, payload: into.append(bytes(payload))) == Loaded(COUNT, None)
                assert into == expected
            assert status(daemon)["lookups"]["loaded"]["gpu"] >= COUNT
        assert daemon.errors() == []


@pytest.mark.fault(84)
@pytest.mark.fault(85)
def test_an_engine_that_cannot_open_the_memory_is_served_from_host_and_the_status_says_why(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    fake = gpu()
    fake.open_error = "cudaErrorMapBufferObjectFailed"
    with gpu_daemon(shm_dir, tmp_path, world) as daemon, on_gpu(daemon, fake) as engine:
        expected = engine.store()
        for _ in range(4):
            assert engine.load(expected) == (Loaded(COUNT, None), 0)
        (session,) = status(daemon)["sessions"]
        assert session["transport"] == "arena" and "MapBufferObjectFailed" in session["transport_reason"]
        assert "MapBufferObjectFailed" in str(engine.client.near.why)
        with on_gpu(daemon, fake) as again:
            until(lambda: len(status(daemon)["sessions"]) == 2, "both are there")
            assert again.client.joined
        warnings = [line for line in daemon.log.read_text().splitlines() if "served from host" in line]
        assert len(warnings) == 1, "one warning, however many engines"


@pytest.mark.fault(88)
def test_an_engine_on_another_gpu_is_offered_nothing(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    with gpu_daemon(shm_dir, tmp_path, world) as daemon:
        with on_gpu(daemon, gpu(gpus=2), 1) as engine:
            expected = engine.store()
            assert engine.load(expected) == (Loaded(COUNT, None), 0)
            assert "GPU-0101" in str(engine.client.near.why) and "GPU-0202" in str(engine.client.near.why)
            assert status(daemon)["sessions"][0]["transport_reason"] == engine.client.near.why


@pytest.mark.fault(85)
def test_under_strict_an_engine_that_would_fall_back_is_refused(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    fake = gpu()
    fake.open_error = "cudaErrorMapBufferObjectFailed"
    with gpu_daemon(shm_dir, tmp_path, world, gpu__strict="true") as daemon:
        with on_gpu(daemon, gpu(gpus=2), 1) as engine:
            assert not engine.client.joined and "gpu.strict" in str(engine.client.last_trouble)
        with on_gpu(daemon, fake) as engine:
            assert engine.client.lookup([]).blocks == 0
            until(lambda: "gpu.strict" in daemon.log.read_text() or not engine.client.joined, "it is turned away")
        with daemon.client() as plain:
            assert plain.joined, "an engine without a GPU falls back from nothing"


@pytest.mark.fault(73)
@pytest.mark.fault(88)
@pytest.mark.fault(89)
def test_without_cuda_the_daemon_serves_from_its_other_tiers_and_says_why(shm_dir: Path, tmp_path: Path) -> None:
    with gpu_daemon(shm_dir, tmp_path, None) as daemon, on_gpu(daemon, FakeCupy(World())) as engine:
        expected = engine.store()
        assert engine.load(expected) == (Loaded(COUNT, None), 0)
        told = status(daemon)
        assert "gpu" not in told["tiers"] and told["gpu_tier"]["state"] == "no_gpu"
        assert "CuPy cannot be imported" in told["gpu_tier"]["reason"]
        assert "CuPy cannot be imported" in told["sessions"][0]["transport_reason"]
        until(lambda: "pynvml" in str(status(daemon)["gpus_reason"]), "NVML was looked for")
        assert status(daemon)["gpus"] == []
        warnings = [line for line in daemon.log.read_text().splitlines() if "no gpu tier" in line]
        assert len(warnings) == 1 and "WARNING" in warnings[0]


@pytest.mark.fault(85)
@pytest.mark.parametrize("export", [True, False])
def test_under_strict_a_daemon_that_cannot_share_a_gpu_does_not_start(
    shm_dir: Path, tmp_path: Path, world: Path, export: bool
) -> None:
    daemon = gpu_daemon(shm_dir, tmp_path, None if export else world, export=export, gpu__strict="true")
    try:
        daemon.launch()
        assert daemon.wait() == 1
        assert ("CuPy cannot be imported" if export else "cudaErrorNotSupported") in daemon.tail()
    finally:
        daemon.kill()


@pytest.mark.fault(84)
def test_memory_that_cannot_be_exported_is_the_mode_of_the_tier_and_nobodys_trouble(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    with gpu_daemon(shm_dir, tmp_path, world, export=False) as daemon:
        with on_gpu(daemon, gpu()) as engine:
            expected = engine.store()
            assert engine.load(expected) == (Loaded(COUNT, None), 0)
            told = status(daemon)
            assert told["gpu_tier"]["state"] == told["tiers"]["gpu"]["mode"] == "copy"
            assert "cudaErrorNotSupported" in told["gpu_tier"]["reason"]


@pytest.mark.fault(89)
def test_readings_of_the_gpus_are_in_the_status(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    with gpu_daemon(shm_dir, tmp_path, world) as daemon:
        until(lambda: status(daemon)["gpus"], "NVML has answered")
        (told,) = status(daemon)["gpus"]
        assert (told["uuid"], told["memory_used_bytes"], told["pcie_width"]) == (UUID, 7, 16)
        assert told["numa_node"] is None and told["reasons"]["numa_node"]
        assert status(daemon)["gpus_reason"] is None


def test_a_daemon_that_ends_frees_no_memory_that_an_engine_has_open(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    """A load may be copying out of it. CUDA leaves undefined what it would find."""
    for engines in (0, 1):
        with gpu_daemon(shm_dir, tmp_path, world) as daemon:
            before = set(world.iterdir())
            (memory,) = [each for each in before if each.stat().st_size == 1 << 20 and bytes([FREED]) not in head(each)]
            with ExitStack() as there:
                for _ in range(engines):
                    assert there.enter_context(on_gpu(daemon, gpu())).client.near.memory is not None
                assert daemon.term() == 0
            assert (bytes([FREED]) in head(memory)) is (engines == 0)


def head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(4096)


def test_a_daemon_that_is_killed_during_loads_is_a_miss_and_is_joined_again(
    shm_dir: Path, tmp_path: Path, world: Path, gpu: Callable[..., FakeCupy]
) -> None:
    with gpu_daemon(shm_dir, tmp_path, world) as daemon, on_gpu(daemon, gpu()) as engine:
        expected = engine.store()
        hot(daemon, engine, expected)
        blocks = engine.copier.blocks(engine.pages, engine.engine.stream.ptr)

        def fetch(index: int, *where: Any) -> None:
            if index == 2:
                daemon.kill()
            blocks.fetch(index, *where)

        loaded = engine.client.load(engine.keys, blocks.scatter, blocks.settle, fetch)
        assert loaded.blocks == 0 and loaded.why in ("fenced", "no_daemon"), "memory whose owner is gone counts nothing"
        assert engine.fake.opened == 0 and not engine.fake.busy
        daemon.start()
        until(lambda: engine.client.lookup([]).reason != "no_daemon", "it joins again")
        hot(daemon, engine, expected)

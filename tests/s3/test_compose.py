"""The compose file's own commands, run without Docker: a bucket, a node, and a second node that shares the bucket."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.containers import SMALL, Container, Image, compose, env_file, free_port, make_secrets
from terracekv.tests.harness import TOKENS, Blocks, layout_of, until
from terracekv.tests.seaweed import free_ports, program

BLOCKS = 8
BLOCK_BYTES = 64 << 10

pytestmark = pytest.mark.s3


class Project:
    """What ``docker compose up`` makes of the file."""

    def __init__(self, folder: Path, shm: Path, stack: ExitStack) -> None:
        self.services: dict[str, Any] = compose()["services"]
        self.secrets = make_secrets(folder)
        self._folder = folder
        self._shm = shm
        self._stack = stack
        self._ports = free_ports()
        self.http: dict[str, int] = {}

    def bucket(self) -> None:
        """Up, and healthy by the file's own words."""
        service, data = self.services["bucket"], self._folder / "bucket" / "data"
        here = {
            "=/data": f"={data}",
            "-ip=bucket": "-ip=127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            "8333": str(self._ports["s3.port"]),
        }
        given = [word for word in service["command"] if word.startswith("-s3.port=")]
        assert len(given) == 1
        more = [f"-{name}={port}" for name, port in self._ports.items() if name != "s3.port"]
        container = self._container("bucket", service["environment"], here)
        data.mkdir()
        container.start([str(program()), *service["command"]], *more)
        container.healthy(service["healthcheck"]["test"][1:])

    def node(self, name: str) -> Container:
        """Up, and healthy by the file's own words."""
        service = self.services[name]
        self.http[name] = free_port()
        state = self._folder / f"{name}-state"
        state.mkdir()
        (target,) = [secret["target"] for secret in service["secrets"] if isinstance(secret, dict)]
        (state / Path(target).name).symlink_to(self.secrets / "cluster")
        here = {
            "/cache": str(self.memory(name)),
            str(Path(target).parent): str(state),
            "/run/secrets": str(self.secrets),
            "0.0.0.0:7411": f"127.0.0.1:{self.http[name]}",
            "bucket:8333": f"127.0.0.1:{self._ports['s3.port']}",
        }
        container = self._container(name, Image().environment | service["environment"], here)
        container.start([*Image().entrypoint, *service["command"]])
        container.healthy(service["healthcheck"]["test"][1:])
        return container

    def memory(self, name: str) -> Path:
        """What the service's memory volume is here."""
        folder = self._shm / name
        folder.mkdir(exist_ok=True)
        return folder

    def status(self, name: str) -> Any:
        """Over the published port, with the token."""
        token = (self.secrets / "token").read_text().strip()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http[name]}/v1/status", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def engine(self, name: str) -> Blocks:
        """An engine of a tenant, in a container that has the node's memory volume."""
        return self._stack.enter_context(
            Blocks(
                self.memory(name) / "terracekv" / "engine.sock",
                model="m",
                revision="r",
                dtype="u8",
                block_tokens=TOKENS,
                layout=layout_of(BLOCK_BYTES),
                credential=b"a tenant",
                strict=True,
                lookup_budget_ms=10_000,
                load_deadline_ms=30_000,
                store_deadline_ms=30_000,
            )
        )

    def _container(self, name: str, environment: dict[str, str], here: dict[str, str]) -> Container:
        keys = env_file(self.secrets / "s3.env")
        return self._stack.enter_context(Container(self._folder / name, environment | keys | SMALL, here))


@pytest.fixture
def project(tmp_path: Path, shm_dir: Path) -> Iterator[Project]:
    if program() is None or shutil.which("wget") is None:
        pytest.skip("weed or wget is not installed")
    with ExitStack() as stack:
        yield Project(tmp_path, shm_dir, stack)


@pytest.mark.fault(56)
def test_the_second_node_of_compose_loads_what_a_tenant_stored_on_the_first(project: Project) -> None:
    project.bucket()
    a, b = project.node("node-a"), project.node("node-b")
    engine = project.engine("node-a")
    keys = engine.chain(1, BLOCKS)
    assert engine.put(keys).stored == BLOCKS
    until(lambda: project.status("node-a")["tiers"]["s3"]["counters"]["puts"] >= BLOCKS, "the bucket has the blocks")
    other = project.engine("node-b")
    assert other.namespace_id == engine.namespace_id
    until(lambda: other.get(keys).blocks == BLOCKS, "the second node has loaded them")
    assert project.status("node-b")["tiers"]["s3"]["counters"]["hits"] >= BLOCKS
    assert (a.end(), b.end()) == (0, 0)

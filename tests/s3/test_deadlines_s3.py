"""Whatever state the bucket is in, every message of an engine and every route is answered in its time."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from terracekv.tests.places import STUCK_S, held, hurry, opened, switched, tried
from terracekv.tests.s3_cluster import Cluster, opened_cluster
from terracekv.tests.s3_stub import S3Stub
from terracekv.tests.stores import World

cluster = pytest.fixture(opened_cluster)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


S3: dict[str, Callable[[World, S3Stub], contextlib.AbstractContextManager[None]]] = {
    "up": lambda w, stub: contextlib.nullcontext(),
    "slow": lambda w, stub: switched(stub, delay_s=0.05),
    "down": lambda w, stub: switched(stub, strange=b""),
    "busy": lambda w, stub: switched(stub, slow_down=1.0),
    "full": lambda w, stub: switched(stub, strange=b"HTTP/1.1 507 Full\r\nContent-Length: 0\r\n\r\n"),
    "read-only": lambda w, stub: switched(stub, forbid_writes=True),
    "silent": lambda w, stub: switched(stub, stall=True),
    "stuck": lambda w, stub: held(w.far and w.far.tier, "put", "get", "leading_remote", "delete"),
}


@pytest.mark.parametrize("state", S3)
def test_every_operation_is_answered_whatever_the_bucket_does(
    cluster: Cluster, stub: S3Stub, tmp_path: Path, state: str
) -> None:
    async def story(c: Cluster) -> None:
        stuck_s = STUCK_S if state == "stuck" else 10.0
        async with c.node("a", slabs=16, stuck_s=stuck_s) as w, opened(w, tmp_path) as p:
            await tried(p, "s3", S3[state](w, stub), state == "stuck")

    cluster.run(story)

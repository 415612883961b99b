"""A stub of an S3 server, and nodes that use it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.s3_stub import S3Stub, s3_stub
from terracekv.tests.s3_tiers import Node, Nodes, node


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[S3Stub]:
    with s3_stub(tmp_path) as running:
        yield running


@pytest.fixture
def nodes(tmp_path: Path, stub: S3Stub) -> Nodes:
    def made(label: str = "a", **more: Any) -> AbstractContextManager[Node]:
        more.setdefault("endpoint", stub.endpoint)
        return node(tmp_path / label, credentials=stub.credentials, **more)

    return made


@pytest.fixture
def a(nodes: Nodes) -> Iterator[Node]:
    with nodes() as opened:
        yield opened

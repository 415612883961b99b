"""Nodes of a cluster for tests: s3 tiers with namespaces of their own over one bucket.

Owns nothing. Called by tests. Imports ``tiers``.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from terracekv.tests.blocks import BLOCK_BYTES, name, registered
from terracekv.tests.s3_stub import BUCKET
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.s3 import S3Tier
from terracekv.tiers.s3_record import EPOCH_BELIEVED_MAX, epoch_key, key_of
from terracekv.tiers.s3_settings import S3Settings

PATIENCE_S = 30.0
DAMAGED_EPOCHS = [b"", b"one", b"-1", b"+1", b"1.0", b"1 ", b"\xc2\xb2", b"20261129222826", b"9" * 32]
DAMAGED_EPOCHS += [b"%d" % epoch for epoch in (EPOCH_BELIEVED_MAX + 1, 2**32 - 1, 2**32, 2**64)]
Nodes = Callable[..., AbstractContextManager["Node"]]
"""Opens a node: of a label, with settings that differ from the usual."""


class Node:
    """One tier, the namespaces of its daemon and one namespace of them."""

    def __init__(self, folder: Path, settings: S3Settings, block_bytes: int, keys: Any = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.namespaces = Namespaces(folder / "namespaces.json")
        self.namespace = registered(self.namespaces, 1, block_bytes)
        self.tier = S3Tier(settings, namespaces=self.namespaces, keys=keys)

    @property
    def now(self) -> Namespace:
        """The namespace's snapshot of now."""
        found = self.namespaces.get(self.namespace.id)
        assert found is not None
        return found

    def key(self, index: int) -> str:
        """The name of the object of a numbered block."""
        return key_of(self.tier.settings.root, self.now.id, self.now.epoch, name(index))

    @property
    def key_of_epoch(self) -> str:
        """The name of the object of the namespace's epoch."""
        return epoch_key(self.tier.settings.root, self.now.id)

    def flush(self) -> Namespace:
        """As the daemon does it."""
        raised = self.namespaces.raise_epoch(self.namespace.id)
        self.tier.flush(raised)
        return self.now


@contextmanager
def node(
    folder: Path,
    endpoint: str,
    credentials: Path,
    *,
    block_bytes: int = BLOCK_BYTES,
    probe: bool = True,
    keys: Any = None,
    **more: Any,
) -> Iterator[Node]:
    """A node for the length of the context; its books are checked at the end."""
    settings = S3Settings(**{"bucket": BUCKET, "endpoint": endpoint, "credentials_file": str(credentials)} | more)
    made = Node(folder, settings, block_bytes, keys)
    try:
        if probe:
            assert made.tier.probe()
        yield made
        made.tier.check()
    finally:
        made.tier.close()


def soon(seconds: float = 5.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.02)

"""The connection to the bucket fails now and then, in each way: right bytes or none, and all is well afterwards."""

import random
from collections.abc import Iterator

import pytest

from terracekv.tests.blocks import get, name, payload_of, put, verified
from terracekv.tests.faults import S3, FaultLayer
from terracekv.tests.s3_tiers import Nodes, until
from terracekv.tiers import failpoint
from terracekv.tiers.breaker import State
from terracekv.tiers.tier import Outcome

BLOCKS = 40
WAYS = [f"{call}=errno:{code}" for call in S3 for code in ("ECONNRESET", "ETIMEDOUT", "EPERM")]
WAYS += ["s3.send=short", "s3.receive=short", "s3.receive=flip", "s3.receive=sleep:0.01"]


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultLayer]:
    yield FaultLayer(monkeypatch.setattr, S3)
    failpoint.disarm()


@pytest.mark.long
@pytest.mark.fault(10)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_the_connection_does_right_bytes_come_or_none_and_all_is_well_later(
    nodes: Nodes, layer: FaultLayer, way: str
) -> None:
    call, _, action = way.partition("=")
    random.seed(way)
    with nodes(timeout_s=2.0, read_timeout_s=0.5) as a:
        failpoint.arm(f"{call}%0.3={action}")
        for index in range(BLOCKS):
            assert put(a.tier, a.namespace, name(index)) in (Outcome.STORED, Outcome.PRESENT, Outcome.FAILED)
            asked = name(random.randrange(index + 1))
            outcome, found = get(a.tier, a.namespace, asked)
            assert outcome is not Outcome.HIT or found == payload_of(asked, a.namespace.id)
        failpoint.disarm()
        fired = {each.partition(" ")[0] for each in layer.fired}
        assert call in fired or call == "s3.connect" or action.startswith("sleep")
        until(lambda: a.tier.breaker.state is State.CLOSED, "the breaker closes")
    with nodes("b") as b:
        for index in range(BLOCKS):
            assert put(b.tier, b.namespace, name(index)) in (Outcome.STORED, Outcome.PRESENT)
        assert verified(b.tier, b.namespace, map(name, range(BLOCKS))) == BLOCKS

"""Fuzzing the people's door by its own OpenAPI document: what the document allows is answered as it says, what it
forbids is refused, and no answer has another form than the document's.

Owns the daemon that it starts. Called by the test and by ``make fuzz``. Imports schemathesis (the only module that
does), hypothesis and the harness.
"""

import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from terracekv.tests.harness import MIB, Daemon, until

ENDLESS = ("/v1/events", "/v1/live")
"""Answers without an end: they are tested by themselves."""
GROWTH_BYTES_MAX = 64 * MIB
CALL_S = 30.0


def fuzz_routes(shm: Path, folder: Path, *, count: int, seed: int) -> dict[str, Any]:
    """About ``count`` requests at a daemon that is started for them."""
    begun = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Daemon(shm, folder, daemon__http=address) as daemon, daemon.client(model="kept") as client:
        keys = client.chain(1, 4)
        assert client.put(keys, durable=True).durable == 4
        until(lambda: daemon.http("/healthz")[0] == 200, "the door is open")
        before = daemon.memory_bytes()["anonymous"]
        asked = _ask_all("http" + f"://{address}/openapi.json", (client.namespace_id or b"").hex(), count, seed)
        assert daemon.memory_bytes()["anonymous"] < before + GROWTH_BYTES_MAX, "the daemon has grown"
        assert client.put(keys).refused == 0 and client.get(keys).blocks == 4
        assert daemon.errors() == [] and daemon.term() == 0, daemon.tail()
    return {"requests": asked.total(), "routes": len(asked), "s": round(time.monotonic() - begun, 1)}


def _ask_all(document: str, namespace: str, count: int, seed: int) -> Counter[str]:
    """Every route, with what fits it and with what does not."""
    operations = [each.ok() for each in schemathesis.openapi.from_url(document).get_all_operations()]
    operations = [each for each in operations if each.path not in ENDLESS]
    wide = [each for each in operations if each.definition.raw.get("parameters") or each.body]
    asked: Counter[str] = Counter()
    for operation in operations:
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation in wide else [])]
        for mode in modes:
            examples = max(2, count // (2 * len(wide))) if operation in wide else 2
            asked[operation.label] += _ask(operation, mode, namespace, examples, seed)
    return asked


def _ask(operation: Any, mode: GenerationMode, namespace: str, examples: int, seed: int) -> int:
    """One route; the number of requests. What schemathesis or the door found wrong is raised."""
    asked = 0
    # How long a block must be is a matter of its namespace, so no document can tell bodies that fit from others.
    excluded = [positive_data_acceptance] if "/blocks/" in operation.path else []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        if mode is GenerationMode.POSITIVE:
            case.body = _whole(case.body)
            if asked % 2:
                _name(case, namespace)
        case.call_and_validate(excluded_checks=excluded, timeout=CALL_S)

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        return asked  # there is nothing that does not fit
    return asked


def _name(case: Any, namespace: str) -> None:
    """Ask of a namespace that there is: of another one everything is simply not found."""
    if "ns" in (case.path_parameters or {}):
        case.path_parameters["ns"] = namespace
    if isinstance(case.body, dict) and "namespace" in case.body:
        case.body["namespace"] = namespace


def _whole(value: Any) -> Any:
    """Integers as such: to a schema 1.0 is one too, to the door it is not."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

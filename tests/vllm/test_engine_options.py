"""Settings of an engine and wishes of a request: what is not understood is named, with what would be."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terracekv.connector.vllm_guard import guarded
from terracekv.connector.vllm_layout import GroupSpec, Pages, Unfit, block_tokens_for, runs_of
from terracekv.connector.vllm_options import SOCKET, Options, Wish, credential
from terracekv.connector.vllm_plan import Results
from terracekv.daemon.config import Daemon
from terracekv.tests.mock_pages import Tensor


def test_the_default_socket_is_that_of_a_daemon_with_default_settings() -> None:
    assert SOCKET == f"{Daemon().runtime_dir}/engine.sock"


def test_an_engine_without_its_tenants_secret_does_not_begin(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for says in ("No such file", "is empty"):
        with pytest.raises(ValueError, match=f"credential_file: {file} .*{says}"):
            Options.read({"credential_file": str(file)})
        file.write_text("\n")
    file.write_text("of the tenant\n")
    assert credential(Options.read({"credential_file": str(file)}).credential_file) == b"of the tenant"
    assert credential("") == b""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sockt": "x"}, "'sockt'; did you mean 'socket'? Known keys: block_tokens, credential_file"),
        ({"block_tokens": "64"}, "block_tokens is '64', and should be int"),
        ({"lookup_budget_ms": -1}, "lookup_budget_ms is -1, and cannot be negative"),
        ({"store_output": 1}, "store_output is 1, and should be bool"),
        ({"reset": "sometimes"}, "reset is 'sometimes'"),
        ({"pages_held": 0}, "pages_held is 0"),
        ({"pages_held": float("nan")}, "pages_held is nan"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s is nan"),
        ({"prefill_tokens_per_s": float("inf")}, "prefill_tokens_per_s is inf"),
        ({"socket": ""}, "socket is ''"),
        ({"socket": "/x" * 60}, "a path of at most 107 bytes"),
        *(({name: "a\0b"}, f"{name} is 'a\\x00b'") for name in ("socket", "model", "revision", "credential_file")),
        *(({f.name: 10**30}, f"{f.name} is 1000") for f in fields(Options) if type(f.default) is int),
        ({"lease_s": 0}, "lease_s is 0, and should be longer than wait_ms, 2000"),
        ({"lease_s": 2}, "lease_s is 2, and should be longer than wait_ms, 2000"),
        ({"wait_ms": 60_000}, "lease_s is 60, and should be longer than wait_ms, 60000"),
    ],
)
def test_a_setting_that_is_not_understood_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        Options.read(given)
    assert says in str(error.value)


def test_a_block_of_half_a_page_of_any_kv_group_is_refused_at_the_start() -> None:
    Options.read({"block_tokens": 96}).suit([16, 48])
    Options.read({}).suit([16, 48])
    with pytest.raises(ValueError, match="block_tokens is 33, and should be a multiple of 16, vLLM's own"):
        Options.read({"block_tokens": 33}).suit([11, 16])


def test_every_setting_stands_in_the_manual_with_its_default() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "vllm.md").read_text()
    for field in fields(Options):
        assert f"`{field.name}`" in page
        value = int(field.default) if field.default == 0 and field.default is not False else field.default
        assert f"`{json.dumps(value)}`" in page or f"`{value}`" in page, f"{field.name}: {value}"


def test_settings_have_defaults_and_whole_numbers_are_numbers() -> None:
    assert Options.read({}) == Options()
    assert Options.read({"prefill_tokens_per_s": 100}).prefill_tokens_per_s == 100.0


@pytest.mark.parametrize(
    "given",
    [
        3,
        {"reads": True},
        {"read": 1},
        {"ttl_s": True},
        {"ttl_s": -1},
        {"ttl_s": "x"},
        {"ttl_s": 1e300},
        {"ttl_s": float("inf")},
        {"ttl_s": float("nan")},
        {"ttl_s": 10**400},
    ],
)
def test_a_wish_that_is_not_understood_is_named(given: Any) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params: terracekv"):
        Wish.read_from({"terracekv": given})


def test_wishes_are_read() -> None:
    assert Wish.read_from(None) == Wish.read_from({"other": 1}) == Wish()
    assert Wish.read_from({"terracekv": {"read": False, "ttl_s": 60}}) == Wish(read=False, ttl_s=60)


def test_blocks_are_whole_pages() -> None:
    assert [block_tokens_for(0, align, on_cpu=False) for align in (16, 48, 512)] == [256, 288, 512]
    assert [block_tokens_for(0, align, on_cpu=True) for align in (32, 128)] == [32, 128]
    assert block_tokens_for(64, 32, on_cpu=True) == 64
    with pytest.raises(Unfit, match="48 is not a multiple of the engine's 32 tokens"):
        block_tokens_for(48, 32, on_cpu=True)


def test_a_kind_of_kv_that_is_not_pages_of_tokens_is_refused_by_name() -> None:
    tensor = Tensor(np.zeros((4, 64), np.uint8))
    with pytest.raises(Unfit, match="KV group 1 is MambaSpec"):
        Pages.of(
            {"a": tensor, "b": tensor},
            [GroupSpec("FullAttentionSpec", 4, ("a",)), GroupSpec("MambaSpec", 4, ("b",))], 4, 8,
        )  # fmt: skip
    with pytest.raises(Unfit, match="layer b has no tensor"):
        Pages.of({"a": tensor}, [GroupSpec("FullAttentionSpec", 4, ("a", "b"))], 4, 8)


@pytest.mark.parametrize(
    ("shape", "order", "parts", "run", "runs"),
    [
        ((6, 2, 4, 8), (0, 1, 2, 3), 1, 64, 1),  # one page after the other, heads inside
        ((6, 2, 4, 8), (0, 2, 1, 3), 1, 64, 1),  # tokens inside
        ((6, 2, 4, 8), (1, 0, 2, 3), 1, 32, 2),  # heads outermost: a run for each
        ((12, 2, 4, 8), (0, 1, 2, 3), 2, 128, 1),  # a page is two rows
        ((12, 2, 4, 8), (1, 0, 2, 3), 2, 64, 2),
    ],
)
def test_a_page_is_as_few_runs_as_memory_allows(
    shape: tuple[int, ...], order: tuple[int, ...], parts: int, run: int, runs: int
) -> None:
    dense = np.zeros([shape[axis] for axis in order], np.uint8)
    tensor = Tensor(dense.transpose(np.argsort(order)))
    pages = shape[0] // parts
    stride, run_bytes, addresses = runs_of(tensor, pages, "layer")
    assert (run_bytes, len(addresses)) == (run, runs)
    # Written run by run, every byte of the tensor is written once.
    start = dense.ctypes.data
    flat = dense.reshape(-1)
    for page in range(pages):
        for address in addresses:
            at = address - start + page * stride
            flat[at : at + run_bytes] += 1
    assert (dense == 1).all()
    with pytest.raises(Unfit, match="not 5 pages"):
        runs_of(tensor, 5, "layer")


@pytest.mark.fault(126)
def test_ranks_results_add_up_in_any_order() -> None:
    first, second = Results(), Results()
    first.stored[1] += 1
    second.stored[1] += 1
    second.incomplete[1] = "full"
    first.failed["a"], second.failed["a"] = (3, "x"), (1, "y")
    for results in (first.add(second), second.add(first)):
        assert results.stored[1] == 2 and results.incomplete == {1: "full"} and results.failed == {"a": (1, "y")}


@pytest.mark.fault(59)
def test_what_goes_wrong_in_an_entry_point_is_a_miss_and_counted() -> None:
    class Connector:
        errors: Counter[str] = Counter()

        @guarded(lambda: (0, False))
        def matched(self) -> tuple[int, bool]:
            raise KeyError("a bug")

    assert [Connector().matched() for _ in range(30)] == [(0, False)] * 30
    assert Connector.errors["matched"] == 30

"""Namespaces: numbers that are never reused, epochs that stay raised, a file that is never half written."""

import json
import os
import threading
from dataclasses import replace as but
from pathlib import Path
from typing import Any

import pytest

from terracekv.tiers.errors import BadRequest, Damaged
from terracekv.tiers.namespace import EPOCH_MAX, Namespace, Namespaces

A, B = b"a" * 32, b"b" * 32


def wanted(id: bytes, block_bytes: int = 4096) -> Namespace:
    return Namespace(id, 99, 99, "m", layout=b"l" * 32, block_tokens=256, shards=1, block_bytes=block_bytes)


def unchecked(content: dict[str, Any]) -> dict[str, Any]:
    """As the first format was, which had no check."""
    return {name: value for name, value in content.items() if name != "check"} | {"format": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespaces.json"


def test_number_and_epoch_are_ours_and_not_the_callers(path: Path) -> None:
    made = Namespaces(path).register(wanted(A))
    assert (made.number, made.epoch, made.model, made.block_bytes) == (1, 0, "m", 4096)


def test_what_was_registered_stays_as_it_is(path: Path) -> None:
    namespaces = Namespaces(path)
    made = namespaces.register(wanted(A))
    assert namespaces.register(wanted(A, block_bytes=8192)) == made
    assert namespaces.get(A) == made and namespaces.get(B) is None


@pytest.mark.fault(15)
def test_an_epoch_once_raised_stays_raised_after_a_restart(path: Path) -> None:
    namespaces = Namespaces(path)
    before = namespaces.register(wanted(A))
    raised = namespaces.raise_epoch(A)
    again = Namespaces(path)
    assert raised.epoch == 1 and again.get(A) == raised and again.identity == namespaces.identity
    assert raised.stamp != before.stamp


@pytest.mark.fault(15)
def test_a_flush_of_one_namespace_leaves_the_others(path: Path) -> None:
    namespaces = Namespaces(path)
    namespaces.register(wanted(A))
    other = namespaces.register(wanted(B))
    namespaces.raise_epoch(A)
    assert namespaces.get(B) == other


def test_the_last_epoch_cannot_be_raised_and_says_so(path: Path) -> None:
    """One more would not fit the records, and its stamp would be that of the next namespace."""
    namespaces = Namespaces(path)
    one = namespaces.register(wanted(A))
    namespaces.adopt(one.id, EPOCH_MAX - 1)
    assert namespaces.raise_epoch(one.id).epoch == EPOCH_MAX
    with pytest.raises(BadRequest, match=one.id.hex()[:12]):
        namespaces.raise_epoch(one.id)
    assert Namespaces(path).get(one.id) == namespaces.get(one.id)


@pytest.mark.parametrize("epoch", [-1, EPOCH_MAX + 1, 1.5, True, "1", None])
def test_a_file_with_an_epoch_that_cannot_be_is_refused(path: Path, epoch: object) -> None:
    one = Namespaces(path).register(wanted(A))
    content = json.loads(path.read_bytes())
    content["namespaces"][0]["epoch"] = epoch
    path.write_text(json.dumps(unchecked(content)))
    with pytest.raises(Damaged, match=one.id.hex()[:12]):
        Namespaces(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 0},
        {"number": 2**32},
        {"number": "1"},
        {"block_bytes": -1},
        {"block_bytes": "4096"},
        {"block_tokens": 2**64},
        {"shards": 1.5},
        {"id": "aa"},
        {"model": None},
        {"tenant": 7},
        {"dtype": ["u8"]},
        {"layout": "x"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_row_that_nobody_writes_is_refused(path: Path, changes: dict[str, object]) -> None:
    Namespaces(path).register(wanted(A))
    content = json.loads(path.read_bytes())
    content["namespaces"][0] |= changes
    path.write_text(json.dumps(unchecked(content)))
    with pytest.raises(Damaged, match="namespaces.json"):
        Namespaces(path)


def test_two_namespaces_of_one_number_are_refused(path: Path) -> None:
    """Each would be served the other's blocks."""
    namespaces = Namespaces(path)
    namespaces.register(wanted(A))
    namespaces.register(wanted(B))
    content = json.loads(path.read_bytes())
    content["namespaces"][1]["number"] = 1
    path.write_text(json.dumps(unchecked(content)))
    with pytest.raises(Damaged, match="one number"):
        Namespaces(path)


@pytest.mark.parametrize("change", ["an epoch", "a size", "the identity", "the check"])
def test_a_file_that_changed_by_itself_is_refused(path: Path, change: str) -> None:
    """An epoch that sinks by itself would bring back blocks that were flushed."""
    namespaces = Namespaces(path)
    namespaces.register(wanted(A))
    namespaces.raise_epoch(A)
    content = json.loads(path.read_bytes())
    match change:
        case "an epoch":
            content["namespaces"][0]["epoch"] = 0
        case "a size":
            content["namespaces"][0]["block_bytes"] += 1
        case "the identity":
            content["identity"] = "0" * 32
        case _:
            del content["check"]
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged, match="check"):
        Namespaces(path)


@pytest.mark.parametrize("change", ["another", "none"])
def test_a_file_whose_untold_flushes_changed_by_themselves_is_refused(path: Path, change: str) -> None:
    """The bucket would not be told of the flush, and other nodes go on with what was flushed."""
    namespaces = Namespaces(path)
    namespaces.register(wanted(A))
    namespaces.note_unheard(A, True)
    assert Namespaces(path).unheard == {A}
    content = json.loads(path.read_bytes())
    if change == "none":
        del content["unheard"]
    else:
        content["unheard"] = [B.hex()]
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged, match="check"):
        Namespaces(path)


def test_untold_flushes_of_a_file_without_a_check_over_them_are_read(path: Path) -> None:
    namespaces = Namespaces(path)
    namespaces.register(wanted(A))
    namespaces.note_unheard(A, True)
    content = json.loads(path.read_bytes())
    del content["unheard_check"]
    path.write_text(json.dumps(content))
    Namespaces(path).note_unheard(A, False)
    assert not Namespaces(path).unheard and "unheard" not in json.loads(path.read_bytes())


def test_a_file_of_the_first_format_is_read_and_written_anew_with_a_check(path: Path) -> None:
    namespaces = Namespaces(path)
    one = namespaces.register(wanted(A))
    path.write_text(json.dumps(unchecked(json.loads(path.read_bytes()))))
    again = Namespaces(path)
    assert again.get(A) == one and again.identity == namespaces.identity
    again.raise_epoch(A)
    assert json.loads(path.read_bytes())["check"]
    assert Namespaces(path).get(A) == again.get(A)


def test_a_tenants_namespace_stays_its_own_and_one_of_nobody_is_written_as_before_tenants(
    path: Path,
) -> None:
    namespaces = Namespaces(path)
    nobodys, reds = namespaces.register(wanted(A)), namespaces.register(but(wanted(B), tenant="red"))
    namespaces.raise_epoch(A)
    content = json.loads(path.read_bytes())
    assert [row.get("tenant") for row in content["namespaces"]] == [None, "red"]
    again = Namespaces(path)
    assert again.get(A) == but(nobodys, epoch=1) and again.get(B) == reds
    content["namespaces"][1]["tenant"] = "blue"
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged, match="check"):
        Namespaces(path)


def test_stamps_of_two_namespaces_differ_whatever_their_epochs(path: Path) -> None:
    namespaces = Namespaces(path)
    stamps = [namespaces.register(wanted(A)).stamp, namespaces.register(wanted(B)).stamp]
    for _ in range(3):
        stamps += [namespaces.raise_epoch(A).stamp, namespaces.raise_epoch(B).stamp]
    assert len(set(stamps)) == len(stamps)


def test_one_met_in_a_record_is_known_by_number_and_filled_in_later(path: Path) -> None:
    namespaces = Namespaces(path)
    met = namespaces.adopt(A, 5)
    assert not met.registered and met.epoch == 5
    filled = namespaces.register(wanted(A))
    assert filled.registered and (filled.number, filled.epoch) == (met.number, 5)


@pytest.mark.fault(15)
def test_an_old_record_never_lowers_an_epoch(path: Path) -> None:
    namespaces = Namespaces(path)
    assert namespaces.adopt(A, 5).epoch == 5
    assert namespaces.adopt(A, 3).epoch == 5
    assert Namespaces(path).adopt(A, 7).epoch == 7
    assert [n.epoch for n in Namespaces(path)] == [7]


def test_a_lost_file_is_noticed_by_its_identity(path: Path) -> None:
    first = Namespaces(path).identity
    path.unlink()
    assert Namespaces(path).identity != first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1, "identity": "x"}', b"\xff"])
def test_a_file_that_cannot_be_read_is_named_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(Damaged, match="namespaces.json") as caught:
        Namespaces(path)
    assert caught.value.hint
    assert path.read_bytes() == content


@pytest.mark.fault(1)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_could_not_be_made_durable_did_not_happen(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    namespaces = Namespaces(path)
    before = namespaces.register(wanted(A))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError):
            namespaces.raise_epoch(A)
        with pytest.raises(OSError):
            namespaces.register(wanted(B))
    assert namespaces.get(A) == before and namespaces.get(B) is None
    assert [n.id for n in Namespaces(path)] == [A]
    assert namespaces.raise_epoch(A).epoch == 1


def test_numbers_are_unique_when_many_threads_register(path: Path) -> None:
    namespaces = Namespaces(path)
    ids = [bytes((n,)) * 32 for n in range(24)]

    def register(part: list[bytes]) -> None:
        for id in part:
            namespaces.register(wanted(id))

    threads = [threading.Thread(target=register, args=(ids[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n.number for n in namespaces) == list(range(1, 25))
    assert {(n.id, n.number) for n in Namespaces(path)} == {(n.id, n.number) for n in namespaces}
    assert json.loads(path.read_text())["format"] == 2


def test_nobody_meets_a_namespace_or_an_epoch_that_a_crash_could_take_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespaces = Namespaces(path)
    seen: list[int | None] = []

    def look(fresh: Path, final: Path) -> None:
        known = namespaces.get(A)
        seen.append(known.epoch if known else None)
        replace(fresh, final)

    replace = os.replace
    monkeypatch.setattr(os, "replace", look)
    namespaces.register(wanted(A))
    namespaces.raise_epoch(A)
    assert seen == [None, 0]

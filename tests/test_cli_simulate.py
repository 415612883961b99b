"""``terracekv simulate`` and ``terracekv whatif``, as a person runs them."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.cli_simulate import print_whatif
from terracekv.daemon.cli_text import policies
from terracekv.tests.traces import conversations

RUN = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()", "simulate"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    names: dict[bytes, int] = {}
    chains = conversations(2, requests=400)
    lines = [
        {"hash_ids": [names.setdefault(key, len(names)) for key in chain], "block_bytes": 1 << 20} for chain in chains
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, text=True, timeout=100)


def rows(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def test_each_size_under_each_policy_is_a_row(trace: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    found = rows(trace, "--sizes", "5%,200,64MiB", "--policies", "lru/all,frequency/second_touch,auto", "--csv", table)
    assert [row["policy"] for row in found] == ["lru/all"] * 3 + ["frequency/second_touch"] * 3 + ["auto"] * 3
    assert [row["capacity"] for row in found[:3]][1:] == [200, 64]
    assert all(row["written_bytes"] == row["written_blocks"] << 20 for row in found)
    assert 0 < found[2]["hit_rate"] < found[1]["hit_rate"] < 1
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert [row["policy"] for row in read] == [row["policy"] for row in found]
    assert [float(row["hit_rate"]) for row in read] == [row["hit_rate"] for row in found]


def test_a_disk_below_serves_what_host_has_lost(trace: Path) -> None:
    (alone,) = rows(trace, "--sizes", "60")
    (above,) = rows(trace, "--sizes", "60", "--disk", "50%")
    (thrifty,) = rows(trace, "--sizes", "60", "--disk", "50%", "--policies", "lru/second_touch")
    assert above["hit_rate"] > alone["hit_rate"] and above["disk_rate"] > 0
    assert above["promoted_blocks"] > 0 and thrifty["written_blocks"] < above["written_blocks"]
    (auto,) = rows(trace, "--sizes", "60", "--disk", "50%", "--policies", "auto")
    assert auto["hit_rate"] >= min(above["hit_rate"], thrifty["hit_rate"])


def test_a_person_reads_a_table(trace: Path) -> None:
    done = run(trace, "--sizes", "10%")
    assert done.returncode == 0 and done.stderr == ""
    assert "400 requests" in done.stdout and "prefix hits" in done.stdout and "1MiB each" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "ten"], "is no size"),
        (["--sizes", "-5%"], "holds nothing"),
        (["--sizes", "nan%"], "is no size"),
        (["--sizes", "1e999%"], "is no size"),
        (["--sizes", "0"], "holds nothing"),
        (["--block-bytes", "-5"], "--block-bytes: '-5' is not a size"),
        (["--disk", "0%"], "holds nothing"),
        (["--policies", "fifo"], "there is no policy fifo"),
        (["--policies", "lru/sometimes"], "there is no policy"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_a_hint(trace: Path, arguments: list[str], says: str) -> None:
    done = run(trace, *arguments)
    assert done.returncode == 1 and says in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "line 2 is not JSON"),
        ("[]", "line 2 has no hash_ids"),
        ('{"hash_ids": ["a", "b"]}', "line 2 has no hash_ids that are whole numbers"),
        ('{"hash_ids": [1, true]}', "line 2 has no hash_ids that are whole numbers"),
        ('{"hash_ids": [1, 2, 1]}', "line 2: a hash stands in it twice"),
        ('{"hash_ids": ' + "[" * 100_000, "line 2 is not JSON"),
        ('{"hash_ids": [1], "block_bytes": -1}', "line 2: block_bytes is -1"),
        ("\udcff", "is no text"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"hash_ids": [1]}}\n{line}\n', errors="surrogateescape")
    done = run(path)
    assert done.returncode == 1 and says in done.stderr and "hint: " in done.stderr and "Error" not in done.stderr


def test_a_file_that_cannot_be_written_is_told_before_the_replay(tmp_path: Path) -> None:
    done = run(tmp_path / "no trace", "--csv", tmp_path / "nowhere" / "rows")
    assert done.returncode == 1 and "nowhere/rows" in done.stderr


def test_a_size_in_bytes_needs_the_size_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1]}\n')
    assert "--block-bytes" in run(path, "--sizes", "1GiB").stderr
    assert "is no size" in run(path, "--sizes", "x").stderr


def test_a_picture_is_drawn_or_its_extra_named(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    done = run(trace, "--sizes", "5%,20%", "--png", picture)
    if done.returncode:
        assert "terracekv[plot]" in done.stderr and not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_whatif_is_shown_tier_by_tier(capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"bytes": size << 30, "blocks": size * 512, "hits": size / 10} for size in (1, 2, 4)]
    answer: dict[str, Any] = {
        "requests": 7,
        "asked_blocks": 70,
        "block_bytes": 2 << 20,
        "sample": {"rate": 0.125, "blocks": 99},
    }
    answer["sample"] |= {"enough": True}
    print_whatif(answer | {"scope": "all of it", "passed_over": 3, "tiers": {"host": points}})
    out = capsys.readouterr().out
    assert "7 requests" in out and "one in 8" in out and "passed over: 3 requests" in out
    assert all(text in out for text in ("host of", "10.0%", "40.0%", "2,048"))


def test_whatif_from_a_handful_of_blocks_is_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = {"requests": 1, "asked_blocks": 2, "block_bytes": 2 << 20, "passed_over": 0}
    answer |= {"sample": {"rate": 0.125, "blocks": 0, "enough": False}, "scope": "all of it", "tiers": {}}
    print_whatif(answer)
    out = capsys.readouterr().out
    assert out.startswith("1 request, 2 blocks asked for") and "too few to tell" in out and "%" not in out


def test_whatif_before_anything_was_asked_for_gives_blocks_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = {"requests": 0, "asked_blocks": 0, "block_bytes": 1, "passed_over": 0}
    answer |= {"sample": {"rate": 0.125, "blocks": 0, "enough": False}, "scope": "all of it", "tiers": {}}
    print_whatif(answer)
    out = capsys.readouterr().out
    assert out.startswith("0 requests, 0 blocks asked for; told from 0 blocks") and "too few to tell" in out


def test_status_says_which_policy_and_why() -> None:
    candidates = {"lru/all": {"hits": 0.12, "writes": 0.8}, "lru/second_touch": {"hits": 0.2, "writes": 0.1}}
    contest = {"policy": "lru/second_touch", "switches": 2, "candidates": candidates}
    assert policies({"host": {"eviction": "lru"}, "disk": {"admission": "second_touch", "contest": contest}}) == [
        "disk goes by lru/second_touch, 2 changes; of late lru/all hits 12.0% and writes 80.0%, "
        "lru/second_touch hits 20.0% and writes 10.0%"
    ]

"""``terracekv explain`` of a daemon that engines use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terracekv.tests.harness import TOKENS, Daemon

RUN = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()"]
PROMPT = list(range(100, 100 + 5 * TOKENS + 2))


def terracekv(daemon: Daemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
    environ["TERRACEKV_DAEMON_RUNTIME_DIR"] = str(daemon.runtime)
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, env=environ, input=stdin, timeout=60)


@pytest.mark.fault(115)
@pytest.mark.fault(117)
def test_a_person_reads_where_each_block_is_and_why_the_rest_is_not(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as engine:
        keys = engine.keys(PROMPT)
        engine.put(keys[:3], durable=True)
        done = terracekv(daemon, "explain", "-", stdin=json.dumps(PROMPT))
        assert done.returncode == 0, done.stderr
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines[0] == f"namespace {engine.space.hex()[:16]}: m, revision r, u8, 4 tokens a block, 1 shard"
        assert lines[1] == "matched 3 of 5 blocks, 12 of 22 tokens; the last 2 fill no block of 4"
        assert lines[3] == f"0 0-3 {keys[0].hex()[:12]} host disk"
        assert lines[6] == f"3 12-15 {keys[3].hex()[:12]} - absent"
        assert lines[8].startswith("first miss: block 3, absent: never stored here, or gone for longer")
        short = terracekv(daemon, "explain", "-", stdin="1 2 3")
        assert "first miss: block 0, shorter_than_block: the prompt fills no block" in short.stdout
        assert "the last 3 fill no block of 4" in short.stdout
        asked = json.loads(terracekv(daemon, "explain", "-", "-n", "m", "--json", stdin="1 2 3").stdout)
        assert (asked["block_tokens"], asked["first_miss"]["reason"]) == (4, "shorter_than_block")


@pytest.mark.fault(117)
def test_engines_that_call_a_model_by_two_names_are_found_by_explain_and_by_the_doctor(
    shm_dir: Path, tmp_path: Path
) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as first, daemon.client(dtype="fp8") as second:
        second.put(second.keys(PROMPT)[:2])
        text = json.dumps(PROMPT)
        several = terracekv(daemon, "explain", "-", stdin=text)
        assert several.returncode == 1 and several.stdout == ""
        assert "terracekv: 2 namespaces fit a live session" in several.stderr
        for engine, dtype in ((first, "u8"), (second, "fp8")):
            named = f"{engine.space.hex()[:16]} (model m, revision r, dtype {dtype}, block_tokens 4, in use)"
            assert named in several.stderr
        told = terracekv(daemon, "explain", "-", "-n", "m", "--dtype", "u8", stdin=text).stdout
        there = f"the same tokens are present under namespace {second.space.hex()[:16]} (2 blocks, 8 tokens)"
        assert f"{there}, which differs in dtype (fp8 there, u8 here)" in told
        by_id = terracekv(daemon, "explain", "-", "-n", second.space.hex()[:6], stdin=text).stdout
        assert by_id.startswith(f"namespace {second.space.hex()[:16]}: m")
        unknown = terracekv(daemon, "explain", "-", "-n", "M", stdin=text).stdout
        assert "first miss: block 0, unknown_namespace" in unknown and "model (m there)" in unknown
        nothing = terracekv(daemon, "explain", "-", "--dtype", "int4", stdin=text)
        assert nothing.returncode == 1 and "no namespace fits dtype=int4" in nothing.stderr
        findings = json.loads(terracekv(daemon, "doctor", "--json").stdout)
        (engines,) = [finding for finding in findings if finding["what"] == "engines"]
        assert engines["state"] == "warn"
        assert engines["says"] == "engines of m use 2 namespaces, which differ in dtype (fp8 and u8)"


def test_where_one_model_alone_was_ever_here_it_need_not_be_named(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon:
        with daemon.client() as engine:
            engine.put(engine.keys(PROMPT))
        assert terracekv(daemon, "doctor").returncode == 0
        done = terracekv(daemon, "explain", "-", stdin=json.dumps(PROMPT))
        assert done.returncode == 0 and "matched 5 of 5 blocks" in done.stdout, done.stderr
        wrong = terracekv(daemon, "explain", "-", stdin='["a", 1]')
        assert "holds '\"a\"', which is no token id" in wrong.stderr and "literal" not in wrong.stderr


def test_a_long_prompt_is_shown_where_something_changes(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir, tmp_path) as daemon, daemon.client() as engine:
        tokens = list(range(200 * TOKENS))
        engine.put(engine.keys(tokens)[:120])
        lines = terracekv(daemon, "explain", "-", stdin=json.dumps(tokens)).stdout.splitlines()
        assert len(lines) < 20, lines
        rows = [int(line.split()[0]) for line in lines if line.split()[0].isdigit()]
        assert rows[0] == 0 and {119, 120} <= set(rows) and rows[-1] == 199

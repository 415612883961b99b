"""The documents are true: what they tell a reader to run runs, what they show parses, where they point there is."""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from terracekv.daemon import http_messages
from terracekv.daemon.access_file import digest_of, read_table
from terracekv.daemon.config import load_config
from terracekv.daemon.http_client import Door, NotRunning, Silent
from terracekv.tests.page.screenshots import IMAGES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"(<!-- runnable -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
SHM = Path("/dev/shm")
ROOM_BYTES = 256 << 20


def blocks(language: str, *, runnable: bool = False) -> list[tuple[str, str]]:
    """(page, text) of each fenced block in a language."""
    return [
        (page.name, text)
        for page in PAGES
        for mark, kind, text in FENCE.findall(page.read_text())
        if kind == language and (mark or not runnable)
    ]


class Reader:
    """Somebody with the documents, a shell, and a daemon that was started as they say."""

    def __init__(self, runtime_dir: Path, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.runtime_dir = runtime_dir
        bin = home / "bin"
        bin.mkdir()
        (bin / "terracekv").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{MAIN}" "$@"\n')
        (bin / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for program in bin.iterdir():
            program.chmod(0o755)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
        self.environ |= {"HOME": str(home), "PATH": f"{bin}:{os.environ['PATH']}"}

    def here(self, text: str) -> str:
        """The same, with the folder and the port of this test in place of the documented ones."""
        return text.replace("/dev/shm/terracekv", str(self.runtime_dir)).replace(":7411", f":{self.port}")


MAIN = "from terracekv.daemon.cli import main; main()"


@pytest.fixture
def reader(shm_dir: Path, tmp_path: Path) -> Iterator[Reader]:
    """The documented default settings, all of them, from the documented file."""
    if shutil.disk_usage(SHM).free < ROOM_BYTES:
        pytest.skip(f"{SHM} has less than {ROOM_BYTES} bytes free: the defaults are refused here")
    made = Reader(shm_dir, tmp_path)
    file = tmp_path / "terracekv.toml"
    file.write_text(made.here(default_file()))
    log = (tmp_path / "log").open("w+")
    command = [str(tmp_path / "bin" / "terracekv"), "serve", "--config", str(file)]
    process = subprocess.Popen(command, stderr=log, env=made.environ)
    made.environ["TERRACEKV_CONFIG"] = str(file)
    try:
        for _ in range(600):
            try:
                Door(shm_dir).exchange("GET", "/readyz")
                break
            except (NotRunning, Silent):
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
        yield made
    finally:
        process.terminate()
        process.wait()
        log.close()


def default_file() -> str:
    (first, *_) = [text for page, text in blocks("toml") if page == "configuration.md"]
    return first


@pytest.mark.fault(122)
def test_the_documented_defaults_start_and_every_runnable_block_runs(reader: Reader) -> None:
    runnable = blocks("sh", runnable=True)
    assert len(runnable) >= 2
    for page, text in runnable:
        if "curl" in text and shutil.which("curl") is None:
            continue
        command = ["bash", "-euo", "pipefail", "-c", reader.here(text)]
        done = subprocess.run(command, capture_output=True, text=True, env=reader.environ, timeout=60)
        assert done.returncode == 0, f"{page}: {text}\n{done.stdout}\n{done.stderr}"
        if "/v1/lookup" in text:
            assert '"matched_blocks":2' in done.stdout, "what the block above stored is found"
            (shown,) = [json.loads(text) for page, text in blocks("json") if page == "README.md"]
            assert f'"namespace_id":"{shown["namespace_id"].rstrip(".")}' in done.stdout, "as the page shows it"
        assert '"error"' not in done.stdout and "FAIL" not in done.stdout, f"{page}: {text}\n{done.stdout}"


def is_access_file(text: str) -> bool:
    return "[[tokens]]" in text


@pytest.mark.parametrize(("page", "text"), [block for block in blocks("toml") if is_access_file(block[1])])
def test_every_file_of_tokens_that_is_shown_is_one(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(text)
    table = read_table(str(tmp_path / "access.toml"))
    assert table.tokens and table.tenants and table.quotas["host"], page
    assert all(digest != digest_of(b"test") for digest, _ in table.tokens), "who copies it lets nobody in by a word"


@pytest.mark.parametrize(("page", "text"), [block for block in blocks("toml") if not is_access_file(block[1])])
def test_every_settings_file_that_is_shown_is_one(page: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "terracekv.toml"
    file.write_text(text)
    config = load_config(file, {}, {"HOME": "/home/me"})
    given = {f"{section}.{name}" for section, table in tomllib.loads(text).items() for name in table}
    assert given == {key for key, source in config.sources.items() if source.startswith("file")}


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_an_answer_that_is_shown_has_the_fields_that_are_sent(page: str, text: str) -> None:
    shown = json.loads(text)
    assert set(shown) == {field.name for field in msgspec.structs.fields(http_messages.Found)}
    msgspec.convert(shown, http_messages.Found)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_code_that_is_shown_names_what_there_is(page: str, text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("terracekv."):
            source = ROOT / f"{str(node.module).removeprefix('terracekv.').replace('.', '/')}.py"
            defined = {
                n.name
                for n in ast.walk(ast.parse(source.read_text()))
                if isinstance(n, (ast.ClassDef, ast.FunctionDef))
            }
            assert {alias.name for alias in node.names} <= defined


def test_the_lines_for_transformers_use_what_the_connector_has() -> None:
    """By name only: running them needs torch, and is done where torch is."""
    (shown,) = [text for page, text in blocks("python") if page == "README.md"]
    trees = [ast.parse((ROOT / "connector" / name).read_text()) for name in ("report.py", "transformers.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {
        ast.unparse(n.target) for c in classes if c.name == "Report" for n in c.body if isinstance(n, ast.AnnAssign)
    }
    methods = {n.name for c in classes if c.name == "TerraceCache" for n in c.body if isinstance(n, ast.FunctionDef)}
    assert set(re.findall(r"report\.(\w+)", shown)) <= fields
    assert set(re.findall(r"cache\.(\w+)\(", shown)) <= methods


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_every_verb_of_make_that_is_named_is_one() -> None:
    verbs = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)`", page.read_text(), re.MULTILINE))
        assert {a or b for a, b in named} <= verbs, page.name
    assert {"demo", "serve", "test", "lint", "bench", "e2e", "clean"} <= verbs


def test_files_that_the_design_names_exist() -> None:
    named = re.findall(r"`((?:tests|bench|docs)/[\w./]+)`", (ROOT / "docs" / "design.md").read_text())
    assert named and all((ROOT / path).exists() for path in named)


def test_pictures_are_made_where_the_pages_show_them() -> None:
    assert IMAGES.samefile(ROOT / "docs" / "images")

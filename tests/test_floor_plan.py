"""The floor plan: who may import whom, how large a thing may grow. Kept as data, so that a change is a visible diff."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": set[str](),
    "tiers": {"kernels"},
    "daemon": {"tiers"},
    "connector": {"kernels", "tiers.block", "daemon.protocol"},
}
LIBRARIES = {
    "aiohttp": {
        "daemon/http_blocks.py",
        "daemon/http_bodies.py",
        "daemon/http_door.py",
        "daemon/http_gate.py",
        "daemon/http_listeners.py",
        "daemon/http_live.py",
        "daemon/http_messages.py",
        "daemon/http_page.py",
        "daemon/http_queries.py",
        "daemon/http_routes.py",
    },
    "boto3": {"tiers/bucket.py"},
    "botocore": {"tiers/bucket.py"},
    "cryptography": {"tiers/seal.py"},
    "cupy": {"kernels/cuda.py"},
    "lmdb": {"tiers/catalog.py"},
    "matplotlib": {"daemon/simulate.py"},
    "msgspec": {
        "connector/connection.py",
        "daemon/access_file.py",
        "daemon/config.py",
        "daemon/config_access.py",
        "daemon/config_encryption.py",
        "daemon/config_gpu.py",
        "daemon/config_s3.py",
        "daemon/doctor_trial.py",
        "daemon/engine_door.py",
        "daemon/http_bodies.py",
        "daemon/http_live.py",
        "daemon/http_messages.py",
        "daemon/http_queries.py",
        "daemon/http_routes.py",
        "daemon/protocol.py",
        "daemon/verify.py",
    },
    "numpy": {"kernels/host.py", "kernels/planes.py"},
    "prometheus_client": {"connector/vllm_metrics.py", "daemon/metrics.py"},
    "pynvml": {"tiers/nvml.py"},
    "rich": {"daemon/cli_simulate.py", "daemon/cli_status.py", "daemon/cli_top.py"},
    "torch": {
        "connector/transformers.py",
        "connector/transformers_model.py",
        "connector/transformers_weights.py",
        "connector/vllm.py",
    },
    "transformers": {"connector/transformers.py", "connector/transformers_model.py"},
    "typer": {
        "daemon/cli.py",
        "daemon/cli_bench.py",
        "daemon/cli_bucket.py",
        "daemon/cli_options.py",
        "daemon/cli_whatif.py",
    },
    "uvloop": {"daemon/__main__.py"},
    "vllm": {"connector/vllm.py", "connector/vllm_metrics.py", "connector/vllm_tier.py"},
    "xxhash": {"tiers/checksum.py"},
    "zstandard": {"tiers/codec.py"},
}
"""The modules that may import a library. What is not named here may be imported nowhere."""
IMPORTED_AS = {"cupy_cuda12x": "cupy", "cupy_cuda13x": "cupy", "nvidia_ml_py": "pynvml"}
ENGINES = {"vllm"}
"""What loads a connector, and so need not be installed by us."""
BROAD_EXCEPT = {
    "connector/vllm_guard.py": 1,
    "connector/vllm_lookups.py": 1,
    "connector/vllm_tier.py": 1,
    "connector/vllm_worker.py": 1,
    "daemon/engine_door.py": 4,
    "daemon/http_door.py": 1,
    "daemon/mover.py": 1,
    "daemon/tasks.py": 1,
    "tiers/s3.py": 1,
    "tiers/s3_errors.py": 1,
    "tiers/steady.py": 1,
    "bench/gpu_check.py": 1,
}
"""How often a module may catch ``Exception``: once for the outermost frame of each kind of task that it runs, and once
where what a foreign server answers is read."""
READS_ENVIRONMENT = {"daemon/config.py"}
ONLY_NAMES = {"tiers/errors.py"}
"""Modules in which nothing is called, so their docstrings need not say by whom."""
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
FOLDERS = (*MAY_IMPORT, "tests", "bench")
SHIPPED = sorted(p for room in MAY_IMPORT for p in (ROOT / room).rglob("*.py"))
MODULES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".svg",
    ".html",
    ".css",
    ".js",
    ".cpp",
    ".cu",
    ".h",
    ".json",
    ".yaml",
    ".yml",
    ".cfg",
    "",
}
UNTRACKED = {"build", "dist", "__pycache__"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def imports(path: Path) -> set[str]:
    """All that the module imports, wherever in it the import stands."""
    found = set[str]()
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {f"{module}.{alias.name}" for alias in names}
    return found


def texts() -> Iterator[Path]:
    """Every text file of the tree, folders of tools left out."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in parts)
        if not hidden and not UNTRACKED & set(parts) and path.is_file() and path.suffix in TEXT:
            if not any(part.endswith(".egg-info") for part in parts):
                yield path


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = tuple(f"terracekv.{below}." for below in MAY_IMPORT[room] | {room})
    for imported in imports(path):
        if imported.startswith("terracekv"):
            assert f"{imported}.".startswith(allowed), f"{path} imports {imported}"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_a_library_has_one_module(path: Path) -> None:
    for imported in imports(path):
        library = imported.partition(".")[0]
        if library != "terracekv" and library not in sys.stdlib_module_names:
            assert name(path) in LIBRARIES.get(library, set()), f"{path} imports {imported}"


def test_the_table_of_libraries_is_that_of_the_packaging() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    shipped = ("transformers", "s3", "encryption", "gpu", "gpu-cuda12", "plot")
    wanted = {*project["dependencies"], *(name for extra in shipped for name in extras[extra])}
    names = {re.split(r"[<>=!~ ;]", entry)[0].replace("-", "_") for entry in wanted}
    assert {IMPORTED_AS.get(name, name) for name in names} == set(LIBRARIES) - ENGINES


def test_all_that_is_depended_on_is_pinned_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    }
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {entry.replace("_", "-").lower() for entry in wanted} <= {pin.replace("_", "-").lower() for pin in pins}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert [entry for entry in wanted if not re.search(rf"\b{entry}\b", page)] == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_function_fits_on_a_screen(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_docstring_says_what_the_module_owns_who_calls_it_and_what_it_imports(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    assert text, "no docstring"
    if path.name == "__init__.py":
        return
    assert re.search(r"\bimports?\b|\bstandard library\b", text, re.I), "what does it import?"
    if name(path) not in ONLY_NAMES:
        assert re.search(r"\bown(s|ed)?\b|\bpure\b", text, re.I), "what does it own?"
        assert re.search(r"\b(call(s|ed)?|used|runs?|threads?|written|read by)\b", text, re.I), "who calls it?"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_package_is_a_docstring_and_nothing_else(room: str) -> None:
    body = tree(ROOT / room / "__init__.py").body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)
    assert (ROOT / room / "py.typed").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_only_an_outermost_frame_catches_everything(path: Path) -> None:
    broad = 0
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler):
            if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
                continue  # tidies up and lets the error go on
            caught = ast.unparse(node.type) if node.type else "BaseException"
            broad += bool(re.search(r"\b(Base)?Exception\b", caught))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            broad += any(re.fullmatch(r"(Base)?Exception", ast.unparse(arg)) is not None for arg in node.args)
    assert broad <= BROAD_EXCEPT.get(name(path), 0)


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_settings_are_read_in_one_place(path: Path) -> None:
    if name(path) not in READS_ENVIRONMENT:
        assert not re.search(r"\b(os\.(environb?|getenvb?)|from os import .*\b(environ|getenv))\b", path.read_text())


@pytest.mark.fault(19)
@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_no_key_comes_from_the_seeded_builtin_hash(path: Path) -> None:
    calls = [n for n in nodes(path) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("hash", "id")]
    assert not [ast.unparse(call) for call in calls if ast.unparse(call.func) == "hash"]


def test_every_package_is_shipped() -> None:
    """`packages` in pyproject.toml is a list by hand: a forgotten one is absent from the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = set(config["tool"]["setuptools"]["packages"])
    inits = {p.parent.relative_to(ROOT) for room in MAY_IMPORT for p in (ROOT / room).rglob("__init__.py")}
    assert shipped == {"terracekv." + ".".join(p.parts) for p in inits}


def test_no_module_can_be_imported_under_two_names() -> None:
    """A block key of ``tiers.block`` and one of ``terracekv.tiers.block`` would be of two classes."""
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "__init__.py").exists()
    assert not [p for folder in ("tests", "bench") for p in (ROOT / folder).rglob("__init__.py")]


def test_nothing_speaks_of_one_machine() -> None:
    local = re.compile(
        "/wo" r"rk/|/tmp" r"/v/|/ro" r"ot/|pypi" r"\.org|pythonhosted" r"\.org|--(find-links|extra-index)"
    )
    for path in texts():
        found = local.search(path.read_text(errors="replace"))
        assert found is None, f"{name(path)}: {found[0]}"


def loaded_by(code: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after ``code``."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {module.partition(".")[0] for module in out.split()}


def test_client_is_light() -> None:
    """Importing the connector must not drag the daemon's dependencies into the engine."""
    heavy = {"aiohttp", "asyncio", "boto3", "cupy", "lmdb", "numpy", "prometheus_client", "torch", "typer", "uvloop"}
    assert not heavy & loaded_by("import terracekv.connector.client")


def lacks_its_library(path: Path) -> bool:
    """Whether this is the module of an extra that is not installed here."""
    return name(path) in LIBRARIES["cryptography"] and importlib.util.find_spec("cryptography") is None


@pytest.mark.fault(90)
@pytest.mark.fault(95)
def test_daemon_loads_no_torch() -> None:
    here = [p for p in SHIPPED if p.parent.name in ("daemon", "tiers", "kernels") and not lacks_its_library(p)]
    names = [name(p)[:-3].replace("/", ".") for p in here]
    code = "import importlib\n" + "\n".join(f"importlib.import_module('terracekv.{n}')" for n in names)
    assert not {"torch", "transformers", "cupy", "triton", "cuda"} & loaded_by(code)


def test_a_daemon_of_memory_and_disk_loads_no_codec_no_bucket_and_no_cipher() -> None:
    assert not {"boto3", "botocore", "cryptography", "numpy", "zstandard"} & loaded_by(
        "import terracekv.daemon.__main__"
    )


def test_command_line_is_light() -> None:
    """``terracekv status`` is typed often: it starts without the daemon's libraries and without tables."""
    heavy = {"aiohttp", "asyncio", "lmdb", "numpy", "prometheus_client", "rich", "torch", "uvloop"}
    assert not heavy & loaded_by("import terracekv.daemon.cli")


@pytest.mark.fault(73)
def test_a_daemon_without_a_gpu_tier_loads_neither_cuda_nor_nvml(shm_dir: Path, tmp_path: Path) -> None:
    """All tiers opened, in a clean interpreter; with the tier asked for, what it needs is looked for."""
    code = f"""
from terracekv.daemon.config import load_config, resolve, survey
from terracekv.daemon.recovery import open_tiers
flags = {{"daemon.runtime_dir": {str(shm_dir)!r}, "daemon.state_dir": {str(tmp_path)!r}, "host.size": "4MiB"}}
config = load_config(None, flags | {{"disk.size": "32MiB", "disk.segment": "1MiB", "disk.free_floor": "0"}}, {{}})
import terracekv.daemon.__main__
tiers = open_tiers(resolve(config, survey(config)))
assert tiers.gpus.state == "off"
tiers.close()
"""
    assert not {"cupy", "pynvml", "torch"} & loaded_by(code)

"""What the sources may never do, and what the daemon may never load."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("connector", "daemon", "kernels", "tiers")
SOURCES = sorted(p for folder in (*ROOMS, "bench") for p in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop"}
HAS_CIPHER = importlib.util.find_spec("cryptography") is not None
"""What an extra brings need not be installed."""
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offences(source: str) -> list[str]:
    """What in a source runs, or lets data run, code that is not in the tree."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)):
                found += [module] if module.partition(".")[0] in MODULES else []
            case ast.Call(func=func, keywords=keywords):
                called = ast.unparse(func)
                given = {word.arg: ast.unparse(word.value) for word in keywords}
                if called in CALLS or given.get("shell", "False") != "False" or "allow_pickle" in given:
                    found.append(called)
                if called == "torch.load" and given.get("weights_only") != "True":
                    found.append("torch.load without weights_only=True")
                if given.get("trust_remote_code", "False") != "False":
                    found.append("trust_remote_code")
    return found


@pytest.mark.fault(108)
@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_data_can_become_code(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.fault(108)
@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "M.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert offences(source)


@pytest.mark.fault(110)
@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name != "bench"], ids=name)
def test_no_source_names_an_address_outside_this_machine(path: Path) -> None:
    """The daemon connects to nobody by itself: no telemetry, no look-up of versions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "https://" not in node.value and "http://" not in node.value.replace("http://localhost", "")


IN_PROCESS = """
import importlib, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
libraries = {line.split("/", 1)[-1].rstrip() for line in open("/proc/self/maps") if ".so" in line}
print(*sorted(os.path.basename(path) for path in libraries))
print(*(fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        and "nvidia" in os.readlink(f"/proc/self/fd/{fd}")))
print(*sys.modules)
"""


@pytest.mark.fault(90)
@pytest.mark.fault(95)
def test_the_daemon_comes_up_without_torch_and_without_touching_cuda() -> None:
    here = [p for p in SOURCES if p.parent.name in ("daemon", "tiers") and (p.name != "seal.py" or HAS_CIPHER)]
    modules = [f"terracekv.{name(p)[:-3].replace('/', '.')}" for p in here]
    command = [sys.executable, "-c", IN_PROCESS, *modules]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    libraries, devices, loaded = out.stdout.split("\n")[:3]
    assert not [lib for lib in libraries.split() if "cuda" in lib or "nvidia" in lib or "torch" in lib]
    assert devices == ""
    tops = {module.partition(".")[0] for module in loaded.split()}
    assert not tops & {"torch", "transformers", "cupy", "cuda", "triton", "pynvml"}
    assert "terracekv" in tops


@pytest.mark.fault(95)
def test_no_package_of_ours_has_a_compiled_part() -> None:
    assert not [p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in (".so", ".pyx", ".c", ".cpp")]


@pytest.mark.fault(90)
@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_forks_a_process_that_may_hold_cuda(path: Path) -> None:
    text = path.read_text()
    assert "os.fork(" not in text and '"fork"' not in text and "forkserver" not in text

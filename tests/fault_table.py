"""The table of field faults: which tests stand for which row of docs/faults.md.

Owns nothing. Run by ``make faults``; called by its test. Standard library only, until it is asked to run the tests.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)
APART = ("gpu", "s3", "long")
"""Marks of tests that a plain run leaves out."""


@dataclass(frozen=True)
class Marked:
    """A test function, and the marks on it besides its rows."""

    path: str
    name: str
    marks: frozenset[str]

    def __str__(self) -> str:
        apart = [mark for mark in APART if mark in self.marks] or (["e2e"] if "/e2e/" in self.path else [])
        return f"{self.path}::{self.name}" + (f" ({', '.join(apart)})" if apart else "")


def rows() -> dict[int, str]:
    """The rows of the page, by number."""
    return {int(number): title for number, title in ROW.findall((ROOT / "docs/faults.md").read_text())}


def marked() -> dict[int, list[Marked]]:
    """Tests by the rows that they bear."""
    found: dict[int, list[Marked]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        of_module = {name for name, _ in _marks(module.body)}
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = [*_marks_of(node.decorator_list)]
                names = frozenset(name for name, _ in marks) | of_module
                for name, row in marks:
                    if name == "fault":
                        found[row].append(Marked(str(path.relative_to(ROOT)), node.name, names))
    return found


def _marks(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Marks of a whole module."""
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            yield from _marks_of(node.value.elts if isinstance(node.value, ast.List) else [node.value])


def _marks_of(nodes: list[ast.expr]) -> Iterator[tuple[str, int]]:
    """``pytest.mark.NAME``, with the number in its parentheses, 0 for none."""
    for node in nodes:
        call = node.func if isinstance(node, ast.Call) else node
        text = ast.unparse(call)
        if text.startswith("pytest.mark."):
            first = node.args[0] if isinstance(node, ast.Call) and node.args else None
            number = first.value if isinstance(first, ast.Constant) and isinstance(first.value, int) else 0
            yield text.removeprefix("pytest.mark."), number


def results(tests: list[Marked], options: list[str]) -> dict[tuple[str, str], str]:
    """Run the tests; what became of each function: the worst of its cases."""
    worst = ("passed", "skipped", "failed")
    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        wanted = sorted({f"{test.path}::{test.name}" for test in tests})
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options, *wanted]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
        for case in tree.parse(report).iter("testcase"):
            key = case.get("classname", ""), case.get("name", "").partition("[")[0]
            children = {child.tag for child in case}
            became = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
            found[key] = max(found.get(key, "passed"), became, key=worst.index)
    return found


def main() -> int:
    """Print the table; 1 when a row has no test, or a test of one failed."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the tests, and say what became of them")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    asked = parser.parse_args()
    table = marked()
    became = results([test for tests in table.values() for test in tests], asked.options) if asked.run else {}
    good = True
    for row, title in rows().items():
        print(f"{row:>3}  {title}")
        good = good and row in table
        for test in table.get(row, []):
            key = test.path.removesuffix(".py").replace("/", "."), test.name
            said = became.get(key, "not run")
            good = good and said != "failed"
            print(f"       {said:8}{test}" if asked.run else f"       {test}")
    tests = {test for each in table.values() for test in each}
    print(f"{len(rows())} rows, {len(tests)} tests")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

"""The pages that a program writes: the metrics, and the routes of the people's door.

Owns nothing; asks a door that it opens in a temporary folder. ``make docs`` writes them;
``tests/test_written_docs.py`` compares. Imports ``people``.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from terracekv.tests.people import people

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKS = ("<!-- written by make docs: begin -->\n", "<!-- written by make docs: end -->\n")
PARTS = {
    "Lookups": ("lookup", "matched", "loaded"),
    "Tiers": ("tier_", "host_", "promot", "writ", "not_admitted", "evicted_", "pinned", "stale_", "refused_", "stuck_"),
    "GPUs": ("gpu_", "session_transport"),
    "HTTP": ("http_",),
    "The daemon": ("",),
}
"""Headings, and how the names begin that stand under them; the first that fits has it."""
Family = tuple[str, str, tuple[str, ...], str]


async def _asked() -> tuple[list[Family], Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with people(Path(folder), disk_codec="on") as opened:
            families = [
                (
                    family.name + ("_total" if family.type == "counter" else ""),
                    family.type,
                    tuple(getattr(family, "_labelnames", ())),
                    family.documentation,
                )
                for family in opened.door._metrics.collect()
            ]
            _, document = await opened.ask("GET", "/openapi.json")
    return families, document


def metrics_part(families: list[Family]) -> str:
    """Tables of all series: name, kind, labels, what it says."""
    text = ""
    left = list(families)
    for heading, beginnings in PARTS.items():
        here = [each for each in left if each[0].removeprefix("terracekv_").startswith(beginnings)]
        left = [each for each in left if each not in here]
        text += f"## {heading}\n\n| series | kind | labels | what it says |\n|---|---|---|---|\n"
        for name, kind, labels, documentation in here:
            text += f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {documentation} |\n"
        text += "\n"
    return text


def routes_part(document: Mapping[str, Any]) -> str:
    """Each route with its parameters and bodies, and each body with its fields."""
    shapes = document["components"]["schemas"]
    text = ""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            right = operation.get("description", "Needs no token.")
            text += f"### {method.upper()} {path}\n\n{operation['summary']}. {right}\n\n"
            rows = [(p["name"], p["in"], p["description"]) for p in operation.get("parameters", ())]
            if "requestBody" in operation:
                rows.append(("body", "", _shapes(operation["requestBody"])))
            rows += [
                (status, "answer", _shapes(answer))
                for status, answer in operation["responses"].items()
                if status != "default"
            ]
            text += (
                "| what | where | |\n|---|---|---|\n"
                + "".join(f"| `{a}` | {b} | {_cell(c)} |\n" for a, b, c in rows)
                + "\n"
            )
    text += "## Bodies\n\n"
    for name in sorted(shapes):
        text += f"### {name}\n\n{_cell(shapes[name].get('description', ''))}\n\n".replace("\n\n\n\n", "\n\n")
        needed = shapes[name].get("required", ())
        fields = shapes[name].get("properties", {})
        if fields:
            text += "| field | type | |\n|---|---|---|\n"  # of an answer, every field is there
            for field, schema in fields.items():
                must = "" if field in needed else _default(schema)
                text += f"| `{field}` | {_cell(_type(schema))} | {_cell(schema.get('description', must))} |\n"
            text += "\n"
    return text


def _shapes(part: Mapping[str, Any]) -> str:
    content = part.get("content")
    if not content:
        return "no body"
    named = [schema["$ref"] for kind in content.values() if "$ref" in (schema := kind.get("schema", {}))]
    if named:
        name = named[0].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    return ", ".join(f"`{kind}`" for kind in content)


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kinds = schema.get("type", "any")
    if isinstance(kinds, list):
        return " or ".join(_type({**schema, "type": kind}) for kind in kinds)
    kind = str(kinds)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind


def _default(schema: Mapping[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}` when left out" if "default" in schema else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def pages() -> Iterator[tuple[Path, str]]:
    """Each page, and what it should be."""
    families, document = asyncio.run(_asked())
    for name, part in {"metrics.md": metrics_part(families), "api.md": routes_part(document)}.items():
        file = DOCS / name
        before, _, rest = file.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        yield file, f"{before}{MARKS[0]}\n{part.rstrip()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    for file, text in pages():
        file.write_text(text)

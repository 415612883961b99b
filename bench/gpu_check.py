"""``make gpu-check``: whether all that needs a GPU is right on this one, and how fast it is.

Run on a machine with a GPU, from the folder, with nothing installed but Python, NumPy and CuPy (``PYTHONPATH=.ns``);
parts that need more say what, and are skipped. Writes a table and a JSON file, and exits with 1 when a part failed.
Imports everything.
"""

import argparse
import ctypes
import hashlib
import json
import mmap
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from terracekv.bench import gpu_copy, gpu_kernels
from terracekv.bench.gpu_paged import GEOMETRIES, Geometry, Paged, move
from terracekv.kernels.cuda import Device, NoCuda, devices
from terracekv.kernels.pages import address_of
from terracekv.kernels.pinned import Pinned
from terracekv.kernels.shared import Exported, Shared, export
from terracekv.kernels.transfer import Strategy, Transfer

ROOT = Path(__file__).resolve().parent.parent
CHILD_S = 240


class Skipped(Exception):
    """This part cannot be done here; the message says what is missing."""


class Result(NamedTuple):
    """``ok`` is None for a part that was skipped."""

    part: str
    ok: bool | None
    detail: str
    seconds: float


def kernels(device: Device) -> str:
    """Every layout and strategy, and the planes, against the host's copies."""
    done = [*gpu_kernels.check_layouts(device), *gpu_kernels.check_planes(device)]
    return f"{len(done)} comparisons"


def pinned(device: Device) -> str:
    """A mapping registered piece by piece, and slots that lie across its pieces."""
    geometry = gpu_kernels.SMALL[0]
    with mmap.mmap(-1, 1 << 20) as room, memoryview(room) as view, closing(Paged(device, geometry, 4)) as paged:
        host = Pinned(device, address_of(view), len(view), chunk_bytes=1 << 16)
        host.pin()
        try:
            assert host.pinned_bytes == len(view), host.reason
            content = random.Random(2).randbytes(paged.size)
            scratch = device.allocate_pinned(paged.size)
            paged.put(content, scratch)
            across = address_of(view) + (1 << 16) - paged.block_bytes // 2
            with closing(Transfer(device, [paged.runs], paged.pages_per_block, host)) as transfer:
                stream = device.stream()
                found = []
                for strategy in (Strategy.STAGED, Strategy.MAPPED):
                    ctypes.memset(across, 0, paged.block_bytes)
                    transfer.gather(paged.pages[:1], [across], stream.ptr, strategy).finish()
                    found.append(ctypes.string_at(across, paged.block_bytes))
            device.free_pinned(scratch)
            expected = b"".join(
                content[a - paged.address :][: paged.runs.run_bytes] for a, _ in paged.runs.at(*paged.pages[0])
            )
            assert found == [expected, expected], "a slot across two registrations"
        finally:
            host.close()
    return "1 MiB in 16 registrations"


def shared(device: Device) -> str:
    """Memory of this process, read by another one through CUDA IPC."""
    size = 1 << 20
    address, scratch = device.allocate(size), device.allocate_pinned(size)
    try:
        content = random.Random(3).randbytes(size)
        ctypes.memmove(scratch, content, size)
        move(device, [(address, scratch, size)])
        exported = export(device, address, size)
        command = [
            sys.executable,
            "-m",
            "terracekv.bench.gpu_check",
            "--open",
            exported.uuid,
            exported.handle.hex(),
            str(size),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S)
        assert done.returncode == 0, done.stderr[-500:]
        assert done.stdout.strip() == hashlib.sha256(content).hexdigest(), "the other process read other bytes"
    finally:
        device.free(address)
        device.free_pinned(scratch)
    return "1 MiB read by another process"


def opened(uuid: str, handle: str, size: int) -> int:
    """The other process of ``shared``."""
    device = next(each for each in devices() if each.uuid == uuid)
    with closing(Shared(device, Exported(uuid, bytes.fromhex(handle), size))) as memory:
        scratch = device.allocate_pinned(size)
        move(device, [(scratch, memory.address(0, size), size)])
        print(hashlib.sha256(ctypes.string_at(scratch, size)).hexdigest())
    return 0


def contract(device: Device) -> str:
    """The tiers' contract suite with the gpu tier on this device."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/contract"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHILD_S)
    if "No module named" in done.stdout + done.stderr:
        raise Skipped((done.stdout + done.stderr).strip().splitlines()[-1])
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    assert done.returncode == 0, last
    return last


def daemon(device: Device) -> str:
    """Blocks through a real daemon: out of pages, into its arena, and back into other pages."""
    try:
        from terracekv.bench.gpu_daemon import there_and_back
    except ModuleNotFoundError as missing:
        raise Skipped(f"needs {missing.name}") from None
    return there_and_back(device)


def sanitizer(device: Device) -> str:
    """The kernels under compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise Skipped("compute-sanitizer is not on the path")
    command = [program, "--error-exitcode", "9", sys.executable, "-m", "terracekv.bench.gpu_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-800:]
    return "no error"


PARTS: dict[str, Callable[[Device], str]] = {
    "kernels": kernels,
    "pinned": pinned,
    "shared": shared,
    "contract": contract,
    "daemon": daemon,
    "sanitizer": sanitizer,
}


def check(device: Device, parts: dict[str, Callable[[Device], str]]) -> Iterator[Result]:
    """Run parts one after the other; one that fails, however it does, does not keep the others from running."""
    for name, part in parts.items():
        start = time.monotonic()
        try:
            ok, detail = True, part(device)
        except Skipped as reason:
            ok, detail = None, str(reason)
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        yield Result(name, ok, detail, round(time.monotonic() - start, 2))


def measured(wanted: list[Geometry], size: int, into: list[dict[str, Any]]) -> dict[str, Callable[[Device], str]]:
    """A part for the figures of each geometry, which are added to ``into`` as they come."""

    def of(geometry: Geometry, device: Device) -> str:
        before = len(into)
        for figure in gpu_copy.figures(device, geometry, bytes_moved=size):
            into.append(figure)
        return f"{len(into) - before} figures"

    return {geometry.name: partial(of, geometry) for geometry in wanted}


def report(device: Device, results: list[Result], figures: list[dict[str, Any]], into: Path) -> None:
    """Figures on the terminal, all in a JSON file."""
    for figure in figures:
        print(
            f"{figure['geometry']:<22} {figure['name']:<20} {figure['value']:>9.2f} {figure['unit']}"
            f"  {figure['ratio']:>6.3f} of {figure['reference']} ({figure['reference_value']:.2f})"
        )
    document = {
        "device": device.name,
        "uuid": device.uuid,
        "parts": [result._asdict() for result in results],
        "figures": figures,
    }
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {into}")


def chosen(
    parser: argparse.ArgumentParser, names: str, known: dict[str, Callable[[Device], str]]
) -> dict[str, Callable[[Device], str]]:
    """What a person named of what there is, in that order; ends the program for a name that is none."""
    wanted = [name for name in names.split(",") if name]
    if strange := [name for name in wanted if name not in known]:
        parser.error(f"no such: {', '.join(strange)}; there are {', '.join(known)}")
    return {name: known[name] for name in wanted}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, joined by commas")
    parser.add_argument("--figures", default=",".join(each.name for each in GEOMETRIES), help="which geometries")
    parser.add_argument("--bytes", type=int, default=gpu_copy.BYTES_MOVED, help="moved for a figure")
    parser.add_argument("--out", type=Path, default=None, help="the JSON file")
    parser.add_argument("--open", nargs=3, metavar=("UUID", "HANDLE", "BYTES"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        (device, *_) = devices()
    except NoCuda as error:
        print(f"gpu-check needs a GPU: {error}", file=sys.stderr)
        return 2
    if given.open:
        return opened(given.open[0], given.open[1], int(given.open[2]))
    figures: list[dict[str, Any]] = []
    results = []
    work = chosen(parser, given.parts, PARTS) | chosen(
        parser, given.figures, measured(list(GEOMETRIES), given.bytes, figures)
    )
    for result in check(device, work):
        results.append(result)
        verdict = {True: "ok", False: "FAILED", None: "skipped"}[result.ok]
        print(f"{result.part:<22} {verdict:<8} {result.seconds:>7.1f} s  {result.detail}", flush=True)
    name = device.name.lower().replace(" ", "-")
    report(device, results, figures, given.out or Path(tempfile.gettempdir()) / f"terracekv-gpu-{name}.json")
    return int(any(result.ok is False for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""A daemon on a fake GPU, as a process of its own: ``python -m terracekv.tests.gpu_daemon FOLDER --set ...``.

Owns the fake libraries that it puts in place of CuPy and NVML; the GPU's memory lies in files of FOLDER, so that a test
plays an engine of that GPU in another process. An empty FOLDER is a machine on which neither is installed.
"""

import sys
from pathlib import Path

from terracekv.tests.fake_nvml import FakeNvml
from terracekv.tests.harness import Daemon
from terracekv.tests.kernels.fake_cupy import FakeCupy
from terracekv.tests.kernels.fake_world import SharedWorld

GPU = "GPU-01010101-0101-0101-0101-010101010101"
"""Of the first fake GPU."""
NO_EXPORT = "no-export"


def gpu_daemon(
    runtime: Path,
    state: Path,
    world: Path | None,
    *,
    export: bool = True,
    settings: dict[str, str] | None = None,
    **more: str,
) -> Daemon:
    """Not started yet. Without a ``world`` there is no GPU."""
    wanted = {"gpu__enabled": "true", "gpu__size": "1MiB", "gpu__uses": "2", "gpu__bus_share": "1"}
    daemon = Daemon(runtime, state, **(wanted | (settings or {}) | more))
    where = "" if world is None else str(world)
    daemon.program = ["-m", "terracekv.tests.gpu_daemon", where, "" if export else NO_EXPORT]
    return daemon


def main() -> int:
    world, how = sys.argv.pop(1), sys.argv.pop(1)
    if world:
        fake = FakeCupy(SharedWorld(Path(world)), eager=True)
        fake.export_error = "cudaErrorNotSupported" if how == NO_EXPORT else ""
        sys.modules["cupy"], sys.modules["pynvml"] = fake, FakeNvml()  # type: ignore[assignment]
    else:
        sys.modules["cupy"] = sys.modules["pynvml"] = None  # type: ignore[assignment]
    from terracekv.daemon.__main__ import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())

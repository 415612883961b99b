"""The commands ``terracekv whatif`` and ``terracekv simulate``: what another size or policy would do.

Owns nothing. Run by ``cli``. Imports typer, ``cli_options``, ``budget`` and ``errors``; what prints and replays is
imported by the command that does it, so that the others start at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from terracekv.daemon.cli_options import AsJson, ConfigFile, Settings, opened_door, print_json
from terracekv.tiers.budget import parse_size
from terracekv.tiers.errors import BadRequest


def whatif(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Say what more memory would buy."""
    answer = opened_door(config, settings).ask("GET", "/v1/whatif")
    if as_json:
        return print_json(answer)
    from terracekv.daemon.cli_simulate import print_whatif

    print_whatif(answer)


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines with hash_ids: see daemon.lookup_log.")],
    sizes: Annotated[str, typer.Option(help="Sizes to try: parts of the trace, blocks or bytes.")] = "2%,5%,10%,20%",
    policies: Annotated[str, typer.Option(help="EVICTION/ADMISSION, several with commas, or auto.")] = "lru/all",
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Put a disk of this size below.")] = None,
    block_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Size of a block, if not the trace's.")] = "0",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows there, too.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them there (needs the extra plot).")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace under other sizes and policies."""
    from terracekv.daemon import cli_simulate

    cli_simulate.simulate(
        trace,
        sizes=sizes.split(","),
        policies=policies.split(","),
        disk=disk,
        block_bytes=_size(block_bytes),
        as_json=as_json,
        csv=csv,
        png=png,
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadRequest(f"--block-bytes: {error}", "write 2MiB or 65536") from None

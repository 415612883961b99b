"""What the commands share: options, the settings that they come to, the daemon's door, and how lines are printed.

Owns nothing. Called by ``cli`` and the other modules with commands. Imports typer, ``cli_text``, ``config``,
``http_client`` and ``errors``.
"""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from terracekv.daemon.cli_text import printable
from terracekv.daemon.config import Config, load_config
from terracekv.daemon.http_client import Door
from terracekv.tiers.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Name = Annotated[
    str, typer.Option("--namespace", "-n", help="Id, a unique prefix of it (8 digits), or the model's name.")
]
NamespaceOrAll = Annotated[
    str | None, typer.Option("--namespace", "-n", help="As for other commands; without it, all namespaces.")
]
Tokens = Annotated[str, typer.Argument(metavar="TOKENS", help="File with token ids (JSON or plain text), - for stdin.")]


def flags_of(settings: list[str] | None) -> dict[str, str]:
    """What ``--set`` says."""
    flags = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} has no value", "write --set host.size=8GiB")
        flags[key.strip()] = value.strip()
    return flags


def load(file: Path | None, settings: list[str] | None) -> Config:
    return load_config(file, flags_of(settings))


def opened_door(file: Path | None, settings: list[str] | None) -> Door:
    door = Door(load(file, settings).daemon.runtime_dir)
    door.greet()
    return door


def print_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2))


def say(line: str, err: bool = False) -> None:
    typer.echo(printable(line), err=err)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that the terminal is given back."""

    def end(number: int, at: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""The command ``terracekv``: run a daemon, or ask one that runs.

Owns the terminal and the exit status: 0 done, 1 it could not be done, 2 the command line was wrong. Called by a
person's shell. Imports typer, ``cli_bucket``, ``cli_options``, ``cli_text``, ``config``, ``http_client`` and
``errors``; what only one command needs (the daemon, the doctor, the bucket, tables) is imported in it, so that the
others start at once and ``serve`` carries none of it along.
"""

import io
import json
import os
import sys
import time
from typing import Annotated, Any

import typer

from terracekv.daemon.cli_bench import bench
from terracekv.daemon.cli_bucket import bucket_commands
from terracekv.daemon.cli_options import (
    AsJson,
    ConfigFile,
    Name,
    Settings,
    Tokens,
    load,
    opened_door,
    print_json,
    say,
)
from terracekv.daemon.cli_text import count, read_tokens
from terracekv.daemon.cli_whatif import simulate, whatif
from terracekv.daemon.config import TYPES, describe, require_folders, resolve, survey, version
from terracekv.daemon.config_s3 import Size, SizeOrAuto
from terracekv.daemon.http_client import PROMPT_S, Answered, Door
from terracekv.tiers.budget import show
from terracekv.tiers.errors import TerraceError

COMMANDS = {"GET /v1/namespaces": "terracekv status", "POST /v1/lookup": "terracekv lookup"}
"""What a route that the daemon advises is called here."""

app = typer.Typer(
    help="A tiered KV-cache store for LLM inference: run its daemon, or ask one that runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bucket_commands, name="s3")


def main() -> None:
    """Entry point. Whatever goes wrong is one line and a hint on stderr."""
    if sys.stdout is None:  # closed by the caller, who wants the exit status alone
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that the locale does not have is no reason to say nothing
    try:
        app()
    except TerraceError as error:
        hint = error.hint
        for route, command in COMMANDS.items():
            hint = hint.replace(route, command)
        _fail(error.message, hint)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", "see who may read and write there, and whether it has room")


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        say(f"terracekv {version()}")
        raise typer.Exit


@app.command()
def serve(config: ConfigFile = None, settings: Settings = None) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C."""
    from terracekv.daemon.__main__ import run

    loaded = load(config, settings)
    require_folders(loaded)
    raise typer.Exit(run(loaded))


@app.command()
def status(
    as_json: AsJson = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait up to so long for a daemon to be ready.")] = 0,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Show what a daemon holds: tiers, hits, sessions, namespaces."""
    door = Door(load(config, settings).daemon.runtime_dir, PROMPT_S)
    _wait_until_ready(door, wait)
    answer = door.ask("GET", "/v1/status")
    if as_json:
        return print_json(answer)
    from terracekv.daemon.cli_status import print_status

    print_status(answer)


@app.command()
def top(
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Between two looks.")] = 1.0,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Watch a daemon at work; q ends it.

    Tiers, hits of the last minute, what moves, sessions, and what is wrong. When the daemon goes away it waits for
    it to come back. Where nobody watches, as in a pipe, one look and no more.
    """
    from terracekv.daemon.cli_top import run

    run(Door(load(config, settings).daemon.runtime_dir, PROMPT_S), interval)


@app.command()
def health(
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it serves, not only whether it lives.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Exit status 1 if the daemon is not well: for probes."""
    opened_door(config, settings).exchange("GET", "/readyz" if ready else "/healthz")


@app.command()
def lookup(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Ask how much of a prompt is here, where, and why not more."""
    question = {"namespace": namespace, "tokens": read_tokens(tokens)}
    answer = opened_door(config, settings).ask("POST", "/v1/lookup", question)
    if as_json:
        return print_json(answer)
    say(
        f"matched {answer['matched_blocks']} of {count(answer['asked_blocks'], 'block')}, "
        f"{answer['matched_tokens']:,} tokens ({answer['block_tokens']} a block), "
        f"{show(answer['bytes'])}, about {answer['load_ms']:.1f} ms to load"
    )
    for tier, counts in answer["tiers"].items():
        say(f"  from {tier} or above: {count(counts['blocks'], 'block')}, {counts['tokens']:,} tokens")
    if answer["first_miss"]:
        say(f"first miss: block {answer['first_miss']['index']}, {answer['first_miss']['reason']}")
        if answer["first_miss"]["reason"] == "unknown_namespace":
            say(f"no engine has registered {namespace}: terracekv status lists those that have")


@app.command()
def explain(
    tokens: Tokens,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="As for lookup; without it, the one that engines use now."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of the weights, where the name alone fits several.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the KV, where the name alone fits several.")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens in a block, likewise.")] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Say block by block where a prompt is, and why not.

    TOKENS are ids as the engine sees them, special tokens included. Counts as no lookup.
    """
    from terracekv.daemon.cli_explain import choose, lines_of

    question: dict[str, Any] = {"tokens": read_tokens(tokens)}
    door = opened_door(config, settings)
    wanted = {"revision": revision, "dtype": dtype, "block_tokens": block_tokens}
    question["namespace"] = choose(door, namespace, wanted)
    answer = door.ask("POST", "/v1/explain", question)
    if as_json:
        return print_json(answer)
    for line in lines_of(answer):
        say(line)


@app.command()
def flush(
    namespace: Name,
    tier: Annotated[str | None, typer.Option(help="Only this tier; without it, all, for good.")] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Forget all blocks of a namespace, say after its weights changed."""
    question = {"namespace": namespace} | ({"tier": tier} if tier else {})
    _print_done(opened_door(config, settings).ask("POST", "/v1/flush", question), as_json)


@app.command()
def pin(
    tokens: Tokens,
    namespace: Name,
    ttl: Annotated[float, typer.Option("--ttl", metavar="SECONDS", min=1, help="How long.")] = 3600,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Hold a prompt's blocks in host memory for a while."""
    question = {"namespace": namespace, "tokens": read_tokens(tokens), "ttl_s": ttl}
    _print_done(opened_door(config, settings).ask("POST", "/v1/pin", question), as_json)


@app.command()
def unpin(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Let go of what was pinned."""
    question = {"namespace": namespace, "tokens": read_tokens(tokens)}
    _print_done(opened_door(config, settings).ask("POST", "/v1/unpin", question), as_json)


@app.command()
def doctor(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Look at this machine and its daemon; say what to change.

    Exit status 1 if anything fails.
    """
    from terracekv.daemon.doctor import examine

    findings = list(examine(load(config, settings)))
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            say(f"{finding.state.upper():5}{finding.what}: {finding.says}")
            if finding.advice:
                say(f"     -> {finding.advice}")
    raise typer.Exit(any(finding.state == "fail" for finding in findings))


@app.command()
def verify(
    tier: Annotated[list[str] | None, typer.Option(help="Only this tier; may be repeated.")] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Read every block of every tier and check it.

    Through the daemon or, when none runs, in its folders. What is wrong is forgotten, and stored anew when it is next
    computed. Exit status 1 if anything is wrong.
    """
    from terracekv.daemon.verify import checked

    reports = []
    for report in checked(load(config, settings), tier):
        reports.append(report)
        if not as_json:
            for line in report.lines():
                say(line)
    if as_json:
        print_json([report.as_dict() for report in reports])
    raise typer.Exit(any(report.bad for report in reports))


app.command()(whatif)
app.command()(simulate)
app.command()(bench)


@app.command("config")
def show_config(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Print every setting in force and where it came from."""
    loaded = load(config, settings)
    table = describe(resolve(loaded, survey(loaded)))
    if as_json:
        return print_json(table)
    names, width = max(map(len, table)), max(len(_shown(key, entry["value"])) for key, entry in table.items())
    for key, entry in table.items():
        say(f"{key:{names}}  {_shown(key, entry['value']):{width}}  {entry['source']}")


def _wait_until_ready(door: Door, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            door.exchange("GET", "/readyz")
            return
        except TerraceError as error:
            if time.monotonic() >= until:
                if seconds or not isinstance(error, Answered):
                    raise
                return  # it runs, and its status says why it is not ready
        time.sleep(0.05)


def _shown(key: str, value: Any) -> str:
    return show(value) if TYPES[key] in (Size, SizeOrAuto) else json.dumps(value)


def _print_done(answer: dict[str, Any], as_json: bool) -> None:
    """What an order did, tier by tier, and what it did not do, reason by reason."""
    if as_json:
        return print_json(answer)
    for tier, counts in answer["done"].items():
        say(f"{tier}: " + (", ".join(f"{verb} {blocks:,}" for verb, blocks in counts.items()) or "nothing"))
    for reason, blocks in answer["skipped"].items():
        if blocks:
            say(f"skipped {blocks:,}: {reason}")


def _fail(message: str, hint: str) -> None:
    say(f"terracekv: {message}", err=True)
    if hint:
        say(f"  hint: {hint}", err=True)
    sys.exit(1)

"""The command ``terracekv``: run a daemon, or ask one that runs. The only ``import typer``.

Owns the terminal and the exit status: 0 done, 1 it could not be done, 2 the command line was wrong. Called by a
person's shell. Imports ``cli_text``, ``config``, ``http_client`` and ``errors``; what only one command needs (the
daemon, the doctor, the bucket, tables) is imported in it, so that the others start at once and ``serve`` carries none
of it along.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from terracekv.daemon.cli_text import age, printable, read_tokens
from terracekv.daemon.config import Config, describe, load_config, require_folders, resolve, survey, version
from terracekv.daemon.http_client import PROMPT_S, Answered, Door
from terracekv.tiers.budget import parse_size, show
from terracekv.tiers.errors import ConfigError, TerraceError

COMMANDS = {"GET /v1/namespaces": "terracekv status", "POST /v1/lookup": "terracekv lookup"}
"""What a route that the daemon advises is called here."""

app = typer.Typer(
    help="A tiered KV-cache store for LLM inference: run its daemon, or ask one that runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bucket_commands = typer.Typer(help="Look into the bucket of the s3 tier.", no_args_is_help=True)
app.add_typer(bucket_commands, name="s3")

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


def main() -> None:
    """Entry point. Whatever goes wrong is one line and a hint on stderr."""
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
        _say(f"terracekv {version()}")
        raise typer.Exit


@app.command()
def serve(config: ConfigFile = None, settings: Settings = None) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C."""
    from terracekv.daemon.__main__ import run

    loaded = _load(config, settings)
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
    door = Door(_load(config, settings).daemon.runtime_dir, PROMPT_S)
    _wait_until_ready(door, wait)
    answer = door.ask("GET", "/v1/status")
    if as_json:
        return _print_json(answer)
    from terracekv.daemon.cli_status import print_status

    print_status(answer)


@app.command()
def health(
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it serves, not only whether it lives.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Exit status 1 if the daemon is not well: for probes."""
    _door(config, settings).exchange("GET", "/readyz" if ready else "/healthz")


@app.command()
def lookup(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Ask how much of a prompt is here, where, and why not more."""
    question = {"namespace": namespace, "tokens": read_tokens(tokens)}
    answer = _door(config, settings).ask("POST", "/v1/lookup", question)
    if as_json:
        return _print_json(answer)
    _say(
        f"matched {answer['matched_blocks']} of {answer['asked_blocks']} blocks, {answer['matched_tokens']:,} tokens "
        f"({answer['block_tokens']} a block), {show(answer['bytes'])}, about {answer['load_ms']:.1f} ms to load"
    )
    for tier, counts in answer["tiers"].items():
        _say(f"  from {tier} or above: {counts['blocks']} blocks, {counts['tokens']:,} tokens")
    if answer["first_miss"]:
        _say(f"first miss: block {answer['first_miss']['index']}, {answer['first_miss']['reason']}")


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
    _print_done(_door(config, settings).ask("POST", "/v1/flush", question), as_json)


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
    _print_done(_door(config, settings).ask("POST", "/v1/pin", question), as_json)


@app.command()
def unpin(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Let go of what was pinned."""
    question = {"namespace": namespace, "tokens": read_tokens(tokens)}
    _print_done(_door(config, settings).ask("POST", "/v1/unpin", question), as_json)


@app.command()
def doctor(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Look at this machine and its daemon; say what to change.

    Exit status 1 if anything fails.
    """
    from terracekv.daemon.doctor import examine

    findings = list(examine(_load(config, settings)))
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            _say(f"{finding.state.upper():5}{finding.what}: {finding.says}")
            if finding.advice:
                _say(f"     -> {finding.advice}")
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
    for report in checked(_load(config, settings), tier):
        reports.append(report)
        if not as_json:
            for line in report.lines():
                _say(line)
    if as_json:
        _print_json([report.as_dict() for report in reports])
    raise typer.Exit(any(report.bad for report in reports))


@app.command()
def whatif(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Say what more memory would buy."""
    answer = _door(config, settings).ask("GET", "/v1/whatif")
    if as_json:
        return _print_json(answer)
    from terracekv.daemon.cli_simulate import print_whatif

    print_whatif(answer)


@app.command()
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
        block_bytes=parse_size(block_bytes),
        as_json=as_json,
        csv=csv,
        png=png,
    )


@app.command("config")
def show_config(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Print every setting in force and where it came from."""
    loaded = _load(config, settings)
    table = describe(resolve(loaded, survey(loaded)))
    if as_json:
        return _print_json(table)
    width = max(len(_shown(key, entry["value"])) for key, entry in table.items())
    for key, entry in table.items():
        _say(f"{key:20} {_shown(key, entry['value']):{width}}  {entry['source']}")


@bucket_commands.command("ls")
def list_bucket(
    namespace: NamespaceOrAll = None, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """List the blocks."""
    from terracekv.daemon.bucket_view import chosen, listing

    rows = listing(*chosen(_load(config, settings), namespace))
    if as_json:
        return _print_json(list(rows))
    for row in rows:
        typer.echo(
            f"{row['namespace_id'][:16]} {row['epoch']:>4} {row['key']}.{row['shard']} {show(row['bytes'])}"
            f" {age(row['age_s'])}"
        )


@bucket_commands.command("stat")
def measure_bucket(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Say what each namespace takes."""
    from terracekv.daemon.bucket_view import opened, spaces

    rows = spaces(opened(_load(config, settings).s3))
    if as_json:
        return _print_json(rows)
    for row in rows:
        typer.echo(
            f"{row['namespace_id']} epoch {row['epoch']}{'' if row['current'] else ' (flushed)'}: "
            f"{row['objects']:,} objects, {show(row['bytes'])}, {age(row['newest_s'])} to {age(row['oldest_s'])} old"
        )
    if not rows:
        typer.echo("no blocks")


@bucket_commands.command("verify")
def verify_bucket(
    namespace: NamespaceOrAll = None, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Read every block and check it. Exit status 1 if any is damaged."""
    from terracekv.daemon.bucket_view import chosen, verified

    good, bad = 0, []
    for row in verified(*chosen(_load(config, settings), namespace)):
        if row["problem"] is None:
            good += 1
        else:
            bad.append(row)
    if as_json:
        _print_json({"good": good, "damaged": bad})
    else:
        for row in bad:
            typer.echo(f"{row['namespace_id']} {row['key']}.{row['shard']}: {row['problem']}")
        typer.echo(f"{good:,} blocks are whole, {len(bad):,} are not")
    raise typer.Exit(bool(bad))


@bucket_commands.command("gc")
def sweep_bucket(
    dry: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    namespace: NamespaceOrAll = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Delete blocks older than s3.ttl, and those of flushed namespaces."""
    from terracekv.daemon.bucket_view import chosen, swept

    loaded = _load(config, settings)
    done = swept(*chosen(loaded, namespace), loaded.s3.ttl, dry)
    if as_json:
        return _print_json(done)
    typer.echo(
        f"{done['blocks']:,} blocks, {show(done['bytes'])} {'deleted' if done['deleted'] else 'would be deleted'}"
    )


def _load(file: Path | None, settings: list[str] | None) -> Config:
    flags = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} has no value", "write --set host.size=8GiB")
        flags[key.strip()] = value.strip()
    return load_config(file, flags)


def _door(file: Path | None, settings: list[str] | None) -> Door:
    door = Door(_load(file, settings).daemon.runtime_dir)
    door.greet()
    return door


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
    sizes = ("host.size", "host.slab", "daemon.queue", "disk.size", "disk.segment", "disk.free_floor", "s3.queue")
    return show(value) if key in sizes else json.dumps(value)


def _print_done(answer: dict[str, Any], as_json: bool) -> None:
    """What an order did, tier by tier, and what it did not do, reason by reason."""
    if as_json:
        return _print_json(answer)
    for tier, counts in answer["done"].items():
        _say(f"{tier}: " + (", ".join(f"{verb} {count:,}" for verb, count in counts.items()) or "nothing"))
    for reason, count in answer["skipped"].items():
        if count:
            _say(f"skipped {count:,}: {reason}")


def _print_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2))


def _fail(message: str, hint: str) -> None:
    _say(f"terracekv: {message}", err=True)
    if hint:
        _say(f"  hint: {hint}", err=True)
    sys.exit(1)


def _say(line: str, err: bool = False) -> None:
    typer.echo(printable(line), err=err)

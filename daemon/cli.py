"""The command ``terracekv``: run a daemon, or ask one that runs. The only ``import typer`` and ``import rich``.

Owns the terminal and the exit status: 0 done, 1 it could not be done, 2 the command line was wrong. Called by a
person's shell. Imports ``config``, ``http_client`` and ``errors``; what only one command needs (the daemon, the
doctor, tables) is imported in it, so that the others start at once and ``serve`` carries none of it along.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from terracekv.daemon.config import Config, describe, load_config, resolve, survey, version
from terracekv.daemon.http_client import Door, NotRunning
from terracekv.tiers.budget import show
from terracekv.tiers.errors import BadRequest, ConfigError, TerraceError

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
NamespaceId = Annotated[str | None, typer.Option("--namespace", "-n", help="Id in hex; without it, all.")]
Tokens = Annotated[str, typer.Argument(metavar="TOKENS", help="File with token ids (JSON or plain text), - for stdin.")]


def main() -> None:
    """Entry point. Whatever goes wrong is one line and a hint on stderr."""
    try:
        app()
    except TerraceError as error:
        _fail(error.message, error.hint)
    except OSError as error:
        _fail(str(error), "")


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        typer.echo(f"terracekv {version()}")
        raise typer.Exit


@app.command()
def serve(config: ConfigFile = None, settings: Settings = None) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C."""
    from terracekv.daemon.__main__ import run

    raise typer.Exit(run(_load(config, settings)))


@app.command()
def status(
    as_json: AsJson = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait up to so long for a daemon to be ready.")] = 0,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Show what a running daemon holds: tiers, hits, sessions, namespaces."""
    door = _door(config, settings)
    _wait_until_ready(door, wait)
    answer = door.ask("GET", "/v1/status")
    if as_json:
        return _print_json(answer)
    _print_status(answer)


@app.command()
def health(
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it serves, not only whether it lives.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Ask a daemon how it is, say nothing if it is well; exit status 1 if not. For the probes of containers."""
    _door(config, settings).exchange("GET", "/readyz" if ready else "/healthz")


@app.command()
def lookup(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Ask how many leading blocks of a prompt are here, where, and why not more."""
    question = {"namespace": namespace, "tokens": _read_tokens(tokens)}
    answer = _door(config, settings).ask("POST", "/v1/lookup", question)
    if as_json:
        return _print_json(answer)
    typer.echo(
        f"matched {answer['matched_blocks']} of {answer['asked_blocks']} blocks, {answer['matched_tokens']:,} tokens "
        f"({answer['block_tokens']} a block), {show(answer['bytes'])}, about {answer['load_ms']:.1f} ms to load"
    )
    for tier, counts in answer["tiers"].items():
        typer.echo(f"  from {tier} or above: {counts['blocks']} blocks, {counts['tokens']:,} tokens")
    if answer["first_miss"]:
        typer.echo(f"first miss: block {answer['first_miss']['index']}, {answer['first_miss']['reason']}")


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
    question = {"namespace": namespace, "tokens": _read_tokens(tokens), "ttl_s": ttl}
    _print_done(_door(config, settings).ask("POST", "/v1/pin", question), as_json)


@app.command()
def unpin(
    tokens: Tokens, namespace: Name, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Let go of what was pinned."""
    question = {"namespace": namespace, "tokens": _read_tokens(tokens)}
    _print_done(_door(config, settings).ask("POST", "/v1/unpin", question), as_json)


@app.command()
def doctor(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Look at this machine and at the daemon, if one runs; say what to change. Exit status 1 if anything fails."""
    from terracekv.daemon.doctor import examine

    findings = list(examine(_load(config, settings)))
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{finding.state.upper():5}{finding.what}: {finding.says}")
            if finding.advice:
                typer.echo(f"     -> {finding.advice}")
    raise typer.Exit(any(finding.state == "fail" for finding in findings))


@app.command("config")
def show_config(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Print every setting in force and where it came from."""
    loaded = _load(config, settings)
    table = describe(resolve(loaded, survey(loaded)))
    if as_json:
        return _print_json(table)
    width = max(len(_shown(key, entry["value"])) for key, entry in table.items())
    for key, entry in table.items():
        typer.echo(f"{key:20} {_shown(key, entry['value']):{width}}  {entry['source']}")


@bucket_commands.command("ls")
def list_bucket(
    namespace: NamespaceId = None, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """List the blocks."""
    from terracekv.daemon.bucket_view import listing, opened

    rows = listing(opened(_load(config, settings).s3), namespace)
    if as_json:
        return _print_json(list(rows))
    for row in rows:
        typer.echo(
            f"{row['namespace_id'][:16]} {row['epoch']:>4} {row['key']}.{row['shard']} {show(row['bytes'])}"
            f" {_age(row['age_s'])}"
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
            f"{row['objects']:,} objects, {show(row['bytes'])}, {_age(row['newest_s'])} to {_age(row['oldest_s'])} old"
        )
    if not rows:
        typer.echo("no blocks")


@bucket_commands.command("verify")
def verify_bucket(
    namespace: NamespaceId = None, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Read every block and check it. Exit status 1 if any is damaged."""
    from terracekv.daemon.bucket_view import opened, verified

    good, bad = 0, []
    for row in verified(opened(_load(config, settings).s3), namespace):
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
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Delete blocks older than s3.ttl, and those of flushed namespaces."""
    from terracekv.daemon.bucket_view import opened, swept

    s3 = _load(config, settings).s3
    done = swept(opened(s3), s3.ttl, dry)
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
    return Door(_load(file, settings).daemon.runtime_dir)


def _wait_until_ready(door: Door, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            door.exchange("GET", "/readyz")
            return
        except TerraceError as error:
            if time.monotonic() >= until:
                if seconds or isinstance(error, NotRunning):
                    raise
                return  # it runs, and its status says why it is not ready
        time.sleep(0.05)


def _print_status(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Nobody looks at the width of a pipe, and a table cut to 80 columns is of no use to grep.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    state = "ready" if answer["ready"] else f"not ready: {'; '.join(answer['not_ready'])}"
    console.print(f"TerraceKV {answer['version']}, process {answer['pid']}, up {_age(answer['uptime_s'])}, {state}")
    console.print(_lookups(answer["lookups"]))

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tier", "mode", "used", "", "of", "blocks", "leased", "hits", "misses", "evicted"):
        table.add_column(name, justify="left" if name in ("tier", "mode", "") else "right")
    for name, tier in answer["tiers"].items():
        used, capacity, counters = tier["used_bytes"], tier["capacity_bytes"], tier["counters"]
        of = show(capacity) if capacity or name != "s3" else "shared"
        filled = round(20 * used / capacity) if capacity else 0
        bar = Text("\u2588" * filled, style="cyan") + Text("\u2591" * (20 - filled), style="dim")
        counts = (tier["blocks"], tier["leased_blocks"], counters["hits"], counters["misses"])
        evicted = counters["evictions"].get("capacity", 0)
        numbers = (f"{count:,}" for count in (*counts, evicted))
        table.add_row(name, tier["mode"], show(used), bar, of, *numbers)
    console.print()
    console.print(table)
    for name, tier in answer["tiers"].items():
        if tier["last_error"]:
            console.print(f"{name}: last error: {tier['last_error']}", style="red")
    queue, dropped = answer["queue"], answer["lookups"]["writes_dropped"]
    console.print(
        f"write-through queue: {show(queue['bytes'])} of {show(queue['bytes_max'])}, {dropped:,} blocks dropped"
    )

    columns = {"model": "model", "namespace": "namespace_id", "tokens": "block_tokens", "block": "block_bytes"}
    columns |= {"dtype": "dtype", "shards": "shards", "epoch": "epoch"}
    _print_rows(console, "namespaces", answer["namespaces"], columns)
    columns = {"engine": "engine", "pid": "pid", "age": "age_s", "model": "model", "shard": "shard"}
    columns |= {"leased": "leased_blocks", "pending": "pending_blocks", "reserved": "reserved_blocks"}
    _print_rows(console, "sessions", answer["sessions"], columns)


def _print_rows(console: Any, title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    from rich.table import Table

    if not rows:
        console.print(f"no {title}")
        return
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    shown: dict[str, Callable[[Any], str]] = {
        "namespace_id": lambda value: str(value)[:16],
        "block_bytes": show,
        "age_s": _age,
        "shard": lambda value: "all" if value is None else str(value),
    }
    for row in rows:
        table.add_row(*(shown.get(key, str)(row[key]) for key in columns.values()))
    console.print()
    console.print(table)


def _lookups(counts: dict[str, Any]) -> str:
    asked, matched = counts["asked_blocks"], counts["matched_blocks"]
    share = f" ({matched / asked:.1%})" if asked else ""
    split = ", ".join(f"{tier} {blocks:,}" for tier, blocks in counts["matched"].items())
    return f"{counts['lookups']:,} lookups found {matched:,} of {asked:,} blocks{share}: {split}"


def _age(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s" if minute else f"{second} s"


def _read_tokens(source: str) -> list[int]:
    """Token ids as a JSON list, or as numbers between blanks, commas or line ends."""
    text = sys.stdin.read() if source == "-" else Path(source).read_text()
    words = re.sub(r"[\[\],]", " ", text).split()
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise BadRequest(
            f"{source} holds what is no token id: {error}", "write numbers, or a JSON list of them"
        ) from None


def _shown(key: str, value: Any) -> str:
    sizes = ("host.size", "host.slab", "daemon.queue", "disk.size", "disk.segment", "disk.free_floor", "s3.queue")
    return show(value) if key in sizes else json.dumps(value)


def _print_done(answer: dict[str, Any], as_json: bool) -> None:
    """What an order did, tier by tier, and what it did not do, reason by reason."""
    if as_json:
        return _print_json(answer)
    for tier, counts in answer["done"].items():
        typer.echo(f"{tier}: " + (", ".join(f"{verb} {count:,}" for verb, count in counts.items()) or "nothing"))
    for reason, count in answer["skipped"].items():
        if count:
            typer.echo(f"skipped {count:,}: {reason}")


def _print_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2))


def _fail(message: str, hint: str) -> None:
    typer.echo(f"terracekv: {message}", err=True)
    if hint:
        typer.echo(f"  hint: {hint}", err=True)
    sys.exit(1)

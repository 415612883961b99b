"""The commands ``terracekv s3``: look into the bucket of the s3 tier.

Owns nothing. Run by ``cli``. Imports typer, ``cli_options`` and ``cli_text``; the bucket is imported by the command
that looks into it, so that the others start at once.
"""

from typing import Annotated

import typer

from terracekv.daemon.cli_options import AsJson, ConfigFile, NamespaceOrAll, Settings, load, print_json
from terracekv.daemon.cli_text import age
from terracekv.tiers.budget import show

bucket_commands = typer.Typer(help="Look into the bucket of the s3 tier.", no_args_is_help=True)


@bucket_commands.command("ls")
def list_bucket(
    namespace: NamespaceOrAll = None, as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None
) -> None:
    """List the blocks."""
    from terracekv.daemon.bucket_view import chosen, listing

    rows = listing(*chosen(load(config, settings), namespace))
    if as_json:
        return print_json(list(rows))
    for row in rows:
        typer.echo(
            f"{row['namespace_id'][:16]} {row['epoch']:>4} {row['key']}.{row['shard']} {show(row['bytes'])}"
            f" {age(row['age_s'])}"
        )


@bucket_commands.command("stat")
def measure_bucket(as_json: AsJson = False, config: ConfigFile = None, settings: Settings = None) -> None:
    """Say what each namespace takes."""
    from terracekv.daemon.bucket_view import opened, spaces

    rows = spaces(opened(load(config, settings).s3))
    if as_json:
        return print_json(rows)
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
    for row in verified(*chosen(load(config, settings), namespace)):
        if row["problem"] is None:
            good += 1
        else:
            bad.append(row)
    if as_json:
        print_json({"good": good, "damaged": bad})
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

    loaded = load(config, settings)
    done = swept(*chosen(loaded, namespace), loaded.s3.ttl, dry)
    if as_json:
        return print_json(done)
    typer.echo(
        f"{done['blocks']:,} blocks, {show(done['bytes'])} {'deleted' if done['deleted'] else 'would be deleted'}"
    )

"""``terracekv bench``: what each tier gains here, for one model, in a table and a sentence.

Owns nothing. Run by ``cli``. Imports typer, ``cli_options`` and ``cli_text``; what measures is imported when
it is asked for.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terracekv.daemon.cli_options import (
    AsJson,
    ConfigFile,
    Settings,
    ended_by_sigterm,
    flags_of,
    load,
    print_json,
    say,
)
from terracekv.tiers.budget import show
from terracekv.tiers.errors import BadRequest

if TYPE_CHECKING:
    from terracekv.daemon.payoff import Report
    from terracekv.daemon.payoff_cold import Cold

ENGINE_ROUNDS = 3
Geometry = Annotated[str | None, typer.Option(metavar="NAME", help="A model's KV, as Llama-3.1-8B (the default).")]
Lengths = Annotated[str, typer.Option("--tokens", metavar="N,N", help="Lengths of prompts; k is 1024.")]


def bench(
    geometry: Geometry = None,
    tp: Annotated[int, typer.Option("--tp", min=1, max=64, help="Tensor-parallel ranks; one is measured.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, max=1000, help="In place of a name.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=1000, help="Without it the KV is a latent (MLA).")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=65536, help="Numbers in a head, or in the latent.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32, fp8 or int8.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, max=65536, help="Tokens in a block.")] = 256,
    tokens: Lengths = "1k,8k,32k",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Loads of each length; the median counts.")] = 5,
    engine: Annotated[str | None, typer.Option(metavar="URL", help="A running engine, to measure it cold.")] = None,
    model: Annotated[str | None, typer.Option(help="The engine's name for its model.")] = None,
    engine_tokens: Annotated[str, typer.Option(metavar="N,N", help="Two lengths of cold prompts.")] = "512,4k",
    engine_token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Bearer token for the engine.")] = None,
    vocabulary: Annotated[int, typer.Option(min=2, help="Token ids below this are drawn for the engine.")] = 30000,
    prefill_rate: Annotated[
        float | None, typer.Option(metavar="TOKENS/S", min=1e-6, help="How fast the engine computes, if you know.")
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Measure whether offload pays here.

    A prompt's blocks come back from each tier that the settings name, forced out of the tiers above, through a daemon
    and a client of its own: beside a running daemon, whose blocks it does not touch. Cold prompts are measured on an
    engine that runs (--engine, --model), or taken from --prefill-rate; without either there is no cold column.
    """
    from terracekv.daemon import payoff, payoff_models

    with ended_by_sigterm():
        shape = payoff_models.geometry_of(geometry, layers=layers, heads=kv_heads, dim=head_dim, dtype=dtype, ranks=tp)
        lengths, cold_lengths = _lengths("--tokens", tokens), _lengths("--engine-tokens", engine_tokens)
        loaded = load(config, settings)
        payoff.that_fit(loaded, shape, block_tokens, lengths)  # or the engine is bothered for nothing
        cold = _cold(engine, model, prefill_rate, cold_lengths, vocabulary, engine_token_file)
        report = payoff.measure(
            loaded,
            config,
            flags_of(settings),
            shape,
            block_tokens=block_tokens,
            lengths=lengths,
            rounds=rounds,
            cold=cold,
            say=_progress,
        )
    if as_json:
        return print_json(report.as_dict())
    for line in lines_of(report):
        say(line)


def lines_of(report: "Report") -> list[str]:
    """For a person."""
    geometry, cold = report.geometry, report.cold
    shape = f"{geometry.heads} KV heads x {geometry.dim}" if geometry.heads else f"a latent of {geometry.dim}"
    lines = [
        f"{geometry.name}: {geometry.layers} layers, {shape}, {geometry.dtype}: {show(geometry.token_bytes)} a token, "
        f"{show(report.block_bytes)} a block of {report.block_tokens} tokens",
        f"memory to memory, one thread: {report.memcpy_bytes_per_s / 1e9:.2f} GB/s; "
        f"medians of {report.rounds} loads, in ms",
        "",
        _row("", [f"{length:,} tok" for length in report.lengths], "GB/s", "of memcpy", "pays"),
    ]
    if cold is not None:
        lines.append(_row("cold", [f"{cold.ms(length):,.1f}" for length in report.lengths]))
    for name, tier in report.tiers.items():
        if tier.bytes_per_s is None or tier.of_memcpy is None:
            lines.append(_row(name, ["-"] * len(report.lengths)))
            continue
        pays = "?" if cold is None else "no" if tier.pays_from is None else f"from {tier.pays_from:,}"
        cells = [f"{tier.ms[length]:,.1f}" for length in report.lengths]
        lines.append(_row(name, cells, f"{tier.bytes_per_s / 1e9:.2f}", f"{tier.of_memcpy:.0%}", pays))
    lines.append("")
    if cold is not None:
        lines.append(f"cold: {cold.said}")
    for name, tier in report.tiers.items():
        lines += [f"{name}: {text}" for text in dict.fromkeys((tier.verdict, tier.note)) if text]
    lines += [f"{name}: not configured" for name in ("disk", "s3") if name not in report.tiers]
    return [*lines, *report.notes, report.verdict]


def _row(name: str, cells: list[str], *rest: str) -> str:
    figures = "".join(f"{cell:>12}" for cell in cells)
    return f"{name:5}{figures}{''.join(f'{cell:>11}' for cell in rest)}".rstrip()


def _cold(
    engine: str | None,
    model: str | None,
    prefill_rate: float | None,
    lengths: list[int],
    vocabulary: int,
    token_file: Path | None,
) -> "Cold | None":
    from terracekv.daemon import payoff_cold

    if engine is not None and prefill_rate is not None:
        raise BadRequest("--engine and --prefill-rate are two answers to one question", "give one of them")
    if prefill_rate is not None:
        return payoff_cold.of_rate(prefill_rate)
    if engine is None:
        return None
    if model is None:
        raise BadRequest("--engine needs --model", "as the engine calls it: see its /v1/models")
    token = _token(token_file) if token_file is not None else ""
    return payoff_cold.measured(
        engine, model, lengths=lengths, rounds=ENGINE_ROUNDS, vocabulary=vocabulary, token=token, say=_progress
    )


def _token(file: Path) -> str:
    """What the engine wants to be told. The error does not show it."""
    token = file.read_bytes().strip()
    if not re.fullmatch(rb"[!-~]+", token):
        raise BadRequest(f"--engine-token-file {file} has no token", "write the token, and nothing else, in one line")
    return token.decode()


def _lengths(name: str, text: str) -> list[int]:
    """``1k,8k`` or ``1024,8192``."""
    lengths = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,7})(k?)\s*", word, re.IGNORECASE)
        if match is None:
            raise BadRequest(f"{name}: {word!r} is no number of tokens", "write 1k,8k,32k or 1024,8192,32768")
        lengths.append(int(match[1]) * (1024 if match[2] else 1))
    return lengths


def _progress(line: str) -> None:
    say(f"  {line}", err=True)

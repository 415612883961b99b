"""How long a prompt takes an engine that has none of it: the time to its first token, over its OpenAI-compatible door.

Owns nothing. Called by ``payoff`` in the command's own process. Imports the standard library and ``errors``.

The prompts are of random tokens, so neither the engine nor its store has them. Two lengths tell what a prompt costs
whatever its length (queue, scheduler, HTTP) from what each token costs; only the latter is saved by a hit.
"""

import http.client
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from urllib.parse import urlsplit

from terracekv.tiers.errors import BadRequest, TerraceError

ANSWER_S = 300.0
ENDING = b"[DONE]"
SAID_MAX = 500
"""Of what the engine says against a prompt, so much is passed on."""
SEE = "see --model, --engine-tokens (its context), --vocabulary (its token ids), --engine-token-file"
NO_DOOR = "is this an OpenAI-compatible door?"


class EngineTrouble(TerraceError):
    """The engine does not answer as such a server does."""

    kind = "engine"


@dataclass(frozen=True, slots=True)
class Cold:
    """Milliseconds to the first token of ``n`` tokens: ``base_ms + n * token_ms``. ``said`` is where that is from."""

    base_ms: float
    token_ms: float
    said: str
    measured: dict[int, float]

    def ms(self, tokens: int) -> float:
        """Of a prompt of which nothing is known."""
        return self.base_ms + tokens * self.token_ms

    def saved_ms(self, tokens: int) -> float:
        """What a hit of so many tokens need not compute."""
        return tokens * self.token_ms


def of_rate(tokens_per_s: float) -> Cold:
    """As somebody who knows it says."""
    return Cold(0.0, 1e3 / tokens_per_s, f"--prefill-rate {tokens_per_s:g} tokens/s", {})


def measured(
    url: str,
    model: str,
    *,
    lengths: Sequence[int],
    rounds: int,
    vocabulary: int,
    token: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Cold:
    """Ask the engine. EngineTrouble, with its own words, when that does not work."""
    short, long = min(lengths), max(lengths)
    if short == long or short < 1:
        raise BadRequest("--engine-tokens needs two different lengths", "such as --engine-tokens 512,4096")
    draw = random.SystemRandom()
    _first_token_s(url, model, _prompt(draw, 16, vocabulary), token)  # whatever it does once, it does now
    medians = {}
    for length in (short, long):
        spent = [_first_token_s(url, model, _prompt(draw, length, vocabulary), token) for _ in range(rounds)]
        medians[length] = statistics.median(spent) * 1e3
        say(f"cold, {length:,} tokens: {medians[length]:,.0f} ms to the first token")
    token_ms = (medians[long] - medians[short]) / (long - short)
    if token_ms <= 0:
        raise EngineTrouble(
            f"{long:,} tokens took {medians[long]:.0f} ms and {short:,} took {medians[short]:.0f} ms: no rate in that",
            "use lengths further apart (--engine-tokens 512,8192), while nobody else uses the engine",
        )
    said = f"{model} at {url}: {1e3 / token_ms:,.0f} tokens/s, and {max(0.0, medians[short] - short * token_ms):.0f} ms"
    return Cold(max(0.0, medians[short] - short * token_ms), token_ms, f"{said} whatever the length", medians)


def _prompt(draw: random.Random, tokens: int, vocabulary: int) -> list[int]:
    """The first hundred ids are often special ones."""
    return [draw.randrange(min(100, vocabulary - 1), vocabulary) for _ in range(tokens)]


def _first_token_s(url: str, model: str, prompt: list[int], token: str) -> float:
    """Seconds from the request to the first chunk of the stream that carries a choice."""
    connection, path = _door(url)
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        content = json.dumps(body).encode()
        until, begun = monotonic() + ANSWER_S, perf_counter()
        connection.request("POST", path, content, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(SAID_MAX).decode(errors="replace")
            raise EngineTrouble(
                f"the engine answered {answer.status} to {path} with {len(prompt):,} tokens: {text}", SEE
            )
        spent = None
        for line in answer:
            field, _, data = line.partition(b":")  # a line without a field is a comment
            if field == b"data" and data.strip() == ENDING:
                break  # some leave the connection open
            if field == b"data" and spent is None and _has_choice(data):
                spent = perf_counter() - begun
            if monotonic() > until:
                raise EngineTrouble(f"the engine's stream does not end: one token was asked for at {path}", NO_DOOR)
        if spent is None:
            raise EngineTrouble(f"the engine's stream at {path} carried no token", NO_DOOR)
        return spent
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineTrouble(
            f"the engine at {url}: {error!r}", "see that it runs, and serves /v1/completions"
        ) from error
    finally:
        connection.close()


def _door(url: str) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not open yet, and the path to ask there."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", "http")
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"--engine {url} is no address: {error}", "write http://localhost:8000") from None
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise BadRequest(f"--engine {url} is no address", "write http://localhost:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    return kind(parts.hostname, port, timeout=ANSWER_S), path


def _has_choice(data: bytes) -> bool:
    """Whether a chunk of the stream carries a choice. EngineTrouble when it carries an error, or is none."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        said = data[:80].decode(errors="replace").strip()
        raise EngineTrouble(f"the engine's stream carried {said!r}, which is no JSON", NO_DOOR) from None
    if not isinstance(chunk, dict):
        return False
    if error := chunk.get("error"):
        text = error.get("message", error) if isinstance(error, dict) else error
        raise EngineTrouble(f"the engine answered with an error in its stream: {str(text)[:SAID_MAX]}", SEE)
    return bool(chunk.get("choices"))

"""An engine for the demo: a process with the small model, asked in JSON, a line for a line.

Started by ``bench/demo.py`` with the daemon's socket and the document as arguments; ends when its input does.
Imports torch, transformers and the connector.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from terracekv.bench import small_model
from terracekv.bench.models import NotFetched
from terracekv.connector.transformers import TerraceCache

BLOCK_TOKENS = 32
"""Smaller than a GPU engine would choose: what is left of the last block is computed anew, at 2 ms a token here."""
DOCUMENT_TOKENS = 2000
ANSWER_TOKENS = 16
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": ANSWER_TOKENS}
JOIN_S = 30.0
BUDGET_MS = 2000
"""Of a lookup. An engine in service keeps the default of 20 ms and computes instead; here a busy machine would only
spoil the picture."""


class Engine:
    """One model, asked with and without the store."""

    def __init__(self, socket: str, document: Path) -> None:
        self.model, self.tokenizer = small_model.load()
        self.cache = TerraceCache(
            self.model,
            socket=socket,
            block_tokens=BLOCK_TOKENS,
            name=small_model.NAME,
            lookup_budget_ms=BUDGET_MS,
        )
        tokens = self.tokenizer(document.read_text())["input_ids"][:DOCUMENT_TOKENS]
        self.document = self.tokenizer.decode(tokens)

    def join(self) -> dict[str, Any]:
        """Wait until the daemon answers. A session that has ended is found out by asking; a new one is sought then."""
        assert self.cache.client is not None, self.cache.unfit
        client, until = self.cache.client, time.monotonic() + JOIN_S
        while True:
            client.lookup(client.keys([0] * BLOCK_TOKENS))
            if client.joined:
                return {}
            if time.monotonic() > until:
                raise TimeoutError(f"no session after {JOIN_S} s: {client.last_trouble}")
            time.sleep(0.01)

    def plain(self, question: str) -> dict[str, Any]:
        """The answer without the store: transformers alone."""
        prompt = self._prompt(question)
        clock = _Clock()
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=[clock], **SETTINGS
        )
        return {"ttft_ms": clock.ttft_ms, "computed": prompt.shape[1], **self._answer(prompt, output)}

    def cached(self, question: str) -> dict[str, Any]:
        """The answer with the store, and what it took."""
        prompt = self._prompt(question)
        output, report = self.cache.generate(prompt, attention_mask=torch.ones_like(prompt), **SETTINGS)
        return {
            "ttft_ms": report.ttft_ms,
            "lookup_ms": report.lookup_ms,
            "load_ms": report.load_ms,
            "computed": report.computed_tokens,
            "loaded": report.loaded_tokens,
            "stored_blocks": report.stored_blocks,
            "why": report.why,
            **self._answer(prompt, output),
        }

    def _prompt(self, question: str) -> torch.Tensor:
        chat = [{"role": "user", "content": f"{self.document}\n\n{question}"}]
        encoded = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: torch.Tensor = encoded["input_ids"]
        return ids

    def _answer(self, prompt: torch.Tensor, output: torch.Tensor) -> dict[str, Any]:
        text = self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        return {"text": text, "prompt": prompt.shape[1]}


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Asked after each token; the first time is the time to the first token."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.ttft_ms = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.ttft_ms = self.ttft_ms or (time.perf_counter() - self._started) * 1e3
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Answer until the input ends. Whatever libraries print goes to the error output: the other is for answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    logging.getLogger("terracekv").setLevel(logging.ERROR)  # that the daemon goes away is part of the show
    try:
        engine = Engine(sys.argv[1], Path(sys.argv[2]))
    except NotFetched as error:
        sys.exit(str(error))
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "join": engine.join,
        "plain": engine.plain,
        "cached": engine.cached,
    }
    print(json.dumps({"threads": torch.get_num_threads()}), file=answers)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(verbs[verb](*arguments)), file=answers)
    engine.cache.close()

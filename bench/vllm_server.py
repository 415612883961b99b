"""``vllm serve`` as a process of its own, on a free port of the loopback, asked by HTTP with the answer streamed.

Owns the server and all that it starts: they end with the ``with`` block. Used by tests and measurements. Standard
library only. The server is started as a module, since the command of vLLM's CPU wheel looks for a package named vllm.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terracekv.bench.vllm_flags import environment as vllm_environment
from terracekv.bench.vllm_flags import transfer

START_S = 240.0
END_S = 30.0
REST_S = 10.0
ASK_S = 600.0
NAME = "small"


@dataclass(frozen=True, slots=True)
class Reply:
    """``ttft_s`` runs from the request to the first piece of text."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


class Server:
    """An engine behind the OpenAI API. Without ``socket`` it has no connector."""

    def __init__(
        self,
        model: Path,
        log: Path,
        socket: Path | None = None,
        *,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        python: Path | None = None,
        **flags: Any,
    ) -> None:
        """``options`` go to the connector; ``flags`` to vLLM, underscores for hyphens. ``python``: of another
        environment that has vLLM."""
        self.log = log
        self._python = str(python or sys.executable)
        self._environment = vllm_environment() | (environment or {})
        self.port = 0
        wanted: dict[str, Any] = {
            "model": model,
            "served_model_name": NAME,
            "host": "127.0.0.1",
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4096,
            "kv_transfer_config": None if socket is None else json.dumps(transfer(socket, **(options or {}))),
        } | flags
        self._flags = ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        for name, value in wanted.items():
            if value is not None:
                self._flags += [f"--{name.replace('_', '-')}", str(value)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> float:
        """Start, and wait until it is healthy; the seconds that took."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        started = time.monotonic()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "vllm.entrypoints.openai.api_server", "--port", str(self.port), *self._flags],
                cwd=self.log.parent,
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() - started > START_S:
                raise RuntimeError(f"vLLM did not start:\n{self.tail()}")
            time.sleep(0.1)
        return time.monotonic() - started

    def stop(self) -> None:
        """End it, and whatever of its own processes it leaves. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        until = time.monotonic() + REST_S
        with contextlib.suppress(ProcessLookupError):  # there is nobody left
            while time.monotonic() < until:  # who cleans up after the others ends last
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def ask(self, content: str, new: int = 16, **body: Any) -> Reply:
        """The greedy answer to one message of a chat."""
        asked = {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | body
        text, first = list[str](), 0.0
        usage: dict[str, Any] = {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_S)) as connection:
            started = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        text.append(piece)
            ended = time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Reply("".join(text), usage["prompt_tokens"], cached, (first or ended) - started, ended - started)

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``, added up over all labels."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            found: dict[str, float] = {}
            for name, value in re.findall(
                r"^([\w:]+)(?:\{.*\})? (\S+)$", connection.getresponse().read().decode(), re.M
            ):
                found[name] = found.get(name, 0.0) + float(value)
            return found

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _healthy(self) -> bool:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except OSError:
            return False

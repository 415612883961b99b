"""``terracekv bench``: every tier is made to give a prompt back, beside what it takes to compute that."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from terracekv.connector.payoff import looks_like_kv
from terracekv.daemon.payoff import break_even
from terracekv.daemon.payoff_cold import EngineTrouble, measured, of_rate
from terracekv.daemon.payoff_models import Geometry, geometry_of
from terracekv.tests.harness import Daemon, until
from terracekv.tiers.codec import encode
from terracekv.tiers.codec_id import codec_for
from terracekv.tiers.errors import BadRequest

COMMAND = [sys.executable, "-c", "from terracekv.daemon.cli import main; main()", "bench"]
SMALL = "--layers 2 --kv-heads 2 --head-dim 16 --block-tokens 16 --tokens 64,256 --rounds 2".split()


def environ(runtime: Path, state: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TERRACEKV_")}
    kept |= {"TERRACEKV_DAEMON_RUNTIME_DIR": str(runtime), "TERRACEKV_DAEMON_STATE_DIR": str(state)}
    kept |= {"TERRACEKV_DISK_SEGMENT": "1MiB", "TERRACEKV_DISK_FREE_FLOOR": "0", "COLUMNS": "80"}
    return kept | {f"TERRACEKV_{name}": value for name, value in more.items()}


def bench(at: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=at, timeout=100)


def everything(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.mark.fault(121)
def test_each_tier_gives_a_prompt_back_beside_a_daemon_that_notices_nothing(shm_dir: Path, tmp_path: Path) -> None:
    with Daemon(shm_dir / "run", tmp_path / "home") as daemon, daemon.client() as engine:
        keys = engine.chain(1, 10)
        engine.put(keys, durable=True)
        at = environ(daemon.runtime, tmp_path / "home" / "state")
        before, lookups = everything(shm_dir, tmp_path), daemon.http("/v1/status")[1]["lookups"]["lookups"]
        done = bench(at, *SMALL, "--prefill-rate", "1000", "--json")
        assert done.returncode == 0, done.stderr
        assert everything(shm_dir, tmp_path) == before
        assert daemon.http("/v1/status")[1]["lookups"]["lookups"] == lookups and engine.get(keys).blocks == 10
    report = json.loads(done.stdout)
    assert (report["token_bytes"], report["block_bytes"]) == (256, 4096) and report["lengths"] == [64, 256]
    assert list(report["tiers"]) == ["host", "disk"]
    for tier in report["tiers"].values():
        assert tier["ms"].keys() == {"64", "256"} and min(tier["ms"].values()) > 0
        assert tier["of_memcpy"] == pytest.approx(tier["bytes_per_s"] / report["memcpy_bytes_per_s"])
    assert report["cold"]["token_ms"] == 1.0 and report["verdict"].startswith("offload pays here, down to disk, from ")


@pytest.mark.fault(121)
def test_a_person_reads_a_table_and_a_sentence_and_no_figure_that_nobody_measured(
    shm_dir: Path, tmp_path: Path
) -> None:
    at = environ(shm_dir / "run", tmp_path / "state")
    done = bench(at, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["64", "tok", "256", "tok", "GB/s", "of", "memcpy", "pays"] in lines
    rows = {line[0]: line for line in lines if line}
    assert "cold" not in rows and rows["host"][-1] == rows["disk"][-1] == "?"
    assert "s3: not configured" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("tokens given back a second, at 256: host ")
    assert "--engine http" in done.stdout and "--prefill-rate" in done.stdout
    assert not everything(shm_dir, tmp_path), "folders that the bench made are gone"
    slow = bench(at, *SMALL, "--prefill-rate", "1e9")
    assert slow.stdout.splitlines()[-1].startswith("offload does not pay here"), slow.stdout
    assert "does not pay up to 256 tokens" in slow.stdout


@pytest.mark.fault(121)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_broken_off_it_leaves_nothing_behind(shm_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    at = environ(shm_dir / "run", tmp_path / "state")
    process = subprocess.Popen(
        [*COMMAND, *SMALL[:-2], "--rounds", "100"], env=at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        until(lambda: list(shm_dir.glob("terracekv-bench-*/run/engine.sock")), "the bench has a daemon")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors
    assert not everything(shm_dir, tmp_path)


def test_what_does_not_fit_is_left_out_and_said(shm_dir: Path, tmp_path: Path) -> None:
    at = environ(shm_dir / "run", tmp_path / "state", DISK_ENABLED="false")
    done = bench(at, *SMALL[:-4], "--tokens", "64,99999999", "--rounds", "1", "--layers", "64", "--json")
    report = json.loads(done.stdout)
    assert report["lengths"] == [64] and report["notes"][0].startswith("99,999,984 tokens are left out, memory: ")
    done = bench(at, *SMALL[:-4], "--tokens", "99999999", "--layers", "64")
    assert done.returncode == 1 and "no prompt fits here" in done.stderr and "--tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--geometry", "Llama-3.1-8X"), "did you mean Llama-3.1-8B?"),
        (("--layers", "2"), "--head-dim"),
        (("--tokens", "1k,x"), "'x' is no number of tokens"),
        (("--engine", "http://127.0.0.1:1"), "--engine needs --model"),
        (("--engine", "http://127.0.0.1:1", "--model", "m"), "the engine at http://127.0.0.1:1"),
        (("--engine", "http://127.0.0.1:99999", "--model", "m"), "--engine http://127.0.0.1:99999 is no address"),
        (("--engine", "http://[::1", "--model", "m"), "--engine http://[::1 is no address"),
        (("--prefill-rate", "1", "--engine", "e"), "two answers to one question"),
        (("--dtype", "int5"), "it is one of bfloat16"),
        (("--geometry", "Llama-3.1-8B", "--tp", "3"), "--tp 3 does not divide 8"),
    ],
)
def test_a_wrong_question_is_one_clear_line(
    shm_dir: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = bench(environ(shm_dir / "run", tmp_path / "state"), "--tokens", "256", *arguments)
    assert done.returncode == 1 and done.stdout == "" and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", b"sesame\nopen", b" \n"])
def test_a_file_without_a_token_for_the_engine_is_said_and_not_shown(
    shm_dir: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "token").write_bytes(content)
    asked = ("--tokens", "256", "--engine", "http://127.0.0.1:1", "--model", "m")
    at = environ(shm_dir / "run", tmp_path / "state")
    done = bench(at, *asked, "--engine-token-file", str(tmp_path / "token"))
    assert done.returncode == 1 and f"{tmp_path / 'token'} has no token" in done.stderr
    assert "Traceback" not in done.stderr and "sesame" not in done.stderr


def test_a_daemon_that_ends_at_its_start_is_told_by_what_it_said(shm_dir: Path, tmp_path: Path) -> None:
    s3 = {"S3_ENABLED": "true", "S3_BUCKET": "blocks", "S3_ENDPOINT": "http://127.0.0.1:1"}
    s3 |= {"S3_CREDENTIALS_FILE": str(tmp_path / "nowhere")}
    done = bench(environ(shm_dir / "run", tmp_path / "state", **s3), *SMALL)
    assert done.returncode == 1 and "the bench's daemon ended: " in done.stderr and "nowhere" in done.stderr
    assert "mend what it names" in done.stderr and "idle" not in done.stderr


def test_what_a_token_takes_is_as_the_models_have_it() -> None:
    def named(name: str, ranks: int = 1) -> Geometry:
        return geometry_of(name, layers=None, heads=None, dim=None, dtype=None, ranks=ranks)

    assert named("llama-3.1-8b").token_bytes == 131_072
    assert named("Llama-3.1-70B", 8).token_bytes == 40_960
    assert named("Qwen3-30B-A3B", 8).heads == 1, "fewer heads than ranks are held more than once"
    assert named("DeepSeek-V3", 8).token_bytes == named("DeepSeek-V3").token_bytes == 70_272
    with pytest.raises(BadRequest):
        named("Llama-3.1-8B", 3)


def test_it_pays_from_where_the_time_saved_is_the_time_of_the_load() -> None:
    points = {1000: 60.0, 2000: 110.0}  # 10 ms and 0.05 ms a token
    assert break_even(points, of_rate(10_000), 16) == 208, "10 / (0.1 - 0.05) is 200, and blocks are whole"
    assert break_even(points, of_rate(20_000), 16) is None and break_even(points, of_rate(1e9), 16) is None
    assert break_even({1000: 60.0, 2000: 70.0}, of_rate(20_000), 16) == 1264, "between 1,000 and 2,000 tokens"
    assert break_even({64: 0.8, 256: 0.6}, of_rate(1e9), 16) is None, "noise is no trend, and nothing is claimed of it"
    assert break_even({64: 0.8, 256: 0.6}, of_rate(1000), 16) == 16
    assert break_even({1000: 10.0}, of_rate(10_000), 16) == 112, "of one length all may be what each load costs"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_stored_compresses_as_kv_does(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terracekv.connector.payoff.PIECE_BYTES", 100_001)
    plain = memoryview(looks_like_kv(dtype, 2, 1 << 20))
    coded = encode(codec_for(dtype), plain, memoryview(bytearray(2 << 20)))
    assert coded is not None and 1.15 < len(plain) / coded < 1.7


class Engine:
    """Streams a completion as OpenAI's API does, by a clock of its own: each prompt takes 0.1 s and 1 ms a token, and
    what comes after the first token takes long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[dict[str, Any]] = []
        self.port = 0
        self.refuse = False
        self.looked = threading.Event()
        self._reads = 0
        self.lies = b""
        """Sent in place of an answer."""
        self.ends = True

    def clock(self) -> float:
        """Read at the start of a request and at its first token."""
        self._reads += 1
        now = self.now
        if self._reads % 2 == 0:
            self.looked.set()
        return now

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body | {"authorization": request.headers.get("Authorization")})
        if self.refuse:
            return web.json_response({"error": {"message": "maximum context length is 8"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.lies:
            await response.write(b"data: %b\n\ndata: [DONE]\n\n" % self.lies)
            return response
        await response.write(b": still computing\n\n")
        self.now += 0.1 + 1e-3 * len(body["prompt"])
        self.looked.clear()
        await response.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
        while not self.looked.is_set() and self.ends:
            await asyncio.sleep(0.001)
        self.now += 1000.0
        while not self.ends:
            await response.write(b'data: {"choices": [{"index": 0, "text": "and"}]}\n\n')
            await asyncio.sleep(0.01)
        await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n')
        return response


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", engine.complete)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.port = runner.addresses[0][1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield engine
    finally:
        engine.looked.set()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_engine_that_does_not_end_its_stream_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Engine()) as engine:
        monkeypatch.setattr("terracekv.daemon.payoff_cold.monotonic", lambda: engine.now)
        engine.ends = False
        try:
            with pytest.raises(EngineTrouble, match="does not end"):
                measured(f"http://127.0.0.1:{engine.port}", "m", lengths=[400, 100], rounds=1, vocabulary=500)
        finally:
            engine.ends = True


@pytest.mark.fault(121)
def test_a_cold_prompt_takes_until_its_first_token_and_is_never_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Engine()) as engine:
        monkeypatch.setattr("terracekv.daemon.payoff_cold.perf_counter", engine.clock)
        at = f"http://127.0.0.1:{engine.port}"
        cold = measured(f"{at}/v1", "m", lengths=[400, 100], rounds=3, vocabulary=500, token="secret")
    assert cold.base_ms == pytest.approx(100.0) and cold.token_ms == pytest.approx(1.0)
    assert cold.measured == {100: pytest.approx(200.0), 400: pytest.approx(500.0)}
    assert cold.ms(1000) == pytest.approx(1100.0) and cold.saved_ms(1000) == pytest.approx(1000.0)
    asked = [body for body in engine.asked if len(body["prompt"]) in (100, 400)]
    assert len(asked) == 6 and len({tuple(body["prompt"][:16]) for body in asked}) == 6
    assert all(body["max_tokens"] == 1 and body["stream"] and body["model"] == "m" for body in asked)
    assert {body["authorization"] for body in asked} == {"Bearer secret"}
    assert all(100 <= token < 500 for body in asked for token in body["prompt"])


@pytest.mark.fault(121)
def test_what_the_engine_says_against_a_prompt_is_passed_on() -> None:
    with running(Engine()) as engine:
        engine.refuse = True
        with pytest.raises(EngineTrouble, match="400.*maximum context length is 8"):
            measured(f"http://127.0.0.1:{engine.port}", "m", lengths=[4, 8], rounds=1, vocabulary=500)


@pytest.mark.fault(121)
@pytest.mark.parametrize(
    ("lies", "says"),
    [
        (b'{"error": {"message": "the context is 8", "code": 400}}', "error in its stream: the context is 8"),
        (b'{"error": "no"}', "error in its stream: no"),
        (b'{"choices": [', "carried '.*', which is no JSON"),
        (b"[" * 10_000, "which is no JSON"),
        (b"\xff\xfe", "which is no JSON"),
        (b"[1, 2]", "carried no token"),
        (b"null", "carried no token"),
    ],
)
def test_a_stream_that_is_none_or_ends_in_an_error_says_so(lies: bytes, says: str) -> None:
    with running(Engine()) as engine:
        engine.lies = lies
        with pytest.raises(EngineTrouble, match=says):
            measured(f"http://127.0.0.1:{engine.port}", "m", lengths=[4, 8], rounds=1, vocabulary=500)

"""The TCP door over TLS: what it speaks, whose certificate it shows, and that a new one needs no restart."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
import uvloop

from terracekv.daemon import handshakes
from terracekv.daemon.tls import Tls
from terracekv.tests import people as opened
from terracekv.tests.harness import Daemon, until
from terracekv.tests.people import People, keys_of, people, settings, url, whole
from terracekv.tiers.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
(KEY,) = keys_of(1)
TOKEN = "a secret of enough length"


def certify(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert), *(more or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


T = TypeVar("T")
Scenario = Callable[[People], Awaitable[None]]


def over_tls(folder: Path, scenario: Scenario, cert: Path, key: Path, loop: str = "uvloop") -> None:
    async def run() -> None:
        values = {"daemon_http": "127.0.0.1:0", "access_tls_cert": str(cert), "access_tls_key": str(key)}
        async with people(folder, **values) as there:  # type: ignore[arg-type]
            await scenario(there)

    uvloop.run(run()) if loop == "uvloop" else asyncio.run(run())


@contextlib.asynccontextmanager
async def client_of(p: People, cert: Path) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=trusting(cert))
    async with aiohttp.ClientSession(f"https://localhost:{p.door.port}", connector=connector) as client:
        yield client
    await asyncio.sleep(0.05)  # aiohttp lets go of a TLS connection a little later


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_blocks_go_both_ways_over_tls(shm_dir: Path, tmp_path: Path, loop: str) -> None:
    cert, key = certify(tmp_path, "one")

    async def scenario(p: People) -> None:
        namespace = p.register(block_bytes=900_000)
        async with client_of(p, cert) as client:
            async with client.put(url(namespace, KEY), data=whole(namespace, KEY)) as answer:
                assert answer.status == 201
            for _ in range(3):
                async with client.get(url(namespace, KEY)) as answer:
                    assert await answer.read() == whole(namespace, KEY)

    over_tls(shm_dir, scenario, cert, key, loop)


def test_nothing_older_than_tls_1_2_and_no_plain_http_is_answered(shm_dir: Path, tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "one")

    async def scenario(p: People) -> None:
        old = trusting(cert)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("localhost", p.door.port, ssl=old)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            fine = trusting(cert)
            fine.minimum_version = fine.maximum_version = version
            _, writer = await asyncio.open_connection("localhost", p.door.port, ssl=fine)
            assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_connection("127.0.0.1", p.door.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"alive" not in await reader.read()
        writer.close()
        assert p.door.errors == 0

    over_tls(shm_dir, scenario, cert, key)


def reachable(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def shown(port: int) -> bytes:
    """The certificate that the door shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


@pytest.mark.long
def test_a_renewed_pair_is_shown_without_a_restart_and_half_a_pair_never_is(shm_dir: Path, tmp_path: Path) -> None:
    pairs = [certify(tmp_path, name) for name in ("first", "second")]
    first, second = (ssl.PEM_cert_to_DER_cert(cert.read_text()) for cert, _ in pairs)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(pairs[0][0], cert)
    shutil.copy(pairs[0][1], key)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"access__tls_cert": str(cert), "access__tls_key": str(key), "daemon__http": f"127.0.0.1:{port}"}
    with Daemon(shm_dir / "run", tmp_path / "d", **more) as daemon:

        def trouble() -> str | None:
            said = daemon.http("/v1/status")[1]["access"]["tls"]["last_error"]
            assert said is None or isinstance(said, str)
            return said

        until(lambda: reachable(port), "the TCP door is open")
        assert shown(port) == first and trouble() is None
        shutil.copy(pairs[1][0], cert)
        daemon.signal(signal.SIGHUP)
        until(trouble, "half a pair is noticed")
        assert "cannot be used" in str(trouble()) and shown(port) == first
        shutil.copy(pairs[1][1], key)
        until(lambda: shown(port) == second, "the new pair is shown, without a signal")
        assert trouble() is None


@pytest.mark.parametrize("which", ["access_tls_cert", "access_tls_key"])
def test_a_pipe_in_place_of_a_file_is_read_once_at_the_start_and_later_not_waited_for(
    tmp_path: Path, which: str
) -> None:
    """Opened while nobody writes into it, it would keep the loop, and so everybody, waiting for ever."""
    cert, key = certify(tmp_path, "one")
    paths = {"access_tls_cert": cert, "access_tls_key": key}
    text, pipe = paths[which].read_text(), tmp_path / "pipe"
    os.mkfifo(pipe)
    paths[which] = pipe
    access = settings(tmp_path, **{name: str(path) for name, path in paths.items()}).access
    script = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text(sys.argv[2])"
    with subprocess.Popen([sys.executable, "-c", script, str(pipe), text]) as writer:
        made, waited = let_go(lambda: Tls(access), pipe)
        assert writer.wait(30) == 0
    assert not waited
    taken, waited = let_go(lambda: made.refresh(force=True), pipe)
    assert not taken and not waited
    assert made.last_error is not None and "no plain file" in made.last_error


def let_go(work: Callable[[], T], pipe: Path) -> tuple[T, bool]:
    """What ``work`` comes to, and whether it waited for the pipe's other end until somebody opened that in the end."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            return working.result(30.0), False
        except TimeoutError:
            os.close(os.open(pipe, os.O_RDWR))
            return working.result(), True


@pytest.mark.parametrize("what", ["no file", "no PEM", "another's key", "a key with a password"])
def test_a_pair_that_cannot_be_used_stops_the_start(tmp_path: Path, what: str) -> None:
    cert, key = certify(tmp_path, "one")
    if what == "no file":
        key = tmp_path / "none"
    elif what == "no PEM":
        key.write_text("nonsense")
    elif what == "another's key":
        _, key = certify(tmp_path, "two")
    else:
        cert, key = certify(tmp_path, "three", "-passout", "pass:secret")
    with pytest.raises(ConfigError, match="cannot be used"):
        Tls(settings(tmp_path, access_tls_cert=str(cert), access_tls_key=str(key)).access)


@pytest.mark.parametrize("name", ["access_tls_cert", "access_tls_key"])
def test_half_a_pair_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"access.tls_(cert|key) is set and access.tls_(key|cert) is not"):
        settings(tmp_path, **{name: str(tmp_path / "x")})


@pytest.mark.fault(108)
def test_tls_opens_no_other_address_without_a_token(tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "one")
    pair = {"access_tls_cert": str(cert), "access_tls_key": str(key), "daemon_http": "0.0.0.0:7411"}
    with pytest.raises(ConfigError, match="token_file"):
        settings(tmp_path, **pair)
    (tmp_path / "token").write_text(TOKEN)
    assert settings(tmp_path, **pair, daemon_token_file=str(tmp_path / "token")).access.tls_cert


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_who_says_nothing_takes_no_more_than_so_many_connections_and_those_not_for_long(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr(handshakes, "AT_ONCE", 4)
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 1.0)
    cert, key = certify(tmp_path, "one")

    async def scenario(p: People) -> None:
        (door,) = [each for _, each in p.door._open if isinstance(each, handshakes.Handshakes)]
        with contextlib.ExitStack() as silent:
            for _ in range(20):
                silent.enter_context(socket.create_connection(("127.0.0.1", p.door.port or 0)))
            await opened.until(lambda: len(door._under_way) == 4)
            for _ in range(5):
                await asyncio.sleep(0.05)
                assert len(door._under_way) <= 4
            assert (await p.ask("GET", "/healthz"))[0] == 200, "the other door serves"
        async with client_of(p, cert) as client, client.get("/healthz") as answer:
            assert answer.status == 200, "those who wait come to their turn"
        with socket.create_connection(("127.0.0.1", p.door.port or 0)) as stays:
            stays.settimeout(10.0)
            assert await asyncio.to_thread(stays.recv, 1) == b"", "it is left in time"
        with socket.create_connection(("127.0.0.1", p.door.port or 0)):
            await asyncio.sleep(0.05)  # and is under way when the door closes

    over_tls(shm_dir, scenario, cert, key, loop)


def test_a_machine_without_a_descriptor_left_is_not_asked_for_one_all_the_time(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "REST_S", 0.2)
    cert, key = certify(tmp_path, "one")
    tried = list[None]()

    class Short:
        def accept(self) -> None:
            tried.append(None)
            raise OSError(errno.EMFILE, "too many open files")

    async def scenario(p: People) -> None:
        (door,) = [each for _, each in p.door._open if isinstance(each, handshakes.Handshakes)]
        accept = door._accept
        monkeypatch.setattr(door, "_accept", lambda _: accept(Short()))  # type: ignore[arg-type]
        door._take(False)
        door._take(True)
        with socket.create_connection(("127.0.0.1", p.door.port or 0)):
            await asyncio.sleep(0.5)
        assert 1 <= len(tried) <= 4

    over_tls(shm_dir, scenario, cert, key)

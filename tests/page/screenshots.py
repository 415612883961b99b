"""Pictures of the status page for the documentation, and how soon it is usable: a daemon with real traffic, a browser.

Run: ``python -m terracekv.tests.page.screenshots``, or ``make screenshots``.
"""

import argparse
import base64
import contextlib
import json
import shutil
import socket
import tempfile
import time
from pathlib import Path

from terracekv.tests.harness import Daemon, until
from terracekv.tests.page.browser import Browser, browser
from terracekv.tests.page.traffic import Traffic
from terracekv.tests.s3_stub import BUCKET, s3_stub

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (360, False)}
BYTES_MAX = 250_000
USABLE_ROUNDS = 5
EVERY_S = 0.04


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def picture(page: Browser, name: str, folder: Path) -> Path:
    """The page's upper part as that reader sees it."""
    width, dark = LOOKS[name]
    page.look(width, 900, dark=dark, mobile=name == "phone")
    time.sleep(1.0)  # bars move to where they belong
    height = 1850 if name == "phone" else 1700
    page.look(width, height, dark=dark, mobile=name == "phone")
    time.sleep(1.0)
    shot = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    file = folder / f"status-{name}.png"
    file.write_bytes(base64.b64decode(shot["data"]))
    assert file.stat().st_size < BYTES_MAX, f"{file.name} has {file.stat().st_size} bytes"
    return file


def usable_ms(page: Browser, url: str) -> float:
    """From the request to figures on the page, as the browser's own clock has it."""
    page.driver.get("about:blank")
    page.driver.get(url)
    until(lambda: page.run("return performance.getEntriesByName('usable').length"), "the page has figures")
    return float(page.run("return performance.getEntriesByName('usable')[0].startTime"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    parser.add_argument("--seconds", type=float, default=240.0, help="of traffic before the pictures")
    arguments = parser.parse_args()
    runtime = Path(tempfile.mkdtemp(prefix="terracekv-page-", dir="/dev/shm"))
    state = Path(tempfile.mkdtemp(prefix="terracekv-page-"))
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    try:
        with contextlib.ExitStack() as stack:
            stub = stack.enter_context(s3_stub(state))
            s3 = {"bucket": BUCKET, "endpoint": stub.endpoint, "credentials_file": str(stub.credentials)}
            settings = {f"s3__{name}": value for name, value in {"enabled": "true", **s3}.items()}
            size = {"host__size": "16MiB", "disk__size": "64MiB", "disk__segment": "4MiB"}
            daemon = stack.enter_context(Daemon(runtime, state, daemon__http=f"127.0.0.1:{port}", **size, **settings))
            traffic = stack.enter_context(Traffic(daemon))
            page = stack.enter_context(browser())
            page.open(url)
            traffic.begin(EVERY_S)
            time.sleep(arguments.seconds)
            for name in LOOKS:
                print(picture(page, name, arguments.folder))
            times = sorted(usable_ms(page, url) for _ in range(USABLE_ROUNDS))
            print(json.dumps({"name": "page_usable_p50", "value": round(times[len(times) // 2], 1), "unit": "ms"}))
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()

"""A real browser for the page's tests: Chromium without a window, on a folder of its own, talking to nobody but us.

Owns the process for the length of a ``with``. Called by tests and by ``screenshots``. The only import of selenium.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from terracekv.tests.harness import until

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
__all__ = ["Browser", "Keys", "asked", "browser", "received_bytes"]
INTERNAL = ("chrome:", "data:", "about:", "chrome-extension:", "devtools:")


class Browser:
    """What a reader does with the page, and what the page did behind the reader's back."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.look(width, height, dark=dark)
        self.driver.get(url)

    def look(self, width: int, height: int, *, dark: bool, mobile: bool = False) -> None:
        """The size of the window and the colours that the reader likes."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """As it is shown; "" of what is not."""
        script = "const e = document.querySelector(arguments[0]); return e?.checkVisibility() ? e.innerText : ''"
        return str(self.run(script, selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def press(self, key: str) -> None:
        """A key, on whatever has the focus."""
        ActionChains(self.driver).send_keys(key).perform()

    def link(self) -> str:
        """The state of the page's link to the daemon."""
        return str(self.find("#link").get_attribute("data-state"))

    def until_link(self, state: str) -> None:
        until(lambda: self.link() == state, f"the page says {state}")

    def complaints(self) -> list[str]:
        """What stands in the console since the last call."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def traffic(self) -> list[dict[str, Any]]:
        """Events of the network since the last call."""
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        return [json.loads(entry["message"])["message"] for entry in entries]


def asked(traffic: list[dict[str, Any]]) -> list[str]:
    """The addresses that the page asked for."""
    sent = [event["params"] for event in traffic if event["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if not each["request"]["url"].startswith(INTERNAL)]


def received_bytes(traffic: list[dict[str, Any]]) -> dict[str, int]:
    """By address, what came over the line, headers included; of an answer that goes on what has come by now."""
    urls = {
        event["params"]["requestId"]: event["params"]["request"]["url"]
        for event in traffic
        if event["method"] == "Network.requestWillBeSent"
    }
    sizes = dict[str, int]()
    for event in traffic:
        params, name = event["params"], urls.get(event["params"].get("requestId"), "")
        if event["method"] == "Network.dataReceived":
            sizes[name] = sizes.get(name, 0) + int(params["dataLength"])
    for event in traffic:
        if event["method"] == "Network.loadingFinished" and event["params"]["requestId"] in urls:
            sizes[urls[event["params"]["requestId"]]] = int(event["params"]["encodedDataLength"])
    return sizes


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    folder = tempfile.mkdtemp(prefix="terracekv-browser-")
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={Path(folder) / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        driver = Chrome(options=options, service=Service(DRIVER))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

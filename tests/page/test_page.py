"""The status page in a real browser: what it shows, what it says when it can show nothing, and whom it talks to."""

import contextlib
import http.client
import importlib.util
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.http_listeners import LISTENERS_MAX
from terracekv.tests.harness import Daemon, until
from terracekv.tests.page.traffic import Traffic

pytest.importorskip("selenium", reason="make test-page installs it")
from terracekv.tests.page.browser import CHROMIUM, Browser, Keys, asked, browser, received_bytes  # noqa: E402
from terracekv.tests.page.screenshots import LOOKS, free_port  # noqa: E402

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs chromium and chromedriver"),
]

FIRST_VIEW_BYTES_MAX = 150_000
SECRET = "a secret of more than sixteen letters"
WORST = ("serious", "critical")
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
WHATIF: dict[str, Any] = {
    "scope": "all namespaces of this daemon together; evicted by lru, everything admitted",
    "requests": 420,
    "asked_blocks": 9000,
    "block_bytes": 4096,
    "sample": {"rate": 0.125, "blocks": 700, "enough": True},
    "waiting": 0,
    "passed_over": 0,
    "curve": [{"bytes": 1 << 20, "blocks": 256, "hits": 0.4}],
    "tiers": {
        tier: [
            {"bytes": round(size * factor), "blocks": round(size * factor / 4096), "hits": hits}
            for factor, hits in zip((0.25, 0.5, 1.0, 2.0, 4.0, 8.0), shares, strict=True)
        ]
        for tier, size, shares in (
            ("host", 4 << 20, (0.2, 0.35, 0.5, 0.72, 0.8, 0.81)),
            ("disk", 32 << 20, (0.78, 0.8, 0.8, 0.81, 0.81, 0.81)),
        )
    },
}
"""As GET /v1/whatif answers it."""


class Shown:
    """A daemon with an HTTP port, and a browser that looks at its page."""

    def __init__(self, daemon: Daemon, page: Browser, url: str) -> None:
        self.daemon, self.page, self.url = daemon, page, url

    def open(self, state: str = "live") -> Browser:
        self.page.open(self.url)
        self.page.until_link(state)
        return self.page


@pytest.fixture
def shown(shm_dir: Path, tmp_path: Path) -> Iterator[Shown]:
    port = free_port()
    daemon = Daemon(shm_dir, tmp_path, daemon__http=f"127.0.0.1:{port}")
    with daemon, browser() as page:
        yield Shown(daemon, page, f"http://127.0.0.1:{port}/")


def traffic(shown: Shown, steps: int = 60) -> None:
    with Traffic(shown.daemon) as engines:
        for _ in range(steps):
            engines.step()
        until(lambda: shown.page.all("#sessions tbody tr"), "the page shows the engines")
        until(lambda: shown.page.all("#lookups tbody tr"), "the page shows lookups")


@pytest.mark.fault(117)
@pytest.mark.fault(115)
def test_numbers_move_with_real_traffic_and_each_miss_says_why(shown: Shown) -> None:
    page = shown.open()
    assert "Nothing was asked yet" in page.text("#empty") and "/v1/lookup" in page.text("#empty")
    with Traffic(shown.daemon) as engines:
        for _ in range(120):
            engines.step()
        short = engines.engines[0].lookup([])
        assert short.reason == "shorter_than_block"
        until(lambda: len(page.all("#lookups tbody tr")) == 100, "the last hundred lookups are there")
        until(lambda: len(page.all("#sessions tbody tr")) == len(engines.engines), "each engine is there")
        assert "vLLM 0.32.0 (1)" in page.text("#sessions")
        until(lambda: page.all('#lookups [data-reason="shorter_than_block"]'), "the short prompt is there")
        assert "(4 tokens)" in page.text('#lookups [data-reason="shorter_than_block"]')
        assert "absent" in page.text("#lookups") and "at block" in page.text("#lookups")
        _, status = shown.daemon.http("/v1/status")
        until(lambda: f"{status['tiers']['disk']['blocks']:,} blocks" in page.text("#tier-disk"), "and what is stored")
        assert "off" in page.text("#tier-gpu") and "host" in page.text("#history")
        assert page.text("#pays .word").endswith("%") and page.text("#misses .word")
        assert page.find("#empty").is_displayed() is False
        before = page.text("#namespaces")
        engines.step()
        until(lambda: page.text("#namespaces") != before, "the figures go on")
    until(lambda: "No engine is connected" in page.text("#sessions"), "and notice who has left")
    assert page.complaints() == []
    assert {address for address in asked(page.traffic()) if not address.startswith(shown.url)} == set()


def test_it_is_used_without_a_mouse(shown: Shown) -> None:
    page = shown.open()
    traffic(shown)
    reached = list[str]()
    while "gpus" not in reached and len(reached) < 20:
        page.press(Keys.TAB)
        where = "const e = document.activeElement; return e.id || e.name || e.className || e.tagName"
        reached.append(str(page.run(where)))
        if reached[-1] == "stage":
            newest = page.text("#history .told")
            page.press(Keys.HOME)
            assert (
                page.text("#history .told") and page.find("#history .cursor").get_attribute("visibility") == "visible"
            )
            page.press(Keys.END)
            assert page.text("#history .told").split(":")[0] == newest.split(":")[0]
        if reached[-1] == "unit":
            page.press(Keys.ARROW_RIGHT)
            until(lambda: " blocks were here" in page.text("#history .told"), "the chart counts blocks")
        if reached[-1] == "misses-only":
            page.press(Keys.SPACE)
            assert "all found" not in page.text("#lookups")
    assert reached[0] == "skip"
    assert {"unit", "stage", "misses-only", "lookups", "sessions", "namespaces", "gpus"} <= set(reached)


def test_who_reads_a_chart_with_the_keys_stays_there_while_figures_come(shown: Shown) -> None:
    page = shown.open()
    traffic(shown)
    page.run("document.querySelector('#history .stage').focus()")
    page.press(Keys.HOME)
    before = page.run("return performance.now()")
    until(lambda: page.run("return performance.now()") > before + 2500, "two documents have come")
    assert page.run("return document.activeElement.className") == "stage"
    assert page.find("#history .cursor").get_attribute("visibility") == "visible"
    page.press(Keys.ARROW_RIGHT)
    assert page.find("#history .stage").get_attribute("aria-valuenow") in ("0", "1")


def test_a_daemon_that_stops_dies_and_comes_back_is_told_apart(shown: Shown) -> None:
    page = shown.open()
    shown.daemon.stop()
    page.until_link("stale")
    assert "silent" in page.text("#gone") and page.find("#content").is_displayed()
    shown.daemon.cont()
    page.until_link("live")
    assert not page.find("#gone").is_displayed()
    shown.daemon.kill()
    page.until_link("gone")
    assert "Trying again" in page.text("#gone")
    shown.daemon.start()
    page.until_link("live")
    assert not page.find("#gone").is_displayed()


def test_a_daemon_that_has_no_place_for_one_more_is_not_said_to_be_away(shown: Shown) -> None:
    with contextlib.ExitStack() as others:
        for _ in range(LISTENERS_MAX):
            listening = http.client.HTTPConnection(shown.url.split("/")[2], timeout=10)
            others.enter_context(contextlib.closing(listening))
            listening.request("GET", "/v1/live")
            assert listening.getresponse().status == 200
        page = shown.open("gone")
        assert "listen to events already: close one of them" in page.text("#gone-text")
        assert page.text("#gone-title") == "The daemon does not show its status now"
        assert "Engines" not in page.text("#gone-text")
    page.until_link("live")


def test_a_guarded_daemon_asks_for_the_token_and_keeps_it_for_this_tab(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    shown.daemon.restart(daemon__token_file=str(tmp_path / "token"))
    page = shown.open("denied")
    assert not page.find("#content").is_displayed()
    assert page.run("return document.activeElement.id") == "token"
    page.find("#token").send_keys("not this one\n")
    until(lambda: "not enough" in page.text("#denied"), "a wrong token is refused")
    page.run("document.getElementById('denied-text').textContent = ''")
    page.find("#token").send_keys("\u200b\u201cnot this one either\u201d\n")
    until(lambda: "not enough" in page.text("#denied"), "one with letters that no header can hold is refused as well")
    page.find("#token").send_keys(SECRET + "\n")
    page.until_link("live")
    assert page.find("#content").is_displayed() and SECRET not in page.driver.page_source
    page.driver.refresh()
    page.until_link("live")
    assert page.run("return [localStorage.length, document.cookie, location.search]") == [0, "", ""]
    page.find("footer a[href='/v1/status']").click()
    until(lambda: '"uptime_s"' in page.text("body"), "the link shows what the token may see")
    page.driver.back()
    page.until_link("live")


def test_a_tenant_sees_its_share_also_with_a_screen_reader_and_is_told_nothing_that_nobody_knows(
    shown: Shown, tmp_path: Path
) -> None:
    others = SECRET.upper()
    (tmp_path / "access").write_text(
        f'[[tokens]]\nname = "red"\nsecret = "{SECRET}"\ntenant = "red"\nrights = ["read", "write"]\n'
        f'[[tokens]]\nname = "all"\nsecret = "{others}"\nrights = ["read", "metrics"]\n'
        '[tenants.red]\nhost = "64KiB"\n'
    )
    shown.daemon.restart(access__file=str(tmp_path / "access"))
    page = shown.open("denied")
    with shown.daemon.client(model="red/model", credential=SECRET.encode()) as engine:
        engine.put(engine.chain(1, 8))
        page.find("#token").send_keys(others + "\n")
        until(lambda: "8 blocks" in page.text("#tier-host"), "the operator sees the tier")
        assert page.find("#errors-section").is_displayed() and "red" in page.text("#tenants")
        page.run("sessionStorage.setItem('terracekv-token', arguments[0])", SECRET)
        page.driver.refresh()
        until(lambda: "32.0 KiB of 64.0 KiB · 50 %" in page.text("#tier-host"), "the tenant sees its share")
    assert page.find("#tier-host .bar").get_attribute("aria-valuenow") == "50"
    assert not page.find("#errors-section").is_displayed() and not page.find("#tenants-section").is_displayed()


def test_an_engine_with_a_hostile_name_is_text(shown: Shown) -> None:
    page = shown.open()
    with shown.daemon.client(engine=HOSTILE, model=HOSTILE) as engine:
        engine.lookup(engine.chain(1, 2))
        until(lambda: HOSTILE in page.text("#sessions") and HOSTILE in page.text("#lookups"), "it is there, as text")
        assert HOSTILE in page.text("#namespaces")
    assert page.run("return document.querySelectorAll('#content :is(img, script)').length") == 0
    assert page.driver.title == "TerraceKV" and page.complaints() == []


def test_what_more_memory_would_buy_is_shown_where_the_daemon_can_tell(shown: Shown) -> None:
    page = shown.page
    page.open(shown.url)
    page.until_link("live")
    script = """
    const real = window.fetch, answers = {"/openapi.json": {paths: {"/v1/whatif": {}}}, "/v1/whatif": %s};
    window.fetch = async (url, ...more) => (url in answers ? Response.json(answers[url]) : real(url, ...more));
    """
    source = {"source": script % json.dumps(WHATIF)}
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    page.driver.refresh()
    until(lambda: "+22 points" in page.text("#buys"), "the best step is named")
    assert "host tier (8.0 MiB) would find 72 %" in page.text("#buys")
    assert page.find("#whatif-section").is_displayed()
    assert "4.0 MiB (as it is): 50 %" in page.text("#whatif .told")
    page.run("document.querySelector('#whatif .stage').focus()")
    page.press(Keys.HOME)
    told = page.text("#whatif .told")
    page.run("document.getElementById('whatif-tiers').dispatchEvent(new Event('change'))")  # as new figures do
    assert page.run("return document.activeElement.className") == "stage" and page.text("#whatif .told") == told
    page.run("document.activeElement.blur()")
    assert "4.0 MiB (as it is): 50 %" in page.text("#whatif .told")
    page.find("#whatif-tiers input[value=disk]").click()
    assert "32.0 MiB (as it is): 80 %" in page.text("#whatif .told")
    assert page.complaints() == [] and faults(page) == []


def faults(page: Browser) -> list[str]:
    """What axe finds on the page as it is now, of what keeps a reader out."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("make test-page brings axe")
    page.run(Path(found.origin).with_name("axe.min.js").read_text())
    script = """
    const done = arguments[0], failed = (error) => done([{impact: "serious", id: `${error}`, nodes: []}]);
    axe.run().then((found) => done(found.violations), failed);
    """
    violations = page.driver.execute_async_script(script)
    return [f"{v['id']}: {[n['html'][:120] for n in v['nodes'][:3]]}" for v in violations if v["impact"] in WORST]


@pytest.mark.parametrize("look", LOOKS)
def test_it_can_be_read_by_everybody(shown: Shown, look: str, tmp_path: Path) -> None:
    width, dark = LOOKS[look]
    page = shown.open()
    page.look(width, 800, dark=dark)
    assert faults(page) == [], "with nothing asked yet"
    traffic(shown)
    assert faults(page) == [], "with figures"
    assert page.run("return document.documentElement.scrollWidth") <= width, "nothing sticks out"
    shown.daemon.kill()
    page.until_link("gone")
    assert faults(page) == [], "without a daemon"
    (tmp_path / "token").write_text(SECRET)
    shown.daemon.restart(daemon__token_file=str(tmp_path / "token"))
    page.until_link("denied")
    assert faults(page) == [], "with the field for a token"


def test_nothing_sticks_out_of_a_small_window_with_letters_of_twice_the_size(shown: Shown) -> None:
    page = shown.open()
    traffic(shown)
    page.run("document.documentElement.style.fontSize = '200%'")
    within = "return document.documentElement.scrollWidth <= innerWidth"
    for width in (320, 640):
        page.look(width, 800, dark=False)
        until(partial(page.run, within), f"all of it is within {width}", 5)


def test_the_first_view_is_small_also_of_a_busy_daemon(shown: Shown) -> None:
    with Traffic(shown.daemon) as engines:
        for _ in range(150):
            engines.step()
        page = shown.open()
        until(lambda: len(page.all("#lookups tbody tr")) == 100, "there are figures")
    received = received_bytes(page.traffic())
    sizes = {address: size for address, size in received.items() if address.startswith(shown.url)}
    assert {shown.url, f"{shown.url}page/page.css", f"{shown.url}v1/live"} <= sizes.keys()
    assert sum(sizes.values()) < FIRST_VIEW_BYTES_MAX

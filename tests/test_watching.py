"""Prometheus and Grafana beside the daemon: the files that they are given are right, and find what they ask for."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from terracekv.tests.containers import COMPOSE, ROOT, compose, free_port
from terracekv.tests.harness import TOKENS, Daemon
from terracekv.tests.written_docs import DOCS

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = GRAFANA / "terracekv.json"
SERIES = re.compile(r"\bterracekv_[a-z0-9_]+")
TARGET = "node-a:7411"
TOKEN = "a-token-that-Prometheus-reads-from-a-file"


def documented() -> set[str]:
    """Names as a scrape has them."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M)
    return {
        name + end for name, kind in rows for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }


def queries() -> dict[str, str]:
    """Expressions of the dashboard, by panel."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = {
        f"{panel['title']} {target['refId']}": target["expr"] for panel in panels for target in panel.get("targets", ())
    }
    assert len(found) > 25
    return found


def asked(expression: str) -> str:
    """The expression, with the dashboard's variables filled in."""
    for name, value in {"$instance": ".*", "$__rate_interval": "1m", "$__range": "1h"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def test_the_dashboard_the_rules_and_the_pages_ask_for_series_that_there_are() -> None:
    there = documented()
    pages = [(DOCS / f"{name}.md").read_text() for name in ("metrics", "operations", "s3")]
    pages[0] = pages[0].replace("| `terracekv_http_request_seconds`", "|")  # a histogram is three
    for text in (*queries().values(), (PROMETHEUS / "alerts.yml").read_text(), *pages):
        assert set(SERIES.findall(text)) <= there


def test_every_alert_points_to_a_heading() -> None:
    for rule in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["what_to_do"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, rule["annotations"]["what_to_do"]


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24 and panel["title"]
        taken |= cells


def test_grafana_is_given_the_dashboard_and_the_source_it_names() -> None:
    volumes = dict(volume.split(":")[:2] for volume in compose()["services"]["grafana"]["volumes"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "terracekv.yml").read_text())["providers"]
    assert volumes[f"./{DASHBOARD.relative_to(ROOT)}"].startswith(provider["options"]["path"])
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose()["services"]
    assert json.loads(DASHBOARD.read_text())["templating"]["list"][0]["query"] == source["type"]
    assert "watch" in COMPOSE.read_text()


def promtool(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_finds_nothing_wrong_with_the_rules(words: tuple[str, ...]) -> None:
    done = promtool(*words, cwd=PROMETHEUS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_seen_to_fire() -> None:
    names = {rule["alert"] for rule in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]}
    assert set(re.findall(r'alertname="(\w+)"', (PROMETHEUS / "alerts_test.yml").read_text())) == names


class Prometheus:
    """A real one, with the file of docker-compose.yml but for the address, the token's place and the interval."""

    def __init__(self, folder: Path, target: str) -> None:
        if (program := shutil.which("prometheus")) is None:
            pytest.skip("Prometheus is not here: apt-get install prometheus")
        text = (PROMETHEUS / "prometheus.yml").read_text()
        for theirs, ours in {TARGET: target, "/run/secrets/token": str(folder / "token"), "15s": "1s"}.items():
            assert theirs in text
            text = text.replace(theirs, ours)
        (folder / "prometheus.yml").write_text(text)
        shutil.copy(PROMETHEUS / "alerts.yml", folder)
        self.port = free_port()
        words = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        words += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Its answer to a query."""
        where = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(where, timeout=10) as answer:
            document = json.load(answer)
        assert document["status"] == "success"
        return list(document["data"]["result"])

    def until(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there is one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if found := self.ask(expression):
                    return found
            except OSError:
                assert self.process.poll() is None
            time.sleep(0.2)
        raise AssertionError(f"nothing comes of {expression}")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def watched(tmp_path: Path, shm_dir: Path) -> Iterator[tuple[Daemon, Prometheus]]:
    """A daemon behind a token, and Prometheus that has it."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    port = free_port()
    settings = {"daemon__http": f"127.0.0.1:{port}", "daemon__token_file": str(tmp_path / "token")}
    with Daemon(shm_dir, tmp_path / "state", **settings) as daemon:
        prometheus = Prometheus(tmp_path, f"127.0.0.1:{port}")
        try:
            yield daemon, prometheus
        finally:
            prometheus.end()


@pytest.mark.fault(109)
@pytest.mark.fault(113)
@pytest.mark.long
def test_a_real_prometheus_scrapes_a_daemon_and_every_panel_finds_its_figures(
    watched: tuple[Daemon, Prometheus],
) -> None:
    daemon, prometheus = watched
    prometheus.until('up{job="terracekv"} == 1')
    prometheus.until("count_over_time(terracekv_lookups_total[1h]) > 1")  # seen at zero, so that all growth is seen
    with daemon.client() as client:
        chain = client.chain(1, 10)
        assert client.put(chain[:4], durable=True).durable == 4
        assert client.lookup(chain).blocks == 4
    prometheus.until(f"terracekv_lookup_asked_tokens_total == {10 * TOKENS}")
    (found,) = prometheus.ask("terracekv_lookup_found_tokens_total / terracekv_lookup_asked_tokens_total")
    assert float(found["value"][1]) == 0.4
    (split,) = prometheus.ask("sum(terracekv_lookup_matched_tokens_total) / sum(terracekv_lookup_asked_tokens_total)")
    assert float(split["value"][1]) == 0.4
    for expression in queries().values():
        if not ("gpu_memory" in expression or "gpu_pcie" in expression):  # there is no GPU, so there are no readings
            prometheus.until(asked(expression).removesuffix(" > 0"))
    assert not [each for each in prometheus.ask("ALERTS") if each["metric"]["alertstate"] == "firing"]
    daemon.kill()
    prometheus.until('up{job="terracekv"} == 0')

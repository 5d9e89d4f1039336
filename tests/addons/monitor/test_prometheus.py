"""The alert rules and the dashboard's queries in a real Prometheus, which scrapes monitors with
planted trouble."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from headstart.addons.monitor import Monitor
from headstart.inference import Stats
from headstart.inference.trees.stats import RoundRecord

ROOT = Path(__file__).parents[3]
FILES = ROOT / "examples" / "monitoring"
SHORT = {"5m": "4s", "15m": "6s", "10m": "1s"}
"""The rules' times, and those of the test."""
DRAFTED, MISSED = RoundRecord(2, 3, 4), RoundRecord(0, 1, 4)
TROUBLE = {
    "good": [DRAFTED] * 8 + [MISSED] * 2,
    "low": [DRAFTED] * 3 + [MISSED] * 7,
    "slow": [DRAFTED] + [RoundRecord(0, 1, fallback="slower")] * 9,
    "broken": [RoundRecord(0, 1, fallback="drafter_failed")] * 10,
    "full": [DRAFTED] * 8,
}
"""Rounds of each generation, by model; `full` runs out of memory once, and `idle` stops."""
EXPECTED = {
    ("HeadstartLowAcceptance", "low"),
    ("HeadstartSlowerThanPlain", "slow"),
    ("HeadstartDrafterFailed", "broken"),
    ("HeadstartOutOfMemory", "full"),
    ("HeadstartNoTokens", "idle"),
}

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


def generation(records):
    rows = [
        [
            RoundRecord(each.accepted, each.returned, each.drafted, 0, each.fallback)
            for each in records
        ]
    ]
    return Stats(rows, 4, {"prefill": 0.01, "target": 0.02}, [0.01], [0.01], 1000)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Prometheus:
    """A running server."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}") as response:
            return json.load(response)["data"]

    def query(self, expression):
        return self.get("/api/v1/query", query=expression)["result"]

    def alerts(self, state):
        found = self.get("/api/v1/alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"]["model"])
            for each in found
            if each["state"] == state
        }


def wait_for(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    rules = re.sub(
        r"\b(5|10|15)m\b", lambda found: SHORT[found[0]], (FILES / "alerts.yml").read_text("utf-8")
    )
    (folder / "alerts.yml").write_text(rules, "utf-8")
    first = Monitor(model="good", head="h", drafter="d")
    monitors = {
        name: first.labelled(model=name, head="h", drafter="d") for name in (*TROUBLE, "idle")
    }
    scraped, port = first.serve(0), free_port()
    config = {
        "global": {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "500ms",
        },
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "headstart", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    over = threading.Event()

    def generate():
        while not over.wait(0.2):
            for name, records in TROUBLE.items():
                monitors[name].add(generation(records))

    with (folder / "log").open("w") as log:
        arguments = [
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = subprocess.Popen(["prometheus", *arguments], cwd=folder, stdout=log, stderr=log)
    thread, server = threading.Thread(target=generate), Prometheus(port)

    def ready():
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return server.query("up")
        except (urllib.error.URLError, ConnectionError):
            return False

    thread.start()
    try:
        wait_for(ready, (folder / "log").read_text)
        monitors["idle"].add(generation([DRAFTED]))
        monitors["full"].add(generation([RoundRecord(0, 1, fallback="out_of_memory")]))
        yield server
    finally:
        over.set()
        thread.join()
        process.terminate()
        process.wait()


def test_alerts_fire_for_planted_trouble_and_for_nothing_else(prometheus):
    fired, waited = set(), set()

    def seen():
        fired.update(prometheus.alerts("firing"))
        waited.update(prometheus.alerts("pending"))
        return fired >= EXPECTED

    wait_for(seen, lambda: f"missing: {EXPECTED - fired}")
    assert fired == EXPECTED
    # not at once
    assert {name for name, _ in waited} >= {"HeadstartLowAcceptance", "HeadstartSlowerThanPlain"}


def test_queries_of_the_dashboard_and_of_the_docs_have_results(prometheus):
    dashboard = json.loads((FILES / "dashboard.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    (block,) = re.findall(
        r"```promql\n(.*?)```", (ROOT / "docs" / "production.md").read_text("utf-8"), re.DOTALL
    )
    queries += [text for text in re.split(r"^#.*\n", block, flags=re.MULTILINE) if text.strip()]
    assert len(queries) == 14
    for query in queries:
        query = query.replace("$__rate_interval", "4s").replace("$model", "low")
        wait_for(
            lambda query=query: prometheus.query(query),
            lambda query=query: f"no result: {query}",
            20.0,
        )
        values = {result["value"][1] for result in prometheus.query(query)}
        assert values != {"NaN"}, query
    (variable,) = (each for each in dashboard["templating"]["list"] if each["name"] == "model")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
    assert set(prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": metric})) == {
        *TROUBLE,
        "idle",
    }

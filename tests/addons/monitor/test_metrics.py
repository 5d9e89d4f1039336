"""What Prometheus scrapes: the values of `Stats`, over HTTP, from several threads and several
processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from helpers import Ended
from messages import refused
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headstart.addons.monitor import Monitor
from headstart.inference import SpeculativeLM, Stats
from headstart.inference.trees.stats import RoundRecord

FILES = Path(__file__).parents[3] / "examples" / "monitoring"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)
LABELS = {"model": "tiny", "head": "", "drafter": "prompt-lookup"}


def samples(text):
    """Values by name and labels, without those that say which decoder it was."""
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name not in LABELS),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return samples(response.read().decode())


def answered(lm, start):
    prompts = torch.tensor([[start, 1, 2, start], [2, 1, 2, 1]])
    lm.generate(prompts, max_new_tokens=30, do_sample=False)


@pytest.fixture
def generated(tiny_target):
    """A monitor, after generations in several threads that were scraped meanwhile, and what they
    returned."""
    lm = SpeculativeLM.from_pretrained(
        tiny_target(vocab_size=20), drafter="prompt-lookup", adaptive=False
    )
    monitor, heard = Monitor(**LABELS), Ended()
    lm.observers += [monitor, heard]
    port = monitor.serve(0)
    threads = [threading.Thread(target=answered, args=(lm, start)) for start in range(6)]
    for thread in threads:
        thread.start()
    between = [scraped(port) for _ in range(5)]
    for thread in threads:
        thread.join()
    return port, between, Stats.merged(heard.stats)


def test_what_is_scraped_is_what_threads_generated(generated):
    port, between, whole = generated
    found = scraped(port)
    records = [record for row in whole.rows for record in row]
    drafts = [record for record in records if record.drafted]
    assert whole.tokens == 6 * 2 * 29
    expected = {
        "generations": 6,
        "tokens": whole.tokens,
        "rounds": whole.rounds,
        "plain_rounds": whole.plain_rounds,
        "drafts": len(drafts),
        "draft_tokens": sum(record.drafted for record in records),
        "accepted_tokens": sum(record.accepted for record in records),
    }
    assert {name: found[f"headstart_{name}_total",] for name in expected} == expected
    assert 0 < expected["accepted_tokens"] < expected["draft_tokens"]
    for kind, of_record in (("draft", "drafted"), ("accepted", "accepted")):
        for depth in range(whole.max_depth):
            count = sum(getattr(record, of_record) > depth for record in records)
            assert found[f"headstart_{kind}_tokens_per_position_total", str(depth)] == count
    length = sum(record.returned for record in drafts) / len(drafts)
    assert found["headstart_acceptance_length",] == pytest.approx(length)
    rate = expected["accepted_tokens"] / expected["draft_tokens"]
    assert found["headstart_acceptance_rate",] == pytest.approx(rate)
    assert found["headstart_time_per_output_token_seconds_count",] == whole.tokens
    seconds = pytest.approx(sum(whole.round_seconds) * 2, rel=0.5)
    assert found["headstart_time_per_output_token_seconds_sum",] == seconds
    assert found["headstart_time_to_first_token_seconds_count",] == 6
    assert found["headstart_part_seconds_total", "target"] == pytest.approx(whole.seconds["target"])
    assert found["headstart_kv_cache_bytes",] == whole.cache_bytes > 0
    for each in between:
        assert each.get(("headstart_tokens_total",), 0) % (2 * 29) == 0


def test_a_fallback_is_counted_with_its_reason(tiny_target):
    monitor = Monitor()
    slower = [RoundRecord(0, 1, 0, place, "slower") for place in (1, 2)]
    other = [RoundRecord(0, 1, 0, 0, "out_of_memory"), RoundRecord(0, 1)]
    monitor.add(Stats([[RoundRecord(2, 3, 2, 0), *slower], other], 2, {}, [0.1] * 3))
    found = samples(generate_latest(monitor.registry).decode())
    name = "headstart_fallback_rounds_total"
    counts = {key[1]: value for key, value in found.items() if key[0] == name}
    # shown from the start
    absent = {"drafter_failed": 0, "large_batch": 0, "not_finite": 0, "segment_border": 0}
    assert counts == {"slower": 2, "out_of_memory": 1} | absent
    assert found["headstart_plain_rounds_total",] == 4


def test_the_window_forgets_old_rounds():
    monitor = Monitor()
    for accepted in (0, 1):
        monitor.add(Stats([[RoundRecord(accepted, accepted + 1, 1)] * 1000], 1, {}, [0.1]))
    assert samples(generate_latest(monitor.registry).decode())["headstart_acceptance_rate",] == 1


def test_decoders_share_metrics_by_their_labels():
    first = Monitor(model="a")
    first.labelled(model="b").add(Stats([[RoundRecord(0, 1)] * 3], 0, {}, [0.1]))
    first.add(Stats([[RoundRecord(0, 1)] * 2], 0, {}, [0.1]))
    for model, rounds in (("a", 2), ("b", 3)):
        labels = {"model": model, "head": "", "drafter": ""}
        assert first.registry.get_sample_value("headstart_rounds_total", labels) == rounds
    registry = CollectorRegistry()
    assert Monitor(registry=registry).registry is registry


def test_a_taken_port_is_named():
    port = Monitor().serve(0)
    with refused(f"{port} 127.0.0.1"):
        Monitor().serve(port)


def test_processes_are_served_together(tmp_path, monkeypatch):
    program = """if True:
        import os, urllib.request
        from headstart.inference import Stats
        from headstart.inference.trees.stats import RoundRecord
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        from headstart.addons.monitor import Monitor  # which reads the environment
        monitor = Monitor()
        monitor.add(Stats([[RoundRecord(1, 2, 3)] * (2 if child else 5)], 3, {}, [0.1]))
        if child:
            port = monitor.serve(0)
            print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
        """
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found = samples(ran.stdout)
    assert found["headstart_rounds_total",] == 7
    assert found["headstart_accepted_tokens_per_position_total", "0"] == 7
    assert found["headstart_time_per_output_token_seconds_count",] == 14


def expressions():
    """Every PromQL expression of the dashboard and of the alerts."""
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_dashboard_and_alerts_name_metrics_that_exist(generated):
    port, _, _ = generated
    known = {key[0] for key in scraped(port)}
    used = set(re.findall(r"headstart_\w+", " ".join(expressions())))
    assert len(used) >= 8
    assert used <= known


@needs_promtool
def test_queries_of_the_dashboard_can_be_asked(tmp_path):
    rules = []
    for number, expression in enumerate(expressions()):
        query = expression.replace("$__rate_interval", "4m").replace("$model", "tiny")
        rules.append({"record": f"panel:{number}", "expr": query})
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_alerts_fire_on_trouble_and_not_without():
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run(["promtool", *command], cwd=FILES, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr

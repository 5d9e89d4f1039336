"""`headstart data` as a command: its metrics. What it writes is tested in tests/train/data."""

from __future__ import annotations

import urllib.request

from messages import refused

from headstart.addons.monitor import Monitor
from headstart.scripts import data
from headstart.train.config import SelfMadeConfig
from headstart.train.data import self_made


def test_metrics_are_served_by_option(monkeypatch, tmp_path):
    ports, serve = [], Monitor.serve
    monkeypatch.setattr(
        Monitor, "serve", lambda self, *args: ports.append(serve(self, *args)) or ports[-1]
    )
    made = []
    monkeypatch.setattr(self_made, "make_conversations", lambda *given: made.append(given))
    given = ["--target", "some/model", "--output", str(tmp_path / "made.jsonl"), "--seed", "3"]
    data.main(given)
    data.main([*given, "--metrics_port", "0"])
    (config, none), (same, (monitor,)) = made
    assert type(config) is SelfMadeConfig and config == same and config.seed == 3
    assert not list(none) and isinstance(monitor, Monitor)
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics") as response:
        assert (
            'headstart_generations_total{drafter="",head="",model="some/model"} 0.0'
            in response.read().decode()
        )


def test_a_servers_metrics_are_its_own():
    with refused("metrics_port"):
        data.DataCommand(
            target="x",
            output="y",
            server="http://localhost:8000/v1",
            prompts="p.jsonl",
            metrics_port=0,
        )

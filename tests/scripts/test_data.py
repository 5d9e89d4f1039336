"""`headstart data` as a command: its metrics. What it writes is tested in tests/train/data."""

from __future__ import annotations

from messages import refused
from runs import rows_of, write_prompts

from headstart.scripts.data import DataCommand, main


def test_metrics_are_served_by_option(target_folder, tmp_path, capsys, generations):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["count to 3", "count to 4"])
    given = ["--target", str(target_folder), "--prompts", prompts, "--max_new_tokens", "3"]
    main([*given, "--output", str(tmp_path / "plain.jsonl")])
    assert "metrics:" not in capsys.readouterr().out
    main([*given, "--output", str(tmp_path / "watched.jsonl"), "--metrics_port", "0"])
    assert generations(capsys.readouterr().out) == {"": 1}  # of both prompts at once
    assert rows_of(tmp_path / "watched.jsonl") == rows_of(tmp_path / "plain.jsonl")


def test_a_servers_metrics_are_its_own():
    server = {"server": "http://localhost:8000/v1", "prompts": "p.jsonl"}
    with refused("metrics_port"):
        DataCommand(target="x", output="y", **server, metrics_port=0)

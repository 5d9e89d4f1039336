"""What a run says of itself, and what it does when nobody can be told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from messages import lacking, refused
from runs import changed, evaluations_of, log_of, save_options, write_rows

from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import Stats
from headstart.inference.trees.stats import RoundRecord
from headstart.plots import plotted
from headstart.train import loop, report
from headstart.train.loop import train
from headstart.train.report import PARTS, StepClock


def test_a_line_of_the_log_tells_what_was_learned_and_what_it_cost(short):
    rows = [row for row in log_of(train(short)) if "loss" in row]
    for row in rows:
        first, second = row["accuracy"]
        assert row["estimated_acceptance_length"] == pytest.approx(1 + first + first * second)
        costs = row["costs"]
        # one process
        assert costs["answer_tokens_per_second_per_device"] == row["answer_tokens_per_second"]
        assert 0 < costs["share_waiting_for_features"] < 1
        assert 0 < costs["share_waiting_for_data"] < 1
        assert list(row["step_seconds"]) == list(PARTS) and min(row["step_seconds"].values()) > 0
        assert costs["peak_memory_gib_by_process"] == [pytest.approx(costs["peak_memory_gib"])]
        assert 0.05 < costs["peak_memory_gib"] < 64
        assert row["epoch"] == pytest.approx(row["step"] * rows[0]["epoch"])
    assert rows[-1]["epoch"] > 2
    progress = Path(short.output) / "checkpoints" / "step-00000012" / "progress.json"
    saved = json.loads(progress.read_text())
    assert rows[-1]["answer_tokens"] == saved["answer_tokens"]
    parts = sum(sum(row["step_seconds"].values()) for row in rows)  # a line a step
    assert parts == pytest.approx(saved["seconds"], rel=0.05)


class Queue:
    """A device that does its work later: `now` is the host's clock, `busy` the end of what was
    launched."""

    now, busy = 0.0, 0.0

    def launch(self, seconds):
        self.now += 0.001
        self.busy = max(self.busy, self.now) + seconds


def test_parts_of_a_step_are_timed_by_the_device_where_its_work_is_asynchronous(monkeypatch):
    queue = Queue()

    class Event:
        def __init__(self, device, enable_timing):
            assert device.type == "cuda" and enable_timing

        def record(self):
            self.at = max(queue.busy, queue.now)

        def synchronize(self):
            queue.now = max(queue.now, self.at)

        def elapsed_time(self, later):
            assert queue.now >= later.at  # it was waited for
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(report.time, "perf_counter", lambda: queue.now)
    clock = StepClock(torch.device("cuda"))
    work = {"target": 2.0, "head": 3.0}
    for _ in range(2):
        clock.part("data")
        queue.now = max(queue.busy, queue.now) + 0.5  # the device waits for the host
        for part, seconds in [*work.items(), *work.items(), ("optimizer", 1.0)]:
            clock.part(part)
            queue.launch(seconds)
        clock.end()
    clock.part("data")
    clock.part("target")
    clock.part("data")  # discards the step that was stopped
    expected = {"data": 1.0, "target": 8.0, "head": 12.0, "optimizer": 2.0}
    assert clock.totals() == pytest.approx(expected, abs=0.02)
    assert clock.totals() == dict.fromkeys(PARTS, 0.0)


@pytest.fixture
def plots(monkeypatch):
    """The plots of reports, which other tests leave out."""
    monkeypatch.setattr(report, "plotted", plotted)


@pytest.mark.usefixtures("plots")
def test_the_report_shows_every_evaluation_and_every_option(short):
    folder = train(changed(short, loop={"eval_every": 8}))
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# medusa for ")
    evaluations = evaluations_of(folder)
    assert [row["step"] for row in evaluations] == [8, 12]
    for row in evaluations:
        length = row["eval"]["static"]["acceptance_length"]
        assert f"| {row['step']} | " in text and f"{length:.3f}" in text
    assert "batch_size: 4" in text
    for name in ("loss", "accuracy", "acceptance", "rate"):
        assert f"(plots/{name}.png)" in text
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    curves = report.by_depth([{"step": 1, "loss": [3.0, 4.0]}, {"step": 2, "loss": [2.0]}], "loss")
    assert curves == {"depth 0": [(1, 3.0), (2, 2.0)], "depth 1": [(1, 4.0)]}


def test_the_number_of_prompts_stands_beside_every_interval(short, capsys):
    config = changed(short, data={"held_out": 0.04}, loop={"max_steps": 1}, eval={"prompts": 5})
    folder = train(config)
    assert not lacking(capsys.readouterr().out, "1 held-out prompt eval.prompts 5")
    (evaluation,) = evaluations_of(folder)
    assert evaluation["prompts"] == 1
    page = (folder / "report.md").read_text(encoding="utf-8")
    header, _, row = [line.split(" | ") for line in page.splitlines() if line.startswith("|")][:3]
    assert row[header.index("prompts")] == "1"
    card = (folder / "best" / "README.md").read_text(encoding="utf-8")
    assert "1 held-out prompt" in card


MAY = '{"step": "May", "eval": {"chain": {"acceptance_length": 1.5}}, "held_out_loss": [1.0]}'
"""A line that matplotlib would take, with text as a date."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("log.jsonl", line) for line in ("{", "", '{"eval": 3}', '{"eval": {"a": {}}}', MAY)),
        ("log.jsonl", '{"loss": [1.0]}'),
        *(("config.yaml", config) for config in ("", "{", "head: [1]", "a: &a [*a]")),
    ],
)
def test_a_broken_file_of_a_run_is_named_by_its_report(run_options, tmp_path, plots, name, text):
    row = {"step": 1, "eval": {"static": {"acceptance_length": 1.5, "interval": [1, 2]}}}
    save_options(tmp_path, dataclasses.asdict(run_options(tmp_path, 1)))
    write_rows(tmp_path / "log.jsonl", [{**row, "held_out_loss": [1.0]}, ""])
    assert report.write_report(tmp_path).exists()
    (tmp_path / name).write_text(text)
    with refused(str(tmp_path / name)) as caught:
        report.write_report(tmp_path)
    assert "\n" not in str(caught.value)


# Stopping early.


def judged_as(monkeypatch, lengths, losses):
    """Evaluations find these acceptance lengths and held-out losses, one after the other."""
    original = loop.evaluate
    figures = iter(zip(lengths, losses, strict=True))

    def evaluate(*given):
        found = original(*given)
        length, loss = next(figures)
        trees = {name: Stats([[RoundRecord(length - 1, length)] * 2], 3) for name in found.trees}
        return dataclasses.replace(found, trees=trees, loss_K=[loss])

    monkeypatch.setattr(loop, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("lengths", "losses", "patience", "steps"),
    [
        # the objective is not what it should be
        ([3, 2, 2, 2, 2], [5, 4, 3, 2, 1], 2, [3, 6, 9, 9]),
        ([3, 2, 2, 2, 2], [5, 4, 3, 2, 1], 0, [3, 6, 9, 12]),
        # both worse: more data, not another objective
        ([3, 2, 2, 2, 2], [5, 6, 7, 8, 9], 2, [3, 6, 9, 12]),
        ([3, 2, 4, 2, 2], [5, 4, 3, 2, 1], 2, [3, 6, 9, 12]),  # it recovered
    ],
)
def test_a_run_stops_when_acceptance_falls_while_the_loss_sinks(
    short, monkeypatch, lengths, losses, patience, steps
):
    judged_as(monkeypatch, lengths, losses)
    folder = train(changed(short, loop={"eval_every": 3, "patience": patience}))
    assert [row["step"] for row in evaluations_of(folder)] == steps
    assert (folder / "last").is_dir()


def test_killed_before_its_last_evaluation_a_run_that_stopped_early_does_not_go_on(
    short, monkeypatch
):
    config = changed(short, loop={"eval_every": 3, "patience": 1})
    judged_as(monkeypatch, [3, 2, 2], [5, 4, 3])
    original = loop.Trainer.evaluate_and_save

    def killed(*given, **more):
        if "last" in more:
            raise KeyboardInterrupt
        return original(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "evaluate_and_save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    folder = train(config)
    assert max(row["step"] for row in log_of(folder)) == 6
    load_head(folder / "last")

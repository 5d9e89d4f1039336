"""Traces of a window of steps, by the option that asks for them."""

from __future__ import annotations

import gzip
import json

import pytest
from messages import refused

from headstart.train.loop import train


def events(path):
    """Names of the events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_window_of_steps_is_traced_with_the_parts_of_a_step(short, changed, capsys):
    folder = train(changed(short, loop={"profile": (3, 5), "max_steps": 8}))
    (path,) = (folder / "profile").iterdir()
    assert path.name == "steps-3-to-5.process-0.json.gz"
    names = events(path)
    for part in ("target", "head", "head, backward", "optimizer"):
        assert names.count(part) == 3, part
    assert any(name.startswith("aten::") for name in names)
    said = capsys.readouterr().out
    assert "steps 3 to 5, traced to" in said and "Self CPU" in said


@pytest.mark.parametrize(("window", "traced"), [((1, 2), 2), ((7, 20), 2), ((9, 12), 0)])
def test_a_window_may_begin_at_the_first_step_or_end_after_the_last(short, changed, window, traced):
    folder = train(changed(short, loop={"profile": window, "max_steps": 8}))
    paths = list((folder / "profile").glob("*.json.gz")) if (folder / "profile").exists() else []
    assert [events(path).count("optimizer") for path in paths] == ([traced] if traced else [])


def test_losses_are_the_same_with_a_trace_and_without(short, changed, tmp_path):
    def weights(config):
        return (train(config) / "last" / "model.safetensors").read_bytes()

    assert weights(changed(short, loop={"profile": (2, 3)})) == weights(
        changed(short, output=str(tmp_path / "plain"))
    )


@pytest.mark.parametrize("window", [(0, 2), (5, 4)])
def test_what_is_no_window_is_refused(short, changed, window):
    with refused("loop.profile [10 12]"):
        changed(short, loop={"profile": window})

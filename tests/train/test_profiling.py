"""Traces of a window of steps, by the option that asks for them."""

from __future__ import annotations

import gzip
import json

import pytest
from messages import lacking, refused
from runs import changed, last_bytes

from headstart.train.loop import train


def events(path):
    """Names of the events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_window_of_steps_is_traced_with_the_parts_of_a_step(short, tmp_path, capsys):
    config = changed(short, loop={"profile": (3, 5), "max_steps": 8})
    folder = train(config)
    (path,) = (folder / "profile").iterdir()
    assert path.name == "steps-3-to-5.process-0.json.gz"
    names = events(path)
    for part in ("target", "head", "head, backward", "optimizer"):
        assert names.count(part) == 3, part
    assert any(name.startswith("aten::") for name in names)
    assert not lacking(capsys.readouterr().out, "3 5 CPU")
    plain = changed(config, output=str(tmp_path / "plain"), loop={"profile": None})
    assert last_bytes(folder) == last_bytes(train(plain))


@pytest.mark.parametrize(("window", "traced"), [((1, 2), [2]), ((7, 20), [2]), ((9, 12), [])])
def test_a_window_may_begin_at_the_first_step_or_end_after_the_last(short, window, traced):
    folder = train(changed(short, loop={"profile": window, "max_steps": 8}))
    paths = (folder / "profile").glob("*.json.gz")
    assert [events(path).count("optimizer") for path in paths] == traced


@pytest.mark.parametrize("window", [(0, 2), (5, 4)])
def test_what_is_no_window_is_refused(short, window):
    with refused("loop.profile [10 12]"):
        changed(short, loop={"profile": window})

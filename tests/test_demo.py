"""The demo on a tiny target: it goes all the way, stops when told, and repeats nothing."""

from __future__ import annotations

import argparse
import json
import signal
from contextlib import contextmanager

import demo as demo_module
import pytest
import torch
from demo import CONVERSATIONS, FEWEST_CONVERSATIONS, STEPS, demo, self_made, training
from helpers import saved_head
from runs import write_prompts, write_rows

from headstart.heads import CheckpointMetadata
from headstart.inference import Target
from headstart.stopping import Stopped, stop_on_signals
from headstart.train import loop
from headstart.train.data import answers
from headstart.train.data import self_made as selfmade

LIKELY = {"<|im_end|>": 0.05, **dict.fromkeys("abcdefghijklmnopqrst", 0.05)}


@pytest.fixture(scope="module")
def demo_target(talking):
    """A target in float32 that writes words and ends its texts, with a head that starts as its own
    LM head."""
    folder = talking(LIKELY, 0.3)
    target = Target.from_pretrained(folder, torch.bfloat16)
    metadata = CheckpointMetadata(tree=[[0], [1], [0, 0]])
    saved_head(folder / "head", target, metadata=metadata, num_heads=2)
    return folder


@pytest.fixture
def demo_options(demo_target, tmp_path, monkeypatch):
    monkeypatch.setitem(demo_module.HEAD, "feature_layers", [0])  # the target has two blocks
    for generating in (selfmade, answers):
        # so small a model repeats itself
        monkeypatch.setattr(generating, "distinct_share", lambda _: 1.0)
    return argparse.Namespace(
        minutes=1,
        target=str(demo_target),
        output=str(tmp_path / "demo"),
        prompts=write_prompts(tmp_path / "prompts.jsonl", ["count to 3", "say a word"]),
        head=str(demo_target / "head"),
    )


def test_what_is_finished_is_not_repeated(demo_options, tmp_path, capsys):
    """A second start has the rates of the first, by which the data and the run were begun."""
    demo(demo_options)
    first_answer = tmp_path / "demo-1min" / "first_answer.json"
    rates = first_answer.read_text()
    assert json.loads(rates).keys() == {"generate", "headstart"}
    first = capsys.readouterr().out
    assert "same text" in first
    assert first.count("identical") == 2
    demo(demo_options)
    second = capsys.readouterr().out
    tables = [[line for line in shown.splitlines() if "│" in line] for shown in (first, second)]
    assert tables[0] == tables[1]
    assert second.count(" is finished") == 2
    assert first_answer.read_text() == rates
    for shown in (first, second):  # the sentence, and then a table each for both heads
        assert shown.index("prompts your head") < shown.index("vs plain")
        assert shown.count("vs plain") == 2


@pytest.mark.parametrize("module", [selfmade, loop])
def test_it_stops_while_data_are_made_or_heads_trained_and_goes_on(
    demo_options, module, capsys, monkeypatch
):
    @contextmanager
    def stops():
        with stop_on_signals() as flag:
            signal.raise_signal(signal.SIGTERM)
            yield flag

    with monkeypatch.context() as patch:
        patch.setattr(module, "stop_on_signals", stops)
        with pytest.raises(Stopped):
            demo(demo_options)
    demo(demo_options)
    assert capsys.readouterr().out.count("vs plain") == 2


@pytest.mark.parametrize(
    ("speed", "conversations", "steps"),
    [
        (1.0, CONVERSATIONS * 15, STEPS * 15),
        (0.5, CONVERSATIONS * 15 // 2, STEPS * 15 // 2),
        (0.0, FEWEST_CONVERSATIONS, 1),
    ],
)
def test_a_slower_machine_does_less(demo_options, tmp_path, speed, conversations, steps):
    row = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}
    path = write_rows(tmp_path / "conversations.jsonl", [row])
    demo_options.minutes = 15
    assert self_made(demo_options, tmp_path, speed).conversations == conversations
    assert training(demo_options, tmp_path, path, speed).loop.max_steps == steps

"""The demo on a tiny target: it goes all the way, stops when told, and repeats nothing."""

from __future__ import annotations

import argparse
import signal
from contextlib import contextmanager

import demo as demo_module
import pytest
import torch
from demo import (
    CONVERSATIONS,
    FEWEST_CONVERSATIONS,
    STEPS,
    demo,
    first_answer,
    self_made,
    training,
)

from headstart.heads import CheckpointMetadata, MedusaConfig, MedusaHead
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import Target
from headstart.stopping import Stopped, stop_on_signals
from headstart.train import loop
from headstart.train.data import answers
from headstart.train.data import self_made as selfmade

LIKELY = {"<|im_end|>": 0.05, **dict.fromkeys("abcdefghijklmnopqrst", 0.05)}


@pytest.fixture(scope="module")
def talker(talking):
    """A target in float32 that writes words and ends its texts, with a head that starts as its own
    LM head."""
    folder = talking(LIKELY, 0.3)
    target = Target.from_pretrained(folder, torch.bfloat16)
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, folder / "head", CheckpointMetadata(tree=[[0], [1], [0, 0]]))
    return folder


@pytest.fixture
def config(talker, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "count to 3"}\n{"prompt": "say a word"}\n')
    monkeypatch.setitem(demo_module.HEAD, "feature_layers", [0])  # the target has two blocks
    for generating in (selfmade, answers):
        # so small a model repeats itself
        monkeypatch.setattr(generating, "distinct_share", lambda _: 1.0)
    return argparse.Namespace(
        minutes=1,
        target=str(talker),
        output=str(tmp_path / "demo"),
        prompts=str(prompts),
        head=str(talker / "head"),
    )


def test_what_is_finished_is_not_repeated(config, capsys):
    demo(config)
    first = capsys.readouterr().out
    assert "both generated the same text" in first and first.count("identical") == 2
    demo(config)
    second = capsys.readouterr().out
    tables = [[line for line in said.splitlines() if "│" in line] for said in (first, second)]
    assert tables[0] == tables[1] and second.count(" is finished") == 2
    for said in (first, second):  # the sentence, and then a table each for both heads
        assert said.index("prompts your head") < said.index("vs plain")
        assert said.count("vs plain") == 2


@pytest.mark.parametrize("stage", ["2 of 4", "3 of 4"])
def test_it_stops_while_data_are_made_or_heads_trained_and_goes_on(
    config, stage, capsys, monkeypatch
):
    module = selfmade if stage == "2 of 4" else loop

    @contextmanager
    def stops():
        with stop_on_signals() as flag:
            signal.raise_signal(signal.SIGTERM)
            yield flag

    with monkeypatch.context() as patch:
        patch.setattr(module, "stop_on_signals", stops)
        with pytest.raises(Stopped, match="the same command"):
            demo(config)
    demo(config)
    assert "all of it took" in capsys.readouterr().out


def test_a_slower_machine_does_less_and_a_faster_one_no_more(config, tmp_path):
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text('{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}\n')
    config.minutes = 15
    fast, slow, slowest = (
        self_made(config, tmp_path, speed).conversations for speed in (1.0, 0.5, 0.0)
    )
    assert (fast, slow, slowest) == (
        CONVERSATIONS * 15,
        CONVERSATIONS * 15 // 2,
        FEWEST_CONVERSATIONS,
    )
    steps = [
        training(config, tmp_path, conversations, speed).loop.max_steps for speed in (1.0, 0.5, 0.0)
    ]
    assert steps == [STEPS * 15, STEPS * 15 // 2, 1]


def test_the_first_answer_decides_once(config, tmp_path, monkeypatch):
    """A second start has the numbers of the first, with which the data and the run were begun."""
    given = [{"generate": 5.0, "headstart": 9.0}, {"generate": 50.0, "headstart": 90.0}]
    monkeypatch.setattr(demo_module, "stream_answer", lambda _: given.pop(0))
    path = tmp_path / "demo" / "first_answer.json"
    assert (
        first_answer(config, path)
        == first_answer(config, path)
        == {
            "generate": 5.0,
            "headstart": 9.0,
        }
    )

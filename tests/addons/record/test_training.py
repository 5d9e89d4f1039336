"""A head trained on what was recorded while another one decoded, without the target."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import saved_head
from messages import refused
from runs import assert_same_losses

from headstart.addons.record import record
from headstart.files import text_shards
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.train.config import FeaturesConfig, TrainConfig
from headstart.train.data.conversations import open_sources, read_conversations
from headstart.train.loop import train

HEAD = {"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2}


@pytest.fixture(scope="module")
def recorded(taught, conversations_file, tmp_path_factory):
    """A folder with the answers to all prompts, the second of them twice, in two turns of a
    conversation."""
    tokenizer = load_tokenizer(taught)
    target = Target.from_pretrained(str(taught), torch.float32)
    options = {name: value for name, value in HEAD.items() if name != "type"}
    folder = tmp_path_factory.mktemp("recorded")
    head = saved_head(folder.with_name("head"), target, "eagle3", **options)
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False)
    rows = read_conversations(str(conversations_file))
    questions = list(dict.fromkeys(row["messages"][0]["content"] for row in rows))
    with record(lm, folder, format="float32", kind="counting") as running:
        for question in questions:
            chat = lm.chat(tokenizer, max_new_tokens=24, do_sample=False)
            chat.say(question)
            chat.say("again")
        lm.chat(tokenizer, max_new_tokens=24, do_sample=False).say(questions[1])
    assert running.written == 2 * len(questions) + 1
    return folder


@pytest.mark.parametrize("max_length", [200, 40])  # longer texts are cut with their states
def test_a_recording_is_data_and_states_in_one(recorded, short, monkeypatch, changed, max_length):
    features = FeaturesConfig(mode="stored", format="float32", folder=str(recorded))
    short = changed(
        short, features=features, head=HEAD, loop={"max_steps": 4}, eval={"max_new_tokens": 4}
    )
    config = changed(short, data={"sources": [], "held_out": 0.3, "max_length": max_length})
    assert config.data.sources == [str(recorded)]
    online = dataclasses.replace(
        config, output=config.output + "-online", features=FeaturesConfig()
    )
    expected = train(online)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)
        row, _ = assert_same_losses(train(config), expected, atol=1e-5)
    assert row["eval"]["chain"]["acceptance_length"] > 1


def test_recorded_texts_are_not_copied_beyond_their_folder(
    recorded, short, changed, tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    features = FeaturesConfig(mode="stored", format="float32", folder=str(recorded))
    given = changed(short, features=features, head=HEAD, loop={"max_steps": 1})
    config = changed(given, data={"sources": [], "held_out": 0.3, "cache": None})
    train(config)
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert list((recorded / "tokens").rglob("*.arrow"))
    named = changed(given, data={"sources": [str(recorded)], "cache": None})
    assert named.data.cache == config.data.cache == str(recorded / "tokens")
    own = changed(given, data={"sources": [], "cache": str(tmp_path / "own")})
    assert own.data.cache == str(tmp_path / "own")


def test_equal_texts_are_one_row_and_what_is_no_recording_is_no_source(recorded, taught, tmp_path):
    (source,) = open_sources([str(recorded)])
    rows = [row for _, row in source.read_all()]
    assert len(rows) == len(text_shards(recorded)) - 1
    assert {row["kind"] for row in rows} == {"counting"}
    assert [sum(row["loss_mask"]) > 0 for row in rows] == [True] * len(rows)
    (tmp_path / "recorded-1-2-3.safetensors").write_bytes(b"cut")
    with refused("recorded-1-2-3.safetensors"):
        next(open_sources([str(tmp_path)])[0].read_all())
    given = {"target": str(taught), "output": str(tmp_path / "run")}
    empty = FeaturesConfig(mode="stored", folder=str(tmp_path / "empty"))
    with refused("'data.sources'"):
        TrainConfig(**given, features=empty)

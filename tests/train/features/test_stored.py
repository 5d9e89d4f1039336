"""A head trained with no target in memory: on states from a folder, or from a source of the
caller's."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from messages import refused
from runs import assert_same_losses, last_weights, same_tensors

from headstart import files as files_module
from headstart.inference import Target, feature_cache
from headstart.inference.feature_cache import FeatureCache, key_of
from headstart.scripts.features import precompute
from headstart.train.config import FeaturesConfig
from headstart.train.features.sources import StateSource
from headstart.train.loop import Callback, train

HEAD = {"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2}


@pytest.fixture
def stored(short, tmp_path):
    """A run of EAGLE-3 on states in float32 that `headstart features` has written."""
    config = dataclasses.replace(
        short,
        head=HEAD,
        features=FeaturesConfig(mode="stored", format="float32", folder=str(tmp_path / "states")),
    )
    precompute(config)
    return config


def test_a_run_without_the_target_has_the_losses_of_one_with_it(stored, monkeypatch):
    with_target = dataclasses.replace(
        stored, output=stored.output + "-online", features=FeaturesConfig()
    )
    expected = train(with_target)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)
        folder = train(stored)
    row, judged = assert_same_losses(folder, expected)
    assert row["eval"] == judged["eval"]
    assert last_weights(folder).keys() == last_weights(expected).keys()


def test_what_a_folder_lacks_is_told_before_the_target_is_needed(
    stored, changed, tmp_path, monkeypatch
):
    monkeypatch.setattr(Target, "load", None)
    folder = tmp_path / "states"
    elsewhere = dataclasses.replace(stored.features, folder=str(tmp_path / "none"))
    with refused("none headstart features"):
        train(dataclasses.replace(stored, features=elsewhere))
    assert not (tmp_path / "none").exists()
    answers = sorted((folder / "answers").iterdir())
    assert answers, "of the prompts, some of which are the same"
    kept = answers[0].read_text()
    answers[0].unlink()
    with refused("8 (eval.max_new_tokens)"):
        train(stored)
    answers[0].write_text(kept)
    shards = list(folder.glob("*.safetensors"))
    for shard in shards:
        shard.rename(tmp_path / shard.name)
    with refused("lacks data.max_length"):
        train(stored)
    for shard in shards:
        (tmp_path / shard.name).rename(shard)
    other = dataclasses.replace(
        stored, head={**stored.head, "feature_layers": [0]}, dtype="float32"
    )
    assert train(changed(other, output=stored.output + "-fewer", loop={"max_steps": 1})).exists()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with refused("= 'another'"):
        train(dataclasses.replace(stored, output=stored.output + "-2"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-9])
    with refused(f"{shard} corrupt"):
        train(dataclasses.replace(stored, output=stored.output + "-3"))


class TwinStates(StateSource):
    """States that a twin of the target computes: how a program gives its own."""

    greedy = False

    def __init__(self, folder, info, layers):
        assert layers[-1] == -1
        self.layers = layers
        self.twin = Target.load(folder, torch.float32, "cpu")

    def states(self, tokens_T, conversation):
        features_1TF, last_1TD = self.twin.read(tokens_T[None], self.layers[:-1])
        features_TLD = features_1TF[0].unflatten(-1, (len(self.layers) - 1, -1))
        return torch.cat([features_TLD, last_1TD[0, :, None]], 1), None


def test_a_source_of_the_callers_own_gives_the_same_head(short, taught):
    with_target = dataclasses.replace(short, head=HEAD, output=short.output + "-online")
    served = dataclasses.replace(short, head=HEAD, features=FeaturesConfig(mode="served"))
    folder = train(served, source=partial(TwinStates, str(taught)))
    assert_same_losses(folder, train(with_target))


class Asked(TwinStates):
    """Remembers how many sequences it was asked for at once, and fails while a file is there."""

    at_once: ClassVar[list[int]] = []
    hangs: ClassVar[Path] = Path("nowhere")

    def many(self, sequences):
        self.at_once.append(len(sequences))
        if self.hangs.exists():
            raise ValueError("the server hangs")
        return super().many(sequences)


def test_a_steps_sequences_are_asked_for_together(short, taught, changed, monkeypatch):
    monkeypatch.setattr(Asked, "at_once", [])
    served = dataclasses.replace(short, head=HEAD, features=FeaturesConfig(mode="served"))
    loop = {"batch_size": 4, "micro_batch": 1, "max_steps": 3}
    served = changed(served, loop=loop, data={"workers": 0})
    train(served, source=partial(Asked, str(taught)))
    assert Asked.at_once.count(4) >= 2 and 1 not in Asked.at_once


class Hang(Callback):
    def on_step(self, progress, row):
        if progress.step == 2:
            Asked.hangs.touch()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_fails_costs_no_step(short, taught, changed, monkeypatch, workers, tmp_path):
    monkeypatch.setattr(Asked, "hangs", tmp_path / "hangs")
    source = partial(Asked, str(taught))
    served = dataclasses.replace(short, head=HEAD, features=FeaturesConfig(mode="served"))
    served = changed(served, loop={"max_steps": 12, "save_every": 0}, data={"workers": workers})
    wanted = last_weights(train(served, source=source))
    again = dataclasses.replace(served, output=served.output + "-again")
    with pytest.raises(ValueError, match="the server hangs"):
        train(again, [Hang()], source)
    (saved,) = (Path(again.output) / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step == 2 if workers == 0 else 2 <= step < 12
    Asked.hangs.unlink()
    assert same_tensors(last_weights(train(again, source=source)), wanted)


def test_a_mode_that_does_not_go_with_the_callers_source_is_refused(short):
    with refused("features.mode"):
        train(dataclasses.replace(short, features=FeaturesConfig(mode="served")))
    with refused("features.mode"):
        train(short, source=partial(TwinStates, "nothing"))


def test_two_jobs_of_one_number_fill_one_folder_and_both_finish(tmp_path, monkeypatch):
    """One writes the shard while the other, on another machine, is about to put its own in the same
    place."""
    rows = [[1, 2, 3], [4, 5]]
    caches = [FeatureCache(tmp_path, {"layers": [-1], "format": "float32"}) for _ in range(2)]
    for cache in caches:
        for tokens in rows:
            cache.add(key_of(torch.tensor(tokens)), torch.ones(len(tokens), 1, 4))
    names = []
    original = feature_cache.save_file

    def save(tensors, path, about):
        original(tensors, path, about)
        names.append(path.name)
        if len(names) == 1:
            caches[1].flush()

    monkeypatch.setattr(feature_cache, "save_file", save)
    monkeypatch.setattr(files_module.os, "getpid", lambda: 7)
    caches[0].flush()
    assert len(set(names)) == 2
    for cache in caches:
        for tokens in rows:
            states_TLD, _ = cache.stored(key_of(torch.tensor(tokens)))
            assert torch.equal(states_TLD, torch.ones(len(tokens), 1, 4))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_broken_answer_is_named(stored):
    paths = list((Path(stored.features.folder) / "answers").iterdir())
    for text in ("{", "[1]", "{}", '{"text": 3}', '{"text": {}}', '{"text": [1.5]}'):
        for path in paths:
            path.write_text(text)
        with refused("answers/"):
            train(stored)

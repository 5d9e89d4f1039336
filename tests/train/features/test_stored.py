"""A head trained with no target in memory: on states from a folder, or from a source of the
caller's."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from messages import refused
from runs import (
    assert_same_losses,
    assert_same_weights,
    changed,
    checkpoints_of,
    last_weights,
)

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
    features = FeaturesConfig(mode="stored", format="float32", folder=str(tmp_path / "states"))
    config = changed(short, head=HEAD, features=features)
    precompute(config)
    return config


@pytest.fixture
def served(short):
    """The same on states of the caller's own source."""
    return changed(short, head=HEAD, features=FeaturesConfig(mode="served"))


@pytest.fixture
def without_target(monkeypatch):
    monkeypatch.setattr(Target, "load", None)


def test_a_run_without_the_target_has_the_losses_of_one_with_it(stored, request):
    online = changed(stored, output=f"{stored.output}-online", features=FeaturesConfig())
    expected = train(online)
    request.getfixturevalue("without_target")
    folder = train(stored)
    row, judged = assert_same_losses(folder, expected)
    assert row["eval"] == judged["eval"]
    assert last_weights(folder).keys() == last_weights(expected).keys()


def test_what_a_folder_lacks_is_told_before_the_target_is_needed(stored, tmp_path, without_target):
    folder = tmp_path / "states"
    with refused("none headstart features"):
        train(changed(stored, features={"folder": str(tmp_path / "none")}))
    assert not (tmp_path / "none").exists()

    @contextmanager
    def without(path):
        kept = path.read_bytes()
        path.unlink()
        yield
        path.write_bytes(kept)

    # an answer to a prompt, and the states of the conversations
    answer = min((folder / "answers").iterdir())
    with without(answer), refused("8 (eval.max_new_tokens)"):
        train(stored)
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with without(shard), refused("states data.max_length"):
        train(stored)
    fewer = {**HEAD, "feature_layers": [0]}
    assert train(
        changed(stored, head=fewer, output=f"{stored.output}-fewer", loop={"max_steps": 1})
    )
    shard.write_bytes(shard.read_bytes()[:-9])
    with refused(f"{shard} corrupt"):
        train(stored)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with refused("= 'another'"):
        train(stored)


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


def test_a_source_of_the_callers_own_gives_the_same_head(served, taught):
    online = changed(served, output=f"{served.output}-online", features=FeaturesConfig())
    folder = train(served, source=partial(TwinStates, str(taught)))
    assert_same_losses(folder, train(online))


class Asked(TwinStates):
    """Remembers how many sequences it was asked for at once, and fails while a file is there."""

    at_once: ClassVar[list[int]] = []

    def __init__(self, folder, broken, info, layers):
        super().__init__(folder, info, layers)
        self.broken = broken

    def many(self, sequences):
        self.at_once.append(len(sequences))
        if self.broken.exists():
            raise ValueError("the server hangs")
        return super().many(sequences)


def test_a_steps_sequences_are_asked_for_together(served, taught, tmp_path):
    Asked.at_once.clear()
    loop = {"batch_size": 4, "micro_batch": 1, "max_steps": 3}
    served = changed(served, loop=loop, data={"workers": 0})
    train(served, source=partial(Asked, str(taught), tmp_path / "broken"))
    assert Asked.at_once.count(4) >= 2 and 1 not in Asked.at_once


class Breaks(Callback):
    """Breaks the source after the second step."""

    def __init__(self, broken):
        self.broken = broken

    def on_step(self, progress, row):
        if progress.step == 2:
            self.broken.touch()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_fails_costs_no_step(served, taught, workers, tmp_path):
    broken = tmp_path / "broken"
    source = partial(Asked, str(taught), broken)
    served = changed(served, data={"workers": workers})
    whole = train(served, source=source)
    again = changed(served, output=f"{served.output}-again")
    with refused("hangs"):
        train(again, [Breaks(broken)], source)
    (saved,) = checkpoints_of(again.output)
    step = int(saved.removeprefix("step-"))
    assert step == 2 if workers == 0 else 2 <= step < 12
    broken.unlink()
    assert_same_weights(train(again, source=source), whole)


def test_a_mode_that_does_not_go_with_the_callers_source_is_refused(served, short):
    with refused("features.mode"):
        train(served)
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

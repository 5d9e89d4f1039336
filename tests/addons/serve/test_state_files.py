"""States that a server made, in speculators' files, are those that the target would have
computed."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from messages import refused
from runs import random_examples
from safetensors.torch import save_file

from headstart.addons.serve.options import ServedFeaturesConfig, ServedTrainConfig
from headstart.addons.serve.state_files import FileStates, ServerLayers
from headstart.heads import build_head
from headstart.inference.feature_cache import FeatureCache
from headstart.train.data.batches import collate
from headstart.train.features.by_mode import import_states
from headstart.train.features.online import CachedFeatures, online_features

LAYERS = [3, 1, 2]
"""What the files hold: what leaves the last of three blocks, and the inputs of blocks 1 and 2, our
0 and 1."""


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=24, layers=3)


@pytest.fixture
def head(target):
    return build_head("eagle3", {"feature_layers": [0, 1]}, target.info)


@pytest.fixture
def examples():
    return random_examples(3, 24)


@pytest.fixture
def served(target, examples, tmp_path):
    """The folder that a server would have written."""
    folder = tmp_path / "served"
    folder.mkdir()
    seen = []
    assert target.first_block_index == 1  # found by forwards of its own, once
    modules = (*target.modules.blocks[1:], target.modules.norm)
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for module in modules
    ]
    for number, example in enumerate(examples):
        seen.clear()
        target.read(torch.tensor([example.tokens]), (0, 1))
        first, second, last = (states[0] for states in seen)
        states = {
            "token_ids": torch.tensor(example.tokens),
            "hidden_states": torch.stack([last, first, second], 1),
        }
        save_file(states, folder / f"hs_{number}.safetensors")
    for hook in hooks:
        hook.remove()
    return folder


@pytest.fixture
def source(target, head, tmp_path):
    manifest = {"target": "tiny", "layers": [0, 1, -1], "format": "float32"}
    return CachedFeatures(target, head, FeatureCache(tmp_path / "cache", manifest))


def take(source, target, examples, folder, layers=LAYERS):
    files = FileStates(folder, ServerLayers.of(layers, source.cache.layers, target.info))
    return import_states(Accelerator(), source.cache, files, target, source.head, examples)


@pytest.mark.parametrize("cut", [0, 3])  # a longer file serves a sequence that is cut here
def test_they_are_the_targets_own(target, head, source, examples, served, monkeypatch, cut):
    examples = [example.truncated(len(example.tokens) - cut) for example in examples]
    batch = collate(examples)
    wanted = online_features(target, head, batch)
    assert take(source, target, examples, served) == 3
    monkeypatch.setattr(target, "read", None)  # it computes none
    found = source(batch)
    for row, place in batch.places():
        for name in ("features_BTF", "last_BTD"):
            states_BTF, expected_BTF = getattr(found, name), getattr(wanted, name)
            torch.testing.assert_close(states_BTF[row, place], expected_BTF[row, place])
    assert take(source, target, examples, served) == 0, "what is there is not taken again"


def test_a_folder_without_files_or_layers_is_refused(target, source, examples, served, tmp_path):
    (tmp_path / "empty").mkdir()
    with refused("empty' hs_NUMBER.safetensors"):
        take(source, target, examples, tmp_path / "empty")
    with refused("server_layers [2, 3] [1] [1, 2, 3]"):
        take(source, target, examples, served, [2, 3])
    (served / "hs_1.safetensors").unlink()
    with refused("3 hs_1.safetensors"):
        take(source, target, examples, served)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"from_server": "f", "mode": "cached"}, "features.server_layers"),
        ({"server_layers": [1], "mode": "cached"}, "features.server_layers"),
        ({"server": "http://h/v1", "mode": "served"}, "features.server_layers"),
        ({"from_server": "f", "server_layers": [1]}, "from_server needs features.mode"),
        ({"server": "http://h/v1", "server_layers": [1]}, "features.server needs features.mode"),
        ({"mode": "served"}, "features.mode needs features.server"),
        (
            {"server": "host:8000", "server_layers": [1], "mode": "served"},
            "URL http://HOST:8000/v1",
        ),
        ({"server": "http://h/v1", "from_server": "f", "mode": "stored"}, "sources states"),
        (
            {"server": "http://h/v1", "server_layers": [1], "mode": "served"},
            "features.server needs features.server_folder",
        ),
        ({"server_seconds": 0}, "server_seconds 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run_options, tmp_path, given, message):
    config = run_options(tmp_path, 1)
    with refused(message):
        ServedTrainConfig(**{**vars(config), "features": ServedFeaturesConfig(**given)})

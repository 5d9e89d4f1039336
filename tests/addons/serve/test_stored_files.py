"""A head trained with no target in memory, on the files that a server wrote."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from messages import refused
from runs import assert_same_losses, launched, write_config
from safetensors.torch import load_file, save_file

from headstart.addons.serve import state_files
from headstart.addons.serve.options import (
    ServedFeaturesConfig,
    ServedTrainConfig,
    open_server,
    training_source,
)
from headstart.addons.serve.state_files import ServerLayers
from headstart.inference import Target
from headstart.scripts.features import precompute
from headstart.train import inputs as loading
from headstart.train.features import by_mode
from headstart.train.inputs import load_inputs
from headstart.train.loop import train


def train_served(config):
    run_config, source = training_source(config)
    return train(run_config, source=source)


@pytest.fixture
def files(short, taught, tmp_path):
    """A folder of speculators' files with the states of every conversation, and a run on it."""
    options = {
        **vars(short),
        "head": {"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2},
        "features": ServedFeaturesConfig(
            mode="stored", from_server=str(tmp_path / "files"), server_layers=[2, 1]
        ),
    }
    config = ServedTrainConfig(**options)
    folder = tmp_path / "files"
    folder.mkdir()
    inputs = load_inputs(
        dataclasses.replace(config, features=ServedFeaturesConfig()), Accelerator()
    )
    streams = []
    for block in inputs.target.modules.blocks:
        block.register_forward_hook(lambda module, given, output: streams.append(output))
    for example in [*inputs.training[:], *inputs.held_out]:
        streams.clear()
        tokens_1T = torch.tensor([example.tokens])
        inputs.target.model(tokens_1T)
        states = torch.stack([streams[1][0], streams[0][0]], 1)
        save_file(
            {"token_ids": tokens_1T[0], "hidden_states": states},
            folder / f"hs_{example.conversation}.safetensors",
        )
    return config


def test_files_are_read_as_they_are_needed_and_give_the_same_head(files, monkeypatch, tmp_path):
    with_target = dataclasses.replace(
        files, output=files.output + "-online", features=ServedFeaturesConfig()
    )
    expected = train_served(with_target)
    monkeypatch.setattr(Target, "load", None)
    read = []
    original = ServerLayers.read
    monkeypatch.setattr(
        ServerLayers, "read", lambda *given: read.append(given[1].name) or original(*given)
    )
    row, _ = assert_same_losses(train_served(files), expected)
    assert row["eval"]["chain"]["acceptance_length"] > 1, "their own answers are replayed"
    read.clear()
    started = dataclasses.replace(
        files, output=files.output + "-started", loop=dataclasses.replace(files.loop, max_steps=1)
    )
    check_source = by_mode.check_source

    def checked(*given):
        check_source(*given)
        assert len(read) == 1, "all others are decided by name"

    monkeypatch.setattr(loading, "check_source", checked)
    train_served(started)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "1 of 5 states"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "read"),
        (
            lambda path: rewrite(path, hidden_states=lambda s: s[:, :1].clone()),
            "hidden_states 1, 32]",
        ),
        (lambda path: rewrite(path, hidden_states=lambda s: s.flip(1).contiguous()), "nats token"),
        (lambda path: rewrite(path, hidden_states=lambda s: s[:-1].clone()), "hidden_states"),
        (lambda path: rewrite(path, hidden_states=lambda s: s * float("nan")), "hidden_states NaN"),
        (lambda path: save_file({"token_ids": torch.ones(3)}, path), "lacks hidden_states"),
        (lambda path: rewrite(path, token_ids=lambda t: t.flip(0).contiguous()), "token 0"),
        (
            lambda path: rewrite(path, token_ids=lambda t: t[:-2], hidden_states=lambda s: s[:-2]),
            "max_length",
        ),
        (lambda path: rewrite(path, token_ids=lambda t: t + 300), "made tokenizer"),
    ],
)
def test_a_wrong_file_is_named_before_the_first_step(files, tmp_path, spoil, message, monkeypatch):
    first = load_inputs(
        dataclasses.replace(files, features=ServedFeaturesConfig()), Accelerator()
    ).held_out[0]
    spoil(tmp_path / "files" / f"hs_{first.conversation}.safetensors")
    monkeypatch.setattr(state_files, "WORSE", 0.2)  # the blocks of a tiny target do little
    monkeypatch.setattr(Target, "load", None)
    with refused(message):
        train_served(files)


def rewrite(path, **changes):
    tensors = load_file(path)
    save_file(
        {**tensors, **{name: change(tensors[name]) for name, change in changes.items()}}, path
    )


def test_a_file_that_is_cut_in_training_is_named_by_the_step_and_not_by_a_worker(
    files, changed, tmp_path
):
    inputs = load_inputs(dataclasses.replace(files, features=ServedFeaturesConfig()), Accelerator())
    path = tmp_path / "files" / f"hs_{inputs.training[3].conversation}.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with refused(f"{path}"):
        train_served(changed(files, data={"workers": 1}))


def test_headstart_features_copies_files_and_asks_no_target(files, monkeypatch, tmp_path):
    monkeypatch.setattr(Target, "load", None)
    config = dataclasses.replace(
        files,
        features=dataclasses.replace(
            files.features, folder=str(tmp_path / "copied"), format="float32"
        ),
    )
    precompute(config, partial(open_server, config.features))
    alone = ServedFeaturesConfig(mode="stored", folder=str(tmp_path / "copied"), format="float32")
    direct = dataclasses.replace(files, output=files.output + "-direct")
    copied = dataclasses.replace(files, features=alone)
    assert_same_losses(train_served(copied), train_served(direct))


def on_two_processes(script, config, folder):
    """The status of a command on two processes, and what it printed."""
    path = write_config(config, folder / f"{script}.yaml")
    done = launched(f"scripts/{script}.py", "--config", path)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_two_processes_fill_a_folder_and_train_on_it(files, tmp_path):
    with_target = dataclasses.replace(
        files, output=files.output + "-online", features=ServedFeaturesConfig()
    )
    expected = train_served(with_target)
    copied = dataclasses.replace(files.features, folder=str(tmp_path / "copied"), format="float32")
    code, said = on_two_processes("features", dataclasses.replace(files, features=copied), tmp_path)
    assert code == 0, said
    shards = list((tmp_path / "copied").glob("*.safetensors"))
    assert len(shards) >= 2, "each process wrote its part"
    alone = ServedFeaturesConfig(mode="stored", folder=str(tmp_path / "copied"), format="float32")
    code, said = on_two_processes("train", dataclasses.replace(files, features=alone), tmp_path)
    assert code == 0, said
    assert_same_losses(files.output, expected, atol=1e-5)

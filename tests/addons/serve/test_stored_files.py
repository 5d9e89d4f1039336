"""A head trained with no target in memory, on the files that a server wrote."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from messages import refused
from runs import assert_same_losses, changed, launched, write_config
from safetensors.torch import load_file, save_file

from headstart.addons.serve import state_files
from headstart.addons.serve.options import ServedFeaturesConfig, open_server
from headstart.addons.serve.state_files import ServerLayers
from headstart.inference import Target
from headstart.scripts.features import precompute
from headstart.train import inputs as loading
from headstart.train.features import by_mode
from headstart.train.inputs import load_inputs


@pytest.fixture
def files(served_run, tmp_path):
    """A folder of speculators' files with the states of every conversation, and a run on it."""
    folder = tmp_path / "files"
    folder.mkdir()
    config = served_run(mode="stored", from_server=str(folder), server_layers=[2, 1])
    inputs = inputs_of(config)
    streams = []
    for block in inputs.target.modules.blocks:
        block.register_forward_hook(lambda module, given, output: streams.append(output))
    for example in [*inputs.training[:], *inputs.held_out]:
        streams.clear()
        tokens_1T = torch.tensor([example.tokens])
        inputs.target.model(tokens_1T)
        states = torch.stack([streams[1][0], streams[0][0]], 1)
        tensors = {"token_ids": tokens_1T[0], "hidden_states": states}
        save_file(tensors, file_of(config, example))
    return config


def inputs_of(config):
    """The data of a run, with a target of its own."""
    return load_inputs(changed(config, features=ServedFeaturesConfig()), Accelerator())


def file_of(config, example):
    return Path(config.features.from_server) / f"hs_{example.conversation}.safetensors"


def test_files_are_read_as_they_are_needed_and_give_the_same_head(
    files, train_served, train_with_target, monkeypatch
):
    expected = train_with_target(files)
    monkeypatch.setattr(Target, "load", None)
    read = []
    original = ServerLayers.read
    monkeypatch.setattr(
        ServerLayers, "read", lambda *given: read.append(given[1].name) or original(*given)
    )
    row, _ = assert_same_losses(train_served(files), expected)
    assert row["eval"]["chain"]["acceptance_length"] > 1, "their own answers are replayed"
    read.clear()
    started = changed(files, output=f"{files.output}-started", loop={"max_steps": 1})
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
        (lambda path: cut(path), "read"),
        (lambda path: rewrite(path, hidden_states=lambda s: s[:, :1]), "hidden_states 1, 32]"),
        (lambda path: rewrite(path, hidden_states=lambda s: s.flip(1)), "nats token"),
        (lambda path: rewrite(path, hidden_states=lambda s: s[:-1]), "hidden_states"),
        (lambda path: rewrite(path, hidden_states=lambda s: s * float("nan")), "hidden_states NaN"),
        (lambda path: save_file({"token_ids": torch.ones(3)}, path), "lacks hidden_states"),
        (lambda path: rewrite(path, token_ids=lambda t: t.flip(0)), "token 0"),
        (
            lambda path: rewrite(path, token_ids=lambda t: t[:-2], hidden_states=lambda s: s[:-2]),
            "max_length",
        ),
        (lambda path: rewrite(path, token_ids=lambda t: t + 300), "made tokenizer"),
    ],
)
def test_a_wrong_file_is_named_before_the_first_step(
    files, train_served, spoil, message, monkeypatch
):
    spoil(file_of(files, inputs_of(files).held_out[0]))
    monkeypatch.setattr(state_files, "WORSE", 0.2)  # the blocks of a tiny target do little
    monkeypatch.setattr(Target, "load", None)
    with refused(message):
        train_served(files)


def rewrite(path, **changes):
    tensors = load_file(path)
    for name, change in changes.items():
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def test_a_file_that_is_cut_in_training_is_named_by_the_step_and_not_by_a_worker(
    files, train_served
):
    path = file_of(files, inputs_of(files).training[3])
    cut(path)
    with refused(f"{path}") as caught:
        train_served(changed(files, data={"workers": 1}))
    assert "\n" not in str(caught.value)


def copying(files, folder):
    """The options of copying files to a folder, and those of a run on the copies alone."""
    where = {"folder": str(folder), "format": "float32"}
    alone = ServedFeaturesConfig(mode="stored", **where)
    return changed(files, features=where), changed(files, features=alone)


def test_headstart_features_copies_files_and_asks_no_target(
    files, train_served, monkeypatch, tmp_path
):
    monkeypatch.setattr(Target, "load", None)
    config, copied = copying(files, tmp_path / "copied")
    precompute(config, partial(open_server, config.features))
    direct = changed(files, output=f"{files.output}-direct")
    assert_same_losses(train_served(copied), train_served(direct))


def on_two_processes(script, config, folder):
    path = write_config(config, folder / f"{script}.yaml")
    done = launched(f"scripts/{script}.py", "--config", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_two_processes_fill_a_folder_and_train_on_it(files, train_with_target, tmp_path):
    expected = train_with_target(files)
    config, copied = copying(files, tmp_path / "copied")
    on_two_processes("features", config, tmp_path)
    shards = list((tmp_path / "copied").glob("*.safetensors"))
    assert len(shards) >= 2, "each process wrote its part"
    on_two_processes("train", copied, tmp_path)
    assert_same_losses(files.output, expected, atol=1e-5)

"""A head trained with no target in memory: on states from files, or from a server."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from headstart import files as files_module
from headstart.heads.checkpoints.files import json_ready
from headstart.inference import Target, feature_cache
from headstart.inference.feature_cache import FeatureCache, key_of
from headstart.scripts.features import precompute
from headstart.train import loop
from headstart.train.config import FeaturesConfig
from headstart.train.features import by_mode, online, server_states
from headstart.train.features.server_states import ServerLayers
from headstart.train.loop import load_inputs, train


@pytest.fixture
def stored(short, tmp_path):
    """A run of EAGLE-3 on states in float32 that `headstart features` has written."""
    config = dataclasses.replace(
        short,
        head={"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2},
        features=FeaturesConfig(mode="stored", format="float32", folder=str(tmp_path / "states")),
    )
    precompute(config)
    return config


def losses(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row], [row for row in rows if "eval" in row]


def test_a_run_without_the_target_has_the_losses_of_one_with_it(stored, monkeypatch):
    with_target = dataclasses.replace(stored, output=stored.output + "-online", features=FeaturesConfig())
    expected, (judged,) = losses(train(with_target))
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", None)
        folder = train(stored)
    found, (row,) = losses(folder)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(row["held_out_loss"], judged["held_out_loss"], atol=1e-6, rtol=0)
    assert row["eval"] == judged["eval"]
    one, other = (load_file(path / "last" / "model.safetensors") for path in (folder, folder.parent / "run-online"))
    assert one.keys() == other.keys()


def test_what_a_folder_lacks_is_told_before_the_target_is_needed(stored, changed, tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    folder = tmp_path / "states"
    elsewhere = dataclasses.replace(stored.features, folder=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"finds no states in .*none.* write them by `headstart features`"):
        train(dataclasses.replace(stored, features=elsewhere))
    assert not (tmp_path / "none").exists()
    answers = sorted((folder / "answers").iterdir())
    assert answers, "of the prompts, some of which are the same"
    kept = answers[0].read_text()
    answers[0].unlink()
    with pytest.raises(ValueError, match=r"no answer of 8 tokens \(eval.new_tokens\) to the held-out conversation"):
        train(stored)
    answers[0].write_text(kept)
    shards = list(folder.glob("*.safetensors"))
    for shard in shards:
        shard.rename(tmp_path / shard.name)
    with pytest.raises(ValueError, match=r"lacks the states of \d+ of \d+ sequences to train on; .*data.max_length"):
        train(stored)
    for shard in shards:
        (tmp_path / shard.name).rename(shard)
    other = dataclasses.replace(stored, head={**stored.head, "feature_layers": [0]}, target_dtype="float32")
    assert train(changed(other, output=stored.output + "-fewer", loop={"max_steps": 1})).exists()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with pytest.raises(ValueError, match=r"holds states with tokenizer = 'another', not"):
        train(dataclasses.replace(stored, output=stored.output + "-2"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{shard} is corrupt"):
        train(dataclasses.replace(stored, output=stored.output + "-3"))


@pytest.fixture
def files(short, taught, tmp_path):
    """A folder of speculators' files with the states of every conversation, and a run on it."""
    config = dataclasses.replace(
        short,
        head={"type": "eagle3", "feature_layers": [0, -1], "depth": 3, "train_steps": 2},
        features=FeaturesConfig(mode="stored", from_server=str(tmp_path / "files"), server_layers=[2, 1]),
    )
    folder = tmp_path / "files"
    folder.mkdir()
    inputs = load_inputs(dataclasses.replace(config, features=FeaturesConfig()), Accelerator())
    streams = []
    for block in inputs.target.modules.blocks:
        block.register_forward_hook(lambda module, given, output: streams.append(output))
    for example in [*inputs.training[:], *inputs.held_out]:
        streams.clear()
        tokens_1T = torch.tensor([example.tokens])
        inputs.target.model(tokens_1T)
        states = torch.stack([streams[1][0], streams[0][0]], 1)
        save_file(
            {"token_ids": tokens_1T[0], "hidden_states": states}, folder / f"hs_{example.conversation}.safetensors"
        )
    return config


def test_files_are_read_as_they_are_needed_and_give_the_same_head(files, monkeypatch, tmp_path):
    with_target = dataclasses.replace(files, output=files.output + "-online", features=FeaturesConfig())
    expected, (judged,) = losses(train(with_target))
    monkeypatch.setattr(Target, "load", None)
    read = []
    original = ServerLayers.read
    monkeypatch.setattr(ServerLayers, "read", lambda *given: read.append(given[1].name) or original(*given))
    found, (row,) = losses(train(files))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(row["held_out_loss"], judged["held_out_loss"], atol=1e-6, rtol=0)
    assert row["eval"]["chain"]["acceptance_length"] > 1, "their own answers are replayed"
    read.clear()
    started = dataclasses.replace(
        files, output=files.output + "-started", loop=dataclasses.replace(files.loop, max_steps=1)
    )
    check_source = by_mode.check_source

    def checked(*given):
        check_source(*given)
        assert len(read) == 1, "all others are decided by name"

    monkeypatch.setattr(loop, "check_source", checked)
    train(started)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"1 of 5 sequences that are held out have no states .* there is no hs_"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), r"hs_\d+.safetensors cannot be read"),
        (lambda path: rewrite(path, hidden_states=lambda s: s[:, :1].clone()), r"hidden_states of \[\d+, 1, 32\], not"),
        (lambda path: rewrite(path, hidden_states=lambda s: s.flip(1).contiguous()), "nats a token, and that of 1 at"),
        (
            lambda path: rewrite(path, token_ids=lambda t: t.flip(0).contiguous()),
            r"differs from .*: token 0 is \d+ here",
        ),
        (lambda path: rewrite(path, token_ids=lambda t: t + 300), "made with another tokenizer"),
    ],
)
def test_a_wrong_file_is_named_before_the_first_step(files, tmp_path, spoil, message, monkeypatch):
    first = load_inputs(dataclasses.replace(files, features=FeaturesConfig()), Accelerator()).held_out[0]
    spoil(tmp_path / "files" / f"hs_{first.conversation}.safetensors")
    monkeypatch.setattr(server_states, "WORSE", 0.2)  # the blocks of a tiny target do little
    monkeypatch.setattr(Target, "load", None)
    with pytest.raises(ValueError, match=message):
        train(files)


def rewrite(path, **changes):
    tensors = load_file(path)
    save_file({**tensors, **{name: change(tensors[name]) for name, change in changes.items()}}, path)


def test_a_file_that_is_cut_in_training_is_named_by_the_step_and_not_by_a_worker(files, changed, tmp_path):
    inputs = load_inputs(dataclasses.replace(files, features=FeaturesConfig()), Accelerator())
    path = tmp_path / "files" / f"hs_{inputs.training[3].conversation}.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=rf"^{path} cannot be read"):
        train(changed(files, data={"workers": 1}))


def test_headstart_features_copies_files_and_asks_no_target(files, monkeypatch, tmp_path):
    monkeypatch.setattr(Target, "load", None)
    config = dataclasses.replace(
        files, features=dataclasses.replace(files.features, folder=str(tmp_path / "copied"), format="float32")
    )
    precompute(config)
    alone = FeaturesConfig(mode="stored", folder=str(tmp_path / "copied"), format="float32")
    copied, _ = losses(train(dataclasses.replace(files, features=alone)))
    direct, _ = losses(train(dataclasses.replace(files, output=files.output + "-direct")))
    torch.testing.assert_close(torch.tensor(copied), torch.tensor(direct), atol=1e-6, rtol=0)


def test_states_that_do_not_fit_on_the_disk_are_refused_before_any_is_written(short, monkeypatch, tmp_path):
    features = FeaturesConfig(mode="cached", format="float32", folder=str(tmp_path / "states"))
    monkeypatch.setattr(online, "free_bytes", lambda path: 1000)
    with pytest.raises(ValueError, match=r"states of [\d,]+ tokens take .* GiB, and the disk of .* GiB left; choose"):
        train(dataclasses.replace(short, features=features))
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["manifest.json"]


def test_two_jobs_of_one_number_fill_one_folder_and_both_finish(tmp_path, monkeypatch):
    """One writes the shard while the other, on another machine, is about to put its own in the same place."""
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


def launched(script, config, folder):
    """Run a command on two processes; return what it printed."""
    path = folder / f"{script}.yaml"
    path.write_text(yaml.safe_dump(json_ready(dataclasses.asdict(config))))
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/ddp.yaml"]
    command += ["--num_processes", "2", "--main_process_port", "0", f"scripts/{script}.py", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=550)
    return done.returncode, done.stdout + done.stderr


def test_two_processes_fill_a_folder_and_train_on_it(files, tmp_path):
    with_target = dataclasses.replace(files, output=files.output + "-online", features=FeaturesConfig())
    expected, _ = losses(train(with_target))
    copied = dataclasses.replace(files.features, folder=str(tmp_path / "copied"), format="float32")
    code, said = launched("features", dataclasses.replace(files, features=copied), tmp_path)
    assert code == 0, said
    shards = list((tmp_path / "copied").glob("*.safetensors"))
    assert len(shards) >= 2, "each process wrote its part"
    alone = FeaturesConfig(mode="stored", folder=str(tmp_path / "copied"), format="float32")
    code, said = launched("train", dataclasses.replace(files, features=alone), tmp_path)
    assert code == 0, said
    found, _ = losses(Path(files.output))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)
    shards[0].unlink()
    other = dataclasses.replace(files, output=files.output + "-lacking", features=alone)
    code, said = launched("train", other, tmp_path)
    assert code != 0 and "lacks the states of" in said

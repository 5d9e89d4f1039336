"""A run resumes with other options where they change no weights, and with data and target
elsewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from messages import lacking, refused
from runs import (
    assert_same_weights,
    changed,
    last_weights,
    log_of,
    rows_of,
    same_tensors,
    save_options,
    saved_options,
    write_config,
    write_rows,
)
from safetensors.torch import load_file, save_file

from headstart.heads import MedusaHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import Stats
from headstart.inference.feature_cache import FORMATS
from headstart.inference.trees.stats import RoundRecord
from headstart.scripts.command_line import options as options_of
from headstart.train import loop
from headstart.train.config import FeaturesConfig, TrainConfig
from headstart.train.evaluate import difference_interval
from headstart.train.loop import Callback, train

STEPS = 14
STOP = 6


@pytest.fixture(scope="module")
def resumable(run_options):
    def build(folder):
        loop_options = {"max_steps": STEPS, "eval_every": 5, "save_every": 0}
        return changed(run_options(folder, STEPS), loop=loop_options)

    return build


@pytest.fixture(scope="module")
def whole_run(resumable, tmp_path_factory):
    """A run that nothing happened to."""
    return train(resumable(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def half_run(resumable, tmp_path_factory, stopped_at):
    """A run that was stopped in the middle; tests copy its folder."""
    folder = tmp_path_factory.mktemp("half") / "run"
    stopped_at(STOP, resumable(folder))
    return folder


@pytest.fixture
def stopped_run(half_run, resumable, tmp_path):
    """The options of a copy of that run."""
    return resumable(shutil.copytree(half_run, tmp_path / "run"))


RESUMED = [
    ({"optim": {"name": "muon"}}, 2),
    ({"optim": {"name": "muon"}}, 8),
    *(
        ({"features": FeaturesConfig(mode=mode, format=word)}, step)
        for mode, steps in (("cached", (2, 8, 2)), ("auto", (8, 2, 8)))
        for word, step in zip(FORMATS, steps, strict=True)
    ),
]
"""What a run is trained with, and the step at which it is stopped."""


@pytest.mark.parametrize(("change", "step"), RESUMED, ids=str)
def test_stopped_and_started_again_a_run_ends_with_the_same_weights(short, resumed, change, step):
    whole, folder = resumed(changed(short, **change), step)
    assert_same_weights(folder, whole)


FREE = [
    {"loop": {"micro_batch": 2}},
    {"loop": {"recompute": True, "save_every": 3, "keep": 1, "patience": 9, "save_minutes": 100.0}},
    {"target_attention": "eager"},
    {"features": FeaturesConfig(mode="cached")},
    {"features": FeaturesConfig(mode="auto")},
    {"eval": {"prompts": 2, "max_new_tokens": 4}},
]


@pytest.mark.parametrize("change", FREE, ids=str)
def test_options_that_change_no_weights_may_change(stopped_run, whole_run, change, capsys):
    config = changed(stopped_run, **change)
    train(config)
    rounding = 0.0 if "eval" in change else 1e-3 if "features" in change else 2e-6
    assert_same_weights(config.output, whole_run, rounding)
    assert f"from step {STOP} on with " in capsys.readouterr().out
    history = rows_of(Path(config.output) / "changes.jsonl")
    assert {row["step"] for row in history} == {STOP}
    assert {row["name"].partition(".")[0] for row in history} == {*change}
    _, metadata = load_head(Path(config.output) / "last")
    assert metadata.training["changes"] == history
    train(config)  # it is finished, and the options are its own now


@pytest.mark.parametrize("moved", ["data", "target"])
def test_data_and_target_may_be_found_at_another_path(stopped_run, whole_run, tmp_path, moved):
    if moved == "data":
        path = shutil.copy(stopped_run.data.sources[0], tmp_path / "elsewhere.jsonl")
        config = changed(stopped_run, data={"sources": [str(path)]})
    else:
        config = changed(
            stopped_run, target=str(shutil.copytree(stopped_run.target, tmp_path / "elsewhere"))
        )
    train(config)
    assert_same_weights(config.output, whole_run)


def test_other_data_at_any_path_are_refused(stopped_run, tmp_path):
    path = write_rows(tmp_path / "less.jsonl", rows_of(stopped_run.data.sources[0])[:20])
    before = saved_options(stopped_run.output)
    with refused("digest", "data.sources", path):
        train(changed(stopped_run, data={"sources": [path]}))
    assert saved_options(stopped_run.output) == before


def test_another_target_is_refused(stopped_run, tmp_path):
    folder = shutil.copytree(stopped_run.target, tmp_path / "other")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    save_file({**tensors, name: tensors[name] * 1.01}, file, {"format": "pt"})
    with refused("weights digest", str(folder)):
        train(changed(stopped_run, target=str(folder)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_lower_learning_rate_holds_from_the_step_on_at_which_it_was_given(
    resumable, tmp_path, optimizer, stopped_at
):
    config = changed(resumable(tmp_path / "run"), optim={"name": optimizer})
    stopped_at(STOP, config)
    lower = changed(config, optim={"lr": 3e-4})
    with refused("optim.lr = 0.003 0.0003 output"):
        train(lower)
    save_options(config.output, dataclasses.asdict(lower))
    train(lower)
    before = train(changed(config, output=str(tmp_path / "before")))
    found, expected = (
        {row["step"]: row["lr"] for row in log_of(folder) if "lr" in row}
        for folder in (lower.output, before)
    )
    for step in range(STOP + 1, STEPS + 1):
        expected[step] /= 10
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)
    _, metadata = load_head(Path(config.output) / "last")
    for options in (saved_options(config.output), metadata.training["config"]):
        assert options["optim"]["lr"] == 3e-4
    assert not same_tensors(last_weights(config.output), last_weights(before))


def test_the_advice_after_a_loss_that_is_not_finite_can_be_followed(stopped_run, monkeypatch):
    forward = MedusaHead.forward

    def poisoned(self, *given, **more):
        output = forward(self, *given, **more)
        return output._replace(loss=output.loss * torch.nan) if torch.is_grad_enabled() else output

    with monkeypatch.context() as patch:
        patch.setattr(MedusaHead, "forward", poisoned)
        with refused("nan") as caught:
            train(stopped_run)
    # where to write it, and the option that says it again
    advice = re.search(r"(\S+)/config.yaml .* --optim.lr (\S+)", str(caught.value))
    folder, lower = advice.groups()
    assert folder == stopped_run.output
    options = saved_options(folder)
    options["optim"]["lr"] = float(lower)
    save_options(folder, options)
    path = write_config(stopped_run, Path(folder).with_suffix(".yaml"))
    train(options_of(TrainConfig, "train", "", ["--config", path, "--optim.lr", lower]))
    assert log_of(folder)[-1]["step"] == STEPS
    assert saved_options(folder)["optim"]["lr"] == stopped_run.optim.lr / 2


# Saving.


def test_minutes_make_checkpoints_between_those_of_steps(resumable, tmp_path, monkeypatch):
    """Every step takes a minute here."""
    saved = []

    class Saves(Callback):
        steps = 0

        def on_step(self, progress, row):
            self.steps += 1

        def on_save(self, progress, checkpoint):
            saved.append(progress.step)

    saves = Saves()
    monkeypatch.setattr(loop.time, "monotonic", lambda: 60.0 * saves.steps)
    train(changed(resumable(tmp_path / "run"), loop={"save_minutes": 4.0}), [saves])
    assert saved == [5, 10, STEPS]  # it is seen when the next step begins


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("online", OSError, "checkpoint 0.00 GiB"),
        ("cached", ValueError, "tokens 0.0 GiB"),
    ],
)
def test_a_disk_that_is_too_small_is_told_before_anything_long_is_written(
    resumable, tmp_path, mode, error, words, monkeypatch
):
    config = changed(resumable(tmp_path / "run"), features=FeaturesConfig(mode=mode))
    if mode == "cached":
        monkeypatch.setattr(loop, "checkpoint_bytes", lambda _: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=1000))
    with refused(words, error=error):
        train(config)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


# Which head is the best one.


def test_the_interval_holds_the_true_difference_in_95_of_100_cases():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        level_N = torch.rand(64, generator=generator)  # a prompt is easy or hard for both heads
        sides = []
        for gain in (0.3, 0.0):
            rounds_N = torch.randint(20, 40, (64,), generator=generator)
            per_round_N = 2 + gain + level_N + 0.3 * torch.randn(64, generator=generator)
            sides.append(
                [[float(r * p), int(r)] for r, p in zip(rounds_N, per_round_N, strict=True)]
            )
        low, high = difference_interval(*sides)
        inside += low <= 0.3 <= high
    assert 0.92 < inside / 400 < 0.98


def test_best_is_the_newest_head_that_is_not_shorter_beyond_chance(short, monkeypatch):
    lengths = iter([[4.0, 4.2, 3.8], [3.9, 4.3, 3.7], [2.0, 2.1, 1.9]])
    judge = loop.evaluate

    def evaluate(*given):
        rows = [[RoundRecord(1, length)] * 10 for length in next(lengths)]
        return dataclasses.replace(judge(*given), trees={"chain": Stats(rows, 3)})

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(changed(short, loop={"eval_every": 5}))
    _, metadata = load_head(folder / "best")
    assert metadata.training["step"] == 10 and metadata.training["longest_length"] == 4.0
    assert "longest_prompts" not in metadata.training


DAMAGED = {
    "optimizer.bin": [100, 0],
    "model.safetensors": [None],
    "progress.json": [0],
    "random_states_0.pkl": [100],
}
"""Bytes that are left of a file; None where it is gone."""


@pytest.mark.parametrize(
    ("file", "left"), [(file, left) for file, sizes in DAMAGED.items() for left in sizes]
)
def test_a_checkpoint_that_is_broken_gives_way_to_the_one_before(
    resumable, whole_run, tmp_path, file, left, capsys, stopped_at
):
    config = changed(resumable(tmp_path / "run"), loop={"save_every": 2})
    stopped_at(STOP, config)
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / f"step-{STOP:08d}"
    if left is None:
        (newest / file).unlink()
    else:
        os.truncate(newest / file, left)
    assert_same_weights(train(config), whole_run)
    assert not lacking(capsys.readouterr().out, f"{newest} cannot resumes")
    assert (checkpoints / f"{newest.name}.broken").is_dir()


def test_the_only_checkpoint_that_is_broken_is_told_in_one_line(stopped_run):
    (checkpoint,) = (Path(stopped_run.output) / "checkpoints").glob("step-*")
    os.truncate(checkpoint / "optimizer.bin", 100)
    with refused(f"{checkpoint} remove") as caught:
        train(stopped_run)
    assert "\n" not in str(caught.value) and checkpoint.is_dir()


def test_files_of_a_checkpoint_are_on_the_disk_before_it_gets_its_name(short, monkeypatch):
    """Otherwise a crash of the machine could leave its name, and half of its contents."""
    flushed, renamed = set(), []
    sync, rename = os.fsync, Path.rename

    def fsync(opened):
        flushed.add(os.readlink(f"/proc/self/fd/{opened}"))
        sync(opened)

    def renaming(path, target):
        if path.name.startswith("step-"):
            renamed.append({str(file.resolve()) for file in path.rglob("*")})
            # `write_whole` flushes a file under another name, before it takes its place.
            left = {Path(file).name for file in renamed[-1] - flushed}
            assert left <= {"progress.json"}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renaming)
    train(changed(short, loop={"save_every": 5}))
    assert len(renamed) == 3 and all(len(files) > 4 for files in renamed)

"""A run resumes with other options where they change no weights, and with data and target
elsewhere."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from messages import refused
from runs import last_weights, log_of, rows_of, write_config
from safetensors.torch import load_file, save_file

from headstart.heads import MedusaHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference.feature_cache import FORMATS
from headstart.scripts.command_line import options as options_of
from headstart.train import loop
from headstart.train.config import FeaturesConfig, TrainConfig
from headstart.train.evaluate import difference_interval
from headstart.train.loop import Callback, train

STEPS = 14
STOP = 6


@pytest.fixture(scope="module")
def plain(run_options, changed):
    def build(folder):
        loop_options = {"max_steps": STEPS, "eval_every": 5, "save_every": 0, "log_every": 1}
        return changed(run_options(folder, STEPS), loop=loop_options)

    return build


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    """A run that nothing happened to."""
    return train(plain(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def half(plain, tmp_path_factory, stopped_at):
    """A run that was stopped in the middle; tests copy its folder."""
    folder = tmp_path_factory.mktemp("half") / "run"
    stopped_at(STOP, plain(folder))
    return folder


@pytest.fixture
def options(half, plain, tmp_path):
    """The options of a copy of that run."""
    shutil.copytree(half, tmp_path / "run")
    return plain(tmp_path / "run")


def assert_same_weights(folder, other, atol=0.0):
    for name, tensor in last_weights(other).items():
        torch.testing.assert_close(last_weights(folder)[name], tensor, atol=atol, rtol=0, msg=name)


def set_learning_rate(folder, rate):
    """Edit the run's own options, as a user would."""
    path = Path(folder) / "config.yaml"
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    options["optim"]["lr"] = rate
    path.write_text(yaml.safe_dump(options), encoding="utf-8")


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
def test_stopped_and_started_again_a_run_ends_with_the_same_weights(
    short, changed, resumed, change, step
):
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
def test_options_that_change_no_weights_may_change(options, whole, change, changed, capsys):
    exact = change.keys() == {"eval"}
    config = changed(options, **change)
    train(config)
    rounding = 1e-3 if "features" in change else 2e-6
    assert_same_weights(config.output, whole, 0.0 if exact else rounding)
    assert f"from step {STOP} on with " in capsys.readouterr().out
    history = rows_of(Path(config.output) / "changes.jsonl")
    assert {row["step"] for row in history} == {STOP} and {
        row["name"].partition(".")[0] for row in history
    } == {*change}
    _, metadata = load_head(Path(config.output) / "last")
    assert metadata.training["changes"] == history
    train(config)  # it is finished, and the options are its own now


@pytest.mark.parametrize("moved", ["data", "target"])
def test_data_and_target_may_be_found_at_another_path(options, whole, tmp_path, moved, changed):
    if moved == "data":
        path = shutil.copy(options.data.sources[0], tmp_path / "elsewhere.jsonl")
        config = changed(options, data={"sources": [str(path)]})
    else:
        config = changed(
            options, target=str(shutil.copytree(options.target, tmp_path / "elsewhere"))
        )
    train(config)
    assert_same_weights(config.output, whole)


def test_other_data_at_any_path_are_refused(options, tmp_path, changed):
    lines = Path(options.data.sources[0]).read_text(encoding="utf-8").splitlines()
    path = tmp_path / "less.jsonl"
    path.write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    before = (Path(options.output) / "config.yaml").read_text()
    with refused("digest", "data.sources", str(path)):
        train(changed(options, data={"sources": [str(path)]}))
    assert (Path(options.output) / "config.yaml").read_text() == before


def test_another_target_is_refused(options, tmp_path, changed):
    folder = shutil.copytree(options.target, tmp_path / "other")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    save_file({**tensors, name: tensors[name] * 1.01}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"whose weights had the digest .*give what the run began with"
    ):
        train(changed(options, target=str(folder)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_lower_learning_rate_holds_from_the_step_on_at_which_it_was_given(
    plain, tmp_path, optimizer, changed, stopped_at
):
    config = changed(plain(tmp_path / "run"), optim={"name": optimizer})
    stopped_at(STOP, config)
    lower = changed(config, optim={"lr": 3e-4})
    with pytest.raises(
        ValueError, match=r"optim.lr = 0.003, not 0.0003.*choose another output folder"
    ):
        train(lower)
    set_learning_rate(config.output, 3e-4)
    train(lower)
    rates = {row["step"]: row["lr"] for row in log_of(config.output) if "lr" in row}
    train(changed(config, output=str(tmp_path / "before")))
    before = {row["step"]: row["lr"] for row in log_of(tmp_path / "before") if "lr" in row}
    for step in range(1, STEPS + 1):
        assert rates[step] == pytest.approx(
            before[step] / (10 if step > STOP else 1), rel=1e-6, abs=1e-12
        ), step
    saved = yaml.safe_load((Path(config.output) / "config.yaml").read_text())
    assert saved["optim"]["lr"] == 3e-4
    _, metadata = load_head(Path(config.output) / "last")
    assert metadata.training["config"]["optim"]["lr"] == 3e-4
    assert not torch.equal(
        *(
            last_weights(folder)[sorted(last_weights(folder))[0]]
            for folder in (config.output, tmp_path / "before")
        )
    )


def test_the_advice_after_a_loss_that_is_not_finite_can_be_followed(options, changed, monkeypatch):
    forward = MedusaHead.forward

    def poisoned(self, *given, **more):
        output = forward(self, *given, **more)
        return output._replace(loss=output.loss * torch.nan) if torch.is_grad_enabled() else output

    with monkeypatch.context() as patch:
        patch.setattr(MedusaHead, "forward", poisoned)
        with pytest.raises(ValueError, match="loss is nan") as caught:
            train(options)
    advice = r"set optim.lr to \S+ in (\S+)/config.yaml .* --optim.lr (\S+)"
    folder, lower = re.search(advice, str(caught.value)).groups()
    assert folder == options.output
    set_learning_rate(folder, float(lower))
    path = write_config(options, Path(folder).with_suffix(".yaml"))
    config = options_of(TrainConfig, "train", "", ["--config", path, "--optim.lr", lower])
    train(config)
    assert log_of(options.output)[-1]["step"] == STEPS
    assert (
        yaml.safe_load((Path(options.output) / "config.yaml").read_text())["optim"]["lr"]
        == options.optim.lr / 2
    )


# Saving.


def test_minutes_make_checkpoints_between_those_of_steps(plain, tmp_path, changed, monkeypatch):
    """Every step takes a minute here."""
    clock = collections.Counter()

    def monotonic():
        return 60.0 * clock["steps"]

    saved = []

    class Saves(Callback):
        def on_step(self, progress, row):
            clock["steps"] += 1

        def on_save(self, progress, checkpoint):
            saved.append(progress.step)

    monkeypatch.setattr(loop.time, "monotonic", monotonic)
    train(changed(plain(tmp_path / "run"), loop={"save_minutes": 4.0}), [Saves()])
    assert saved == [5, 10, STEPS]  # it is seen when the next step begins


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "a checkpoint",
            (
                r"a checkpoint to resume from.* takes about \d.\d\d GiB, and .* has 0.00 GiB free;"
                r" make room"
            ),
        ),
        (
            "cached states",
            r"the states of \d+ tokens take \d.\d GiB, and the disk of .* has 0.0 GiB left; choose",
        ),
    ],
)
def test_a_disk_that_is_too_small_is_told_before_anything_long_is_written(
    plain, tmp_path, what, told, monkeypatch
):
    config = plain(tmp_path / "run")
    if "cached" in what:
        config = dataclasses.replace(config, features=FeaturesConfig(mode="cached"))
        monkeypatch.setattr(loop, "checkpoint_bytes", lambda _: 0)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    with pytest.raises((OSError, ValueError), match=told):
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


def test_best_is_the_newest_head_that_is_not_shorter_beyond_chance(
    plain, tmp_path, changed, monkeypatch
):
    lengths = {
        5: [[40, 10], [42, 10], [38, 10]],
        10: [[39, 10], [43, 10], [37, 10]],
        STEPS: [[20, 10], [21, 10], [19, 10]],
    }
    steps = iter(lengths)
    monkeypatch.setattr(
        "headstart.train.evaluate.Evaluation.prompts",
        property(lambda self: lengths[self.__dict__["step"]]),
    )
    judge = loop.evaluate

    def evaluate(*given):
        found = judge(*given)
        found.__dict__["step"] = next(steps)
        rows = lengths[found.__dict__["step"]]
        found.acceptance_length = sum(tokens for tokens, _ in rows) / sum(
            rounds for _, rounds in rows
        )
        return found

    monkeypatch.setattr(loop, "evaluate", evaluate)
    folder = train(plain(tmp_path / "run"))
    _, metadata = load_head(folder / "best")
    assert metadata.training["step"] == 10 and metadata.training["longest_length"] == 4.0
    assert "longest_prompts" not in metadata.training


def cut_short(path):
    path.write_bytes(path.read_bytes()[:100])


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("optimizer.bin", cut_short),
        ("optimizer.bin", emptied),
        ("model.safetensors", Path.unlink),
        ("progress.json", emptied),
        ("random_states_0.pkl", cut_short),
    ],
)
def test_a_checkpoint_that_is_broken_gives_way_to_the_one_before(
    plain, whole, tmp_path, damage, file, changed, capsys, stopped_at
):
    config = changed(plain(tmp_path / "run"), loop={"save_every": 2})
    stopped_at(STOP, config)
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / f"step-{STOP:08d}"
    damage(newest / file)
    assert_same_weights(train(config), whole)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{newest} cannot be read" in said and "resumes from the checkpoint before it" in said
    assert (checkpoints / f"{newest.name}.broken").is_dir()


def test_the_only_checkpoint_that_is_broken_is_told_in_one_line(options):
    (checkpoint,) = (Path(options.output) / "checkpoints").glob("step-*")
    cut_short(checkpoint / "optimizer.bin")
    with pytest.raises(ValueError, match=r"cannot be read .* no earlier checkpoint: remove it"):
        train(options)
    assert checkpoint.is_dir()


def test_files_of_a_checkpoint_are_on_the_disk_before_it_gets_its_name(
    plain, tmp_path, changed, monkeypatch
):
    """Otherwise a crash of the machine could leave its name, and half of its contents."""
    flushed, renamed = set(), []
    sync, rename = os.fsync, Path.rename

    def fsync(opened):
        flushed.add(os.readlink(f"/proc/self/fd/{opened}"))
        sync(opened)

    def renaming(path, target):
        if path.name.startswith("step-"):
            files = {str(file.resolve()) for file in path.rglob("*")}
            renamed.append((files, files - flushed))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renaming)
    train(changed(plain(tmp_path / "run"), loop={"save_every": 5}))
    assert len(renamed) == 3
    for files, lacking in renamed:
        # `write_whole` flushes a file under another name, before it takes its place.
        assert len(files) > 4 and {Path(path).name for path in lacking} <= {"progress.json"}

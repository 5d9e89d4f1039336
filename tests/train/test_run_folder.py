"""A run's folder belongs to the first options that really trained, not to a typo."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from accelerate import Accelerator
from messages import refused
from runs import changed, checkpoints_of, files_of_at_most, save_options, saved_options

from headstart.addons.serve.answers import read_answered
from headstart.files import write_whole
from headstart.heads.checkpoints.files import finish_replacing
from headstart.train.config import DataConfig, OptimConfig, SelfMadeConfig, TrainConfig
from headstart.train.data.self_made import make_conversations
from headstart.train.run_folder import (
    Progress,
    RunFolder,
    as_begun,
    earlier_options,
    whole_checkpoints,
)


def config_for(run, target="right"):
    return TrainConfig(target=target, output=str(run.folder), data=DataConfig(["data.jsonl"]))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run", Accelerator())


@pytest.fixture
def begun_run(run):
    """A run that has claimed its folder and made a step."""
    run.claim(config_for(run))
    begin(run)
    return run


def begin(run, progress="{}"):
    """Make a checkpoint, by which a run has begun."""
    checkpoint = run.checkpoints / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text(progress)
    return checkpoint


def test_options_that_never_trained_do_not_claim_the_folder(run):
    run.claim(config_for(run, "typo"))
    run.claim(config_for(run))
    assert saved_options(run.folder)["target"] == "right"
    begin(run)
    with refused("= 'right' 'typo'"):
        run.claim(config_for(run, "typo"))


def test_a_number_without_a_dot_in_the_options_of_a_run_is_one(run):
    """As the advice after a loss that is not finite may have a user write it."""
    slow = changed(config_for(run), optim=OptimConfig(lr=5e-6))
    run.claim(slow)
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("lr: 5.0e-06", "lr: 5e-06"))
    assert "lr: 5e-06" in path.read_text()
    begin(run)
    run.claim(slow)


def test_a_run_of_an_earlier_version_resumes_unless_it_used_an_option_that_is_gone(begun_run):
    of_before = saved_options(begun_run.folder)
    of_before["optim"]["ema"] = 0.0
    save_options(begun_run.folder, of_before)
    begun_run.claim(config_for(begun_run))
    of_before["optim"]["ema"] = 0.9
    save_options(begun_run.folder, of_before)
    with refused("config.yaml optim.ema output"):
        begun_run.claim(config_for(begun_run))


def test_options_that_made_no_conversation_do_not_claim_the_file(tmp_path):
    output = str(tmp_path / "made.jsonl")
    for target in ("no/such-model", "no/other-model"):
        with refused(f"'{target}'"):
            make_conversations(SelfMadeConfig(target=target, output=output))


def test_a_log_without_a_checkpoint_starts_anew(run):
    run.folder.mkdir()
    run.log({"step": 10})
    assert run.resume("one process").step == 0
    assert (run.folder / "log.jsonl").read_text() == ""


def test_a_full_disk_is_told_with_the_file_that_it_does_not_take(run, tmp_path):
    run.folder.mkdir()
    with files_of_at_most(10), refused(str(run.folder / "log.jsonl"), "large", error=OSError):
        run.log({"step": 10, "loss": 2.0})
    with files_of_at_most(10), refused(str(tmp_path / "state.json"), "large", error=OSError):
        write_whole(tmp_path / "state.json", "0" * 20)


@pytest.mark.parametrize("line", [b"{", b"3", b"{}", b'{"step": "x"}', b"\xff", b"[" * 100_000])
def test_a_broken_line_of_the_log_is_named_and_nothing_is_lost(run, line):
    run.folder.mkdir()
    log = run.folder / "log.jsonl"
    log.write_bytes(b'{"step": 0}\n' + line + b"\n")
    with refused(f"{log} line 2") as caught:
        run.resume("one process")
    assert "\n" not in str(caught.value)
    assert log.read_bytes() == b'{"step": 0}\n' + line + b"\n"


@pytest.mark.parametrize("name", ["config.yaml", "changes.jsonl"])
@pytest.mark.parametrize("text", ["{", "3", "[" * 3000, "a: &a [*a]", "head: 2026-99-99"])
def test_a_broken_file_of_a_run_that_resumes_is_named(run, name, text):
    begin(run)
    (run.folder / name).write_text(text)
    with refused(name) as caught:
        earlier_options(run.folder) if name == "config.yaml" else run.changes()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [0, "x", "\x1b[2J" * 999])
def test_a_format_that_a_run_cannot_have_begun_with_is_named(begun_run, value):
    options = saved_options(begun_run.folder)
    options["loop"]["precision"] = value
    save_options(begun_run.folder, options)
    with refused(f"{begun_run.folder / 'config.yaml'} loop.precision") as caught:
        as_begun(config_for(begun_run))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["changes.jsonl", "log.jsonl", "config.yaml", "inputs.json"])
def test_a_named_pipe_in_a_runs_folder_is_refused_and_not_waited_for(run, name):
    run.folder.mkdir()
    os.mkfifo(run.folder / name)
    with refused(f"{run.folder / name} pipe"):
        run.claim(config_for(run))
    if name == "log.jsonl":
        with refused("log.jsonl pipe"):
            run.resume("one process")


def test_a_named_pipe_in_place_of_answers_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "answers.jsonl")
    made = SelfMadeConfig(target="x", output=str(tmp_path / "answers.jsonl"))
    with refused("answers.jsonl pipe"):
        make_conversations(made)
    with refused("answers.jsonl pipe"):
        read_answered(tmp_path / "answers.jsonl")


def test_a_folder_that_a_kill_left_half_replaced_comes_back(tmp_path):
    folder = tmp_path / "best"
    folder.mkdir()
    (folder / "file").touch()
    folder.rename(tmp_path / "best.replaced")
    finish_replacing(folder)
    assert (folder / "file").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("best/notes.txt", "mine"),
        ("last/model.safetensors", "mine"),
        ("config.yaml", "a: 1\n"),
        ("config.yaml", "{"),
    ],
)
def test_a_folder_that_holds_something_else_is_refused_before_training(run, name, text):
    path = run.folder / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with refused(path.name):
        run.claim(config_for(run))
    assert path.read_text() == text


def test_checkpoints_of_another_trainer_are_neither_counted_nor_removed(run):
    theirs = {"step-5", "step-00000002", "step-x9"}
    for name in theirs:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "weights.pt").write_text("theirs")
    for step in (1, 3, 4):
        run.save(Progress(step=step), keep=1)
    assert [path.name for path in whole_checkpoints(run.folder)] == ["step-00000004"]
    assert set(checkpoints_of(run.folder)) == theirs | {"step-00000004"}
    with refused("step-00000002"):
        run.save(Progress(step=2), keep=1)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in ("1", 1.5)),
        *(("best_length", value) for value in (None, 10**400)),
        *(("seconds", value) for value in (NAN, INFINITE)),
        *(("longest_prompts", value) for value in (3, [[1]], [3])),
        ("engine", []),
        ("unknown", 1),
    ],
)
def test_a_broken_progress_is_named(run, name, value):
    progress = dataclasses.asdict(Progress(step=1, longest_prompts=[[3, 2]]))
    checkpoint = begin(run, json.dumps(progress))
    assert Progress.read(checkpoint / "progress.json").longest_prompts == [[3, 2]]
    (checkpoint / "progress.json").write_text(json.dumps({**progress, name: value}))
    with refused(f"{checkpoint}"):
        run.resume("one process")

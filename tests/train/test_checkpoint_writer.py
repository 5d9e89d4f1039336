"""Checkpoints that a thread writes while steps go on: of the step at which they were asked for,
whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from messages import refused
from runs import checkpoints_of, last_bytes, write_config
from safetensors.torch import load_file

from headstart.train import Callback, loop, train
from headstart.train.checkpoint_writer import (
    INDEX_FILE,
    Sharded,
    TrainingState,
    save_shards,
    together,
)
from headstart.train.run_folder import Unreadable, reading_checkpoint

STEPS = 16
EVERY = 5


@pytest.fixture
def config(run_options, tmp_path, changed):
    options = run_options(tmp_path / "run", STEPS)
    return changed(options, loop={"eval_every": 0, "save_every": EVERY, "keep": 4})


def tensors_of(folder):
    """All tensors of a checkpoint by a name, and its other files by theirs."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix == ".json":
            found[path.name] = {**json.loads(path.read_text()), "seconds": 0}
        else:
            found[path.name] = torch.load(path, weights_only=False)
    return found


def assert_same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for own, other in zip(ours, theirs, strict=True):
            assert_same(own, other)
    else:
        assert str(ours) == str(theirs)


class Steps(Callback):
    """Tells a writer which step the run is at, and notes which checkpoints were told of."""

    def __init__(self):
        self.step = 0
        self.saved = []

    def on_step(self, progress, row):
        self.step = progress.step

    def on_save(self, progress, checkpoint):
        assert (checkpoint / "progress.json").exists()
        self.saved.append((progress.step, self.step))

    def wait_for(self, step):
        """Wait until the run has made a step; fail, if it does not."""
        deadline = time.monotonic() + 20
        while self.step < step:
            assert time.monotonic() < deadline, f"step {step} waits for the writer"
            time.sleep(0.001)


@pytest.fixture
def slow(monkeypatch):
    """Have the first checkpoint's files written only after a number of steps more: `slow(steps,
    more)`."""

    def patch(steps, more):
        original = TrainingState.write
        calls = []

        def write(self, *given):
            calls.append(steps.step)
            if len(calls) == 1:
                steps.wait_for(calls[0] + more)
            original(self, *given)

        monkeypatch.setattr(TrainingState, "write", write)

    return patch


def test_steps_go_on_while_the_state_of_an_earlier_one_is_written(config, changed, slow):
    plain = train(
        changed(config, output=config.output + "-plain", loop={"save_in_background": False})
    )
    steps = Steps()
    slow(steps, 3)
    train(config, [steps])
    assert steps.saved[0][0] == EVERY and steps.saved[0][1] >= EVERY + 3
    assert [step for step, _ in steps.saved] == [EVERY, 2 * EVERY, 3 * EVERY, STEPS]
    for step in (EVERY, 2 * EVERY, 3 * EVERY, STEPS):
        name = f"checkpoints/step-{step:08d}"
        assert_same(tensors_of(Path(config.output) / name), tensors_of(plain / name))


def test_a_stopped_run_waits_for_the_write_in_flight_and_each_of_both_resumes(
    config, changed, slow, stopped_at
):
    plain = train(
        changed(config, output=config.output + "-plain", loop={"save_in_background": False})
    )
    steps = Steps()
    slow(steps, 2)
    stopped_at(EVERY + 2, config, [steps])
    assert checkpoints_of(config.output) == [f"step-{EVERY:08d}", f"step-{EVERY + 2:08d}"]
    shutil.rmtree(Path(config.output) / "checkpoints" / f"step-{EVERY + 2:08d}")
    train(config)
    assert last_bytes(config.output) == last_bytes(plain)


def test_one_checkpoint_is_written_at_a_time_and_waiting_is_told(
    config, changed, monkeypatch, capsys
):
    writing, most = [], []
    original = TrainingState.write

    def write(self, *given):
        writing.append(None)
        most.append(len(writing))
        time.sleep(0.5)
        original(self, *given)
        writing.pop()

    monkeypatch.setattr(TrainingState, "write", write)
    train(changed(config, loop={"save_every": 1, "max_steps": 4}))
    assert max(most) == 1
    said = capsys.readouterr().out
    assert said.count("s for the checkpoint before to be written") == 3, said


def test_what_a_writer_cannot_write_ends_the_run_soon_and_leaves_the_checkpoint_before(
    config, changed, monkeypatch
):
    config = changed(config, loop={"keep": 1})
    whole = train(dataclasses.replace(config, output=config.output + "-whole"))
    steps = Steps()
    original = TrainingState.write

    def write(self, folder, *given):
        if folder.name == "step-00000010.partial":
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, folder, *given)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "write", write)
        with refused("step-00000010 space", error=OSError):
            train(config, [steps])
    assert 10 <= steps.step < 15
    assert checkpoints_of(config.output) == ["step-00000005"]
    train(config)
    assert last_bytes(config.output) == last_bytes(whole)


def test_an_error_of_the_last_write_in_flight_is_raised_at_the_end(config, changed, monkeypatch):
    def write(self, *given):
        time.sleep(0.3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TrainingState, "write", write)
    with refused(f"step-{STEPS - 1:08d} space", error=OSError):
        train(changed(config, loop={"save_every": STEPS - 1}))
    assert not (Path(config.output) / "last").exists()
    assert checkpoints_of(config.output) == []


def test_a_run_that_fails_lets_the_checkpoint_in_flight_become_whole(config, monkeypatch):
    original = TrainingState.write
    update = loop.Trainer.update

    def write(self, *given):
        time.sleep(0.5)
        original(self, *given)

    def fails(trainer):
        if trainer.schedule.last_epoch == EVERY + 1:
            raise KeyError("a mistake")
        return update(trainer)

    monkeypatch.setattr(TrainingState, "write", write)
    monkeypatch.setattr(loop.Trainer, "update", fails)
    with pytest.raises(KeyError, match="a mistake"):
        train(config)
    assert checkpoints_of(config.output) == [f"step-{EVERY:08d}"]


KILLED = """
import sys, time
from pathlib import Path
from headstart.scripts.command_line import options
from headstart.train import TrainConfig, train
from headstart.train.checkpoint_writer import TrainingState

original = TrainingState.write

def write(self, folder, *given):
    if "00000010" in folder.name:
        (folder / "model.safetensors").write_bytes(b"half")
        time.sleep(600)
    original(self, folder, *given)

TrainingState.write = write
train(options(TrainConfig, "train", "", sys.argv[1:]))
"""


def test_killed_while_the_second_is_written_a_run_goes_on_from_the_first(
    config, tmp_path, wait_for, steps_logged
):
    whole = train(dataclasses.replace(config, output=config.output + "-whole"))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    given = write_config(config, tmp_path / "killed.yaml")
    with subprocess.Popen(
        [sys.executable, script, "--config", given], stdout=subprocess.DEVNULL
    ) as process:
        wait_for(process, lambda: steps_logged(config.output) >= 13, "step 13")
        process.kill()
    assert checkpoints_of(config.output) == ["step-00000005", "step-00000010.partial"]
    train(config)
    assert last_bytes(config.output) == last_bytes(whole)
    assert not list(Path(config.output).rglob("*.partial"))


def test_a_fault_that_is_no_full_disk_keeps_its_own_name():
    def broken():
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        together(broken, None)


class Planted:
    """What runs code where a pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["nowhere", "index", "shard"])
def test_shards_run_no_code(tmp_path, where):
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharded = Sharded(module, optimizer)
    folder = tmp_path / Sharded.FOLDER
    states = sharded.states()
    if where == "shard":
        groups = states["optimizer"]["param_groups"]
        groups[0]["lr"] = Planted(tmp_path / "ran")
    save_shards(states, checkpoint_id=folder)
    if where == "index":
        (folder / INDEX_FILE).write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    if where == "nowhere":
        before = module.weight.clone()
        module.weight.data.zero_()
        sharded.load(None, str(tmp_path))
        assert torch.equal(module.weight, before)
    else:
        with pytest.raises(Unreadable), reading_checkpoint(tmp_path):
            sharded.load(None, str(tmp_path))
    assert not (tmp_path / "ran").exists()

"""Checkpoints that a thread writes while steps go on: of the step at which they were asked for,
whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from runs import changed, checkpoints_of, last_bytes
from safetensors.torch import load_file
from torch.utils._pytree import tree_map_only

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
def saved_often(run_options, tmp_path):
    options = run_options(tmp_path / "run", STEPS)
    return changed(options, loop={"eval_every": 0, "save_every": EVERY, "keep": 4})


@pytest.fixture(scope="module")
def in_foreground(run_options, tmp_path_factory):
    """The same run, which waits for each of its checkpoints."""
    loop = {"eval_every": 0, "save_every": EVERY, "keep": 4, "save_in_background": False}
    return train(changed(run_options(tmp_path_factory.mktemp("plain"), STEPS), loop=loop))


def tensors_and_files(folder):
    """All tensors of a checkpoint by a name, and its other files by theirs, as text."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix == ".json":
            found[path.name] = {**json.loads(path.read_text()), "seconds": 0}
        else:
            found[path.name] = torch.load(path, weights_only=False)
    return found


def shown_whole(contents):
    """Every number of nested contents, as text."""
    with np.printoptions(threshold=sys.maxsize):
        return repr(tree_map_only(torch.Tensor, lambda tensor: tensor.tolist(), contents))


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
def writing(monkeypatch):
    """Has a function called with the folder before each checkpoint's files are written."""

    def patch(before):
        original = TrainingState.write

        def write(self, folder, *given):
            before(folder)
            original(self, folder, *given)

        monkeypatch.setattr(TrainingState, "write", write)

    return patch


@pytest.fixture
def slowly(writing):
    """Have the first checkpoint's files written only after a number of steps more: `slowly(steps,
    more)`."""

    def patch(steps, more):
        calls = []

        def wait(folder):
            calls.append(steps.step)
            if len(calls) == 1:
                steps.wait_for(calls[0] + more)

        writing(wait)

    return patch


def disk_full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_steps_go_on_while_the_state_of_an_earlier_one_is_written(
    saved_often, in_foreground, slowly
):
    steps = Steps()
    slowly(steps, 3)
    train(saved_often, [steps])
    assert steps.saved[0][0] == EVERY and steps.saved[0][1] >= EVERY + 3
    assert [step for step, _ in steps.saved] == [EVERY, 2 * EVERY, 3 * EVERY, STEPS]
    for name in checkpoints_of(in_foreground):
        ours, theirs = (
            tensors_and_files(Path(folder) / "checkpoints" / name)
            for folder in (saved_often.output, in_foreground)
        )
        assert shown_whole(ours) == shown_whole(theirs)


def test_a_stopped_run_waits_for_the_write_in_flight_and_each_of_both_resumes(
    saved_often, in_foreground, slowly, stopped_at
):
    steps = Steps()
    slowly(steps, 2)
    stopped_at(EVERY + 2, saved_often, [steps])
    first, second = checkpoints_of(saved_often.output)
    assert (first, second) == (f"step-{EVERY:08d}", f"step-{EVERY + 2:08d}")
    shutil.rmtree(Path(saved_often.output) / "checkpoints" / second)
    assert last_bytes(train(saved_often)) == last_bytes(in_foreground)


def test_one_checkpoint_is_written_at_a_time_and_waiting_is_told(saved_often, monkeypatch, capsys):
    writing, most = [], []
    original = TrainingState.write

    def write(self, *given):
        writing.append(None)
        most.append(len(writing))
        time.sleep(0.5)
        original(self, *given)
        writing.pop()

    monkeypatch.setattr(TrainingState, "write", write)
    train(changed(saved_often, loop={"save_every": 1, "max_steps": 4}))
    assert max(most) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "waited" in line]
    assert len(told) == 3


def test_what_a_writer_cannot_write_ends_the_run_soon_and_leaves_the_checkpoint_before(
    saved_often, in_foreground, writing
):
    config = changed(saved_often, loop={"keep": 1})
    steps = Steps()
    failures = []

    def fail_once(folder):
        if folder.name == "step-00000010.partial" and not failures:
            (folder / "model.safetensors").write_bytes(b"half")
            failures.append(disk_full())
            raise failures[0]

    writing(fail_once)
    with refused("step-00000010 space", error=OSError):
        train(config, [steps])
    assert 10 <= steps.step < 15
    assert checkpoints_of(config.output) == ["step-00000005"]
    assert last_bytes(train(config)) == last_bytes(in_foreground)


def test_an_error_of_the_last_write_in_flight_is_raised_at_the_end(saved_often, writing):
    def fail(folder):
        time.sleep(0.3)
        raise disk_full()

    writing(fail)
    with refused(f"step-{STEPS - 1:08d} space", error=OSError):
        train(changed(saved_often, loop={"save_every": STEPS - 1}))
    assert not (Path(saved_often.output) / "last").exists()
    assert checkpoints_of(saved_often.output) == []


def test_a_run_that_fails_lets_the_checkpoint_in_flight_become_whole(
    saved_often, writing, monkeypatch
):
    update = loop.Trainer.update

    def fails(trainer):
        if trainer.schedule.last_epoch == EVERY + 1:
            raise KeyError("a mistake")
        return update(trainer)

    writing(lambda folder: time.sleep(0.5))
    monkeypatch.setattr(loop.Trainer, "update", fails)
    with refused("mistake", error=KeyError):
        train(saved_often)
    assert checkpoints_of(saved_often.output) == [f"step-{EVERY:08d}"]


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
    planted = Planted(tmp_path / "ran")
    states = sharded.states()
    if where == "shard":
        states["optimizer"]["param_groups"][0]["lr"] = planted
    save_shards(states, checkpoint_id=folder)
    if where == "index":
        (folder / INDEX_FILE).write_bytes(pickle.dumps(planted))
    if where == "nowhere":
        before = module.weight.clone()
        module.weight.data.zero_()
        sharded.load(None, str(tmp_path))
        assert torch.equal(module.weight, before)
    else:
        with pytest.raises(Unreadable), reading_checkpoint(tmp_path):
            sharded.load(None, str(tmp_path))
    assert not (tmp_path / "ran").exists()

"""Training from Python: the entry, code of the caller's own between the steps, and who sees what is
reported."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from runs import (
    assert_same_weights,
    changed,
    checkpoints_of,
    launched,
    log_of,
)

import headstart.train
from headstart.stopping import StopFlag
from headstart.train import Callback, Progress, Stopped, train
from headstart.train.loop import Callbacks

ROOT = Path(__file__).parents[2]


OFTEN = {"eval_every": 8, "save_every": 5, "log_every": 3, "save_in_background": False}


@pytest.fixture
def interrupted(run_options, tmp_path):
    """A run with an evaluation and checkpoints in its middle."""
    return changed(run_options(tmp_path / "run", 12), loop=OFTEN)


class Recorder(Callback):
    """Writes down every call."""

    def __init__(self):
        self.calls = []

    def on_step(self, progress, row):
        self.calls.append(("step", progress, row))

    def on_evaluation(self, progress, row):
        self.calls.append(("evaluation", progress, row))

    def on_save(self, progress, checkpoint):
        assert (checkpoint / "progress.json").exists()
        self.calls.append(("save", progress, None))

    def on_end(self, progress, folder):
        assert (folder / "report.md").exists() and (folder / "last").is_dir()
        self.calls.append(("end", progress, None))


def test_callbacks_are_called_in_order_with_what_is_logged(interrupted):
    seen = Recorder()
    folder = train(interrupted, callbacks=[Callback(), seen])
    events = {5: ["save"], 8: ["evaluation"], 10: ["save"], 12: ["save", "evaluation", "end"]}
    expected = []
    for step in range(1, 13):
        expected += [(name, step) for name in ["step", *events.get(step, [])]]
    assert [(name, progress.step) for name, progress, _ in seen.calls] == expected
    rows = [row for _, _, row in seen.calls if row is not None]
    assert rows == log_of(folder) and [row["step"] for row in rows] == [3, 6, 8, 9, 12, 12]
    (_, first, _), *_, (_, last, _) = seen.calls
    assert isinstance(first, Progress) and first.answer_tokens < last.answer_tokens


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("on_step", KeyError("a mistake")),
        ("on_evaluation", Stopped("enough")),
        ("on_save", KeyError("a mistake")),
        ("on_end", Stopped("enough")),
    ],
)
def test_an_exception_in_a_callback_ends_the_run_and_nothing_is_lost(
    interrupted, tmp_path, method, error
):
    class Broken(Callback):
        steps = ()

    def broken(self, progress, given):
        self.steps = (*self.steps, progress.step)
        raise error

    setattr(Broken, method, broken)
    callback, after = Broken(), Recorder()
    with pytest.raises(type(error)) as caught:
        train(interrupted, callbacks=[callback, after])
    assert caught.value is error
    (stopped,) = callback.steps  # it is not called again
    assert checkpoints_of(interrupted.output)[-1] == f"step-{stopped:08d}"
    assert all(progress.step <= stopped for _, progress, _ in after.calls)
    if method != "on_end":
        assert stopped < 12 and not (Path(interrupted.output) / "last").exists()
    whole = train(changed(interrupted, output=str(tmp_path / "whole")))
    assert_same_weights(train(interrupted), whole)


def shown(number, config):
    """A block of Python in the section "From Python" of docs/training.md, with a small run's own
    target, data, steps and folder."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## From Python")[2], re.DOTALL)
    code = blocks[number]
    for there, here in (
        ("Qwen/Qwen3-8B", config.target),
        ("conversations.jsonl", config.data.sources[0]),
        ("runs/mine", config.output),
        ("epochs=1.0", "max_steps=2, batch_size=4"),
        ('"depth": 5', '"depth": 2, "feature_layers": [0]'),
    ):
        code = code.replace(there, here)
    return code


def test_the_notebook_of_the_page_trains_resumes_and_decodes(short):
    names: dict[str, Any] = {}
    for _ in range(2):  # the same cell again
        exec(shown(0, short), names)
        assert names["folder"] == Path(short.output)
    answer = names["lm"].generate(torch.tensor([[256, 65, 66]]), max_new_tokens=4, do_sample=False)
    assert answer.sequences.shape == (1, 7)


def test_the_script_of_the_page_runs_under_accelerate_launch(short, tmp_path):
    script = tmp_path / "train_mine.py"
    small = "data=data, loop=STEPS, head=HEAD"
    script.write_text(shown(1, short).replace("data=data", small))
    few = "from headstart.train import LoopConfig\nSTEPS = LoopConfig(max_steps=2, batch_size=4)\n"
    few += f"HEAD = {short.head}\n"
    # A thread of gloo's that outlives the training may abort Python as it ends.
    threads = "import os\nnames = [open(f'/proc/self/task/{thread}/comm').read().strip()"
    threads += " for thread in os.listdir('/proc/self/task')]\n"
    threads += "assert not any('gloo' in name for name in names), names\n"
    script.write_text(few + script.read_text() + (threads if Path("/proc").exists() else ""))
    done = launched(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{short.output}\n") == 2  # each process prints its folder
    assert log_of(short.output)[-1]["step"] == 2 and (Path(short.output) / "best").is_dir()


def test_callbacks_run_on_the_main_process_with_copies():
    class Careless(Callback):
        def on_step(self, progress, row):
            progress.step += 1

    progress = Progress(step=3)
    stop = StopFlag()
    Callbacks([Careless()], main_process=True).call(Callback.on_step, progress, None, stop)
    assert progress.step == 3
    seen = Recorder()
    Callbacks([seen], main_process=False).call(Callback.on_step, progress, None, stop)
    assert not seen.calls


def test_names_of_the_package_are_those_that_it_lists():
    for name in headstart.train.__all__:
        assert getattr(headstart.train, name).__name__ == name
    with refused("'trian'", error=AttributeError):
        headstart.train.trian  # noqa: B018


# Who sees what is reported.


def test_importing_headstart_prints_nothing_and_leaves_logging_alone():
    code = (
        "import logging, headstart, headstart.heads, headstart.inference\n"
        "from headstart.train import TrainConfig, train\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('headstart').handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_another_program_a_run_reports_by_logging_alone(short, monkeypatch, capsys):
    kept = BufferingHandler(1000)
    monkeypatch.setattr(logging.getLogger("headstart"), "handlers", [kept])
    train(short)
    assert capsys.readouterr().out == ""
    said = [record.getMessage() for record in kept.buffer]
    assert sum(line.startswith("step 12/12  loss") for line in said) == 1
    assert any(line.startswith("step 12  acceptance length: chain") for line in said)
    assert {record.levelname for record in kept.buffer} == {"INFO"}

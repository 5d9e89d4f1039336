"""The demo on a tiny target: it keeps its time, says how far it is, stops when told, and resumes where it stopped."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import SIGINT, SIGTERM

import pytest
import torch

from headstart.console import Stopped, StopRequest
from headstart.heads import CheckpointMetadata, MedusaConfig, MedusaHead
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import Target
from headstart.scripts.demo import Budget, DemoConfig, demo, time_limit
from headstart.train.data import answers
from headstart.train.data import self_made as selfmade

LIKELY = {"<|im_end|>": 0.05, **dict.fromkeys("abcdefghijklmnopqrst", 0.05)}


@pytest.fixture(scope="module")
def talker(talking):
    """A target in float32 that writes words and ends its texts, with a head that starts as its own LM head."""
    folder = talking(LIKELY, 0.3)
    target = Target.from_pretrained(folder, torch.bfloat16)
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.initialize(target.modules, torch.ones(target.info.vocab_size, dtype=torch.int64))
    save_head(head, folder / "head", CheckpointMetadata(tree=[[0], [1], [0, 0]]))
    return folder


@pytest.fixture
def config(talker, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "count to 3"}\n{"prompt": "say a word"}\n')
    for module in (selfmade, answers):
        monkeypatch.setattr(module, "distinct_share", lambda _: 1.0)  # so small a model repeats itself
    return DemoConfig(
        minutes=1, target=str(talker), output=str(tmp_path / "demo"), prompts=str(prompts), head=str(talker / "head")
    )


def test_what_is_finished_is_not_repeated(config, capsys, monkeypatch):
    began = time.monotonic()
    demo(config)
    assert time.monotonic() - began < 66
    first = capsys.readouterr().out
    assert "both generated the same text" in first and first.count("identical") == 2
    monkeypatch.setattr(Target, "from_pretrained", lambda *_: pytest.fail("loaded something"))
    demo(config)
    second = capsys.readouterr().out
    tables = [[line for line in said.splitlines() if "│" in line] for said in (first, second)]
    assert tables[0] == tables[1] and second.count(" is finished") == 2


SLOW = """
import functools, sys, time
from transformers import LlamaForCausalLM
from headstart.scripts.__main__ import main
from headstart.train.data import answers, self_made
from headstart.console import console
answers.distinct_share = self_made.distinct_share = lambda _: 1.0
stage, rule, forward, slow = sys.argv.pop(1), console.rule, LlamaForCausalLM.forward, []

def told(title):
    rule(title)
    if title.startswith(stage):
        slow.append(title)

@functools.wraps(forward)
def slowly(*given, **named):
    if slow:
        print("a slow forward", flush=True)
        time.sleep(0.4)
    return forward(*given, **named)

console.rule, LlamaForCausalLM.forward = told, slowly
main()
"""


@pytest.mark.parametrize(
    ("stage", "number"),
    [("model.generate", SIGTERM), ("2 of 4", SIGINT), ("2 of 4", SIGTERM), ("3 of 4", SIGTERM), ("4 of 4", SIGTERM)],
)
def test_it_stops_within_five_seconds_and_goes_on(config, stage, number, capsys):
    named = [f"--{name}={value}" for name, value in vars(config).items()]
    command = [sys.executable, "-c", SLOW, stage, "demo", *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = "".join(itertools.takewhile(lambda line: "a slow forward" not in line, process.stdout))
        time.sleep(1)
        began = time.monotonic()
        process.send_signal(number)
        said += process.communicate(timeout=60)[0]
    assert time.monotonic() - began < 5
    assert process.returncode == 0 and "the same command resumes from there" in said.replace("goes on", "resumes"), said
    demo(config)
    assert "all of it took" in capsys.readouterr().out


def test_time_that_was_spent_before_counts(tmp_path):
    path = tmp_path / "demo.json"
    budget = Budget(path, 60)
    assert budget.once("plan", lambda: 3) == 3
    budget._began -= 20
    budget.write()
    budget = Budget(path, 60)
    assert 39 < budget.left <= 40
    assert budget.once("plan", lambda: 4) == 3


def waiting(seconds=10.0):
    """Work that polls a wish to stop, as training does, and reports what it was told."""
    with StopRequest() as stop:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if stop.wanted:
                raise Stopped("stopped")
            time.sleep(0.01)


@pytest.mark.parametrize("work", [waiting, lambda: time.sleep(10.0)])
def test_a_command_is_stopped_when_its_time_is_over(work):
    began = time.monotonic()
    with time_limit(0.2) as is_over:
        work()
    assert is_over.is_set() and time.monotonic() - began < 5


def test_a_command_that_keeps_its_time_is_not_stopped():
    with time_limit(0.2) as is_over:
        time.sleep(0.01)
    time.sleep(0.4)
    assert not is_over.is_set()


@pytest.mark.parametrize(("work", "error"), [(waiting, Stopped), (lambda: time.sleep(10.0), KeyboardInterrupt)])
def test_a_stop_that_the_user_wishes_is_not_taken_for_the_end_of_the_time(work, error):
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), SIGINT))
    timer.start()
    with pytest.raises(error), time_limit(60.0):
        work()


def test_with_no_time_left_each_stage_does_the_least(config, capsys):
    budget = Budget(Path(f"{config.output}-1min/demo.json"), 60)
    budget._began -= 100
    budget.write()
    demo(config)
    said = capsys.readouterr().out
    assert "as many steps as there is time for: 1\n" in said and said.count("1/1") == 4  # a row, and their total

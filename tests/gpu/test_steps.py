"""A training step on an accelerator: every head, no tensor on another device, and how often the
host waits for it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from helpers import DEVICE, VOCAB, head_for

from headstart.heads import HEADS
from headstart.inference import Target
from headstart.train import loop
from headstart.train.config import DataConfig, LoopConfig, TrainConfig
from headstart.train.data.batches import Order, Share, Step, collate
from headstart.train.data.chat_template import Example
from headstart.train.inputs import Inputs
from headstart.train.run_folder import RunFolder
from headstart.train.tracking import Tracker

pytestmark = pytest.mark.gpu
STEPS = 2
WAITS = 1
"""Of a step of two forwards: whether loss and gradient are numbers."""


def batches():
    """Two forwards of a step."""
    random = torch.Generator().manual_seed(2)
    examples = []
    for length in (12, 9, 15, 11):
        tokens = torch.randint(VOCAB, (length,), generator=random).tolist()
        examples.append(Example(tokens, [place >= 4 for place in range(length)]))
    return [collate(examples[:2]).pin_memory(), collate(examples[2:]).pin_memory()]


def trained_steps(target, head, config, monkeypatch, after_step=lambda: None):
    """The losses and gradient norms of some steps, where the target is."""
    torch.manual_seed(0)  # the noise that heads learn with
    accelerator = Accelerator(cpu=True)
    # which all accelerators of a process share
    monkeypatch.setattr(accelerator.state, "device", target.device)
    share = Share(0, 1, 2)
    run = RunFolder(loop.Path(config.output), accelerator)
    run.folder.mkdir(exist_ok=True)
    objective = head.default_objective(head.config)
    order = Order([12], batch_size=4, seed=0)
    inputs = Inputs(target, head, objective, {}, [], [], order, 1.0, {})
    monkeypatch.setattr(loop, "load_inputs", lambda *_, **__: inputs)
    monkeypatch.setattr(loop, "try_evaluation", lambda *_: None)
    tracker = Tracker(accelerator, run.best)
    trainer = loop.Trainer(run, share, config, tracker, loop.Callbacks([], True), None)
    found = []
    for _ in range(STEPS):
        outputs, norm, _ = trainer.gradients(Step(0, batches(), 40), loop.Wishes())
        trainer.update()
        after_step()
        found.append([*(float(output.loss.detach()) for output in outputs), norm])
    return found


def in_float32(on_cpu, kind, place):
    """The target and a head in a place."""
    target = Target(copy.deepcopy(on_cpu.model).float().to(place))
    head = head_for(on_cpu, kind).float().train()
    if kind == "eagle":  # its noise is drawn on the device, by a generator of its kind
        head.config = replace(head.config, noise=0.0)
    return target, head.to(place)


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_learns_as_on_the_cpu_and_a_step_waits_so_often(
    on_cpu, device, tmp_path, monkeypatch, kind
):
    config = TrainConfig(
        target="tiny",
        output=str(tmp_path / "run"),
        head={"type": kind},
        data=DataConfig(sources=["none.jsonl"]),
        loop=LoopConfig(precision="float32", batch_size=4, max_steps=STEPS),
    )
    expected = trained_steps(*in_float32(on_cpu, kind, "cpu"), config, monkeypatch)
    given = in_float32(on_cpu, kind, device)
    waits = []
    if DEVICE == "sim":
        import simulated

        with simulated.counted() as counts:

            def after_step():
                waits.append(
                    sum(count for where, count in counts.waits.items() if where != "elsewhere")
                )

            found = trained_steps(*given, config, monkeypatch, after_step)
        assert waits[1] - waits[0] == WAITS, counts.waits
    else:
        found = trained_steps(*given, config, monkeypatch)
    assert found == [pytest.approx(step) for step in expected]

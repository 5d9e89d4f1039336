"""A loss or a gradient that is no number stops a run before it spoils the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from messages import refused
from safetensors.torch import load_file

from headstart.heads import MedusaHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.train.features import online as features
from headstart.train.loop import train

STEP = 9


@pytest.fixture
def options(short, changed):
    return changed(short, loop={"save_every": 4, "eval_every": 4})


@pytest.fixture
def seen(monkeypatch):
    """The batches and the heads of every forward of a step."""
    batches = []
    original = features.online_features

    def record(target, head, batch, *rest):
        if head.training and torch.is_grad_enabled():  # not what is evaluated
            batches.append((batch, head))
        return original(target, head, batch, *rest)

    monkeypatch.setattr(features, "online_features", record)
    return batches


def poison(patch, how, step=STEP, every=1):
    """From a step's first forward on, the training loss becomes `how` of it."""
    forward, calls = MedusaHead.forward, []

    def poisoned(self, features, objective=None, ranks=1):
        output = forward(self, features, objective, ranks)
        if not torch.is_grad_enabled():  # evaluation
            return output
        calls.append(0)
        late = len(calls) > (step - 1) * every
        return output._replace(loss=how(output.loss)) if late else output

    patch.setattr(MedusaHead, "forward", poisoned)


def without_slope(loss):
    """The same value, with a gradient that is no number."""
    return loss + (loss * 0).sqrt()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda loss: loss * float("nan"), "the loss is nan"),
        (lambda loss: loss * float("inf"), "the loss is inf"),
        (lambda loss: -loss * float("inf"), "the loss is -inf"),
        (without_slope, "the gradient norm is nan"),
    ],
    ids=["nan", "inf", "-inf", "gradient"],
)
def test_the_step_and_its_conversations_are_named_and_nothing_is_spoiled(options, seen, how, words):
    folder = Path(options.output)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, how)
        with refused(f"{STEP} {words}") as error:
            train(options)
    assert len(seen) == STEP  # at once
    batch, head = seen[-1]
    assert re.search(r"conversations (\[.*?\])", str(error.value))[1] == str(
        sorted(batch.conversations)
    )
    assert str(folder / "checkpoints" / "step-00000008") in str(error.value)
    saved = load_file(folder / "checkpoints" / "step-00000008" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in head.state_dict().items())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]
    load_head(folder / "best")
    assert not (folder / "last").exists()
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert max(steps) == STEP - 1


def test_healed_and_started_again_the_run_ends_where_it_would_have(options, changed):
    whole = train(changed(options, output=options.output + "-whole"))
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, lambda loss: loss * float("nan"))
        with refused(f"{STEP}"):
            train(options)
    assert (train(options) / "last" / "model.safetensors").read_bytes() == (
        whole / "last" / "model.safetensors"
    ).read_bytes()


def test_all_batches_of_an_accumulated_step_are_named(options, seen, changed):
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, lambda loss: loss * float("nan"), step=2, every=2)
        with refused("2") as error:
            train(changed(options, loop={"batch_size": 8, "micro_batch": 4}))
    numbers = sorted(number for batch, _ in seen[2:4] for number in batch.conversations)
    assert len(seen) == 4 and f"conversations {numbers} " in str(error.value)
    assert "The newest checkpoint is not yet written" in str(error.value)

"""A loss or a gradient that is no number stops a run before it spoils the weights."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
import torch
from messages import refused
from runs import changed, checkpoints_of, last_bytes, log_of, same_tensors
from safetensors.torch import load_file

from headstart.heads import MedusaHead
from headstart.heads.checkpoints.save_load import load_head
from headstart.train.features import online as features
from headstart.train.loop import train

STEP = 9


@pytest.fixture
def checked_often(short):
    return changed(short, loop={"save_every": 4, "eval_every": 4})


@pytest.fixture
def forwards(monkeypatch):
    """The batches and the heads of every forward of a step."""
    batches = []
    original = features.online_features

    def record(target, head, batch, *rest):
        if head.training and torch.is_grad_enabled():  # not what is evaluated
            batches.append((batch, head))
        return original(target, head, batch, *rest)

    monkeypatch.setattr(features, "online_features", record)
    return batches


@contextlib.contextmanager
def poisoned(how, step=STEP, every=1):
    """Within it, from a step's first forward on, the training loss becomes `how` of it."""
    forward, calls = MedusaHead.forward, []

    def spoilt(self, features, objective=None, ranks=1):
        output = forward(self, features, objective, ranks)
        if not torch.is_grad_enabled():  # evaluation
            return output
        calls.append(0)
        late = len(calls) > (step - 1) * every
        return output._replace(loss=how(output.loss)) if late else output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MedusaHead, "forward", spoilt)
        yield


def times(factor):
    return lambda loss: loss * factor


def without_slope(loss):
    """The same value, with a gradient that is no number."""
    return loss + (loss * 0).sqrt()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (times(math.nan), "loss nan"),
        (times(math.inf), "loss inf"),
        (times(-math.inf), "loss -inf"),
        (without_slope, "gradient nan"),
    ],
    ids=["nan", "inf", "-inf", "gradient"],
)
def test_the_step_and_its_conversations_are_named_and_nothing_is_spoiled(
    checked_often, forwards, how, words
):
    folder = Path(checked_often.output)
    newest = folder / "checkpoints" / "step-00000008"
    with poisoned(how), refused(f"{STEP} {words} {newest}") as error:
        train(checked_often)
    assert len(forwards) == STEP  # at once
    batch, head = forwards[-1]
    assert f"conversations {sorted(batch.conversations)}" in str(error.value)
    assert same_tensors(load_file(newest / "model.safetensors"), head.state_dict())
    assert checkpoints_of(folder) == ["step-00000004", "step-00000008"]
    load_head(folder / "best")
    assert not (folder / "last").exists()
    assert max(row["step"] for row in log_of(folder)) == STEP - 1
    # Healed and started again it ends where it would have.
    whole = train(changed(checked_often, output=f"{folder}-whole"))
    assert last_bytes(train(checked_often)) == last_bytes(whole)


def test_all_batches_of_an_accumulated_step_are_named(checked_often, forwards):
    config = changed(checked_often, loop={"batch_size": 8, "micro_batch": 4})
    with poisoned(times(math.nan), step=2, every=2), refused("2 checkpoint") as error:
        train(config)
    numbers = sorted(number for batch, _ in forwards[2:4] for number in batch.conversations)
    assert len(forwards) == 4 and f"conversations {numbers}" in str(error.value)

"""The target's states, kept between epochs: the same training, less work, never more memory than allowed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads import MedusaConfig, MedusaHead
from headstart.inference import Target
from headstart.train import loop
from headstart.train.console import Stopped
from headstart.train.data import Example, collate
from headstart.train.features import KeptFeatures, online_features
from headstart.train.loop import train

GIB = 2**30


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=24)


@pytest.fixture
def head(target):
    head = MedusaHead(MedusaConfig(num_heads=2), target.info)
    head.feature_layers = (0, -1)
    head.initialize(target.ends, torch.ones(24, dtype=torch.int64))
    return head.double()


@pytest.fixture
def examples():
    """Random tokens; what follows the last answer is of different length."""
    random = torch.Generator().manual_seed(2)
    found = []
    for i in range(6):
        tokens = torch.randint(24, (8 + 3 * (i % 4),), generator=random).tolist()
        mask = [3 <= t < 6 or len(tokens) - 4 <= t < len(tokens) - i % 3 for t in range(len(tokens))]
        found.append(Example(tokens, mask))
    return found


@pytest.fixture
def reads(target, monkeypatch):
    """The token rows that the target was asked to read."""
    rows = []
    original = target.read
    monkeypatch.setattr(target, "read", lambda tokens, layers: rows.append(tokens) or original(tokens, layers))
    return rows


def test_kept_features_are_those_of_the_batch_up_to_the_last_answer_token(target, head, examples):
    kept, batch = KeptFeatures(target, head, 1.0), collate(examples)
    fresh = online_features(target, head, batch, torch.float64)
    assert fresh.features_BTF.shape[-1] == 2 * 32
    for _ in range(2):  # computed, then kept
        found = kept.of(batch, torch.float64)
        assert found.ends is fresh.ends
        longest = found.tokens_BT.shape[1]
        assert torch.equal(found.tokens_BT, batch.tokens_BT[:, :longest])
        assert torch.equal(found.loss_mask_BT, batch.loss_mask_BT[:, :longest])
        assert not batch.loss_mask_BT[:, longest:].any()
        for row, example in enumerate(examples):
            length = len(example.loss_mask) - example.loss_mask[::-1].index(True)
            for name in ("features_BTF", "last_BTD"):
                ours, theirs = getattr(found, name)[row, :length], getattr(fresh, name)[row, :length]
                torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(head(found).loss, head(fresh).loss)


def test_every_conversation_is_read_once_and_alone(target, head, examples, reads):
    kept = KeptFeatures(target, head, 1.0)
    first = kept.of(collate(examples[:3]))
    again = kept.of(collate(examples[2::-1]))  # the same ones in another order
    assert [len(rows) for rows in reads] == [1, 1, 1]
    assert torch.equal(first.last_BTD, again.last_BTD.flip(0))
    kept.of(collate(examples[2:5]))
    assert len(reads) == 5


def test_the_limit_is_kept_and_what_does_not_fit_is_computed_again(target, head, examples, reads):
    sizes = []
    for example in examples:  # 3 vectors of 32 doubles a token: two feature layers and the last state
        sizes.append((len(example.loss_mask) - example.loss_mask[::-1].index(True)) * 3 * 32 * 8)
    kept = KeptFeatures(target, head, (sum(sizes[:3]) + 1) / GIB)
    assert kept.room == sum(sizes[:3]) + 1
    unlimited = KeptFeatures(target, head, 1.0)
    for _ in range(3):
        for example in examples:
            limited, free = (features.of(collate([example])).last_BTD for features in (kept, unlimited))
            assert torch.equal(limited, free)
            assert kept.room >= 0
    assert kept.room == 1
    assert len(reads) == len(examples) + 3 + 3 * (len(examples) - 3)


def test_no_room_keeps_nothing(target, head, examples, reads):
    kept = KeptFeatures(target, head, 100 / GIB)
    for _ in range(2):
        kept.of(collate(examples))
    assert len(reads) == 2 * len(examples) and kept.room == 100


def test_conversations_with_one_beginning_do_not_take_each_others_states(target, head):
    tokens = [*range(1, 13)]
    longest = Example(tokens, [False] * 3 + [True] * 9)
    shorter = Example(tokens, [False] * 3 + [True] * 6 + [False] * 3)
    other = Example([*tokens[:-4], 20, 21, 22, 23], longest.loss_mask)
    kept = KeptFeatures(target, head, 1.0)
    for example in (shorter, longest, other, shorter):
        batch = collate([example])
        torch.testing.assert_close(
            head(kept.of(batch, torch.float64)).loss, head(online_features(target, head, batch, torch.float64)).loss
        )


def last(folder):
    return load_file(folder / "last" / "model.safetensors")


def test_a_run_ends_with_the_weights_that_it_would_have_had(short, changed, monkeypatch):
    plain = last(train(short))
    reads, original = [], Target.read
    monkeypatch.setattr(
        Target, "read", lambda self, tokens, layers: reads.append(tokens) or original(self, tokens, layers)
    )
    monkeypatch.setattr(loop, "evaluate", lambda *_: pytest.fail("judged"))
    monkeypatch.setattr(loop.Run, "save", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):  # before the evaluation, which reads on its own account
        train(changed(short, output=short.output + "-counted", data={"keep_features": 1.0}))
    assert len(reads) == 5 and {len(rows) for rows in reads} == {1}  # so many texts are different
    monkeypatch.undo()
    kept = last(train(changed(short, output=short.output + "-kept", data={"keep_features": 1.0})))
    assert plain.keys() == kept.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(kept[name], tensor, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("gib", [1.0, 30_000 / GIB])  # all of them, and about half
def test_stopped_and_started_again_a_run_ends_with_the_same_weights(short, changed, monkeypatch, stop_after, gib):
    short = changed(short, data={"keep_features": gib})
    whole = train(dataclasses.replace(short, output=short.output + "-whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(Stopped):
            train(short)
    one, other = last(train(short)), last(whole)
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
